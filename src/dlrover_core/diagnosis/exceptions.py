"""Exceptions in text: tracebacks and their chains, and which exception of a chain tells what went wrong.

A traceback is a structure. An exception has frames, a type and a message, and it hangs together with others: it is caused by
one (`direct cause`), it was raised while one was handled (`during handling`), or it wraps one (a remote task's error, a data
loader's `Caught KeyError in DataLoader worker`, a launcher's report, an exception group). Java's `Caused by:` is the same. The
innermost exception that tells is the root; a wrapper is the root only where it holds nothing.

Text is given as lines without the prefixes that launchers put before them (`who.plain`). Ranks that write to one stream at once
mix their tracebacks line by line: such a *knot* is read as a whole, and its exceptions are given to its tracebacks in order. Each
exception knows its own lines, so that what others wrote in between is still there to be read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Bounds: a message longer than this is cut, and so many foreign lines may stand between a traceback's lines; between two
# exceptions of one knot fewer, for a traceback may have been cut off. So many tracebacks may be open at once.
MESSAGE_LINES_MAX, FOREIGN_MAX, BETWEEN_MAX, CHAIN_MAX, OPEN_MAX = 60, 40, 10, 32, 64
# Of a traceback without its head so many lines are looked at.
FRAMES_MAX = 200
# A word that may be an exception's type is none where frames go on within so many lines.
FRAMES_GO_ON = 3

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
ANEW = re.compile(
    r"^(?:\[?\d{4}[-/]\d\d[-/]\d\d|[IWEF]\d{4} |(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[:| ]|\[\d\d:\d\d|srun: |slurmstepd"
    r"|\S+:\d+:\d+ \[\d+\] |\[[IWEF]\d{3,4} |\[\S+:\d+\] \*\*\* |wandb: |mpi(?:run|exec)\b|Primary job |pdsh@|make: \*\*\*"
    r"|\S{1,200}:\d+: \w*Warning: |Killed$|Aborted\b|Segmentation fault\b|Bus error\b|\S{1,120}: line \d+: +\d+ "
    r"|\*\*\* |free\(\): |malloc\(\): |double free or|munmap_chunk\(\)|corrupted (?:size|double|unsorted)|pure virtual method)"
)
# What ended no program: raised in a destructor, at its end, or in a thread that nobody waits for.
IGNORED = re.compile(r"Exception ignored in|Error in atexit|Exception in thread (?:Thread|Pin)", re.IGNORECASE)
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
        "ExecutionException", "InvocationTargetException", "CompletionException", "CheckpointException",
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


_NO_FRONTS: Mapping[int, str] = {}


class Raised(NamedTuple):
    """One exception as it was printed.

    ``name``: its class without the package.
    ``message``: what it says, maybe several lines.
    ``frames``: file, line and function of each call, the outermost first.
    ``first``, ``last``: the lines that it takes.
    ``link``: how it hangs together with the one before it.
    ``at``: the line of its type.
    ``package``: where its class is from, empty if that is not told.
    ``rows``: the lines that are its own; empty: all from the first to the last.
    """

    name: str
    message: str
    frames: tuple[tuple[str, str, str], ...] = ()
    first: int = 0
    last: int = 0
    link: str = ALONE
    at: int = 0
    package: str = ""
    rows: tuple[int, ...] = ()

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
    """Exceptions that hang together, as printed: the first to be raised mostly comes first.

    ``rows``: the lines that are its own, and no other writer's.
    """

    links: tuple[Raised, ...]
    rows: tuple[int, ...] = ()

    @property
    def first(self) -> int:
        """The line on which it begins."""
        return min(one.first for one in self.links)

    @property
    def last(self) -> int:
        """The line on which it ends."""
        return max(one.last for one in self.links)


def chains(lines: Sequence[str], own: Mapping[int, str] = _NO_FRONTS) -> list[Chain]:
    """All chains of exceptions in the lines, in order. Lines that belong to none are skipped.

    ``own``: what stood before lines that had a time, a level or a call site of their own, figures apart: no message goes on in
    them, unless the same stood before its first line.
    """
    found: list[list[Raised]] = []
    latest: list[list[Raised]] = []
    for parts in _all(lines, own):
        goes_on = _continued(lines, latest, parts) if parts[0][0].link != ALONE else []
        made = []
        for part, into in itertools.zip_longest(parts, goes_on):
            if into is not None and len(into) < CHAIN_MAX:
                into.extend(part)
            else:
                found.append(part)
            made.append(part if into is None else into)
        latest = made
    return _owned(found)


def _continued(
    lines: Sequence[str], latest: Sequence[list[Raised]], parts: Sequence[Sequence[Raised]]
) -> Sequence[list[Raised]]:
    """Which of the newest chains go on in these tracebacks: all, in their order.

    Where one goes on: the one that went through the same files, or after which an empty line stands.
    """
    many = len(parts)
    if many >= len(latest):
        return latest
    files = {frame[0] for one in parts[0] for frame in one.frames}
    akin = [sum(file in files for file, _, _ in one[-1].frames) for one in latest]
    if many == 1 and akin.count(max(akin)) == 1:
        return [latest[akin.index(max(akin))]]
    parted = [one for one in latest if not "".join(lines[one[-1].last + 1 : one[-1].last + 2]).strip()]
    return parted if len(parted) == many else latest[len(latest) - many :]


def _owned(found: Sequence[Sequence[Raised]]) -> list[Chain]:
    """Chains with their own lines: what stands between theirs, but is another one's or nobody's, is not among them."""
    taken = {row for links in found for one in links for row in one.rows}
    made = []
    for links in found:
        own = {row for one in links for row in one.rows}
        foreign = (taken - own).union(*(set(range(one.first, one.last + 1)) - own for one in links))
        chain = Chain(tuple(links))
        rows = tuple(sorted(set(range(chain.first, chain.last + 1)) - foreign))
        if rows:  # of a head in another one's message nothing is left
            made.append(chain._replace(rows=rows))
    return made


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


@dataclass(slots=True)
class _Head:
    """A traceback whose exception has not come yet. ``joins``: the exception of its knot that it goes on from, or -1."""

    first: int
    indent: int
    link: str
    joins: int = -1
    frames: list[tuple[str, str, str]] = field(default_factory=list)
    known: set[tuple[str, str, str]] = field(default_factory=set)
    rows: list[int] = field(default_factory=list)


class _Title(NamedTuple):
    """An exception's type and message, from the line ``at`` to ``last``."""

    name: str
    message: str
    package: str
    at: int
    last: int


