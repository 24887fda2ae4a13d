"""The desk: a process of its own that holds Ray's client library, and serves the masters of one run over a Unix socket.

Importing Ray takes seconds and tens of MiB, and Ray's library ends its process when the cluster's state service has been away for
a minute: neither may be a master's. The desk holds nothing that the cluster does not have: it may die at any moment, and whoever
needs one starts it anew (`client`). It ends when nobody has talked to it for `IDLE_S`.

``python -c ... SOCKET ADDRESS JOB RUN REPORT``: to the descriptor REPORT it writes why it cannot serve, as JSON, or nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from dlrover_backends.ray import faults
from dlrover_backends.ray.lookout import Lookout
from dlrover_backends.ray.names import Run
from dlrover_backends.ray.records import Actor
from dlrover_backends.ray.standbys import Reserve, Standbys, seat_of
from dlrover_backends.shared import wire
from dlrover_backends.shared.conversations import Conversations
from dlrover_backends.shared.observers import Observer
from dlrover_core.errors import LaunchRefused, MalformedMessage

if TYPE_CHECKING:
    from dlrover_backends.ray.cluster import Cluster

IDLE_S = 10.0
CLEAR_S = 12.0
"""With a second look (`cluster.AGAIN_PART`) less than a launcher waits (`apart.CLEAR_S`), so that it can say what is left."""

log = structlog.get_logger("dlrover.desk")


class Desk:
    """Serves one run at ``path``. ``cluster`` is connected. Make it in its event loop."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        self._cluster, self._path = cluster, path
        self._lookout = Lookout(cluster)
        self._standbys = Standbys(cluster, self._lookout)
        self._ordering = asyncio.Lock()
        self._over = asyncio.Event()
        self._conversations = Conversations(self._answer, self._observed)

    async def serve(self, listening: Callable[[], None]) -> None:
        """Until nobody needs it any more. ``listening`` is called once it can be talked to. Raises `CoreError`."""
        server = await asyncio.start_unix_server(self._conversations.take, sock=wire.listen(self._path))
        listening()
        tasks = [asyncio.ensure_future(one) for one in (self._lookout.run(), self._wait_idle(), self._over.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            with contextlib.suppress(OSError):
                self._path.unlink()

    async def _wait_idle(self) -> None:
        since = time.monotonic()
        while time.monotonic() - since < IDLE_S:
            await asyncio.sleep(1.0)
            if self._conversations.tasks:
                since = time.monotonic()

    # ---- orders

    async def _launch(self, token: int, fields: dict[str, Any], fit: dict[str, Any]) -> tuple[object, ...]:
        from dlrover_backends.ray.cluster import Order

        order = Order(**fields)
        async with self._ordering:
            await asyncio.to_thread(self._cluster.admit, token)
            if order.name in await asyncio.to_thread(self._cluster.deletions.names):
                raise LaunchRefused(f"{order.name} was here and was deleted; a name is used once", permanent=True)
            fitting: list[str] = []
            try:
                if fit:
                    await self._lookout.look(anew=False)  # a standby that is not published yet may be no node yet
                    shape = await asyncio.to_thread(self._cluster.shape, fit["shape"], order.runtime_env)
                    fitting = self._standbys.fitting(fit["group"], shape, fit["heard"], order.avoid)
                made = await asyncio.to_thread(self._cluster.create, order, fitting, token=token)
            except LaunchRefused:
                raise
            except Exception as error:
                fault = faults.of_order(error)
                if fault is None:
                    raise
                raise LaunchRefused(fault.text, permanent=fault.permanent) from error
        if made.new:
            log.info("node is placed", node=order.name, wants=dict(order.wants), standby=made.seat)
            self._lookout.wake()
        return ("done", seat_of(made.seat) if made.seat else None)

    async def _reserve(self, token: int, wanted: tuple[Any, ...]) -> tuple[object, ...]:
        async with self._ordering:
            await asyncio.to_thread(self._cluster.admit, token)
            groups = [Reserve(**one) for one in wanted]
            try:
                shapes = [
                    await asyncio.to_thread(self._cluster.shape, one.shape, one.order["runtime_env"]) for one in groups
                ]
                levels = [one._replace(shape=shape) for one, shape in zip(groups, shapes, strict=True)]
                await self._standbys.level(levels)
            finally:
                await asyncio.to_thread(self._cluster.sweep)
        return ("done", None)

    async def _delete(self, token: int, name: str, grace_s: float) -> tuple[object, ...]:
        async with self._ordering:
            await asyncio.to_thread(self._cluster.fence.check, token)
            if self._cluster.fence.is_removed:  # whoever removes it ends the node, and leaves no keys
                return ("done", None)
            await asyncio.to_thread(self._cluster.deletions.mark, name, grace_s)
            await asyncio.to_thread(self._cluster.sweep)
            actor = await self._found(name)
            if actor is None or actor.is_dead:
                self._lookout.wake()
                return ("done", None)
            log.info("node is deleted", node=name, state=actor.state, grace_s=grace_s)
            await asyncio.to_thread(self._cluster.end, actor, grace_s)
        self._lookout.ends(name, grace_s)
        return ("done", None)

    async def _found(self, name: str) -> Actor | None:
        """The node's actor. No table is read for one that was seen to run or to be over; a whole one only for one never seen."""
        actor = self._lookout.actor(name)
        if actor is None or not (actor.state == "ALIVE" or actor.is_dead):
            await self._lookout.look(anew=actor is None)
        return self._lookout.actor(name)

    async def _clear(self) -> tuple[object, ...]:
        """Remove all that the run has in the cluster."""
        async with self._ordering:
            await asyncio.to_thread(self._cluster.clear, CLEAR_S)
        return ("done", None)

    async def _in_turn(self, order: Callable[..., object], *words: object) -> tuple[object, ...]:
        """An order about masters, after those before it: what is kept while the run is released would stay."""
        async with self._ordering:
            return ("done", await asyncio.to_thread(order, *words))

    async def _keep(self, plan: dict[str, Any]) -> tuple[object, ...]:
        """Keepers that Ray has started on other hosts than meant move; nobody's order waits for that."""
        done, wanted = await self._in_turn(_keep, plan)
        await asyncio.to_thread(_settle, plan, wanted)
        return (done, None)

    # ---- conversations

    async def _answer(self, request: tuple[Any, ...]) -> tuple[object, ...]:
        match request:
            case ("launch", int(token), dict(fields), dict(fit)):
                return await self._launch(token, fields, fit)
            case ("reserve", int(token), tuple(wanted)):
                return await self._reserve(token, wanted)
            case ("delete", int(token), str(name), grace_s):
                return await self._delete(token, name, float(grace_s))
            case ("check", dict(labels)):
                return ("done", await asyncio.to_thread(_label_fault, labels))
            case ("others",):
                return ("done", await asyncio.to_thread(self._cluster.others))
            case ("claim", str(job), str(run), str(token), str(driver), bool(encrypts)):
                return await self._in_turn(_claimed, job, run, token, driver, encrypts)
            case ("send", dict(env)):
                return ("done", (self._cluster.address, await asyncio.to_thread(self._cluster.sent, env)))
            case ("keep", dict(plan)):
                return await self._keep(plan)
            case ("release", str(job), str(run)):
                return await self._in_turn(_release, job, run)
            case ("clear",):
                return await self._clear()
            case ("end",):
                self._over.set()  # the answer is written before anybody else runs
                return ("done", None)
        raise MalformedMessage(f"there is no order {request[0]!r} with {len(request) - 1} fields like these")

    async def _observed(self, _: tuple[Any, ...], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tell one client everything from now on, until it goes away."""
        observer = Observer(writer)
        await self._lookout.look()  # what was ordered before is in the list
        with self._lookout.told(observer) as listed:
            await wire.write(writer, "listed", listed)
            await observer.serve(reader)


def _label_fault(labels: dict[str, str]) -> str:
    from dlrover_backends.ray import private

    return private.label_fault(labels)


def _claimed(job: str, run: str, token: str, driver: str, encrypts: bool) -> tuple[str, bool]:
    """Why the job's name cannot be this run's, empty: it is; and whether the cluster's state outlives its head's process."""
    from dlrover_backends.ray import masters

    try:
        masters.claim(job, run, token, driver, encrypts=encrypts)
    except masters.InUse as error:
        return str(error), True
    return "", masters.persistent()


def _keep(plan: dict[str, Any]) -> dict[str, str]:
    from dlrover_backends.ray import masters, mastery

    return masters.keep(mastery.of_map(plan))


def _settle(plan: dict[str, Any], wanted: Any) -> None:
    from dlrover_backends.ray import masters, mastery

    try:
        masters.settle(mastery.of_map(plan), wanted)
    except masters.NotKept as error:
        log.error("masters of this job are not kept in the cluster", error=str(error))
    except Exception as error:  # noqa: BLE001  # Ray raises anything, and they are kept, wherever they are
        log.warning("masters' keepers may share a host", error=f"{type(error).__name__}: {error}")


def _release(job: str, run: str) -> None:
    from dlrover_backends.ray import masters

    masters.release(job, run)


def main() -> int:
    """Join the cluster and serve; the exit status. Where another desk serves already, there is nothing to do."""
    path, address, job, run, report = sys.argv[1:6]
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.LogfmtRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(30),  # warnings
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    with os.fdopen(int(report), "w", encoding="utf-8") as told, Path(f"{path}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0
        from dlrover_backends.ray.cluster import Cluster

        cluster = Cluster(Run(job, run))
        try:
            cluster.connect(address)
        except BaseException as error:  # noqa: BLE001  # Ray leaves by SystemExit too; whoever started us tells it
            json.dump(faults.of_connect(error, address)._asdict(), told)
            return 1
        lock.truncate(0)  # masters read there which cluster it is
        lock.write(cluster.address)
        lock.flush()
        asyncio.run(_serve(cluster, Path(path), told.close))
    return 0


async def _serve(cluster: Cluster, path: Path, listening: Callable[[], None]) -> None:
    await Desk(cluster, path).serve(listening)
