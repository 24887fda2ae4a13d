"""Logs of a failure as the observations that a job's own agents would have made.

A text holds what a live job tells by events: exceptions that ended a process, launchers' words on exit codes, the kernel's lines,
a platform's reasons, and much that was handled and gone by. Read so, a text and a live job are judged by the same procedure, and
one model of cause and consequence holds for both.

An exception counts for how its process ended unless the run went on after it. Lines before the last burst of failures that speak
of the program alone are set aside for the same reason; if nothing else is left, they count after all.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from dlrover_core.diagnosis import clock, exceptions, launchers, peers, vocabulary, who
from dlrover_core.diagnosis.classify import DYING, plainly, words_of
from dlrover_core.diagnosis.evidence import (
    CASC,
    DATA,
    ERROR,
    EXIT,
    HW,
    KERNEL,
    LOG,
    NET,
    PLAT,
    PLATFORM,
    RES,
    SOFT,
    USER,
)
from dlrover_core.diagnosis.exceptions import Chain, Raised
from dlrover_core.diagnosis.found import (
    EARLIER,
    ENDS,
    LIVED,
    WENT_ON,
    Found,
    Spot,
    believed,
    last_word,
    symptoms_alone,
    thinned,
)
from dlrover_core.diagnosis.matching import Hit, Matcher
from dlrover_core.diagnosis.offline import Observation
from dlrover_core.diagnosis.rows import Row, Text, numbered, rows_of, stack_head
from dlrover_core.diagnosis.whereabouts import Whereabouts
from dlrover_core.diagnosis.who import Who

CHUNK_LINES = 200
"""Lines scanned at a time."""
WENT_ON_LINES, STEPS_MIN = 25, 3
"""After so many lines of no failure, or so many steps, a run has gone on."""
BANNER_LINES = 3
NAMED_LINES, PEER_LINES = 4, 14
"""So many lines after one about a host, or about a peer, may say which."""
LINE_S = 1e-6
_NOBODY = (-1, "", "", 0)
TEXT_LINES_MAX, GUESS_LINES = 160, 3
# What no guess adds to a symptom or an end: that a connection broke, or that something did not start.
_UNTOLD = frozenset(("net.reset", "container.start", "exit.not_started"))
_KILLED = (-9, 137)

# A launcher that only passes on how its child ended.
_LAUNCHES = re.compile(
    r"/torch/distributed/(?:launch|run|launcher|elastic)|/accelerate/|/deepspeed/launcher|/bin/(?:torchrun|accelerate|deepspeed)"
)
_FIGURES = re.compile(r"\d+(?:[.,]\d+)?")
# How a child ended, in the words of whoever ran it.
_CHILD = re.compile(r"\bdied with <Signals\.|\bnon-zero exit status (?:-\d|1[2-5]\d)")
_BANNER = "BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
_SHELL = re.compile(r"^\W*Terminated\W*$")
# A remote worker's address, in what Ray says of its end.
_ACTOR_AT = re.compile(r"\n\s*ip: (\d{1,3}(?:\.\d{1,3}){3})\b")
_TASK_AT = re.compile(r"\bray::[^\n]{1,200}?\(pid=\d+, ip=(\d{1,3}(?:\.\d{1,3}){3})\b")
_HANDLED = re.compile(
    r"(?i)\b(?:retrying|will retry|skipping (?:this |the )?(?:batch|sample|step|image|file)|falling back|ignoring|recovered"
    r"|using default instead)\b|\bdlerror: |:\d+: \w*Warning: "
)


# Where a job or a container ran, by whoever placed it there.
_PLACED = re.compile(
    r"uccessfully assigned|^Node:|for host: |^Exec host: |\bexec_host ?= ?|^Execution host", re.IGNORECASE
)
_GOT = re.compile(r"\bSuccessfully assigned\b")
_PEER = re.compile(r"\s*(?:Peer|Remote) host: +\S")
# mp.spawn's own words on whose exception it passes on.
_SPAWNED = re.compile(r"\bProcess (\d{1,5}) (?:terminated with the following error|exited with error code)")
# With what an exception ends a process: by itself, or where the interpreter aborts in its wake.
_RAISES = (*range(1, 128), -6, 134)


class Read(NamedTuple):
    """What texts tell.

    ``observations`` and ``spots`` belong together, one for one.
    ``aside``: what no cause can be, and why.
    ``files``: names that stand for a node because no line names one.
    ``untimed``: files whose times cannot be compared with the others'.
    ``gpus``: the rank at a host's PCI address, by what NCCL said.
    ``pods``: the pod that the whole of a file is from.
    ``hosts``: every host that wrote a line.
    """

    observations: tuple[Observation, ...]
    spots: tuple[Spot, ...]
    aside: tuple[tuple[Spot, str], ...] = ()
    files: frozenset[str] = frozenset()
    untimed: tuple[str, ...] = ()
    gpus: tuple[tuple[str, int], ...] = ()
    pods: tuple[tuple[str, str], ...] = ()
    hosts: tuple[str, ...] = ()


def read(texts: Sequence[Text], matcher: Matcher) -> Read:
    """What the texts of one failure tell, by one clock, in the order of the texts and of their lines."""
    files = [_File(text, matcher) for text in texts]
    spans = [one.span() for one in files]
    known = [number for number, one in enumerate(files) if one.found]
    moves = dict(zip(known, clock.aligned([spans[number] for number in known]), strict=True))
    kept = [(number, one, found) for number, one in enumerate(files) for found in one.found]
    sure = believed(kept)
    aside = (
        [(one.spot(found), found.doubted) for _, one, found in kept if found.doubted] if len(sure) < len(kept) else []
    )
    observations, spots = [], []
    for number, one, found in sure:
        observations.append(found.seen._replace(at_s=found.seen.at_s + moves[number]))
        spots.append(one.spot(found))
    clocks = Counter(spans[number][2] for number in known if spans[number][2])
    common = max(clocks, key=lambda each: (clocks[each], each == clock.CALENDAR), default="")
    strange = tuple(files[number].text.name for number in known if spans[number][2] != common)
    return Read(
        tuple(observations),
        tuple(spots),
        tuple(aside),
        frozenset(one.places.surrogate for one in files),
        strange if len(strange) < len(known) or (strange and len(known) > 1 and common) else (),
        tuple(item for one in files for item in one.places.gpus.items()),
        tuple((one.places.surrogate, one.pod) for one in files if one.pod),
        tuple(dict.fromkeys(host for one in files for host in one.places.hosts)),
    )


class _File:
    """One text, read."""

    def __init__(self, text: Text, matcher: Matcher) -> None:
        self.text = text
        rows, self.pod = numbered(list(rows_of(text)))
        self.times, self.clock = clock.in_order([row.stamps for row in rows])
        ends = launchers.ends([row.body for row in rows])
        self.places = Whereabouts(text.name, rows, self.pod, ends)
        self.rows = self.places.rows
        self._matcher = matcher
        self._taken: set[int] = set()
        chains = self._chains()
        self._taken.update(one.line for one in ends)
        # A banner over a process's end says no more than that end.
        banners = (index for one in ends for index in range(max(0, one.line - BANNER_LINES), one.line))
        self._taken.update(index for index in banners if _BANNER in self.rows[index].body)
        hits = self._hits()
        if not self.places.host and not self.places.hosts:
            placed = [index for index, row in enumerate(self.rows) if _PLACED.search(row.body)]
            named = {who.host_named(self.rows[index].raw) for index in (*placed, *(at for at, _ in hits))} - {""}
            self.places.host = named.pop() if len(named) == 1 else ""
        self._steps = [
            index
            for index, row in enumerate(self.rows)
            if exceptions.PROGRESS.search(row.body) and index not in self._taken
        ]
        self._quiet = [
            index
            for index, row in enumerate(self.rows)
            if index not in self._taken
            and row.body.strip()
            and not row.body[:1].isspace()
            and not DYING.search(row.body)
        ]
        self._last = max(
            [
                *(chain.last for chain, _, _ in chains),
                *(one.line for one in ends),
                *(at for at, hit in hits if _fails(hit)),
            ],
            default=-1,
        )
        raised = list(self._of_chains(chains, ends))
        found = [*raised, *self._of_ends(ends), *self._lived_through(self._of_hits(hits), raised)]
        self.found = thinned(sorted(found, key=lambda one: one.row))
        if symptoms_alone(self.found):
            known = {at for at, _ in hits} | self._taken
            guessed = self._guessed(known)
            self.found = sorted([*self.found, *guessed], key=lambda one: one.row)

    def spot(self, found: Found) -> Spot:
        """Where it was found."""
        row = self.rows[found.shown if found.shown >= 0 else found.row]
        return Spot(self.text.name, row.number, row.raw.strip()[:500], found.signature)

    def span(self) -> tuple[float, float, str]:
        """First and last failure, and by which clock."""
        times = [one.seen.at_s for one in self.found]
        return min(times, default=0.0), max(times, default=0.0), self.clock

    # ---- what is found

    def _chains(self) -> list[tuple[Chain, list[int], Who]]:
        """Exceptions, each with its rows and its writer; writers are read apart."""
        streams: dict[tuple[int, str, str, int], list[int]] = {}
        for index, row in enumerate(self.rows):
            its = row.who
            pid = its.pid if its.device < 0 else 0
            key = (its.rank, its.pod, its.host if its.device < 0 else "", pid)
            if "Traceback (most" in row.body and index + 1 < len(self.rows):
                # Only the first line has a prefix: the rest is read with it.
                after = self.rows[index + 1]
                key = _NOBODY if after.who == Who() and after.body.lstrip().startswith("File ") else key
            streams.setdefault(key, []).append(index)
        found = []
        for indices in streams.values():
            if not any(
                "Traceback" in self.rows[index].body
                or "Error" in self.rows[index].body
                or "Exception" in self.rows[index].body
                for index in indices
            ):
                continue
            own = {at: front for at, index in enumerate(indices) if (front := _front(self.rows[index]))}
            for chain in exceptions.chains([self.rows[index].body for index in indices], own):
                rows = [indices[row] for row in chain.rows]
                self._taken.update(rows)
                moved = Chain(
                    tuple(
                        one._replace(first=indices[one.first], last=indices[one.last], at=indices[one.at])
                        for one in chain.links
                    )
                )
                found.append((moved, rows, self.rows[rows[0]].who))
        return sorted(found, key=lambda one: one[0].first)

    def _hits(self) -> list[tuple[int, Hit]]:
        """What the table knows in the other lines."""
        rest = [index for index in range(len(self.rows)) if index not in self._taken]
        found = []
        for begin in range(0, len(rest), CHUNK_LINES):
            part = rest[begin : begin + CHUNK_LINES]
            text = "\n".join(self._shown(index) for index in part)
            found += [
                (part[hit.number - 1], hit)
                for hit in filter(None, map(self._unshelled, self._matcher.scan(text, "")))
                # NCCL's own INFO is of what it tries.
                if hit.signature.verdict and (" NCCL INFO " not in hit.line or hit.signature.verdict == CASC)
            ]
        return found

    def _unshelled(self, hit: Hit) -> Hit | None:
        """A shell's bare word on how a child ended is no platform's reason."""
        if not _SHELL.match(hit.line):
            return hit
        said = self._matcher.scan(hit.line, LOG)
        return said[0]._replace(number=hit.number) if said else None

    def _shown(self, index: int) -> str:
        row = self.rows[index]
        return (row.body if row.raw.startswith("{") else row.raw).replace("\n", " ").replace("\r", " ")

    def _of_chains(
        self, chains: Sequence[tuple[Chain, list[int], Who]], ends: Sequence[launchers.Ended]
    ) -> Iterator[Found]:
        signalled = {one.rank for one in ends if one.code not in (0, *_RAISES)}
        guilty = {(one.rank, one.host) for one in ends if one.code in _RAISES and one.rank >= 0}
        guilty = {its for its in guilty if its[0] not in signalled}
        places = {chain.links[-1].name for chain, _, its in chains if its.rank < 0 and not _passes_on(chain)}
        for chain, rows, its in chains:
            kept = rows[:TEXT_LINES_MAX] + rows[TEXT_LINES_MAX:][-TEXT_LINES_MAX:]
            text = "\n".join(self.rows[index].body for index in kept)
            before = " ".join(self.rows[index].raw for index in range(max(0, rows[0] - 1), rows[0] + 1))
            doubted = ""
            if exceptions.IGNORED.search(before):
                doubted = "raised while the interpreter ended, or in a thread that nobody waits for: a consequence"
            elif self.rows[rows[0]].level == "W" or self._went_on(chain.last, its, chain.links[-1].at):
                doubted = WENT_ON
            elif chain.links[-1].name.endswith("Warning") and any(one[0].first > chain.last for one in chains):
                doubted = "a warning, and the program went on to an exception"
            elif _passes_on(chain):
                doubted = "a launcher's report: it passes on how its child ended"
            at = _ACTOR_AT.findall(text)[:1] or _TASK_AT.findall(text)[-1:]  # the innermost task raised it
            its = its._replace(host=at[0]) if at and not its.host else its
            spawned = _SPAWNED.search(text)
            if its.rank < 0 and spawned is not None:
                its = its._replace(rank=int(spawned[1]))
            elif (
                its.rank < 0
                and self.places.rank < 0
                and len(guilty) == 1
                and len(places) == 1
                and not _passes_on(chain)
            ):
                rank, host = next(iter(guilty))
                its = its._replace(rank=rank, host=its.host or host)
            seen = self.places.placed(self._at(chain.last), ERROR, its, text, "")
            told = exceptions.telling(chain, plainly)
            said = Matcher.best(self._matcher.scan(words_of(told), ERROR))
            name = said.signature.id if said is not None and said.signature.id.startswith(ENDS) else ""
            vague = said is not None and _vague(said)
            telling = said is not None and not vague and not name and not exceptions.wraps(told)
            typed = said is None or said.signature.id.startswith("exception")
            likely = _likeliest(told, chain) if typed else ""
            yield Found(chain.last, seen._replace(exit_code=1, guess=likely), name, doubted, told.at, vague, telling)

    def _of_ends(self, ends: Sequence[launchers.Ended]) -> Iterator[Found]:
        for one in ends:
            rank = one.rank
            if rank < 0 <= one.local:
                host = one.host or self.places.host
                rank = self.places.rank_of.get((host, one.local), self.places.layout.rank(host, one.local))
            # A launcher that knows the rank on its host is on that host.
            its = self.rows[one.line].who if one.local >= 0 and not one.host else Who(host=one.host)
            at_s = (self._first_at(one, ends) if one.first else self._at(one.line)) - one.before_s
            seen = self.places.placed(at_s, EXIT, its._replace(rank=rank, local=one.local), "", "")
            if one.code == 0:
                continue
            # A summary's order is that of its own times; without any it comes after whatever the ranks said.
            yield Found(
                one.line,
                seen._replace(exit_code=one.code),
                "",
                EARLIER if self._went_on(one.line, seen_who(seen)) else "",
            )

    def _first_at(self, first: launchers.Ended, ends: Sequence[launchers.Ended]) -> float:
        """When a summary's first failure was: just before the first of those that it lists for the same second."""
        alike = (one.line for one in ends if one.rank >= 0 and one.local >= 0 and one.before_s == first.before_s)
        return self._at(min(alike, default=first.line)) - LINE_S / 2

    def _of_hits(self, hits: Sequence[tuple[int, Hit]]) -> Iterator[Found]:
        for index, hit in hits:
            row, sources = self.rows[index], hit.signature.sources
            source = next(
                (one for one in (KERNEL, LOG, PLATFORM) if sources[0] == one), LOG if LOG in sources else sources[0]
            )
            line = row.raw
            its = row.who
            if hit.signature.scope in ("node", "host"):
                if not who.host_named(line):
                    line = "\n".join(one.raw for one in self.rows[index : index + 1 + NAMED_LINES])
                its = its if its.host else its._replace(host=who.host_named(line))
                if hit.signature.id.startswith("ray."):  # whoever tells of a node's death is not on it
                    its = Who(host=self._dead_node(index))
            words = hit.line.strip()
            if (
                hit.signature.id == "mpi.peer_lost"
            ):  # a message of several lines, of which a later one says whom it means
                block = self.rows[index : index + 1 + PEER_LINES]
                words += next((f" {one.body.strip()}" for one in block if _PEER.match(one.body)), "")
            its = self.rows[stack_head(self.rows, index)].who if its.rank < 0 and not its.host else its
            seen = self.places.placed(self._at(index), source, its, words, line)
            if hit.signature.id.startswith("exception"):
                seen = seen._replace(guess=vocabulary.likeliest(hit.line.strip()))
            own = (
                hit.signature.verdict in (USER, DATA, SOFT)
                or hit.signature.scope == "process"
                or hit.signature.verdict == CASC
            )
            # A want or a path that the program only warned of; words on the machine or the platform count whoever lived on.
            warned = row.level in ("I", "W") and hit.signature.verdict in (NET, RES)
            doubted = ""
            if source == LOG and own and (row.level in ("I", "W") or _HANDLED.search(row.body)) and index < self._last:
                doubted = "a warning, and the run went on"
            elif source == LOG and (own or warned) and self._went_on(index, row.who):
                doubted = WENT_ON
            # Whoever waited for a place or an image has got it.
            waits = hit.signature.action == "wait" and hit.signature.verdict == PLAT
            if hit.signature.id == "k8s.unschedulable" and any(_GOT.search(one.body) for one in self.rows[index:]):
                doubted = doubted or "waited for: it was given a place after that"
            mild = waits or (source == LOG and hit.signature.verdict in (USER, DATA, SOFT, NET))
            made = Found(index, seen, hit.signature.id, doubted, vague=_vague(hit), mild=mild)
            yield made if doubted else made._replace(seen=last_word(made))

    def _dead_node(self, index: int) -> str:
        """The node of whose end a line, or one just before or after it, tells; empty where none is named."""
        around = sorted(
            range(max(0, index - NAMED_LINES), min(len(self.rows), index + 1 + NAMED_LINES)),
            key=lambda at: abs(at - index),
        )
        for body in (self.rows[at].body for at in around):
            named = who.host_named(body) or next(iter(_ACTOR_AT.findall(f"\n{body}")), "")
            if named:
                return named
        return ""

    def _guessed(self, known: AbstractSet[int]) -> Iterator[Found]:
        """Where nothing tells of a cause: the first words that fail, and what they are likely about.

        ``known``: rows not looked at. Whom a signal killed, only resources, the platform or hardware explain.
        """
        symptoms = [one for one in self.found if not one.doubted]
        killed = any(one.seen.exit_code in _KILLED or one.signature == "exit.sigkill" for one in symptoms)

        def meant(name: str) -> bool:
            likely = self._matcher.table.get(name)
            if not symptoms or likely is None:
                return likely is not None
            return name not in _UNTOLD and likely.verdict != CASC and (not killed or likely.verdict in (RES, PLAT, HW))

        lines = ["" if at in known else row.body for at, row in enumerate(self.rows)]
        warned = {at for at, row in enumerate(self.rows) if row.level == "W"}
        guessed = vocabulary.guess(lines, meant, warned)
        if guessed is not None and self.steps_after(guessed[0]) < STEPS_MIN:
            index, name = guessed
            row = self.rows[index]
            its = Who(host=self._dead_node(index)) if name.startswith("ray.") else row.who
            seen = self.places.placed(self._at(index), LOG, its, row.body.strip(), row.raw)
            made = Found(index, seen._replace(guess=name), name, vague=True)
            yield made._replace(seen=last_word(made))

    def _lived_through(self, hits: Iterable[Found], raised: Sequence[Found]) -> Iterator[Found]:
        """What a program said before the exception that ended it is no cause: it went on to where it failed.

        That is so only of an exception that tells what it was, and of words on what a program can live through.
        """
        ended = [one for one in raised if not one.doubted and one.telling]
        for one in hits:
            later = any(one.row < end.row and one.seen.rank in (-1, end.seen.rank) for end in ended)
            lived = later and one.mild and not one.doubted and not self._hangs_together(one.row)
            yield one._replace(doubted=LIVED) if lived else one

    def _hangs_together(self, index: int) -> bool:
        """Is this an exception without a traceback, to which the next one says that it belongs?"""
        return any("above exception" in row.body for row in self.rows[index + 1 : index + 1 + NAMED_LINES])

    def _went_on(self, index: int, its: Who, title: int = -1) -> bool:
        """Did the run make steps after this line, one if the ``title`` says so, or write much before the last failure?"""
        steps = self.steps_after(index)
        least = 1 if title >= 0 and _HANDLED.search(self.rows[title].body) else STEPS_MIN
        if steps >= least:
            ranked = [at for at in self._steps[-steps:] if its.rank < 0 or self.rows[at].who.rank in (-1, its.rank)]
            if len(ranked) >= least:
                return True
        if self._last <= index:
            return False
        quiet = bisect_right(self._quiet, self._last) - bisect_right(self._quiet, index)
        return quiet >= WENT_ON_LINES

    def steps_after(self, index: int) -> int:
        """How many steps are told of after a line."""
        return len(self._steps) - bisect_right(self._steps, index)

    def _at(self, index: int) -> float:
        """When: the line's time, and within one moment the order of lines."""
        return self.times[index] + self.rows[index].number * LINE_S