def _all(lines: Sequence[str], own: Mapping[int, str]) -> Iterator[list[list[Raised]]]:
    """Every exception with a traceback, in order: of each knot its parts, of which each hangs together."""
    link, number, after, holds, cut, barren = ALONE, 0, -1, False, False, 0
    while number < len(lines):
        line = lines[number]
        if "above exception" in line:
            link = CAUSE if _CAUSE.search(line) else HANDLING if _HANDLING.search(line) else link
            number += 1
            continue
        start = _START.match(line)
        java = _JAVA_AT.match(lines[number + 1]) if number + 1 < len(lines) and not start else None
        if start is None and java is None:
            framed = _FRAME.match(line) is not None
            if framed and number >= barren:
                cut, barren = _cut(lines, number)
            headless = framed and (cut or (after >= 0 and number - after <= 3 and holds))
            cut = False
            remote = _REMOTE.match(line)
            if remote is not None:
                yield [
                    [Raised(remote[1], line[remote.end() :].strip(), (), number, number, link, number, "", (number,))]
                ]
                link, after, holds = ALONE, number, True
            if not headless:
                number += 1
                continue
        near = after >= 0 and number - after <= 4
        # What is raised while an interpreter ends is no wrapper's content.
        near = near and not any(IGNORED.search(one) for one in lines[after + 1 : number + 1])
        its = link or (INSIDE if holds and near else ALONE)
        read = _java(lines, number, its) if java is not None else _Knot(lines, number, its, own).read()
        parts, last = read
        if not parts:
            number = max(number, last) + 1
            continue
        newest = max((one for part in parts for one in part), key=lambda one: one.last)
        link, after = ALONE, newest.last
        said = newest.message.split("\n", maxsplit=1)[-1]
        holds = (wraps(newest) and newest.name != REPORT) or any(
            _HOLDS.search(one) for one in (said, *lines[newest.last + 1 : newest.last + 3])
        )
        yield parts
        number = newest.last + 1


