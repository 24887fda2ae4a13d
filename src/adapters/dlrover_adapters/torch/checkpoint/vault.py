"""A worker's line to the vault: its agent, which keeps the memory that its states lie in.

One packet socket, `PATH_NAME` beside the agent's own, one msgpack map per packet, descriptors of memory by SCM_RIGHTS. Questions
wait a bounded time for their answer, which bears their number; what is only told never waits. Usable from several threads.
A forked child (a DataLoader worker) has no line: what it tells is not said, what it asks raises `VaultGone`.

    if Vault.here():
        vault = Vault.connect()                         # raises VaultGone
        arena = vault.arena(layout, geometry)           # raises VaultRefused where there is no room, in words
        memory = mmap.mmap(arena.fd, geometry.total_bytes)

A line that failed once is gone for good: an agent that dies takes its workers with it.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgpack

from dlrover_core.checkpoint.arena import Geometry
from dlrover_core.words import plain

SOCKET_VARIABLE = "DLROVER_AGENT_SOCKET"
PATH_NAME = "vault.sock"
PACKET_BYTES_MAX = 64 * 1024
ANSWER_S = 300.0
"""Of a question that takes the agent no work: as long as a job bears an agent that is not heard of. One that is dead hangs up."""
FETCH_S = 3600.0
"""Of bringing a state, those of others before it too. What stalls is given up long before, by the savers themselves."""
TELL_S = 1.0
"""What is said once may wait for so long while the agent is busy."""
ALARM_CHARS_MAX, WHY_CHARS_MAX = 2000, 500
MEMORY, REPLICA, OBJECTS = "memory", "replica", "objects"
_FD = array.array("i")


class VaultGone(Exception):
    """There is no vault, or it does not answer. Go on without it."""


class VaultRefused(VaultGone):
    """The vault lives and says no, in a sentence for people: too little memory, a peer that does not answer."""


class Told(NamedTuple):
    """What the agent says first.

    ``generation`` is the one that this worker is of; ``node``, ``nodes``, ``node_rank`` and ``run`` as its world orders them.
    ``replica``: where the agent's saver takes copies and serves what it has (``host:port``), empty as long as it does not.
    ``committed``: the newest step that is whole on storage by the log, -1: none. ``plans``: the job's master makes planned
    changes that lose no step, where the ranks can agree on a boundary. ``memory``: bytes that arenas may still take here.
    ``resume_step``: from where the leader believes the ranks go on (-1: it does not know). ``lenders``: nodes that have left the
    world before at its boundary ``resume_step`` and wait: the address of each one's saver, its first rank there, and how many.
    ``copies``: nodes of this job take copies of each other's states, whether or not the saver can be reached yet.
    """

    generation: int
    node: str
    nodes: int
    node_rank: int
    run: str
    replica: str
    committed: int
    plans: bool
    memory: int
    resume_step: int = -1
    lenders: tuple[tuple[str, int, int], ...] = ()
    copies: bool = False


class Arena(NamedTuple):
    """Memory for this rank's states; whoever gets it closes ``fd``. Not ``fresh``: its pages and older slots are there."""

    id: int
    fresh: bool
    fd: int


class Holding(NamedTuple):
    """One slot that this node has in memory: its own rank's (`MEMORY`), a copy of another node's (`REPLICA`), or one of
    what another node's rank alone has (`OBJECTS`).

    ``id`` is what `Vault.borrow` takes, ``slot`` its place there. ``rank`` of ``world``, as they were when it was saved.
    """

    id: int
    kind: str
    rank: int
    world: int
    generation: int
    step: int
    layout: int
    slot: int


class Inventory(NamedTuple):
    """What the node has; ``replica`` and ``committed`` as in `Told`, of now."""

    holdings: tuple[Holding, ...]
    replica: str
    committed: int


class Fetched(NamedTuple):
    """An arena with one slot, received from a peer and verified; whoever gets it closes ``fd``."""

    id: int
    took_us: int
    fd: int


