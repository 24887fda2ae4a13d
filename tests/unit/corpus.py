"""The incidents of `tests/corpus`: logs of public failures, in values of our own, with what each was."""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).resolve().parents[1] / "corpus"
TEACHING, HELDOUT, ASIDE, CHECKING, SECOND = "teaching", "heldout", "aside", "checking", "heldout2"
DRAWN = (TEACHING, HELDOUT, ASIDE, CHECKING)  # a project's name says in which of them it is
PARTS = (*DRAWN, SECOND)
HELD_OF_TEN = 3
RESERVED = "37"  # last figures of the threads that others judge by


@dataclass(frozen=True, slots=True)
class Case:
    """One incident. ``rank`` -1 and ``host`` and ``device`` empty: the text names none, or nobody is at fault alone.

    ``accept``, ``verdicts``: other right answers. ``never``: actions that would be wrong. ``settled``: "document" where the
    thread says what it was, "text" where the log alone does.
    """

    id: str
    part: str
    project: str
    source: str
    family: str
    settled: str
    settled_by: str
    text: str = field(repr=False)
    root: str = ""
    verdict: str = ""
    rank: int = -1
    host: str = ""
    device: str = ""
    never: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    verdicts: tuple[str, ...] = ()


def held_out(project: str) -> bool:
    """Is that source project in the part that no writer of patterns reads?"""
    return _drawn(project) % 10 < HELD_OF_TEN


def checks(project: str) -> bool:
    """Of the third lot's new projects: is it in the half that checks (else it teaches)?"""
    return _drawn(project) // 10 % 2 == 1


def _drawn(project: str) -> int:
    return int(hashlib.sha256(project.lower().encode()).hexdigest(), 16)


def cases(part: str) -> list[Case]:
    """All incidents of a part, by file."""
    return [
        _case(part, told["project"], row)
        for path in sorted((FOLDER / part).glob("*.toml"))
        for told in [read(path)]
        for row in told["incident"]
    ]


def causes() -> Mapping[str, Mapping[str, Any]]:
    """The causes that the corpus names beside the published signatures."""
    return {row["id"]: row for row in read(FOLDER / "causes.toml")["cause"]}