class _Knot:
    """A traceback, with those that begin before it has its exception: several ranks write to one stream at once."""

    def __init__(self, lines: Sequence[str], start: int, link: str, own: Mapping[int, str]) -> None:
        self._lines, self._own = lines, own
        self._heads: list[_Head] = []
        self._titles: list[_Title] = []
        self._newest = 0
        opened = _START.match(lines[start])
        self._open(start, _bare(opened["lead"] if opened else ""), link)
        self._number = start + 1 if opened else start

    def read(self) -> tuple[list[list[Raised]], int]:
        """Its exceptions, and the last line that was looked at."""
        lines, foreign, link = self._lines, 0, ALONE
        while self._number < len(lines) and len(self._titles) < len(self._heads):
            if foreign > (BETWEEN_MAX if self._titles else FOREIGN_MAX):
                break
            line, number = lines[self._number], self._number
            bare = _bare(line)
            frame, head = _FRAME.match(line), _START.match(line)
            if frame is not None:
                self._frame((frame["file"], frame["line"], (frame["function"] or "").strip()))
                foreign = 0
            elif head is not None and len(self._heads) < OPEN_MAX:
                self._open(number, _bare(head["lead"]), link)
                link = ALONE
            elif "above exception" in line:
                link = CAUSE if _CAUSE.search(line) else HANDLING
            elif not bare.strip() or _indent(bare) > self._heads[self._newest].indent:
                self._heads[self._newest].rows.append(number)
            elif self._title(bare.strip()):
                foreign = 0
            else:
                foreign += 1
            self._number += 1
        return self._parts(), self._number - 1

    def _open(self, number: int, lead: str, link: str) -> None:
        joins = len(self._titles) - 1 if self._heads and link != ALONE else -1
        self._heads.append(_Head(number, _indent(lead), link, joins, rows=[number]))
        self._newest = len(self._heads) - 1

    def _frame(self, frame: tuple[str, str, str]) -> None:
        """Give a frame to a traceback that has none; else to the newest, or where that has it already, to one that has not."""
        waiting = range(len(self._titles), len(self._heads))
        bare = next((place for place in waiting if not self._heads[place].frames), -1)
        if bare >= 0:
            self._newest = bare
        elif self._newest not in waiting or frame in self._heads[self._newest].known:
            lack = (place for place in waiting if frame not in self._heads[place].known)
            self._newest = next(lack, self._newest if self._newest in waiting else waiting[0])
        self._heads[self._newest].frames.append(frame)
        self._heads[self._newest].known.add(frame)
        self._heads[self._newest].rows.append(self._number)

    def _title(self, line: str) -> bool:
        """Take the line as an exception's type, if it may be one."""
        lines, number = self._lines, self._number
        waiting = self._heads[len(self._titles) :]
        found = _titled(line, sure=any(head.frames for head in waiting))
        if found is None:
            return False
        if not _is_type(found) and (self._titles or self._foreign(line)):
            return False
        last, message = _message(lines, number, found[1], waiting[0].indent, self._own, alone=len(waiting) == 1)
        self._titles.append(_Title(found[0], message, found[2], number, last))
        self._number = last
        return True

    def _foreign(self, line: str) -> bool:
        """Is a line with a word and a colon another writer's, and not an exception of that name?"""
        after = self._lines[self._number + 1 : self._number + 1 + FRAMES_GO_ON]
        goes_on = next((one for one in after if _FRAME.match(one) or _START.match(one)), "")
        return bool(ANEW.match(line) or PROGRESS.search(line) or _FRAME.match(goes_on))

    def _parts(self) -> list[list[Raised]]:
        """The exceptions, those that hang together in one part. A traceback that was cut off before others began has none."""
        begun = self._heads[len(self._heads) - len(self._titles) :] if self._titles else []
        parts: list[list[Raised]] = []
        part_of: list[int] = []
        for head, title in zip(begun, self._titles, strict=True):
            rows = (*(row for row in head.rows if row < title.at), *range(title.at, title.last + 1))
            one = Raised(
                title.name, self._whole(title), tuple(head.frames), head.first, title.last, head.link or begun[0].link,
                title.at, title.package, rows,
            )  # fmt: skip
            if 0 <= head.joins < len(part_of):
                parts[part_of[head.joins]].append(one)
                part_of.append(part_of[head.joins])
            else:
                parts.append([one])
                part_of.append(len(parts) - 1)
        return parts

    def _whole(self, title: _Title) -> str:
        """A message, where another rank of the knot says the same and was not interrupted: all of it."""
        alike = (
            one.message for one in self._titles if one.name == title.name and one.message.startswith(title.message)
        )
        return max(alike, key=len, default=title.message)


