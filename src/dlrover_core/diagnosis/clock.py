"""When a line was written, by one clock for a whole log.

A log's times come from many clocks: a collector's and a program's, in other zones, with or without a date, since boot, or not
at all. Within a file the order of lines is what counts: a time that contradicts it is another clock's. So every kind of stamp
of a file is compared with its neighbours of the kind that is most common there, and moved by the whole quarters of an hour
between the two. Files are compared likewise: two that differ by whole half hours are in other zones, and tell of the same
minutes.

Invariant: within a file later lines are never earlier than lines before them.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

BOOT, CALENDAR, DAY = "since boot", "calendar", "time of day"
_DAY_S = 86_400.0
# Zones differ by quarters of an hour; two clocks of one zone by less than this.
QUARTER_S, SKEW_S = 900.0, 600.0
ZONES_S = 15 * 3600.0
# Times of one failure, of several files: within so much they need no other explanation than that they are so.
NEAR_S = 1200.0

_DATED = re.compile(
    r"(?:rank\d+\]?:? ?)?(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _](?P<hour>\d\d):(?P<minute>\d\d):"
    r"(?P<second>\d\d)(?:[.,](?P<part>\d{1,9}))?(?: ?(?P<zone>Z|UTC|GMT|[+-]\d\d:?\d\d))?$"
)
_GLOG = re.compile(
    r"glog (?P<month>\d\d)-?(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:\.(?P<part>\d{1,9}))?$"
)
_NAMED = re.compile(
    r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[ ,]+)?(?P<name>[A-Z][a-z]{2}) +(?P<day>\d{1,2}) (?P<hour>\d\d):(?P<minute>\d\d):"
    r"(?P<second>\d\d)(?:\.(?P<part>\d+))?(?: \d{4})?$"
)
_TIME = re.compile(r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<part>\d{1,9}))?$")
_BOOT = re.compile(r"boot (\d+\.\d+)$")
_EPOCH = re.compile(r"\d{10}(?:\.\d+)?$|\d{13}$|\d{16}$")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Moment(NamedTuple):
    """A time as a line says it. ``kind``: how it is written; ``clock``: BOOT, CALENDAR or DAY; ``at_s``: its seconds."""

    kind: str
    clock: str
    at_s: float


def moment(stamp: str) -> Moment | None:
    """What a stamp says; None for what is no time. A calendar's seconds count from a year of months of 31 days."""
    boot = _BOOT.match(stamp)
    if boot is not None:
        return Moment(BOOT, BOOT, float(boot[1]))
    if _EPOCH.match(stamp):
        number = float(stamp[:10]) + float(f"0.{re.sub(r'[^0-9]', '', stamp[10:]) or 0}")
        # 1970-01-01 is a Thursday; only differences count, and a year is near enough.
        days, rest = divmod(number, _DAY_S)
        return Moment("epoch", CALENDAR, _civil(int(days)) + rest)
    for kind, pattern in (("dated", _DATED), ("glog", _GLOG), ("named", _NAMED)):
        found = pattern.match(stamp)
        if found is not None:
            return _calendar(kind, found)
    found = _TIME.match(stamp)
    return Moment(DAY, DAY, _of_day(found)) if found is not None else None


def in_order(stamps: Sequence[Sequence[str]]) -> tuple[list[float], str]:
    """Seconds of each line of one file, and by which clock; each line's stamps come outermost first.

    A line without a time has that of the line before it. Where no line has one, all are at 0 and the clock is empty.
    """
    seen = [[one for one in map(moment, of_line) if one is not None] for of_line in stamps]
    kinds = Counter(of_line[0].kind for of_line in seen if of_line)
    if not kinds:
        return [0.0] * len(stamps), ""
    clocks = {one.kind: one.clock for of_line in seen for one in of_line}
    # A calendar before a clock without a date before one since boot: what can be compared with other files.
    main = max(kinds, key=lambda kind: (clocks[kind] == CALENDAR, clocks[kind] == DAY, kinds[kind]))
    offsets = _offsets(seen, main)
    made: list[float] = []
    last, ahead = None, 0
    for of_line in seen:
        at = next((one.at_s + offsets[one.kind] for one in of_line if one.kind in offsets), None)
        if at is None:
            made.append(last if last is not None else math.nan)
            ahead += last is None
            continue
        if last is not None and clocks[main] == DAY and at < last - _DAY_S / 2:
            offsets = {kind: offset + _DAY_S for kind, offset in offsets.items()}
            at += _DAY_S
        last = at if last is None else max(last, at)
        made.append(last)
    first = next(one for one in made if not math.isnan(one))
    return [first if math.isnan(one) else one for one in made], clocks[main]


