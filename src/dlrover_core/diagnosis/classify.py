"""What one end was, by the table of signatures: a worker's, from its words and its exit code, or a node's, from its platform's.

Words come before codes: a process that says why it ends is believed, one that is killed says nothing. Of a worker's words the
exception that ended it comes first, then whatever else in its last lines the table knows; an exception that came earlier was
handled. Of exceptions that hang together the innermost that tells is meant (`exceptions`). Everything is a function of the
table and the texts, so that the same end is judged once (`_CACHE`).
"""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from dlrover_core.diagnosis import exceptions, files, peers, signatures, who
from dlrover_core.diagnosis.evidence import CASC, ERROR, LOG, PLATFORM, PRINTED, Evidence
from dlrover_core.diagnosis.exceptions import Chain, Raised
from dlrover_core.diagnosis.matching import MISTAKES, Hit, Matcher, matcher
from dlrover_core.diagnosis.signatures import PRIORITY, PRIORITY_CASC, Signature, Table

# How a backend's final refusal of a node begins, and its signature.
REFUSED_WORD = "refused for good"
REFUSED = "node.refused"
# What a launcher of ours prints last, with this exit status, where it cannot run what its line says, and its signature.
USAGE_WORD, EX_USAGE = "dlrover-run: error: ", 2
USAGE = "launcher.usage"

_CACHE = 1024
# Exceptions' types have priorities below this in the table, general ones at most the other.
_TYPE_PRIORITY_MAX, _GENERAL_PRIORITY_MAX = 25, 18
_GENERAL_NAMES = frozenset(("RuntimeError", "Exception", "OSError", "IOError", "Error", "EOFError", "Empty", "Full"))
# Of a message so many lines say what it is.
_RAISED_LINES = 12
_WORDS_MAX = 16 * 1024
_PLACE_MAX = 200
_UNSAID = (-signal.SIGKILL, -signal.SIGTERM)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
# So many lines may follow the exception that ended a process: of other threads, of what is run at exit.
ENDS = 3
# What a process says of its own end after that: a watchdog, an abort, an interpreter that finishes.
DYING = re.compile(
    r"ProcessGroup|NCCL|\bc10|C10|terminate called|what\(\)|^frame #|Fatal Python error|^(?:Current t|T)hread 0x"
    r"|Extension modules|Exception raised from|resource_tracker|Exception ignored|destroy_process_group|core dumped"
    r"|torch\.distributed|Aborted"
)
# What launchers put before a line.
_PREFIX = re.compile(r"^(?:\[[^\]\n]{1,40}\]:? ?|\([^)\n]{1,60}\) ?)+")
_FRAME = re.compile(r'File "([^"\n]{1,500})", line (\d{1,7})(?:, in ([^\n]{1,120}))?')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<|/ray/_private/|/torch/|/bin/[\w.-]+$")
_NAME = re.compile(r"(?:\[[^\]\n]{1,40}\]:?\s*|\([^)\n]{1,60}\)\s*|[|>+ ]+)*([A-Za-z_][\w.]*)(:|$)")


class Verdict(NamedTuple):
    """What it was."""

    verdict: str
    signature: str
    confidence: float


class Found(NamedTuple):
    """What it was by the table.

    ``place``: where in the user's program; ``subject``: what else the words name; ``line``: the words.
    """

    signature: str
    verdict: str
    confidence: float
    place: str = ""
    subject: str = ""
    line: str = ""


@functools.lru_cache(maxsize=_CACHE)
def of_exit(table: Table, exit_code: int, error: str, tail: str) -> Found:
    """A worker's end. ``error``: its error file's message; ``tail``: the last lines it wrote."""
    error, tail = error[-_WORDS_MAX:], tail[-_WORDS_MAX:]
    said = of_exception(table, error) if error else None
    if said is not None and said.verdict != CASC:
        return said._replace(place=said.place or place_of(tail))
    hit = _last_words(table, exit_code, tail, raised=said is None) if tail else None
    if hit is not None and (said is None or hit.signature.verdict != CASC):
        return _found(hit.signature, place_of(tail) if _raised(hit) else "", hit)
    if said is not None:
        return said
    last = _last_traceback(tail) if _TRACEBACK.search(tail) else ""
    if exit_code > 0 and last and not _handled(exit_code, _lines_after(last)):
        return _of_name(table, tail)
    return _found(_by_code(table, exit_code))


