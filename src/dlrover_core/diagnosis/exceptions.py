"""Exceptions in text: tracebacks and their chains, and which exception of a chain tells what went wrong.

A traceback is a structure. An exception has frames, a type and a message, and it hangs together with others: it is caused by
one (`direct cause`), it was raised while one was handled (`during handling`), or it wraps one (a remote task's error, a data
loader's `Caught KeyError in DataLoader worker`, a launcher's report, an exception group). Java's `Caused by:` is the same. The
innermost exception that tells is the root; a wrapper is the root only where it holds nothing.

Text is given as lines of one writer, without the prefixes that launchers put before them (`who.plain`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

# Bounds: a message longer than this is cut, and so many foreign lines may stand between a traceback's lines.
MESSAGE_LINES_MAX, FOREIGN_MAX, CHAIN_MAX = 60, 40, 32

# Two tracebacks that begin within so many lines are written by two ranks at once.
TOGETHER_LINES = 3

# How one exception hangs together with the one printed before it.
ALONE, CAUSE, HANDLING, INSIDE = "", "cause", "handling", "inside"

_START = re.compile(r"^(?P<lead>.*?)(?:Exception Group )?Traceback \(most recent call last\):?")
_GROUP = re.compile(r"^\s*(?:[|+] ?)+(?:-+(?: \d+ -+)?)?")
_RULER = re.compile(r"^\s*(?:[|+] ?)*\+?-[-+]{3,}.*$")
_FRAME = re.compile(
    r'^\s*(?:[|+] )*File "(?P<file>[^"]{1,500})", line (?P<line>\d{1,7})(?:, in (?P<function>.{1,160}))?'
)
_CAUSE = re.compile(r"The above exception was the direct cause of the following exception")
_HANDLING = re.compile(r"During handling of the above exception, another exception occurred")
_NAME = re.compile(
    r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:\[[\w.]+\])?(?P<of>\((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*\))?(?:(?P<colon>:)(?:\s+|$)(?P<message>.*)|\s*)$"
)
_JAVA = re.compile(
    r'^(?:Exception in thread "[^"]{1,120}" )?(?P<name>(?:[a-z_]\w*\.)+[A-Z][\w$]*)(?:: (?P<message>.*))?$'
)
_JAVA_AT = re.compile(r"^\s+at [\w.$<>/]+\(.{0,200}\)")
_JAVA_CAUSE = re.compile(r"^Caused by: (?P<name>(?:[a-z_]\w*\.)*[A-Z][\w$]*)(?:: (?P<message>.*))?$")
# A line that begins anew: with a time, a level or a writer of its own.
_ANEW = re.compile(
    r"^(?:\[?\d{4}[-/]\d\d[-/]\d\d|[IWEF]\d{4} |(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[:| ]|\[\d\d:\d\d|srun: |slurmstepd"
    r"|\S+:\d+:\d+ \[\d+\] |\[[IWEF]\d{3,4} |\[\S+:\d+\] \*\*\* |wandb: |mpi(?:run|exec)\b|Primary job |pdsh@|make: \*\*\*"
    r"|\S{1,200}:\d+: \w*Warning: |Killed$|Aborted\b|Segmentation fault\b|Bus error\b)"
)
# What launchers put around their own words.
_RULED = re.compile(r"^(?:-{10,}|={10,}|\*{10,})$")
# A step of a run, which goes on.
PROGRESS = re.compile(
    r"\b(?:step|iter(?:ation)?|epoch|batch|global_step)s?\b[ :=#/\[]{0,4}\d+|\d+(?:\.\d+)?(?:it/s|s/it)\b"
    r"|\b(?:train_?)?loss\W{1,4}\d",
    re.IGNORECASE,
)
# Words after which another traceback is the one inside this exception.
_HOLDS = re.compile(
    r'Original Traceback|terminated with the following error|^"""|^\'\'\'|^\s*Remote traceback|ray::|raised:?$'
)
# Ray's own around the user's, which has no traceback of its own.
_REMOTE = re.compile(r"^(?:ray\.exceptions\.)?(RayTaskError)\([\w.]+\): ?(?=.*\bray::)")
_TITLE = re.compile(r"^[A-Z][\w.]*$|^[a-z_]\w*(?:\.[A-Za-z_]\w*)+$")
_TYPED = re.compile(r"(?:Error|Exception|Interrupt|Exit|Warning|Failure|Failed|Invalid|NotFound|Timeout|Killed|Group)$")
# A library's file, without the machine's own path.
_LIBRARY = re.compile(
    r"(?:^|/)(?:(?:site|dist)-packages|lib(?:64)?/python\d[\d.]*|python\d[\d.]*/lib|Lib)/(?P<file>[^/].*)$"
)
# Two ranks' exceptions of one type, written into one line.
_TWICE = re.compile(r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception))(?P=name)+: ")
# What only passes on another's failure, by type; and in whose message a second exception stands.
WRAPPERS = frozenset(
    (
        "ChildFailedError", "RayTaskError", "ProcessRaisedException", "ProcessExitedException", "RemoteTraceback",
        "_RemoteTraceback", "RemoteError", "ExceptionGroup", "BaseExceptionGroup", "BackendCompilerFailed",
        "InternalTorchDynamoError", "InductorError", "TorchRuntimeError", "TrainingFailedError", "RayTrainWorkerError",
        "WorkerGroupError", "ControllerError", "TaskError", "ProcessException", "CancelledError", "ExceptionWrapper",
        "CompilationError", "TuneError", "HyperparameterError", "SystemExit", "CalledProcessError", "BrokenProcessPool",
        "EngineDeadError", "AsyncEngineDeadError", "InstantiationException", "UserCodeException", "UndeclaredThrowableException",
        "ExecutionException", "InvocationTargetException", "CompletionException",
    )
)  # fmt: skip
# A launcher's report, which is whole: what is printed after it is another story.
REPORT = "ChildFailedError"
_CAUGHT = re.compile(r"^Caught ([A-Za-z_][\w.]*) in ")
_RAISED_INSIDE = re.compile(
    r"(?:backend='\w+' raised:|raised:|due to|caused by|error:|failed with|exception:"
    r"|[:(])\s*\n?\s*((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): (.*)",
    re.IGNORECASE | re.DOTALL,
)
# Raised by look-ups that code makes for trial: what is raised while one is handled tells more.
_TRIALS = frozenset(
    ("KeyError", "AttributeError", "IndexError", "LookupError", "StopIteration", "ImportError",
     "ModuleNotFoundError", "Empty", "QueueEmpty")
)  # fmt: skip


