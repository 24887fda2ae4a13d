"""What is done to logs on their way must not change what they say: noise, prefixes, zones, cuts, wrapping, other names."""

from __future__ import annotations

import functools
import json
import random
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dlrover_core.diagnosis import answers, reading, rows
from dlrover_core.diagnosis.matching import matcher
from dlrover_core.diagnosis.signatures import table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CORPUS = Path(__file__).resolve().parents[1] / "corpus" / "teaching"
# So many are read every day, in a few seconds.
TAKEN = 120
FLIPS_MAX = 2  # of these; of all 300 logs, eight times changed, one flipped when this was written


@functools.lru_cache(maxsize=1)
def logs() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Logs of the corpus, by a number of their names, so that the same are taken every day."""
    found = []
    for path in sorted(CORPUS.glob("*.toml")):
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["incident"]
        found += [(f"{path.stem}/{one['id']}", tuple(one["text"].strip("\n").split("\n"))) for one in rows]
    return tuple(sorted(found, key=lambda one: zlib.crc32(one[0].encode()))[:TAKEN])


def said(*texts: Sequence[str]) -> str:
    """The signature of the likeliest cause; empty: none."""
    given = [rows.Text(f"{number}.log", range(1, len(lines) + 1), lines) for number, lines in enumerate(texts)]
    found = answers.answer(reading.read(given, matcher(table())))
    return found.judgement.signature if found is not None else ""


@functools.lru_cache(maxsize=1)
def before() -> dict[str, str]:
    """What each says undisturbed."""
    return {name: said(lines) for name, lines in logs()}


def noise(lines: Sequence[str], chance: random.Random) -> list[str]:
    """Others' harmless lines in between."""
    made: list[str] = []
    for line in lines:
        if chance.random() < 0.1:
            made.append(f"INFO cache: {chance.randrange(99)} entries are warm")
        made.append(line)
    return made


def stamped(lines: Sequence[str], _chance: random.Random) -> list[str]:
    """As `kubectl logs --timestamps` writes them, in a zone of its own."""
    return [f"2031-07-09T03:{n // 60 % 60:02d}:{n % 60:02d}.123456789Z {line}" for n, line in enumerate(lines)]


def composed(lines: Sequence[str], _chance: random.Random) -> list[str]:
    """With a container's name before each."""
    return [f"trainer-1  | {line}" for line in lines]


def in_json(lines: Sequence[str], _chance: random.Random) -> list[str]:
    """As a collector writes them."""
    return [json.dumps({"log": f"{line}\n", "stream": "stderr"}) for line in lines]


def coloured(lines: Sequence[str], _chance: random.Random) -> list[str]:
    """With colours, and with a terminal's line ends."""
    return [f"\x1b[31m{line}\x1b[0m\r" for line in lines]


def cut(lines: Sequence[str], _chance: random.Random) -> list[str]:
    """The last 200 lines of a log that had been long."""
    healthy = [f"step {number} loss 2.{number:03d} tokens/s 4711" for number in range(300)]
    return [*healthy, *lines][-200:]


def hosts(lines: Sequence[str], _chance: random.Random) -> list[str]:
    """On other hosts."""
    return [re.sub(r"(?<!GPU )\b(dgx|node|gpu|cn|gn)-(\d)", r"rack4-\1-1\2", line) for line in lines]


def wrapped(lines: Sequence[str], _chance: random.Random) -> list[str]:
    """As a terminal of 160 columns shows them."""
    return [line[at : at + 160] for line in lines for at in range(0, max(len(line), 1), 160)]


CHANGES = (noise, stamped, composed, in_json, coloured, cut, hosts, wrapped)


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_a_verdict_does_not_flip(change: Callable[[Sequence[str], random.Random], list[str]]) -> None:
    """However a log is written down, it says the same."""
    flips = {}
    for name, lines in logs():
        found = said(change(lines, random.Random(name)))
        if found != before()[name]:
            flips[name] = f"{before()[name]}, then {found}"
    assert len(flips) <= FLIPS_MAX, flips


def test_the_order_of_files_does_not_matter() -> None:
    """Files of other hosts, given first or last, change nothing."""
    other = ["2031-07-09 03:00:00 INFO [rank9] step 3 loss 2.1", "2031-07-09 03:00:01 INFO [rank9] step 4 loss 2.1"]
    flips = [name for name, lines in logs()[:30] if not said(lines, other) == said(other, lines) == before()[name]]
    assert flips == []
