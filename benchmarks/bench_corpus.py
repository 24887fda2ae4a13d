"""What failed, from a log alone: `dlrover diagnose` on `tests/corpus`, and beside it what a person would try first.

The incidents are public failures in values of our own, split by source project before the first was written: the teaching
part may be read by writers of patterns, the others may not. Every figure is of one part, with Wilson's interval.

- root: the signature is the labelled cause, or what `causes.toml` says is the same. `accept` (also right) has a row of its own.
- class, rank, host: by the label alone; rank and host only where the text names the guilty one.
- wrong evictions: logs whose answer is an action that the label forbids (isolate, reset or relaunch for what no host did).
- answered: verdicts of at least 0.75 confidence, and how many of them are right.
- the baselines pick one line, the last exception, or the last that is no launcher's wrapper, and have it named by the same
  signatures: so what is compared is which line is chosen.

- flips: verdicts (signature, class or action) that change when the same incident stands in other surroundings (`perturbed`).

- leaving one out, of the teaching part alone: each log is judged by a table without the patterns that only its own source, or
  its own family, supports (`_leaving_out`). The peers are given the same table. "taught": patterns older than the corpus stay.
- DLRover's rule names classes and no causes, from the first end that the log tells of: so classes are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _bench import HERE, Result, Row, options, say
from _leaving_out import STRICT, TAUGHT, supported, without
from bench_diagnosis import peer as rule
from tools.figures import share_interval

from dlrover_adapters.cli.main import main as command
from dlrover_core.diagnosis import answers, reading, rows, signatures
from dlrover_core.diagnosis.evidence import ERROR, EXIT
from dlrover_core.diagnosis.matching import matcher

sys.path.insert(0, str(HERE.parent / "tests" / "unit"))
from corpus import ASIDE, CHECKING, HELDOUT, PARTS, SECOND, TEACHING, Case, cases, causes, perturbed
from incidents import kind

MEASURES = ("src/dlrover_core/diagnosis", "src/adapters/dlrover_adapters/cli/diagnose.py", "tests/corpus")

ROOT_MIN, CLASS_MIN, PLACE_MIN, SURE, SURE_MIN, ANSWERED_MIN, FLIPS_MAX = 0.90, 0.90, 0.90, 0.75, 0.97, 0.70, 0.01
NAMES = {
    TEACHING: "teaching",
    HELDOUT: "once held out",
    ASIDE: "set aside",
    CHECKING: "checking",
    SECOND: "second held out",
}
EXCEPTION = re.compile(
    r"(?:^|[\s:\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Killed|Panic|Died)\b)(?::|$)"
)
WRAPPERS = re.compile(
    r"ChildFailedError|RayTaskError|ProcessRaisedException|ProcessExitedException|CalledProcessError|RayActorError|ActorDiedError"
    r"|TrainingFailedError|TuneError|DistBackendError|DistStoreError|DistNetworkError"
)


class Mark(NamedTuple):
    """How an answer compares; None: the label does not say."""

    root: bool
    also: bool
    verdict: bool
    rank: bool | None
    host: bool | None
    evicted: bool
    sure: bool
    said: str


def answer(text: str) -> Mapping[str, Any]:
    """What `dlrover diagnose --json` says about a log. An empty signature: it recognised nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "incident.log")
        path.write_text(text, encoding="utf-8")
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
            command(["diagnose", "--json", str(path)])
    told: Mapping[str, Any] = json.loads(said.getvalue() or "{}")
    return told


def answer_with(text: str, extra: str) -> Mapping[str, Any]:
    """The same, by a table with other rows (`signatures.table`), without a command's start."""
    known, read = signatures.table(extra), reading_of(text, extra)
    return answers.values(answers.answer(read, extra), read, known, 1)


def reading_of(text: str, extra: str = "") -> reading.Read:
    """What a log tells."""
    lines = text.splitlines()
    texts = [rows.Text("incident.log", range(1, len(lines) + 1), lines)]
    return reading.read(texts, matcher(signatures.table(extra)))


def rule_class(text: str) -> str:
    """The class that DLRover's rule gives a log: of the first end that it tells of, an exception being exit code 1."""
    seen = [one._replace(source=EXIT) if one.source == ERROR else one for one in reading_of(text).observations]
    return rule(seen)[0]


def mark(case: Case, told: Mapping[str, Any], same: Mapping[str, Sequence[str]]) -> Mark:
    """An answer beside the label."""
    signature = kind(told.get("signature") or "")
    where = {told.get("host") or "", told.get("node") or ""}
    root = signature in (case.root, *same.get(case.root, ()))
    verdict = told.get("class", "") or ""
    return Mark(
        root,
        root or signature in case.accept,
        verdict == case.verdict,
        told.get("rank", -1) == case.rank if case.rank >= 0 else None,
        case.host in where if case.host else None,
        told.get("action", "") in case.never,
        (told.get("confidence") or 0.0) >= SURE,
        f"{signature or 'nothing'} ({verdict}) at {'/'.join(sorted(where - {''})) or '-'}, "
        f"rank {told.get('rank', -1)}, {told.get('action', '-')}",
    )