class Raised(NamedTuple):
    """One exception as it was printed.

    ``name``: its class without the package.
    ``message``: what it says, maybe several lines.
    ``frames``: file, line and function of each call, the outermost first.
    ``first``, ``last``: the lines that it takes.
    ``link``: how it hangs together with the one before it.
    ``at``: the line of its type.
    ``package``: where its class is from, empty if that is not told.
    """

    name: str
    message: str
    frames: tuple[tuple[str, str, str], ...] = ()
    first: int = 0
    last: int = 0
    link: str = ALONE
    at: int = 0
    package: str = ""

    @property
    def text(self) -> str:
        """The exception's own words: its type and its message."""
        return f"{self.name}: {self.message}" if self.message else self.name

    @property
    def origin(self) -> str:
        """Where it is from, in one line: its type with the package, its first words, and which library raised it.

        Empty where neither is told. `ERROR in a pipe between processes` is another failure than the same type elsewhere.
        """
        raised = _LIBRARY.search(self.frames[-1][0].replace("\\", "/")) if self.frames else None
        if not self.package and raised is None:
            return ""
        words = self.message.split("\n", maxsplit=1)[0][:300]
        whole = f"{self.package}.{self.name}" if self.package else self.name
        where = f" (raised in {raised['file'][:120]}: {self.frames[-1][2][:60]})" if raised is not None else ""
        return f"{whole}: {words}{where}"


class Chain(NamedTuple):
    """Exceptions that hang together, as printed: the first to be raised mostly comes first."""

    links: tuple[Raised, ...]

    @property
    def first(self) -> int:
        """The line on which it begins."""
        return min(one.first for one in self.links)

    @property
    def last(self) -> int:
        """The line on which it ends."""
        return max(one.last for one in self.links)


def chains(lines: Sequence[str], own: frozenset[int] = frozenset()) -> list[Chain]:
    """All chains of exceptions in the lines, in order. Lines that belong to none are skipped.

    ``own``: lines that had a time or a level of their own: no message goes on in them, unless its first line had one, too.
    """
    found: list[list[Raised]] = []
    for one in _all(lines, own):
        if found and one.link != ALONE and len(found[-1]) < CHAIN_MAX:
            found[-1].append(one)
        else:
            found.append([one])
    return [Chain(tuple(links)) for links in found]


