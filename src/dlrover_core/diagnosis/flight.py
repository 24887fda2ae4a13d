"""Torch's flight recorder, read across ranks: who lags behind, who called something else, who is missing.

The recorder of each rank numbers the collectives of every process group. Ranks of one group must call the same ones in the same
order; so the rank whose newest number is smaller than its peers' has not come, and one that called another operation, or with
another size, under the same number is where the program parted. Gloo never says that a collective has begun or ended, only
that its entry is retired.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

GROUPS_MAX = 8
SHAPE_CHARS_MAX = 80
_OVER = ("completed",)


class Newest(NamedTuple):
    """The newest collective that one rank called in one process group. ``active``: it is not over.

    ``waits`` is a send or receive of this group that is not over; empty: there is none.
    """

    group: str
    seq: int
    op: str
    sizes: str
    active: bool
    waits: str = ""


class Parted(NamedTuple):
    """Where ranks part: ``lag``, ``missing`` or ``mismatch``; ``ranks`` are those that did, the others did ``op`` at ``seq``.

    Of a mismatch in which no side is the smaller one all ranks are told.
    """

    how: str
    group: str
    ranks: tuple[int, ...]
    seq: int
    op: str
    others: str = ""


def newest(dump: str | bytes) -> tuple[Newest, ...]:
    """A rank's dump, as far as it matters for a hang. Of anything that is none: nothing."""
    try:
        told = json.loads(dump)
        entries = told.get("entries", [])
        return tuple(_newest(entries))[:GROUPS_MAX]
    except (ValueError, AttributeError, TypeError, LookupError, OverflowError, RecursionError):
        return ()


def _newest(entries: Sequence[Mapping[str, Any]]) -> Iterator[Newest]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(str(entry["process_group"][0]), []).append(entry)
    for name, of_group in groups.items():
        collective = [one for one in of_group if not one.get("is_p2p")]
        last = max(collective, key=lambda one: int(one["collective_seq_id"]), default=None)
        # Only the newest: an older one that nobody waited for may never have been retired.
        lone = next((one for one in reversed(of_group) if one.get("is_p2p")), None)
        waits = _op(lone) if lone is not None and _active(lone) else ""
        if last is None:
            yield Newest(name, 0, "", "", False, waits)
        else:
            yield Newest(name, int(last["collective_seq_id"]), _op(last), _shape(last), _active(last), waits)


def _active(entry: Mapping[str, Any]) -> bool:
    return not entry.get("retired") and entry.get("state") not in _OVER


def _op(entry: Mapping[str, Any]) -> str:
    return str(entry.get("profiling_name", "")).rpartition(":")[2].partition(" ")[0] or "?"


def _shape(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry.get("input_sizes", []), separators=(",", ":"))[:SHAPE_CHARS_MAX]


def parted(ranks: Mapping[int, Sequence[Newest]]) -> Parted | None:
    """Where the ranks part. ``ranks``: those whose recorder was read. None: they do not, or nobody has recorded anything."""
    busy = {rank for rank, told in ranks.items() if any(one.active or one.waits for one in told)}
    found = [one for group in _groups(ranks) if (one := _parted(group, ranks, busy)) is not None]
    order = ("lag", "missing", "mismatch")
    # Who waits for a collective of one group lags in another because of it: the group that nobody so excuses tells.
    return min(found, key=lambda one: (order.index(one.how), len(one.ranks)), default=None)


def _groups(ranks: Mapping[int, Sequence[Newest]]) -> list[str]:
    return sorted({one.group for told in ranks.values() for one in told})


def _parted(group: str, ranks: Mapping[int, Sequence[Newest]], busy: set[int]) -> Parted | None:
    here = {rank: one for rank, told in ranks.items() for one in told if one.group == group}
    last = max(here.values(), key=lambda one: one.seq)
    behind = [rank for rank, one in here.items() if one.seq < last.seq]
    idle = [rank for rank in behind if rank not in busy]
    lone = [rank for rank in behind if here[rank].waits]
    if idle or lone:
        return Parted("lag", group, tuple(sorted(idle or lone)), last.seq, last.op)
    if group == "0" and last.active and len(ranks) > len(here):
        absent = sorted(rank for rank in ranks if rank not in here and rank not in busy)
        if absent:
            return Parted("missing", group, tuple(absent), last.seq, last.op)
    return _mismatch(group, {rank: one for rank, one in here.items() if one.seq == last.seq and one.active}, last.seq)


def _mismatch(group: str, here: Mapping[int, Newest], seq: int) -> Parted | None:
    for what in (lambda one: one.op, lambda one: f"{one.op} of {one.sizes}"):
        called = Counter(what(one) for one in here.values())
        if len(called) < 2:
            continue
        (most, times), (_, second) = called.most_common(2)
        odd = sorted(rank for rank, one in here.items() if what(one) != most)
        if times == second:
            return Parted("mismatch", group, tuple(sorted(here)), seq, " and ".join(sorted(called)))
        return Parted("mismatch", group, tuple(odd), seq, what(here[odd[0]]), most)
    return None
