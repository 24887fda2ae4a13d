"""The store of one generation, as torch's elastic agent uses it: to tell its ranks, and to wait for the others at the end.

Torch's own store holds its caller in C++ for minutes: no signal, and no news that the generation is over, reaches it there.
This one asks now and again, and looks up in between. (A wait of torch's with a short bound would print a warning at its end.)
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError, DistStoreError

from dlrover_core.runtime.launcher import WorkersLaunch

ASK_FIRST_S, ASK_MAX_S = 0.002, 0.1
DIAL_S = 1.0
CONNECT = timedelta(seconds=30)
HERE, ALL, PASSED = "dlrover/here", "dlrover/all", "dlrover/passed"
# Keys of torch 2.13's elastic agent.
ROLES, RANKS, BARRIER = "torchelastic/role_info/", "torchelastic/assigned_ranks/", "torchelastic/agent/terminal_state"
MEMBERS = f"{BARRIER}/num_members"


class Overtaken(Exception):
    """This generation is over before it began here."""


class GenerationStore(PrefixStore):
    """``ordered`` says whether this generation is still what should run; ``finished`` is called when its work is done here."""

    def __init__(
        self, store: Any, launch: WorkersLaunch, ordered: Callable[[], bool], finished: Callable[[], None]
    ) -> None:
        super().__init__("dlrover/agents", store)
        self._launch, self._ordered, self._finished = launch, ordered, finished
        self._role = b""

    @property
    def serves(self) -> bool:
        """Is its server on this node, and still in use?"""
        return self._launch.node_rank == 0 and self._ordered()

    def meet(self) -> None:
        """Return when the elastic agents of all nodes are here. Raises `Overtaken`."""
        try:
            # Each node counts once, also where it has to come a second time.
            first = super().add(f"{HERE}/{self._launch.node_rank}", 1) == 1
            if first and super().add(HERE, 1) == self._launch.nodes:
                super().set(ALL, "1")
            self._patiently(ALL)
        except DistError as error:
            raise Overtaken(str(error)) from error

    def part(self, bound_s: float) -> None:
        """Say that the last barrier is behind us; whoever holds the store waits, for a bounded time, until all have said so."""
        until = time.monotonic() + bound_s
        with contextlib.suppress(DistError):
            if super().add(PASSED, 1) == self._launch.nodes:
                super().set(f"{PASSED}/all", "1")
            if self._launch.node_rank == 0:
                self._await(f"{PASSED}/all", lambda: self._ordered() and time.monotonic() < until)

    # ---- what torch's elastic agent calls

    def set(self, key: str, value: Any) -> None:
        """Torch's."""
        if key.startswith(ROLES):
            self._role = value if isinstance(value, bytes) else os.fsencode(str(value))
        with self._unless_overtaken():
            super().set(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Torch's."""
        with self._unless_overtaken():
            super().multi_set(list(keys), list(values))  # type: ignore[misc]  # torch's stub forgets it

    def get(self, key: str) -> bytes:
        """Torch's; the ranks of a generation that is over already are this node's alone: its workers are about to be stopped."""
        with contextlib.suppress(Overtaken):
            self._patiently(key)
            return bytes(super().get(key))
        if not key.startswith(RANKS):
            raise DistStoreError(f"generation {self._launch.generation} is over; nobody will set {key!r}")
        first, size = self._launch.first_rank, max(1, self._launch.world_size)
        return json.dumps([first, size, first, size]).encode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Torch's; as `get`."""
        with contextlib.suppress(Overtaken):
            for key in keys:
                self._patiently(key)
            return [bytes(value) for value in super().multi_get(list(keys))]
        return [self._role for _ in keys]

    def add(self, key: str, amount: int) -> int:
        """Torch's; by counting itself in at its last barrier the elastic agent says that all of its workers ended well."""
        if key == MEMBERS:
            self._finished()
        return int(super().add(key, amount))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Torch's: the last barrier."""
        until = time.monotonic() + (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]  # as above
        for key in keys:
            if not self._await(key, lambda: self._ordered() and time.monotonic() < until):
                over = (
                    ""
                    if self._ordered()
                    else "; it is over, and the others go on without this node, which has finished"
                )
                raise DistStoreError(f"no {key!r} of generation {self._launch.generation}{over}")

    # ----

    def _patiently(self, key: str) -> None:
        """Until the key is there. Raises `Overtaken`."""
        try:
            if not self._await(key, self._ordered):
                raise Overtaken(key)
        except DistError as error:
            # Its node is gone; the master will say so in a moment.
            self._until_overtaken(error)

    def _await(self, key: str, patient: Callable[[], bool]) -> bool:
        """Is the key there, while we are patient?"""
        pause_s = ASK_FIRST_S
        while not super().check([key]):
            if not patient():
                return False
            time.sleep(pause_s)
            pause_s = min(ASK_MAX_S, pause_s * 1.5)
        return True

    @contextlib.contextmanager
    def _unless_overtaken(self) -> Any:
        try:
            yield
        except DistError as error:
            with contextlib.suppress(Overtaken):
                self._until_overtaken(error)

    def _until_overtaken(self, error: Exception) -> None:
        """The store is gone: wait for the news. Raises `Overtaken`; the error itself where none comes."""
        until = time.monotonic() + CONNECT.total_seconds()
        while self._ordered():
            if time.monotonic() >= until:
                raise error
            time.sleep(0.05)
        raise Overtaken(str(error)) from error


def join(launch: WorkersLaunch, ordered: Callable[[], bool], finished: Callable[[], None]) -> GenerationStore:
    """A client of the generation's store. Raises `Overtaken` when the generation is over before it can be reached."""
    host, _, port = launch.store.rpartition(":")
    host = host.strip("[]")
    _knock(host, int(port), ordered)
    try:
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=CONNECT)
    except DistError as error:
        raise Overtaken(f"store {launch.store} cannot be reached: {error}") from error
    return GenerationStore(store, launch, ordered, finished)


def _knock(host: str, port: int, ordered: Callable[[], bool]) -> None:
    """Until somebody listens there: torch's client would try for minutes, deaf to everything."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=DIAL_S):
                return
        except OSError as error:
            if not ordered():
                raise Overtaken(f"{host}:{port} cannot be reached: {error}") from error
            time.sleep(0.05)