def of_exception(table: Table, text: str) -> Found | None:
    """An exception, by its message or its whole traceback; None where ``text`` is empty."""
    if not text.strip():
        return None
    chain = _last_chain(text)
    if chain is not None:
        raised = telling(table, chain)
        hit = _peered(table, _of_raised(table, raised), raised, chain)
        if hit is not None and (raised is chain.links[-1] or hit.signature.verdict != CASC or not _raised(hit)):
            return _found(hit.signature, _place(raised, chain), hit)
        if hit is None and raised.frames and not exceptions.wraps(raised):
            return _named(table, raised.name, _place(raised, chain), raised.text)
    last = _last_traceback(text)
    hit = _telling(matcher(table).scan(last, ERROR), 0)
    if hit is None and last is not text:
        hit = _telling(matcher(table).scan(text, ERROR), 0)
    if hit is None:
        return _of_name(table, text)
    return _found(hit.signature, place_of(text), hit)


@functools.lru_cache(maxsize=_CACHE)
def of_platform(table: Table, phase: str, exit_code: int, reason: str) -> Found:
    """A node's end, as its backend tells of it. ``phase``: failed, gone or lost; ``exit_code``: the node's, 0 if unknown."""
    reason, _, printed = reason.partition(PRINTED)
    if exit_code == EX_USAGE and USAGE_WORD in printed:
        return _found(_row(table, USAGE))._replace(line=printed[printed.rindex(USAGE_WORD) :])
    if reason.startswith(REFUSED_WORD):
        return _found(_row(table, REFUSED))
    word = re.match(r"[\w./-]*", reason)
    coded = table.coded("reason", reason.strip()) or (table.coded("reason", word[0]) if word else None)
    hits = matcher(table).scan(reason, PLATFORM) if reason else []
    hit = _telling(hits, 0)
    if hit is not None and (coded is None or hit.signature.rank > coded.rank):
        return _found(hit.signature, "", hit)
    if coded is not None:
        return _found(coded)._replace(line=reason)
    by_code = table.coded("exit", exit_code) if exit_code not in (0, 1) and phase != "lost" else None
    if by_code is not None:
        return _found(by_code)
    name = "node.silent" if phase == "lost" else f"node.{phase}"
    return _found(table.get(name) or _row(table, "node.failed"))


def place_of(text: str) -> str:
    """Where an exception was raised: its type and the last frame that is the user's, without what differs between hosts.

    Empty where there is no traceback. A line number stays: the same place is the same line of the same code.
    """
    chain = _last_chain(text)
    if chain is not None:
        place = _place(exceptions.telling(chain, plainly), chain)
        if place:
            return place
    last = _last_traceback(text)
    frames: Sequence[tuple[str, str, str]] = _FRAME.findall(last) or _FRAME.findall(text)
    if not frames:
        return ""
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    if not own and last is not text:
        own = [frame for frame in _FRAME.findall(text) if not _LIBRARY.search(frame[0])]
    path, line, function = (own or frames)[-1]
    short = "/".join(path.replace("\\", "/").split("/")[-2:])
    where = f"{short}:{line} in {function.strip()}" if function else f"{short}:{line}"
    return f"{exception_name(last)} at {where}"[:_PLACE_MAX]


def exception_name(text: str) -> str:
    """The exception's class, without its package: of the last line that begins with a name and a colon, or 'unknown'."""
    for line in reversed(text.strip().splitlines()):
        found = _NAME.match(line.strip())
        if found and not line.strip().startswith("File "):
            return found.group(1).rsplit(".", 1)[-1]
    return "unknown"


def telling(table: Table, chain: Chain) -> Raised:
    """The exception of a chain that says what went wrong."""
    return exceptions.telling(chain, lambda one: _weight(table, one))