def last_exception(text: str, wrappers: bool) -> str:
    """The last line that names an exception; without ``wrappers``, the last that is no launcher's."""
    lines = [line for line in text.splitlines() if EXCEPTION.search(line)]
    if not wrappers:
        lines = [line for line in lines if not WRAPPERS.search(line)]
    return lines[-1] if lines else ""


def named(line: str, extra: str = "") -> Mapping[str, Any]:
    """The signature of one exception line, by the engine's own table, or one with other rows."""
    if not line:
        return {}
    found = EXCEPTION.search(line)
    message = line[found.start(1) :] if found else line
    return answer_with(f"Traceback (most recent call last):\n{message}\n", extra)


def row(what: str, found: Sequence[bool], least: float | None = None, peer: Sequence[bool] = ()) -> Row:
    """A share with its interval."""
    ours, theirs = share(found), [share(peer)] if peer else []
    within = share_interval(sum(found), len(found)) if found else (0.0, 1.0)
    return Row(what, "", [ours], theirs, target=least, most=False, exact=True, n=len(found), within=within)


def share(found: Sequence[bool]) -> float:
    """How many of them."""
    return sum(found) / len(found) if found else 1.0


def flipped(told: Sequence[Case]) -> Mapping[str, Sequence[bool]]:
    """By perturbation: whose verdict changed."""
    found: dict[str, list[bool]] = defaultdict(list)
    for case in told:
        plain = verdict_of(answer(case.text))
        for what, text in perturbed(case):
            found[what].append(verdict_of(answer(text)) != plain)
    return found


def verdict_of(told: Mapping[str, Any]) -> tuple[str, str, str]:
    """The parts of an answer that a perturbation must not change."""
    return kind(told.get("signature") or ""), told.get("class") or "", told.get("action") or ""


def judged(result: Result, part: str, told: Sequence[Case], same: Mapping[str, Sequence[str]]) -> None:
    """Add the figures of one part."""
    name = NAMES[part]
    marks = [(case, mark(case, answer(case.text), same)) for case in told]
    say(f"{name}: {len(marks)} logs")
    last = [mark(case, named(last_exception(case.text, wrappers=True)), same).root for case in told]
    inner = [mark(case, named(last_exception(case.text, wrappers=False)), same).root for case in told]
    ruled = [rule_class(case.text) == case.verdict for case in told]
    raised = [number for number, case in enumerate(told) if last_exception(case.text, wrappers=True)]

    documented = [number for number, case in enumerate(told) if case.settled == "document"]

    def all_of(measure: Callable[[Mark], bool | None], of: Sequence[int] | None = None) -> list[bool]:
        chosen = marks if of is None else [marks[number] for number in of]
        return [found for _, one in chosen if (found := measure(one)) is not None]

    least = part == SECOND
    result.rows += [
        row(
            f"{name}: root, by the label alone; peer: last exception",
            all_of(lambda one: one.root),
            ROOT_MIN if least else None,
            last,
        ),
        row(f"{name}: root, by the label alone; peer: last non-wrapper", all_of(lambda one: one.root), None, inner),
        row(
            f"{name}: root, where an exception is told; peer: last exception",
            all_of(lambda one: one.root, raised),
            None,
            [last[i] for i in raised],
        ),
        row(
            f"{name}: root, where an exception is told; peer: last non-wrapper",
            all_of(lambda one: one.root, raised),
            None,
            [inner[i] for i in raised],
        ),
        row(f"{name}: root, where a document settles it", all_of(lambda one: one.root, documented)),
        row(f"{name}: root, with what is right as well", all_of(lambda one: one.also)),
        row(f"{name}: class, by the label alone", all_of(lambda one: one.verdict), CLASS_MIN if least else None),
        row(f"{name}: rank, where the text names it", all_of(lambda one: one.rank), PLACE_MIN if least else None),
        row(f"{name}: host, where the text names it", all_of(lambda one: one.host), PLACE_MIN if least else None),
        row(f"{name}: class; peer: DLRover's rule", all_of(lambda one: one.verdict), None, ruled),
        row(f"{name}: answered with {SURE} or more", all_of(lambda one: one.sure), ANSWERED_MIN if least else None),
        row(
            f"{name}: right of these, with what is right as well",
            [one.also for _, one in marks if one.sure],
            SURE_MIN if least else None,
        ),
        Row(
            f"{name}: wrong evictions",
            "logs",
            [sum(one.evicted for _, one in marks)],
            target=0,
            exact=True,
            n=len(marks),
        ),
    ]
    flips = flipped(told)
    found = [flip for of in flips.values() for flip in of]
    within = share_interval(sum(found), len(found))
    target = FLIPS_MAX if least else None
    result.rows.append(
        Row(f"{name}: verdict flips", "", [share(found)], target=target, exact=True, n=len(found), within=within)
    )
    result.details[f"{name}, flips"] = {what: share(of) for what, of in flips.items()}
    for what, of in flips.items():
        say(f"{name:9} flips: {what:32} {share(of):.3f} of {len(of)}")
    result.details[f"{name}, sources"] = len({case.project for case in told})
    # Held-out logs are told as one: an engineer who read which of them are missed would fit the engine to them.
    if part == TEACHING:
        _by_family(result, name, marks)
        result.details["missed"] = {
            case.id: {"root": case.root, "said": one.said} for case, one in marks if not one.root or one.evicted
        }