def _front(row: Row) -> str:
    """What stands before a line, figures apart: a time, a level, a writer or a call site of its own. Empty: nothing does."""
    raw, body = row.raw.rstrip(), row.body.rstrip()
    at = raw.rfind(body) if body else -1  # in JSON and colours it is not the line's end
    if at > 0:
        return _FIGURES.sub("0", raw[:at].strip()) or " "
    return f"{row.level} " if row.stamps or row.level or raw.strip() != body.strip() else ""


def seen_who(seen: Observation) -> Who:
    """The writer that an observation names."""
    return Who(seen.rank, -1, seen.host)


def _likeliest(told: Raised, chain: Chain) -> str:
    """What an exception is likely about: by its own words, where it was raised, the words of its chain, or its library."""
    others = [one for one in reversed(chain.links) if one.at != told.at and not exceptions.wraps(one)]
    said = ["\n".join(one.text.split("\n")[:GUESS_LINES]) for one in (told, *others)]
    named = next(filter(None, map(vocabulary.likeliest, (said[0], told.origin, *said[1:]))), "")
    # A library's own type tells of what the library does.
    package = (f"{told.package.replace('.', '/')}/", "", "")
    return named or (peers.library((*told.frames, package)) if told.package and not exceptions.wraps(told) else "")


def _passes_on(chain: Chain) -> bool:
    """Is it a launcher's own exception about a child of its?"""
    last = chain.links[-1]
    if last.name == "CalledProcessError":
        return _CHILD.search(last.message) is not None or any(_LAUNCHES.search(frame[0]) for frame in last.frames)
    return all(exceptions.wraps(one) for one in chain.links) and any(
        _LAUNCHES.search(frame[0]) for frame in last.frames
    )


def _fails(hit: Hit) -> bool:
    return hit.signature.action != "obs" or hit.signature.verdict == CASC


def _vague(hit: Hit) -> bool:
    return hit.signature.general or hit.signature.verdict == CASC
