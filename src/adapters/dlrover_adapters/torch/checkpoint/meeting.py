"""How the ranks of one generation talk about checkpoints: through the store that they found each other by.

No process group: in many scripts a restore comes before there is one, and a collective of ours among the script's would be a
sequence number too many. What is said is small (inventories, plans, verdicts); states never go through here.

A collective has one outcome for all: rank 0 gathers, and what comes of it, the absence of others too, is what everybody gets.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgpack
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from dlrover_core.errors import CoreError
from dlrover_core.words import first_few

PREFIX = "dlrover/checkpoint/"
LIMIT_S = 1800.0
"""Ranks prepare their data and their model at different speeds. Who is dead is not waited for: its agent ends the others."""
DIAL_S = 300.0
AGAIN_S, AGAIN_MAX = 2.0, 3
"""About how long a lost connection to the store is retried; and how often within one wait."""
CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes of a value in one request: torch's store, where libuv serves it, hangs up on more than 8 MiB."""
_AROUND_BYTES = 16
"""Bytes at most that are added to an outcome when rank 0 posts it."""
_TOGETHER = 64
"""Values in one request."""
_REFUSED = b"refused:"
_RANKS_NAMED_MAX = 16
_WHY_MAX = 2000
_T = TypeVar("_T")


class MeetingFailed(CoreError):
    """Not all ranks came, or the store is gone. ``missing``: the ranks that were waited for in vain, as far as known."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class StoreGone(MeetingFailed):
    """The store does not answer, nor to a new connection: the ranks of this generation cannot talk to each other any more."""


class Meeting:
    """The ranks of a world, for one purpose. Not for several threads at once: a store's client serves one call at a time.

    ``store`` may be None in a world of one. All ranks make their meetings in the same order, and call the same collectives in the
    same order; ``limit_s`` is how long rank 0 waits for the slowest. Nothing else has a bound but by the store's own.
    """

    def __init__(
        self, store: Store | None, rank: int, world: int, local_rank: int = 0, *, limit_s: float = LIMIT_S
    ) -> None:
        if store is None and world > 1:
            raise MeetingFailed(f"rank {rank} of {world} has no store to meet the others in")
        self.rank, self.world, self.local_rank, self.limit_s = rank, world, local_rank, limit_s
        self._rounds: dict[str, int] = {}
        self._stale: list[tuple[str, bytes]] = []
        self._alone: dict[str, bytes] | None = {} if world == 1 else None
        self.gone = ""
        """Why the store is not asked any more; empty: it answers, as far as is known."""
        self._base: Store | None = None
        if store is not None and world > 1:
            # The second meeting of a process is another one than the first, with nothing global to count them by.
            opened = self._asked("open", lambda: store.add(f"{PREFIX}opened/{rank}", 1))
            self._prefix = f"{PREFIX}{opened}"
            self._store: Store = PrefixStore(self._prefix, store)
            self._base = store
            # The stubs of torch's stores lack these calls.
            self._many = bool(cast("Any", self._store).has_extended_api())

    @classmethod
    def of_environment(cls, *, limit_s: float = LIMIT_S) -> Meeting:
        """By what torchrun and we tell a rank (RANK, WORLD_SIZE, MASTER_ADDR), or the default group. Raises `MeetingFailed`."""
        initialized = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if initialized else int(os.environ.get("RANK", "0"))
        world = dist.get_world_size() if initialized else int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if world == 1:
            return cls(None, rank, world, local_rank, limit_s=limit_s)
        # The agent's store is there whether or not this rank has initialized anything yet; else rank 0 may serve it.
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "MASTER_ADDR" in os.environ
        if initialized and not served:
            return cls(dist.distributed_c10d._get_default_store(), rank, world, local_rank, limit_s=limit_s)
        return cls(_dialled(rank, world, limit_s), rank, world, local_rank, limit_s=limit_s)

    # ---- collectives

    def decide(
        self, name: str, mine: bytes, how: Callable[[list[bytes]], bytes], *, limit_s: float | None = None
    ) -> bytes:
        """What rank 0 makes, by ``how``, of what every rank has to say; the same for all. Raises `MeetingFailed`.

        An error that ``how`` raises is rank 0's own; the others are told of it. ``limit_s``: for this once.
        """
        if self.world == 1:
            return how([mine])
        limit_s = self.limit_s if limit_s is None else limit_s
        key = self._round(name)
        if self.rank:
            self.post(f"{key}/{self.rank}", mine)
            decided = self._heard(name, f"{key}/decided", limit_s)
            self._tidy(f"{key}/{self.rank}", mine)
            return decided
        keys = [f"{key}/{rank}" for rank in range(1, self.world)]
        with self._telling(key):
            self._wait(name, keys, range(1, self.world), limit_s)
            decided = how([mine, *self._taken_all(keys)])
        self.post(f"{key}/decided", msgpack.packb([None, decided]))
        self._all_are_in()
        self._stale = [(f"{key}/decided", decided)]
        return decided

    def assign(
        self,
        name: str,
        mine: bytes,
        how: Callable[[dict[int, bytes]], tuple[bytes, Sequence[bytes]]],
        speakers: Sequence[int],
    ) -> tuple[bytes, bytes]:
        """Rank 0 applies ``how`` to the words of the ``speakers``; every rank returns the common value and its own.

        ``how`` gets the words by rank, and returns what all ranks get and, by rank, what each gets. All ranks give the same
        ``speakers``; what others give as ``mine`` is not sent. Raises as `decide`.
        """
        if self.world == 1:
            common, (own,) = how({0: mine})
            return common, own
        key = self._round(name)
        if self.rank:
            if self.rank in speakers:
                self.post(f"{key}/{self.rank}", mine)
            common = self._heard(name, f"{key}/decided", self.limit_s)
            own = self._taken(f"{key}/for/{self.rank}")
            self._tidy(f"{key}/for/{self.rank}", own)
            if self.rank in speakers:
                self._tidy(f"{key}/{self.rank}", mine)
            return common, own
        ranks = [rank for rank in speakers if rank]
        keys = [f"{key}/{rank}" for rank in ranks]
        with self._telling(key):
            self._wait(name, keys, ranks, self.limit_s)
            said = dict(zip(ranks, self._taken_all(keys), strict=True))
            common, shares = how({0: mine, **said} if 0 in speakers else said)
            if len(shares) != self.world:
                raise ValueError(f"{name}: {len(shares)} shares for {self.world} ranks")
        self._post_all([(f"{key}/for/{rank}", shares[rank]) for rank in range(1, self.world)])
        self.post(f"{key}/decided", msgpack.packb([None, common]))
        # Who did not speak may still be in the round before: its outcome stays until all are in one together.
        self._stale.append((f"{key}/decided", common))
        return common, shares[0]

    @contextlib.contextmanager
    def refusing(self, name: str) -> Iterator[None]:
        """Tell the others of an error in the block, as this rank does not come to the collective ``name`` that follows it.

        They get a `MeetingFailed` with the words of the error instead of waiting. The error itself goes on.
        """
        try:
            yield
        except Exception as error:
            with contextlib.suppress(MeetingFailed):  # the error in the block is what matters
                self.refuse(name, error)
            raise

    def refuse(self, name: str, why: BaseException) -> None:
        """Tell the others that this rank does not come to the collective ``name``; they get a `MeetingFailed` with the words."""
        if self.world == 1:
            return
        key = self._round(name)
        told = f"rank {self.rank}: {type(why).__name__}: {why}"[:_WHY_MAX]
        if self.rank:
            self._set(f"{key}/{self.rank}", _REFUSED + told.encode(errors="backslashreplace"))
        else:
            self.post(f"{key}/decided", _packed([told, (0,)]))

    def all_gather(self, name: str, mine: bytes) -> list[bytes]:
        """What every rank has to say, by rank. Raises `MeetingFailed`, with the ranks that did not come."""
        return cast("list[bytes]", msgpack.unpackb(self.decide(name, mine, msgpack.packb)))

    def together(self, name: str, do: Callable[[], object]) -> None:
        """Call ``do`` on all ranks; where it raises on one rank, all ranks raise. A collective.

        A rank raises its own error, else `MeetingFailed` with the rank and the words of the first one that failed.
        """
        failed: Exception | None = None
        try:
            do()
        except Exception as error:  # noqa: BLE001  # raised below, once the others know it
            failed = error
        mine = f"{type(failed).__name__}: {failed}"[:_WHY_MAX].encode() if failed is not None else b""
        try:
            told = self.all_gather(name, mine)
        except MeetingFailed:
            if failed is None:
                raise
            told = []
        if failed is not None:
            raise failed
        ranks = tuple(rank for rank, why in enumerate(told) if why)
        if ranks:
            raise MeetingFailed(f"{name}: rank {ranks[0]}: {told[ranks[0]].decode(errors='replace')}")

    def share(self, name: str, value: bytes | None) -> bytes:
        """What rank 0 says, for all: its ``value``; what others give is not looked at. Rank 0 does not wait for them.

        Raises `MeetingFailed`.
        """
        if self.rank == 0 and value is None:
            raise ValueError(f"{name}: rank 0 has to say something")
        if self.world == 1:
            return value or b""
        key = f"{self._round(name)}/shared"
        if self.rank:
            return self._heard(name, key, self.limit_s)
        self.post(key, msgpack.packb([None, value]))
        self._stale.append((key, value or b""))
        return value or b""

    # ---- one-sided

    def post(self, name: str, value: bytes) -> None:
        """Leave a value for whoever looks. Raises `MeetingFailed`."""
        if self._alone is not None:
            self._alone[name] = value
            return
        chunks = [value[at : at + CHUNK_BYTES] for at in range(0, len(value), CHUNK_BYTES)] or [b""]
        for number in range(len(chunks) - 1, 0, -1):
            self._set(f"{name}#{number}", chunks[number])
        self._set(name, b"%d:" % len(chunks) + chunks[0])  # whoever sees this one finds the others

    def look(self, name: str) -> bytes | None:
        """What was left there; None: nothing yet. Waits for nobody. Raises `MeetingFailed`."""
        if self._alone is not None:
            return self._alone.get(name)
        return self._taken(name) if self._asked(name, lambda: self._store.check([name])) else None

    # ---- keys

    def _round(self, name: str) -> str:
        self._rounds[name] = self._rounds.get(name, 0) + 1
        return f"{name}/{self._rounds[name]}"

    def _heard(self, name: str, key: str, limit_s: float) -> bytes:
        """What rank 0 decided. It waits for others for as long as we do: its word of their absence comes only after that."""
        self._wait(name, [key], range(1), 2 * limit_s)
        failed, decided = msgpack.unpackb(self._taken(key))
        if failed is not None:
            raise MeetingFailed(f"{name}: {failed}", tuple(decided))
        return cast(bytes, decided)

    @contextlib.contextmanager
    def _telling(self, key: str) -> Iterator[None]:
        """On rank 0: post an error in the block to the other ranks as the outcome."""
        try:
            yield
        except Exception as error:
            missing = error.missing if isinstance(error, MeetingFailed) else ()
            self.post(f"{key}/decided", _packed([f"{type(error).__name__} on rank 0: {error}"[:_WHY_MAX], missing]))
            raise

    def _taken(self, key: str) -> bytes:
        return self._whole(key, self._get(key))

    def _taken_all(self, keys: Sequence[str]) -> list[bytes]:
        if not self._many:
            return [self._taken(key) for key in keys]
        found: list[bytes] = []
        for at in range(0, len(keys), _TOGETHER):
            part = keys[at : at + _TOGETHER]
            firsts = self._asked(part[0], lambda part=part: self._store.multi_get(list(part)))  # type: ignore[misc]  # mypy/10740
            found += [self._whole(key, first) for key, first in zip(part, firsts, strict=True)]
        return found

    def _whole(self, key: str, first: bytes) -> bytes:
        """A value of which the first request is known. Raises `MeetingFailed` where a rank said that it does not come."""
        if first.startswith(_REFUSED):
            raise MeetingFailed(first.removeprefix(_REFUSED).decode(errors="replace"))
        count, _, first = first.partition(b":")
        return b"".join((first, *(self._get(f"{key}#{number}") for number in range(1, int(count)))))

    def _post_all(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Small ones together, as many as one request may hold."""
        batch: list[tuple[str, bytes]] = []
        size = 0
        for key, value in values:
            if not self._many or len(value) >= CHUNK_BYTES:
                self.post(key, value)
                continue
            if batch and (size + len(value) > CHUNK_BYTES or len(batch) >= _TOGETHER):
                self._set_all(batch)
                batch, size = [], 0
            batch.append((key, b"1:" + value))
            size += len(value)
        if batch:
            self._set_all(batch)

    def _set_all(self, values: Sequence[tuple[str, bytes]]) -> None:
        keys, contents = [key for key, _ in values], [value for _, value in values]
        self._asked(keys[0], lambda: cast("Any", self._store).multi_set(keys, contents))

    def _all_are_in(self) -> None:
        """Everybody is in this round, so nobody looks at the outcomes of the ones before any more."""
        for key, value in self._stale:
            self._forget(key, value)
        self._stale = []

    def _tidy(self, key: str, value: bytes) -> None:
        """Delete what was for this rank and rank 0 alone: rank 0 would need as many round trips as there are ranks.

        The outcome is there, and rank 0 may have ended with the store by now: an error is none.
        """
        with contextlib.suppress(MeetingFailed):
            self._forget(key, value)

    def _forget(self, key: str, value: bytes) -> None:
        """Delete a value; how many requests it took follows from its size."""
        count = -(-(len(value) + _AROUND_BYTES) // CHUNK_BYTES)
        for one in (*(f"{key}#{number}" for number in range(1, count)), key):
            self._asked(one, lambda one=one: self._store.delete_key(one))  # type: ignore[misc]  # mypy/10740

    def _wait(self, name: str, keys: list[str], ranks: Sequence[int], limit_s: float) -> None:
        until = time.monotonic() + limit_s
        for again in range(AGAIN_MAX + 1):
            if self.gone:
                raise StoreGone(f"{name}: {self.gone}")
            store = self._store
            try:
                store.wait(keys, timedelta(seconds=max(0.001, until - time.monotonic())))
            except RuntimeError as error:
                missing = [rank for key, rank in zip(keys, ranks, strict=True) if self.look(key) is None]
                if not missing:
                    return
                if self._store is not store and again < AGAIN_MAX:
                    continue  # the connection was lost, and there is a new one
                named = first_few(missing, _RANKS_NAMED_MAX)
                raise MeetingFailed(
                    f"{name}: rank{'s' * (len(missing) > 1)} {named} of {self.world} did not come within {limit_s:g} s; "
                    "all ranks have to make the same calls in the same order",
                    tuple(missing),
                ) from error
            else:
                return

    def _get(self, key: str) -> bytes:
        return self._asked(key, lambda: self._store.get(key))

    def _set(self, key: str, value: bytes) -> None:
        self._asked(key, lambda: self._store.set(key, value))  # type: ignore[arg-type]  # bytes are taken as they are

    def _asked(self, name: str, call: Callable[[], _T]) -> _T:
        if self.gone:
            raise StoreGone(f"{name}: {self.gone}")
        try:
            return call()
        except RuntimeError as error:
            told = f"this generation's store does not answer: {_brief(error)}"
            if self._base is None:
                raise MeetingFailed(f"{name}: {told}") from error
            if not self._connected_again(self._base):
                self.gone = told
                raise StoreGone(f"{name}: {told}") from error
        try:
            return call()
        except RuntimeError as error:
            raise MeetingFailed(f"{name}: this generation's store does not answer: {_brief(error)}") from error

    def _connected_again(self, base: Any) -> bool:
        """Make a new connection to the same store; False: it is not there. A lost connection alone must not part the ranks."""
        try:
            limit = base.timeout
            base.set_timeout(timedelta(seconds=AGAIN_S))
            try:
                fresh = base.clone()
                fresh.check([self._prefix])
            finally:
                base.set_timeout(limit)
            fresh.set_timeout(limit)
        except (RuntimeError, AttributeError):  # stores of others may have no `clone`
            return False
        self._base, self._store = fresh, PrefixStore(self._prefix, fresh)
        return True


def _dialled(rank: int, world: int, limit_s: float) -> Store:
    """A client of the store at MASTER_ADDR. Raises `MeetingFailed`."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise MeetingFailed(
            f"rank {rank} of {world} does not know where to meet the others: MASTER_ADDR and MASTER_PORT are not set, and no "
            "process group is initialized; start it with dlrover-run or torchrun, or initialize the process group first"
        )
    wait = timedelta(seconds=min(DIAL_S, limit_s))
    try:
        store = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=wait)
    except RuntimeError as error:
        raise MeetingFailed(f"rank {rank} cannot reach the store at {host}:{port}: {_brief(error)}") from error
    # Launchers other than ours keep one store for all generations.
    return PrefixStore(f"generation-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _brief(error: Exception) -> str:
    """The first line of a library's error, without the frames that come with it."""
    return (str(error).strip().splitlines() or [""])[0][:200]


def _packed(value: object) -> bytes:
    # Words of an exception may hold what is not UTF-8.
    return cast(bytes, msgpack.packb(value, unicode_errors="backslashreplace"))