def telling(chain: Chain, weight: Callable[[Raised], int]) -> Raised:
    """The exception of a chain that says what went wrong: the innermost of those that tell most.

    ``weight``: how much an exception tells, by type and message: 0 a wrapper, 1 a general type, 2 a type, 3 known words.
    """
    links = [_unwrapped(one) for one in chain.links]
    weights = [0 if wraps(one) and len(links) > 1 else weight(one) for one in links]
    most = max(weights)
    best = next(number for number, one in enumerate(weights) if one == most)
    for number in range(best + 1, len(links)):
        # Whoever fails in handling a look-up that was only tried is the failure.
        trial = links[best].name in _TRIALS and links[number].link == HANDLING
        # A wrapper's content is printed after it.
        if weights[number] == most and trial:
            best = number
    return links[best]


def wraps(one: Raised) -> bool:
    """Does it only pass on what another process or task raised?"""
    return one.name in WRAPPERS or _CAUGHT.match(one.message) is not None


def _unwrapped(one: Raised) -> Raised:
    """The exception whose type and words stand in a wrapper's message, if they do."""
    caught = _CAUGHT.match(one.message)
    if caught is not None:
        return one._replace(name=one.name)
    if one.name not in WRAPPERS:
        return one
    inside = _RAISED_INSIDE.search(one.message[:4000])
    if inside is not None and inside[1].rsplit(".", 1)[-1] in WRAPPERS:
        return one  # a wrapper of a wrapper: the outer one says at least what was tried
    if inside is None:
        first = _NAME.match(one.message.split("\n", maxsplit=1)[0])
        if first is None or not first["colon"] or not _TYPED.search(first["name"]):
            return one
        return one._replace(name=first["name"].rsplit(".", 1)[-1], message=one.message.partition(":")[2].strip())
    return one._replace(name=inside[1].rsplit(".", 1)[-1], message=inside[2].strip())


class _Open(NamedTuple):
    """A traceback whose exception has not come yet."""

    first: int
    indent: int
    link: str


def _all(lines: Sequence[str], own: frozenset[int]) -> Iterator[Raised]:
    """Every exception with a traceback, in order."""
    link, number, after = ALONE, 0, -1
    holds, opened = False, 0
    while number < len(lines):
        line = lines[number]
        if opened:  # several tracebacks began before the first had its exception: two ranks write line by line
            opened -= 1
            other = _python(lines, number, ALONE, own)
            if other is not None and other[0].at - number <= FOREIGN_MAX:
                yield from other
                number, after, holds = other[-1].last + 1, other[-1].last, wraps(other[-1])
            else:
                opened = 0
            continue
        if "above exception" in line:
            link = CAUSE if _CAUSE.search(line) else HANDLING if _HANDLING.search(line) else link
            number += 1
            continue
        start = _START.match(line)
        java = _JAVA_AT.match(lines[number + 1]) if number + 1 < len(lines) and not start else None
        if start is None and java is None:
            headless = after >= 0 and number - after <= 3 and holds and _FRAME.match(line)
            remote = _REMOTE.match(line)
            if remote is not None:
                yield Raised(remote[1], line[remote.end() :].strip(), (), number, number, link, number)
                link, after, holds = ALONE, number, True
            if not headless:
                number += 1
                continue
        near = after >= 0 and number - after <= 4
        its = link or (INSIDE if holds and near else ALONE)
        made = _java(lines, number, its) if java is not None else _python(lines, number, its, own)
        if made is None:
            number += 1
            continue
        link, after = ALONE, made[-1].last
        said = made[-1].message.split("\n", maxsplit=1)[-1]
        holds = (wraps(made[-1]) and made[-1].name != REPORT) or any(
            _HOLDS.search(one) for one in (said, *lines[made[-1].last + 1 : made[-1].last + 3])
        )
        opened = _begun(lines, made[0]) - 1 if java is None else 0
        if opened > 0:
            made = [made[0]._replace(message=made[0].message.split("\n", maxsplit=1)[0], last=made[0].at)]
        yield from made
        number = made[-1].last + 1


def _begun(lines: Sequence[str], made: Raised) -> int:
    """How many tracebacks began before this exception's line, its own included."""
    return sum(_START.match(lines[number]) is not None for number in range(made.first, made.at))