def _offsets(seen: Sequence[Sequence[Moment]], main: str) -> dict[str, float]:
    """By how much each kind of stamp is moved, so that it fits between its neighbours of the main kind."""
    gaps: dict[str, list[float]] = {one.kind: [] for of_line in seen for one in of_line}
    mains = [next((one.at_s for one in of_line if one.kind == main), None) for of_line in seen]
    first = next(one for one in mains if one is not None)
    before: float = first
    for of_line, its in zip(seen, mains, strict=True):
        before = its if its is not None else before
        for one in of_line:
            gaps[one.kind].append(_zone(before - one.at_s, one.kind))
    return {kind: 0.0 if kind == main else statistics.median_low(found) for kind, found in gaps.items()}


def _zone(gap: float, kind: str) -> float:
    """A gap of whole quarters of an hour, as zones have; a gap that no zone explains is taken as it is."""
    if kind in (BOOT, DAY):
        return gap if kind == BOOT else round(gap / QUARTER_S) * QUARTER_S
    if abs(gap) < SKEW_S:
        return 0.0
    return round(gap / QUARTER_S) * QUARTER_S


def aligned(spans: Sequence[tuple[float, float, str]]) -> list[float]:
    """By how much each file is moved, so that all tell of the same minutes.

    Each file is given by its first and its last failure's time and its clock. The first file by the most common clock stays.
    """
    clocks = Counter(clock for _, _, clock in spans if clock)
    if not clocks:
        return [0.0] * len(spans)
    common = max(clocks, key=lambda one: (one == CALENDAR, clocks[one]))
    here = [(begin, end) for begin, end, clock in spans if clock == common]
    base = here[0]
    made = []
    for begin, end, clock in spans:
        if clock != common:
            # Incomparable: taken to tell of what the first file does.
            made.append(base[0] - begin)
            continue
        gap = 0.0 if end >= base[0] and begin <= base[1] else begin - base[1] if begin > base[1] else end - base[0]
        if abs(gap) <= NEAR_S:
            made.append(0.0)
            continue
        near = base[0] - begin if abs(base[0] - begin) < abs(base[1] - end) else base[1] - end
        moved = round(near / (2 * QUARTER_S)) * 2 * QUARTER_S
        made.append(moved if abs(near - moved) <= NEAR_S / 4 and 0 < abs(moved) <= ZONES_S else 0.0)
    return made


def _calendar(kind: str, found: re.Match[str]) -> Moment | None:
    said = found.groupdict()
    name = said.get("name")
    if name and name not in _MONTHS:
        return None
    month = _MONTHS.index(name) + 1 if name else int(said["month"] or 1)
    at = ((month * 31) + int(said["day"] or 1)) * _DAY_S + _of_day(found)
    zone = said.get("zone")
    if zone and zone[0] in "+-":
        digits = zone[1:].replace(":", "")
        at -= (1 if zone[0] == "+" else -1) * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)
    return Moment(f"{kind}{' zoned' if zone else ''}", CALENDAR, at)


def _of_day(found: re.Match[str]) -> float:
    part = float(f"0.{found['part'] or 0}")
    return (int(found["hour"]) * 60 + int(found["minute"])) * 60 + int(found["second"]) + part


def _civil(days: int) -> float:
    """Seconds of a day since 1970 in a year of months of 31 days."""
    # Days from civil, inverted (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms").
    shifted = days + 719_468
    era = shifted // 146_097
    of_era = shifted - era * 146_097
    year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    number = (5 * of_year + 2) // 153
    day = of_year - (153 * number + 2) // 5 + 1
    month = number + 3 if number < 10 else number - 9
    return (month * 31 + day) * _DAY_S