class Keeping(NamedTuple):
    """How this rank's states are kept, for people, the master, and whoever writes them.

    ``url`` of the storage (empty: none), every ``every`` steps in memory, every ``store_every`` on storage (0: only on demand),
    the newest ``keep`` of them (0: all), as ``format`` (``"dcp"`` or ``"torch"``). ``planned``: it can agree on a boundary.
    ``node_bytes``: what the states take on one node, in arenas and in copies that ranks stage themselves. ``writes``: this rank
    has parts to write. ``local``: where parts go while ``url`` fails, a folder of this host; empty: nowhere.
    """

    url: str
    every: int
    store_every: int
    keep: int
    format: str
    planned: bool
    node_bytes: int
    writes: bool
    local: str = ""


class Vault:
    """This worker's line. Made by `connect`; `close` it, or let it end with the process."""

    def __init__(self, line: socket.socket, *, rank: int, local_rank: int, world: int, nproc: int) -> None:
        self.rank, self.local_rank, self.world, self.nproc = rank, local_rank, world, nproc
        self.told: Told
        self._pid = os.getpid()
        self._line = line
        self._line.settimeout(ANSWER_S)
        # A socket with a timeout waits before it sends, whatever its flags say; this one never does.
        self._quick = line.dup()
        self._quick.setblocking(False)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._gone = ""

    @classmethod
    def here(cls) -> bool:
        """Does this process run under an agent that has a vault? Standalone, and under torchrun's own agents: no."""
        path = _path()
        return path is not None and path.exists()

    @classmethod
    def connect(cls) -> Vault:
        """Connect, say who we are (``RANK``, ``LOCAL_RANK``, ... of the environment) and hear the agent. Raises `VaultGone`."""
        try:
            ranks = {name: int(os.environ[variable]) for name, variable in _VARIABLES.items()}
        except (KeyError, ValueError) as error:
            raise VaultGone(f"this process is no rank: {error}") from error
        path = _path()
        if path is None:
            raise VaultGone("this process runs under no agent of ours")
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.settimeout(ANSWER_S)
        try:
            line.connect(str(path))
        except OSError as error:
            line.close()
            raise VaultGone(f"no vault answers at {path}: {error}") from error
        vault = cls(line, **ranks)
        try:
            answer, _ = vault._ask({"op": "hello", "generation": 0, **ranks})
            told = Told(**{name: answer[name] for name in Told._fields})
            lenders = tuple((str(address), int(first), int(count)) for address, first, count in told.lenders)
            vault.told = told._replace(lenders=lenders)
        except (KeyError, TypeError, ValueError) as error:
            vault.close()
            raise VaultGone(f"the vault's greeting is not understood: {error}") from error
        except VaultGone:
            vault.close()
            raise
        return vault

    @property
    def gone(self) -> str:
        """Why there is no line any more; empty: there is one, as far as is known."""
        return self._gone if os.getpid() == self._pid else "a forked child has no vault"

    def close(self) -> None:
        """Idempotent. In a forked child the parent's line stays."""
        self._gone = self._gone or "closed"
        self._line.close()
        self._quick.close()

    # ---- memory

    def arena(self, layout: int, geometry: Geometry, *, beside: int = 0) -> Arena:
        """The memory for this rank's states: the one that its predecessor had, if that fits, else a new one.

        ``beside``: bytes that this node's ranks are yet to take for copies of their own, for which there has to be room too.
        Of a new one no page is there yet: populate it on your own mapping, then write table and control page, then say `ready`.
        The old one is kept for reading until a step of this generation is whole on all nodes. Raises `VaultRefused`, `VaultGone`.
        """
        asked = {
            "op": "arena",
            "layout": layout,
            "slots": geometry.slots,
            "table_bytes": geometry.table_bytes,
            "blob_bytes": geometry.blob_bytes,
            "data_bytes": geometry.data_bytes,
            "generation": self.told.generation,
            "rank": self.rank,
            "world": self.world,
            "local_rank": self.local_rank,
            "beside": beside,
        }
        answer, fd = self._ask(asked, fd=True)
        return Arena(int(answer["id"]), bool(answer["fresh"]), fd)

    def ready(self, arena: int, holders: Sequence[Sequence[int]] | None = None, own: Sequence[int] = ()) -> None:
        """Control page and table of the arena are written: the agent may read them. Raises `VaultRefused`, `VaultGone`.

        ``holders`` and ``own`` as in the table: a state is whole on this node when those of its ranks hold it that are among
        them; None: all.
        """
        members, spread = None, 0
        if holders is not None:
            first = self.rank - self.local_rank
            members = sorted(
                {one - first for ranks in (*holders, own) for one in ranks if 0 <= one - first < self.nproc}
            )
            spread = spread_of(holders, self.nproc, self.told.nodes)
        self._ask({"op": "ready", "id": arena, "members": members, "spread": spread})

    def saved(self, arena: int, slot: int, step: int, *, due: bool) -> None:
        """The slot is published; ``due``: it is to go to storage. Never blocks, and may be lost: the agent also looks itself."""
        self._tell({"op": "saved", "id": arena, "slot": slot, "step": step, "due": due})

    def inventory(self) -> Inventory:
        """What this node has in memory. Waits until the saver has said where it can be reached. Raises `VaultGone`."""
        answer, _ = self._ask({"op": "inventory"})
        holdings = tuple(Holding(*one) for one in answer["holdings"])
        return Inventory(holdings, str(answer["replica"]), int(answer["committed"]))

    def borrow(self, holding: int) -> int:
        """A descriptor of the memory with this `Holding.id`, to be read only; close it. Raises `VaultRefused`, `VaultGone`."""
        return self._ask({"op": "borrow", "id": holding}, fd=True)[1]

    def fetch(
        self, address: str, rank: int, generation: int, step: int, layout: int, timeout_s: float = FETCH_S
    ) -> Fetched:
        """Have a slot brought from the saver at ``address``, verified. Raises `VaultRefused`, `VaultGone`.

        One at a time on one line; to fetch several beside each other, connect several times.
        """
        return self._fetch((address, rank, generation, step, layout), timeout_s, whole=True)

    def head(
        self, address: str, rank: int, generation: int, step: int, layout: int, timeout_s: float = FETCH_S
    ) -> Fetched:
        """The same for a slot's table and objects alone: the arena that comes has no data. Raises `VaultRefused`, `VaultGone`."""
        return self._fetch((address, rank, generation, step, layout), timeout_s, whole=False)

    def _fetch(self, slot: tuple[str, int, int, int, int], timeout_s: float, *, whole: bool) -> Fetched:
        names = ("address", "rank", "generation", "step", "layout")
        asked = {"op": "fetch", **dict(zip(names, slot, strict=True)), "within_s": timeout_s, "whole": whole}
        answer, fd = self._ask(asked, fd=True, timeout_s=timeout_s + ANSWER_S)
        return Fetched(int(answer["id"]), int(answer["took_us"]), fd)

    def dataset(self, terms: Sequence[Any]) -> None:
        """This rank trains on a dataset, with the terms of `dlrover_core.job.shards.Terms`. Raises `VaultGone`.

        Raises `VaultRefused`, which tells both, where the job has another one of that name.
        """
        self._ask({"op": "dataset", "terms": list(terms)})

    # ---- what is told

    def keeping(self, keeping: Keeping) -> None:
        """How states are kept from now on; once per generation, and again when it changes. Never raises."""
        self._tell({"op": "keeping", **keeping._asdict()}, TELL_S)

    def restored(
        self,
        step: int,
        tier: str,
        took_us: int,
        fell: Sequence[tuple[str, str]] = (),
        of: int = 0,
        cut: bytes = b"",
    ) -> None:
        """This rank begins from ``step``, read from ``tier``; before it ``fell`` these tiers, each for a reason. Never raises.

        ``of``: the generation that had made the step; ``cut``: what this rank takes for consumed, packed.
        """
        told = [[one, plain(why, WHY_CHARS_MAX)] for one, why in fell][:8]
        began = {"step": step, "tier": tier, "took_us": took_us, "fell": told, "of": of, "cut": cut}
        self._tell({"op": "restored", **began}, TELL_S)

    def alarm(self, words: str) -> None:
        """A save of this rank was left out because of an error; for people. Never raises."""
        self._tell({"op": "alarm", "words": plain(words, ALARM_CHARS_MAX)})

    def lost(self, words: str) -> None:
        """Training begins anew though there were states; for people, by one rank. Never raises."""
        self._tell({"op": "lost", "words": plain(words, ALARM_CHARS_MAX)}, TELL_S)

    def acked(self, plan: int) -> None:
        """This rank looks for the boundary of ``plan`` from now on. Never raises."""
        self._tell({"op": "acked", "plan": plan}, TELL_S)

    def boundary(self, plan: int, step: int) -> None:
        """The state after ``step``, the boundary of ``plan``, is published; this rank waits. Never raises."""
        self._tell({"op": "boundary", "plan": plan, "step": step}, TELL_S)

    # ---- packets

    def _tell(self, body: dict[str, Any], timeout_s: float = 0.0) -> None:
        if self.gone:
            return
        packet = _packed(body)
        try:
            self._quick.send(packet)
        except BlockingIOError:
            if timeout_s:
                self._tell_patiently(packet, timeout_s)
        except OSError as error:
            self._gone = f"the agent is gone: {error}"

    def _tell_patiently(self, packet: bytes, timeout_s: float) -> None:
        with contextlib.suppress(OSError), self._quick.dup() as line:
            line.settimeout(timeout_s)
            line.send(packet)

    def _ask(
        self, body: dict[str, Any], *, fd: bool = False, timeout_s: float = ANSWER_S
    ) -> tuple[dict[str, Any], int]:
        """The answer to a question, and the descriptor that comes with it."""
        if self.gone:
            raise VaultGone(self.gone)
        number = next(self._numbers)
        with self._lock:
            try:
                self._line.settimeout(timeout_s)
                self._line.send(_packed({**body, "n": number}))
                answer, fds = _receive(self._line)
            except (OSError, ValueError) as error:
                # An answer that comes late would be taken for the next one's.
                self._gone = f"no answer to {body['op']!r} within {timeout_s:g} s: {type(error).__name__}: {error}"
                raise VaultGone(self._gone) from error
        if "error" in answer or answer.get("n") != number or len(fds) != int(fd):
            for one in fds:
                os.close(one)
            if "error" in answer:
                raise VaultRefused(str(answer["error"]))
            self._gone = f"the answer to {body['op']!r} makes no sense"
            raise VaultGone(self._gone)
        return answer, fds[0] if fd else -1