def _by_family(result: Result, name: str, marks: Sequence[tuple[Case, Mark]]) -> None:
    """Add root and class of each family."""
    families: dict[str, list[Mark]] = defaultdict(list)
    for case, one in marks:
        families[case.family].append(one)
    result.details[f"{name}, by family"] = {
        family: {
            "n": len(of),
            "root": share([one.root for one in of]),
            "within": share_interval(sum(one.root for one in of), len(of)),
            "class": share([one.verdict for one in of]),
        }
        for family, of in sorted(families.items())
    }


def left_out(result: Result, told: Sequence[Case], same: Mapping[str, Sequence[str]]) -> None:
    """Add what the teaching part's logs are judged as by tables to which their own source, or family, taught nothing."""
    table = signatures.table()
    keys: Mapping[str, Callable[[Case], str]] = {"source": lambda one: one.project, "family": lambda one: one.family}
    for what, key in keys.items():
        support = supported(table, [(key(case), case.text) for case in told])
        for how in (STRICT, TAUGHT):
            extras = {group: without(table, support, group, how) for group in {key(case) for case in told}}
            changed = sum(extras[key(case)] != "" for case in told)
            say(f"leave one {what} out, {how}: {changed} of {len(told)} logs are judged by another table")
            result.rows += [*_left_out(f"teaching, leave one {what} out, {how}", told, extras, key, same)]
            result.details[f"teaching, leave one {what} out, {how}: logs judged by another table"] = changed


def _left_out(
    name: str,
    told: Sequence[Case],
    extras: Mapping[str, str],
    key: Callable[[Case], str],
    same: Mapping[str, Sequence[str]],
) -> Iterator[Row]:
    """The rows of one way of leaving out. The causes' target is the one of leaving a source out."""
    ordered = sorted(told, key=key)  # tables are compiled once for a group
    marks = [mark(case, answer_with(case.text, extras[key(case)]), same) for case in ordered]
    peers = {
        peer: [
            mark(case, named(last_exception(case.text, wrappers=wrappers), extras[key(case)]), same) for case in ordered
        ]
        for peer, wrappers in (("last exception", True), ("last non-wrapper", False))
    }
    raised = [bool(last_exception(case.text, wrappers=True)) for case in ordered]
    source = "source" in name
    for peer, theirs in peers.items():
        first = peer == "last exception"
        yield row(
            f"{name}: root; peer: {peer}",
            [one.root for one in marks],
            ROOT_MIN if source and first else None,
            [one.root for one in theirs],
        )
        yield row(
            f"{name}: root, where an exception is told; peer: {peer}",
            [one.root for one, does in zip(marks, raised, strict=True) if does],
            None,
            [one.root for one, does in zip(theirs, raised, strict=True) if does],
        )
    yield row(
        f"{name}: class; peer: DLRover's rule",
        [one.verdict for one in marks],
        CLASS_MIN if source else None,
        [rule_class(case.text) == case.verdict for case in ordered],
    )
    sure = [one for one in marks if one.sure]
    yield row(f"{name}: answered with {SURE} or more", [one.sure for one in marks], ANSWERED_MIN if source else None)
    yield row(
        f"{name}: right of these, with what is right as well", [one.also for one in sure], SURE_MIN if source else None
    )
    evicted = [sum(one.evicted for one in marks)]
    yield Row(f"{name}: wrong evictions", "logs", evicted, target=0, exact=True, n=len(marks))


def more(parser: argparse.ArgumentParser) -> None:
    """Options beside the common ones."""
    parser.add_argument("--part", choices=PARTS, help="only that part; written to the temporary folder")


def main() -> int:
    """Judge every log once."""
    chosen = options(__doc__, trials=1, more=more)
    result = Result("corpus", "the last exception of the log")
    same = {name: tuple(told.get("same", ())) for name, told in causes().items()}
    for part in PARTS:
        if chosen.part in (None, part):
            judged(result, part, cases(part), same)
    if chosen.part in (None, TEACHING):
        left_out(result, cases(TEACHING), same)
    # The published result has all parts.
    other = Path(tempfile.gettempdir(), f"corpus-{chosen.part}.json") if chosen.part else None
    return result.finish(Path(chosen.json) if chosen.json else other)


if __name__ == "__main__":
    sys.exit(main())