def signal_name(number: int) -> str:
    """``SIGKILL`` of 9; of a number that is no signal, ``signal 99``."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def worker_death(exit_code: int, error: str, tail: str) -> Verdict:
    """`of_exit` by our own table."""
    found = of_exit(signatures.table(), exit_code, error, tail)
    return Verdict(found.verdict, found.signature, found.confidence)


def node_death(how: str, exit_code: int, reason: str) -> Verdict:
    """`of_platform` by our own table."""
    found = of_platform(signatures.table(), how, exit_code, reason)
    return Verdict(found.verdict, found.signature, found.confidence)


def root(deaths: tuple[Evidence, ...]) -> Evidence:
    """The likeliest first cause: a node's death before any worker's, a cascade after anything else, then the earliest."""
    return min(deaths, key=lambda death: (death.verdict == CASC, death.rank >= 0, death.at, death.seq))


def describe(death: Evidence) -> str:
    """One line about a death, for people."""
    who = f"rank {death.rank} on {death.node}" if death.rank >= 0 else f"node {death.node}"
    if death.text:
        what = death.text.strip().splitlines()[-1][:500]
    elif death.exit_code < 0:
        what = f"killed by {signal_name(-death.exit_code)}"
    else:
        what = f"exit code {death.exit_code}"
    return f"{who}: {what} ({death.signature})"


def _last_words(table: Table, exit_code: int, tail: str, *, raised: bool) -> Hit | None:
    """What the tail tells: the exception that ended the process, else whatever is no handled exception.

    ``raised``: an exception may be why it ended. One that a kill came after was not, and its words must be a failure's own.
    """
    least, known = PRIORITY_CASC if exit_code in _UNSAID else 0, matcher(table)
    last = _last_traceback(tail) if _TRACEBACK.search(tail) else ""
    after = _lines_after(last) if last else 0
    ending = _ending(table, tail, last, least) if last and raised else None
    if ending is not None and after <= ENDS and ending.signature.verdict != CASC:
        return ending
    others = known.scan(tail, LOG)
    if last:
        others = [hit for hit in others if not _raised(hit)]
    if _handled(exit_code, after):
        # What is said inside of it was handled with it.
        first = tail[: len(tail) - len(last)].count("\n") + 1
        said = range(first, first + _said_until(last.splitlines()))
        return _telling([hit for hit in others if hit.number not in said], least)
    if ending is not None and ending.signature.verdict != CASC:
        told = _telling(others, least)
        return told if told is not None and told.signature.verdict != CASC else ending
    return _telling(others, least) or ending


def _ending(table: Table, tail: str, last: str, least: int) -> Hit | None:
    """What the last exception means, or the one in its chain that tells more."""
    chain = _last_chain(tail)
    raised = telling(table, chain) if chain is not None else None
    hit = None
    if chain is not None and raised is not None:
        hit = _peered(table, _of_raised(table, raised), raised, chain)
    if hit is not None and hit.signature.priority < least:
        hit = None
    if hit is not None and chain is not None and raised is not None and raised.first != chain.links[-1].first:
        return hit
    said = _telling(matcher(table).scan(last, LOG), least)
    if hit is None or said is None or _raised(hit):
        return said or hit
    return hit if hit.signature.rank > said.signature.rank else said


def _handled(exit_code: int, after: int) -> bool:
    """Was the last traceback printed, and then went on? An uncaught exception ends its process, with 1."""
    return exit_code != 1 and after > ENDS


def _said_until(lines: Sequence[str]) -> int:
    """How many of these lines, from its beginning, a traceback has, with the exception that ends it."""
    for count, line in enumerate(lines[1:], 2):
        said = _PREFIX.sub("", line, count=1)
        if said.strip() and not said.startswith((" ", "\t")):
            return count
    return len(lines)


def _lines_after(last: str) -> int:
    """How many lines a process went on to write after its last traceback; what it says when it dies is not counted."""
    lines = last.splitlines()
    rest = lines[_said_until(lines) :]
    return sum(bool(line.strip()) and not line.startswith((" ", "\t")) and DYING.search(line) is None for line in rest)


def _telling(hits: Sequence[Hit], least: int) -> Hit | None:
    """The hit that tells most; of exceptions the last one, which went uncaught."""
    failures = [hit for hit in hits if hit.signature.action != "obs" or hit.signature.verdict == CASC]
    failures = [hit for hit in failures if hit.signature.verdict and hit.signature.priority >= least]
    best = Matcher.best(failures)
    if best is not None and _raised(best):
        return [hit for hit in failures if hit.signature.rank == best.signature.rank][-1]
    return best


def _of_raised(table: Table, raised: Raised) -> Hit | None:
    """What an exception's own words mean, type and message together."""
    hit = _telling(matcher(table).scan(words_of(raised), ERROR), 0)
    if hit is not None and hit.line == raised.origin:
        hit = hit._replace(line=raised.text.split("\n", maxsplit=1)[0])
    named = table.get(f"exception.{raised.name}") if hit is not None and hit.signature.id.startswith(MISTAKES) else None
    if hit is None or named is None:
        return hit
    # The program's mistake is called by the exception that it raised, on whichever line its words stand.
    known = hit.signature
    return hit._replace(
        signature=named._replace(
            confidence=known.confidence, priority=known.priority, action=known.action, general=False
        )
    )