def read(path: Path) -> Mapping[str, Any]:
    """A file of the corpus."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _case(part: str, project: str, row: Mapping[str, Any]) -> Case:
    label = row["label"]
    return Case(
        id=row["id"],
        part=part,
        project=project,
        source=row["source"],
        family=row["family"],
        settled=row["settled"],
        settled_by=row["settled_by"],
        text=row["text"],
        root=label["root"],
        verdict=label["class"],
        rank=label.get("rank", -1),
        host=label.get("host", ""),
        device=label.get("device", ""),
        never=tuple(label["never"]),
        accept=tuple(label.get("accept", ())),
        verdicts=tuple(label.get("accept_classes", ())),
    )


# What may stand about an incident in another log, and must change no verdict. Each: a name, and text to text.
WRAPPED_AT, TAIL, ELSEWHERE = 120, 200, "ibex-node-417"
STEP = "step {step:7} | loss {loss:.4f} | grad norm {norm:.3f} | 1.83 s | tokens/s 41211"
# What other ranks write meanwhile: without a prefix, with one, a bar, a library's word.
OTHERS = (
    "step {number:7} | loss 2.1034 | grad norm 0.731 | 1.83 s | tokens/s 41211",
    "[rank{rank}]: step {number:7} | loss 2.1034",
    "INFO:trainer:iteration {number}: lr 3.0e-4",
    "Epoch 3:  41%|####      | {number}/980000 [2:11:09<3:02:11, 1.83s/it, loss=2.1]",
)
# The line of an exception's type: a traceback's last.
RAISES = re.compile(
    r"^(?:\[?[\w:@./-]+\]?:? ?)?(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Group)\b(?::|$)"
)
CLOCK = re.compile(r"\b(20\d\d)-(\d\d)-(\d\d)([ T])(\d\d):(\d\d):(\d\d)")
AFTER_A_HEAD = re.compile(r"^(?:\[?\S+\]?:?)?\s{2,}|^\s*\^+\s*$|Traceback \(most recent call last\):$|^\[\d+\]:$")


def perturbed(case: Case) -> Iterator[tuple[str, str]]:
    """The same incident in other surroundings."""
    lines = case.text.splitlines()
    chance = random.Random(case.id)  # any noise does, the same each time
    yield "noise between lines", "\n".join(_noisy(lines, chance))
    yield "noise within tracebacks", "\n".join(_noisy_within(lines, chance))
    yield "two ranks' tracebacks, line by line", "\n".join(_doubled(lines))
    yield f"last {TAIL} lines of more", "\n".join([*(_step(chance) for _ in range(2 * TAIL)), *lines][-TAIL:]) + "\n"
    yield "timestamps of a collector", "\n".join(_stamped(lines, "{at}Z {line}"))
    yield "a pod before each line", "\n".join(f"[pod/train-7f9c-worker-0/main] {line}" for line in lines)
    yield "JSON lines", "\n".join(json.dumps({"log": f"{line}\n", "stream": "stderr"}) for line in lines)
    yield "carriage returns", "\r\n".join(lines) + "\r\n"
    yield "colours", "\n".join(f"\x1b[31m{line}\x1b[0m" if line else line for line in lines)
    yield "programs' times in another zone", CLOCK.sub(_elsewhere, case.text)
    yield f"wrapped at {WRAPPED_AT}", "\n".join(part for line in lines for part in _wrapped(line))
    if case.host:
        yield "another host's name", case.text.replace(case.host, ELSEWHERE)


def _step(chance: random.Random) -> str:
    return STEP.format(step=chance.randrange(10**6), loss=chance.uniform(1, 4), norm=chance.uniform(0, 2))


def _noisy(lines: list[str], chance: random.Random) -> Iterator[str]:
    """Progress of other ranks after one line in four, but not within a traceback, a table or a stack."""
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        yield line
        if not AFTER_A_HEAD.search(line) and not AFTER_A_HEAD.search(after) and chance.random() < 1 / 4:
            yield _step(chance)


def _noisy_within(lines: list[str], chance: random.Random) -> Iterator[str]:
    """What other ranks write after one line in four, wherever that is."""
    for line in lines:
        yield line
        if chance.random() < 1 / 4:
            yield chance.choice(OTHERS).format(number=chance.randrange(10**6), rank=chance.randrange(1, 512))


def _doubled(lines: list[str]) -> Iterator[str]:
    """Each line of a traceback twice, as two ranks that fail alike write to one file."""
    within = False
    for line in lines:
        within = within or "Traceback (most recent call last)" in line
        yield line
        if within:
            yield line
        within = within and (RAISES.search(line) is None)


def _stamped(lines: list[str], form: str) -> Iterator[str]:
    """Each line with the time at which a collector read it: all within a few seconds, in order."""
    for number, line in enumerate(lines):
        at = datetime(2025, 3, 9, 4, 5, 6, tzinfo=timezone.utc) + timedelta(milliseconds=37 * number)
        yield form.format(at=at.strftime("%Y-%m-%dT%H:%M:%S.%f"), line=line)


def _elsewhere(found: re.Match[str]) -> str:
    year, month, day, between, hour, minute, second = found.groups()
    try:
        told = datetime(*map(int, (year, month, day, hour, minute, second)), tzinfo=timezone.utc)  # type: ignore[misc, arg-type]
    except ValueError:
        return found[0]
    return (told + timedelta(hours=5, minutes=30)).strftime(f"%Y-%m-%d{between}%H:%M:%S")


def _wrapped(line: str) -> list[str]:
    return [line[at : at + WRAPPED_AT] for at in range(0, len(line), WRAPPED_AT)] or [line]