def _python(lines: Sequence[str], start: int, link: str, own: frozenset[int]) -> list[Raised] | None:
    """One traceback with its exception; None where the exception is missing."""
    opened = _START.match(lines[start])
    lead = opened["lead"] if opened else lines[start]
    indent = _indent(_bare(lead)) if opened else 0
    frames: list[tuple[str, str, str]] = []
    foreign = 0
    number = start + 1 if opened else start
    while number < len(lines) and foreign <= FOREIGN_MAX:
        line = _bare(lines[number])
        frame = _FRAME.match(lines[number])
        if frame is not None:
            frames.append((frame["file"], frame["line"], (frame["function"] or "").strip()))
            foreign = 0
        elif _START.match(lines[number]):
            if number - start > TOGETHER_LINES or _alike(lines, number):
                return None  # cut off, or said twice: another one begins
        elif _indent(line) <= indent and line.strip():
            found = _titled(line.strip(), sure=bool(frames))
            if found is not None:
                last, message = _message(lines, number, found[1], indent, own)
                return [Raised(found[0], message, tuple(frames), start, last, link, number, found[2])]
            foreign += 1
        number += 1
    return None


def _alike(lines: Sequence[str], number: int) -> bool:
    """Do two writers say the same here, line by line?"""
    after = lines[number + 1 : number + 3]
    return len(after) == 2 and after[0] == after[1]


def _titled(line: str, *, sure: bool) -> tuple[str, str, str] | None:
    """An exception's type, the first line of its message, and the type's package.

    ``sure``: frames came before it, so that any name may be one.
    """
    line = _TWICE.sub(r"\g<name>: ", line, count=1)
    found = _NAME.match(line)
    if found is None or line.startswith("File "):
        return None
    package, _, name = found["name"].rpartition(".")
    if not found["colon"] and not (_TYPED.search(name) or (sure and _TITLE.match(found["name"]))):
        return None
    if found["colon"] and not (_TYPED.search(name) or found["of"] or (sure and (name[0].isupper() or package))):
        return None
    # Of Ray's own around the user's, RayTaskError(ValueError), the message stays as it is.
    return name, (found["message"] or "") if found["of"] else (found["message"] or "").strip(), package


def _message(lines: Sequence[str], number: int, first: str, indent: int, own: frozenset[int]) -> tuple[int, str]:
    """Where a message ends, and all of it."""
    words, last = [first], number
    name = _NAME.match(_bare(lines[number]).strip())
    wrapper = name is not None and name["name"].rsplit(".", 1)[-1] in WRAPPERS
    rulers = 0
    for offset in range(1, MESSAGE_LINES_MAX):
        if number + offset >= len(lines):
            break
        line = lines[number + offset]
        if number + offset in own and number not in own:
            break
        if _ends(line, _bare(line), indent) or (not wrapper and (not line.strip() or _RULED.match(line.strip()))):
            break
        words.append(_bare(line))
        if line.strip():
            last = number + offset
        rulers += line.strip().startswith("=====")
        if rulers == 2:  # the end of a launcher's summary
            break
    while words and not words[-1].strip():
        words.pop()
    return last, "\n".join(words)


def _ends(line: str, bare: str, indent: int) -> bool:
    """Is this line no part of the message before it?"""
    if _START.match(line) or "above exception" in line or _FRAME.match(line) or (_RULER.match(line) and "+" in line):
        return True
    if (
        _ANEW.match(bare)
        or PROGRESS.search(bare) is not None
        or bare.startswith(("Exception in thread ", "Exception ignored in", "Fatal Python", "terminate called"))
    ):
        return True
    return bool(bare.strip()) and _indent(bare) < indent


def _java(lines: Sequence[str], start: int, link: str) -> list[Raised] | None:
    """A Java exception with its causes: the innermost comes last there, and first here."""
    opened = _JAVA.match(lines[start].strip())
    if opened is None:
        return None
    made = [(opened["name"], opened["message"] or "")]
    number = start + 1
    while number < len(lines):
        line = lines[number]
        cause = _JAVA_CAUSE.match(line.strip())
        if cause is not None:
            made.append((cause["name"], cause["message"] or ""))
        elif not _JAVA_AT.match(line) and not re.match(r"^\s*\.\.\. \d+ (?:more|common frames)", line):
            break
        number += 1
    links = [
        Raised(name.rsplit(".", 1)[-1], message, (), start, number - 1, CAUSE, start)
        for name, message in reversed(made)
    ]
    return [links[0]._replace(link=link), *links[1:]]


def _bare(line: str) -> str:
    """A line of an exception group without its margin."""
    if line.lstrip()[:2] in {"| ", "+ ", "+-"}:
        return _GROUP.sub("", line)
    return line


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))