def _peered(table: Table, hit: Hit | None, raised: Raised, chain: Chain) -> Hit | None:
    """The same, but for a connection or a file: the words or the calls of its chain name the peer, or the owner."""
    words = "\n".join(one.text[:2000] for one in chain.links)
    known = hit.signature.id if hit is not None else "exception"
    # An exception's package is a place as its frames are.
    frames = [
        frame
        for one in chain.links[::-1]
        for frame in (*one.frames, *([(f"/{one.package.replace('.', '/')}/", "", "")] if one.package else ()))
    ]
    named = table.get(
        peers.tracked(known, frames) or peers.meant(known, words, frames) or files.owner(known, words, frames)
    )
    if named is None or named.id == known:
        return hit
    line = hit.line if hit is not None else raised.text.split("\n", maxsplit=1)[0]
    # It counts for no more than an exception's type did: other words of the same end come first.
    priority = hit.signature.priority if hit is not None else named.priority
    return Hit(named._replace(priority=priority), line, hit.number if hit is not None else 1)


def words_of(raised: Raised) -> str:
    """What is read of an exception: the lines that say what it is, and where it is from."""
    return "\n".join([*raised.text.split("\n")[:_RAISED_LINES], *([raised.origin] if raised.origin else ())])


def _weight(table: Table, raised: Raised) -> int:
    """How much an exception tells: 0 a wrapper, 1 a general type or symptom, 2 a type, 3 words that are known."""
    hit = _of_raised(table, raised)
    known = hit.signature if hit is not None else table.coded("exception", raised.name)
    if known is None:
        return 1 if raised.name in _GENERAL_NAMES else 2
    if known.verdict == CASC and known.id.startswith("exception."):
        return 0 if exceptions.wraps(raised) else 1
    if known.id.startswith("exception.") or known.priority < _TYPE_PRIORITY_MAX:
        return 2 if known.priority > _GENERAL_PRIORITY_MAX else 1
    if known.verdict == CASC:
        return 1  # what another process's end does to this one is no reason beside one
    # Of known words those that would count in one line count in one chain.
    return 2 if known.general else 3 + max(0, known.priority - PRIORITY)


def plainly(raised: Raised) -> int:
    """As `_weight`, by the type alone."""
    return 0 if exceptions.wraps(raised) else 1 if raised.name in _GENERAL_NAMES else 2


def _place(raised: Raised, chain: Chain) -> str:
    """Where it was raised: the last frame of the user's own, of its traceback or of another one of its chain."""
    for frames in (raised.frames, *(one.frames for one in chain.links)):
        own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
        if own:
            return _spot(raised.name, own[-1])
    return _spot(raised.name, raised.frames[-1]) if raised.frames else ""


def _spot(name: str, frame: tuple[str, str, str]) -> str:
    path, line, function = frame
    short = "/".join(path.replace("\\", "/").split("/")[-2:])
    where = f"{short}:{line} in {function}" if function else f"{short}:{line}"
    return f"{name} at {where}"[:_PLACE_MAX]


@functools.lru_cache(maxsize=64)
def _last_chain(text: str) -> Chain | None:
    """The last exception with all that hangs together with it, from text with any launcher's prefixes.

    None without a traceback.
    """
    if not _TRACEBACK.search(text) and "\tat " not in text and "RayTaskError(" not in text:
        return None
    found = exceptions.chains([who.peel(line).body for line in text.splitlines()])
    return found[-1] if found else None


def _raised(hit: Hit) -> bool:
    return hit.signature.id.startswith("exception.")


def _last_traceback(text: str) -> str:
    """From the last traceback on; the same object if there is none, or only one at the start."""
    starts = [found.start() for found in _TRACEBACK.finditer(text)]
    return text[starts[-1] :] if starts else text


def _of_name(table: Table, text: str) -> Found:
    """An exception of whose words the table knows none: by its type."""
    chain = _last_chain(text)
    name = chain.links[-1].name if chain is not None else exception_name(text)
    last = text.strip().splitlines()[-1:]
    return _named(table, name, place_of(text), last[0] if last else "")


def _named(table: Table, name: str, place: str, line: str) -> Found:
    known = table.coded("exception", name) or table.get(f"exception.{name}") or _row(table, "exception")
    return _found(known)._replace(place=place, subject=name, line=line.split("\n", maxsplit=1)[0][:500])


def _by_code(table: Table, exit_code: int) -> Signature:
    known = table.coded("exit", exit_code)
    if known is not None:
        return known
    number = -exit_code if exit_code < 0 else exit_code - 128 if 128 < exit_code <= 128 + 64 else 0
    named = f"exit.signal{number}" if number else f"exit.code{exit_code}"
    return table.get(named) or _row(table, "exit.code")


def _row(table: Table, name: str) -> Signature:
    known = table.get(name)
    assert known is not None, f"the table has no row {name}"
    return known


def _found(signature: Signature, place: str = "", hit: Hit | None = None) -> Found:
    return Found(
        signature.id,
        signature.verdict,
        signature.confidence,
        place,
        hit.subject if hit is not None else "",
        hit.line.strip()[:500] if hit is not None else "",
    )