_VARIABLES = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world": "WORLD_SIZE", "nproc": "LOCAL_WORLD_SIZE"}


def spread_of(holders: Sequence[Sequence[int]], nproc: int, nodes: int) -> int:
    """Over how many nodes one state is spread: nodes whose places differ by a multiple of it hold the same of it; 0: over all."""
    places: list[set[int]] = [set() for _ in range(nodes)]
    for number, ranks in enumerate(holders):
        for rank in ranks:
            if 0 <= rank // nproc < nodes:
                places[rank // nproc].add(number)
    for spread in range(1, nodes):
        if nodes % spread == 0 and all(places[at] == places[at % spread] for at in range(nodes)):
            return spread
    return 0 if nodes > 1 else 1


def _path() -> Path | None:
    agent = os.environ.get(SOCKET_VARIABLE, "")
    return Path(agent).with_name(PATH_NAME) if agent else None


def _receive(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One packet. Raises OSError at the line's end, ValueError for what is no map."""
    # Not socket.recv_fds: it drops its flags (CPython before 3.13), and the descriptors would survive an exec.
    payload, ancillary, _flags, _address = line.recvmsg(
        PACKET_BYTES_MAX, socket.CMSG_SPACE(_FD.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % _FD.itemsize])
    body = _unpacked(payload)
    if body is None:
        for one in fds:
            os.close(one)
        raise ValueError("the agent hung up" if not payload else "an answer that is no map")
    return body, list(fds)


def _packed(body: dict[str, Any]) -> bytes:
    # A path may have bytes that are not UTF-8, which Python holds as half characters.
    return cast(bytes, msgpack.packb(body, unicode_errors="surrogatepass"))


def _unpacked(payload: bytes) -> dict[str, Any] | None:
    try:
        body = msgpack.unpackb(payload, unicode_errors="surrogatepass")
    except (ValueError, msgpack.UnpackException):
        return None
    return body if isinstance(body, dict) else None