def _cut(lines: Sequence[str], start: int) -> tuple[bool, int]:
    """Is this the first frame of a traceback whose head was cut off: frames with their code, and then an exception's type?

    Also told is the line that decided: where it is none, no frame before that line is one.
    """
    number = start
    for number, line in enumerate(lines[start : start + FRAMES_MAX], start):
        found = _FRAME.match(line)
        if found is not None and found["function"] is None:
            return False, number + 1
        if found is None and line.strip() and not line[0].isspace() and not PROGRESS.search(line):
            titled = _titled(line.strip(), sure=False)
            return titled is not None and _is_type(titled) and ANEW.match(line) is None, number
    return False, number + 1


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


def _message(
    lines: Sequence[str], number: int, first: str, indent: int, own: Mapping[int, str], *, alone: bool
) -> tuple[int, str]:
    """Where a message ends, and all of it. ``alone``: no other traceback waits for its exception."""
    words, last = [first], number
    name = _NAME.match(_bare(lines[number]).strip())
    wrapper = name is not None and name["name"].rsplit(".", 1)[-1] in WRAPPERS
    rulers = 0
    for offset in range(1, MESSAGE_LINES_MAX):
        if number + offset >= len(lines):
            break
        line = lines[number + offset]
        if own.get(number + offset, "") not in ("", own.get(number, "")):
            break
        if not alone and (_typed(line) or _indent(line) > indent):
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
        ANEW.match(bare)
        or PROGRESS.search(bare) is not None
        or bare.startswith(("Exception in thread ", "Exception ignored in", "Fatal Python", "terminate called"))
    ):
        return True
    return bool(bare.strip()) and _indent(bare) < indent


def _typed(line: str) -> bool:
    """Does an exception's type stand at its beginning?"""
    found = _titled(line.strip(), sure=True)
    return found is not None and _is_type(found)


def _is_type(titled: tuple[str, str, str]) -> bool:
    """Is it an exception's type wherever it stands: by its ending, or as a class of a package?"""
    name, _, package = titled
    return _TYPED.search(name) is not None or bool(package and name[0].isupper())


def _java(lines: Sequence[str], start: int, link: str) -> tuple[list[list[Raised]], int]:
    """A Java exception with its causes: the innermost comes last there, and first here. And its last line."""
    opened = _JAVA.match(lines[start].strip())
    if opened is None:
        return [], start
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
    rows = tuple(range(start, number))
    links = [
        Raised(name.rsplit(".", 1)[-1], message, (), start, number - 1, CAUSE, start, "", rows)
        for name, message in reversed(made)
    ]
    return [[links[0]._replace(link=link), *links[1:]]], number - 1


def _bare(line: str) -> str:
    """A line of an exception group without its margin."""
    if line.lstrip()[:2] in {"| ", "+ ", "+-"}:
        return _GROUP.sub("", line)
    return line


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))
