"""The `Backend` port over Ray, as a master holds it: orders and observations over the desk's socket, and no Ray in this process.

Whoever finds no desk starts one. It is one for all masters of a run on this host, lives on when a master dies, and ends by itself
when nobody needs it. What it is told is complete: it holds nothing between two orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Any, Union

from dlrover_backends.ray import faults, mastery, runtime_env, settings, warm
from dlrover_backends.shared import asking, wire
from dlrover_core.errors import ConnectionLost, CoreError, LaunchRefused, MalformedMessage, SpecError
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import Changed, Listed, Wanted
from dlrover_core.runtime.backends import TOKEN, BackendContext
from dlrover_core.runtime.within import within

CALL_S, START_S, PROBE_S, AWAY_S = 60.0, 60.0, 3.0, 1.0
RECONNECT_S = (0.02, 0.1, 0.5, 1.0, 5.0)
SOCKET = "ray-desk.sock"
_DESK = "import sys; sys.path[:1] = []; from dlrover_backends.ray.desk import main; sys.exit(main())"
"""Not ``-m``: that puts the working directory first, and a module of the user's might hide one of ours."""


class NoDesk(CoreError):
    """The desk cannot be started, or does not reach its cluster. ``permanent``: waiting does not mend it."""

    def __init__(self, reason: str, *, permanent: bool) -> None:
        super().__init__(reason)
        self.permanent = permanent


class RayBackend:
    """Actors of one run. Making it neither connects nor starts anything; it reads what the runtime environment is, once.

    ``check_s``: so long a check may take; importing Ray takes seconds, and more where the processors are busy.
    """

    check_s = START_S

    def __init__(self, here: BackendContext) -> None:
        self._here, self._told = here, settings.read(here)
        self._env = runtime_env.read(self._told.runtime_env, here.cwd, runtime_env.submitted(os.environ))
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self._starting = asyncio.Lock()
        self._warm = warm.Warm(self._order, self._call)
        self._desk: subprocess.Popen[bytes] | None = None

    # ---- the port

    async def launch(self, node: NodeLaunch, token: int) -> str | None:
        """Place the node's actor, or make a standby the node and return its seat.

        Raises `LaunchRefused`, `StaleToken`, and `CoreError` where the outcome is unknown.
        """
        try:
            order = self._order(node)
        except SpecError as error:
            raise LaunchRefused(str(error), permanent=True) from error
        seat = await self._call("launch", token, order, self._warm.fit(node, order))
        return str(seat) if seat else None

    async def sized(self, wanted: Wanted, token: int) -> None:
        """The job wants so many standbys."""
        self._warm.sized(wanted, token)

    def heard(self, seats: Collection[str]) -> None:
        """Agents of standbys wait in these seats, and answer."""
        self._warm.heard(seats)

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """Have the node's keeper end its agent: SIGTERM, after ``grace_s`` SIGKILL. Raises `StaleToken`, `CoreError`."""
        await self._call("delete", token, name, float(grace_s))

    async def observe(self) -> AsyncIterator[Union[Listed, Changed]]:
        """`Listed` first and after every desk that was lost, then one `Changed` for every change. Ends when cancelled.

        Meanwhile standbys are kept.
        """
        keeping = asyncio.ensure_future(self._warm.run())
        try:
            both = asking.observe(self._path, who="the desk", pauses_s=RECONNECT_S, first=self._serve)
            async with contextlib.aclosing(both) as seen:
                async for one in seen:
                    yield one
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def room(self, group: str) -> int | None:  # noqa: ARG002  # the port's
        """Only Ray's scheduler, and its autoscaler, know what would start now."""
        return None

    # ---- before the job, and after it

    async def check(self) -> None:
        """Join the cluster. Raises `SpecError` for what does not mend itself."""
        if not _answers(self._path()):
            await asyncio.to_thread(faults.probe, self._told.address)
        try:
            others = await self._call("others")
            fault = await self._call("check", self._told.labels())
        except NoDesk as error:
            if error.permanent:
                raise SpecError("backend", str(error)) from error
            raise
        match others:
            case ((str(run), int(nodes)), *_):
                job = self._here.job
                raise SpecError(
                    "job-id",
                    f"{job!r} is in use in this cluster, where {nodes} nodes of its run {run} live: end them with "
                    f"dlrover ray rm {job}, or give this job another --job-id",
                )
        if fault:
            raise SpecError("label", f"Ray refuses it: {fault}")

    async def claim(self, driver: str, *, encrypts: bool) -> bool:
        """Take the job's name in the cluster for this run, whose masters are at ``driver``. Raises `SpecError`, `CoreError`.

        ``encrypts``: these masters show a certificate.

        Returned is whether the cluster's state outlives the process that holds it.
        """
        match await self._call("claim", self._here.job, self._here.run, self._here.token, driver, encrypts):
            case ("", bool(persistent)):
                return persistent
            case (str(fault), _):
                raise SpecError("job-id", fault)
            case other:
                raise MalformedMessage(f"the desk at {self._path()} answers {other!r}")

    async def keep(self, plan: mastery.Plan) -> None:
        """Have masters kept in the cluster too. What they are told of nodes is filled in. Raises `SpecError`, `CoreError`."""
        match await self._call("send", self._env):
            case (str(address), dict(sent)):
                told = self._told._replace(address=address, runtime_env="")
                await self._call(
                    "keep", {**plan.to_map(), "backend": f"ray:{settings.text(told)}", "runtime_env": sent}
                )
            case other:
                raise MalformedMessage(f"the desk at {self._path()} has sent {other!r}")

    async def release(self) -> None:
        """Remove the masters' keepers of this run, and its claim of the job's name. Raises `CoreError`."""
        await self._call("release", self._here.job, self._here.run)

    async def away(self) -> str:
        """Why nobody listens where the cluster's state service was; empty: somebody does, or it is not known where."""
        return await self._silence(self.cluster)

    @property
    def cluster(self) -> str:
        """The cluster's HOST:PORT: that of the newest desk, else what is said; empty: it is found by Ray, and not joined yet."""
        return _desk_cluster(self._path()) or settings.address_of(self._told.address)

    async def _silence(self, address: str) -> str:
        why = await asyncio.to_thread(faults.silence, address, AWAY_S)
        return f"no Ray cluster answers at {address} ({why})" if why else ""

    async def close(self) -> None:
        """Nothing to close: the desk serves other masters, and ends when there are none."""
        if self._desk is not None:
            self._desk.poll()
            self._desk.returncode = (
                self._desk.returncode or 0
            )  # nobody waits for it here; its parent's end is no matter

    async def clear(self) -> None:
        """Remove all that the run has in the cluster, and end the desk. Raises `CoreError`."""
        await self._call("clear")
        with contextlib.suppress(CoreError):
            await self._call("end")
        if self._desk is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._desk.wait, PROBE_S)
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    @property
    def remedy(self) -> str:
        """What removes what `clear` has left."""
        return f"dlrover ray rm {self._here.job} removes it"

    # ---- what is ordered

    def _order(self, node: NodeLaunch) -> dict[str, Any]:
        """The fields of `cluster.Order`. Raises `SpecError`."""
        here, told = self._here, self._told
        if not here.command and not here.arguments:
            raise SpecError("backend", "ray has no command of its own: name the script that nodes run")
        wants = settings.resources_of(told.resources)
        asked = {"CPU": node.cpu_m / 1000, "GPU": float(node.gpus), "memory": float(node.memory_mib << 20)}
        wants.update({name: amount for name, amount in asked.items() if amount})
        wants.setdefault("CPU", float(node.nproc))
        env = self._env
        set_by_user = env.get("env_vars")
        kept = tuple(set_by_user) if isinstance(set_by_user, Mapping) else ()
        variables = {**here.environment(node), TOKEN: here.token}
        return {
            "name": node.name,
            "wants": {name: amount for name, amount in wants.items() if amount},
            "gpus_if_any": 0 if "GPU" in wants or told.resources else node.nproc,
            "labels": told.labels(),
            "avoid": node.avoid,
            "runtime_env": env,
            "again": node.incarnation > 0,
            "plan": {
                "command": () if here.arguments else here.command,
                "arguments": here.arguments,
                "env": {name: value for name, value in variables.items() if name not in kept},
                "cwd": "" if env.get("working_dir") else here.cwd,
                "kept": kept,
            },
        }

    # ---- the desk

    async def _call(self, *request: object) -> object:
        try:
            answer = await within(CALL_S, self._ask(request))
        except asyncio.TimeoutError as error:
            raise ConnectionLost(f"the desk at {self._path()} did not answer within {CALL_S:g} s") from error
        return asking.result(answer, "the desk")

    async def _ask(self, request: tuple[object, ...]) -> tuple[Any, ...]:
        await self._serve()
        try:
            return await asking.ask(self._path(), *request)
        except ConnectionLost:  # the desk has died; every order may be given again
            await self._serve()
            return await asking.ask(self._path(), *request)

    def _path(self) -> Path:
        if self._here.directory:
            return Path(self._here.directory, SOCKET)
        if self._own is None:
            self._own = tempfile.TemporaryDirectory(prefix="dlrover-ray-")
        return Path(self._own.name, SOCKET)

    async def _serve(self) -> None:
        """See that a desk serves. Raises `NoDesk`."""
        async with self._starting:
            if _answers(self._path()):
                return
            if why := await self._silence(
                settings.address_of(self._told.address)
            ):  # Ray itself takes ten seconds to say no
                raise NoDesk(why, permanent=False)
            try:
                told = await within(START_S, asyncio.to_thread(self._start))
            except asyncio.TimeoutError as error:
                raise NoDesk(f"the desk has not joined the cluster within {START_S:g} s", permanent=False) from error
        if told:
            raise NoDesk(str(told["text"]), permanent=bool(told["permanent"]))

    def _start(self) -> dict[str, Any]:
        """Start a desk, and wait until it serves; what it says where it cannot. Blocks."""
        self._let_go()
        reading, writing = os.pipe()
        words = (str(self._path()), self._told.address, self._here.job, self._here.run, str(writing))
        try:
            with os.fdopen(reading, encoding="utf-8") as report:
                try:
                    # In a session of its own: a Ctrl-C is for the launcher, which then ends the nodes through it.
                    self._desk = subprocess.Popen(
                        [sys.executable, "-u", "-c", _DESK, *words],
                        stdin=subprocess.DEVNULL,
                        env={settings.EVENTS: "0", **os.environ},
                        pass_fds=(writing,),
                        start_new_session=True,
                    )
                finally:
                    os.close(writing)
                said = report.read()
        except OSError as error:
            return {"text": f"the desk cannot be started: {error}", "permanent": False}
        if said:
            self._desk.wait()
            return dict(json.loads(said))
        if not _answers(self._path()):
            return {"text": "the desk has ended at once", "permanent": False}
        return {}

    def _let_go(self) -> None:
        """Take a dead desk out of the process table; a living one is nobody's to wait for."""
        if self._desk is not None and self._desk.poll() is None:
            self._desk.returncode = 0
        self._desk = None


def _desk_cluster(path: Path) -> str:
    """The address of the cluster that the newest desk there has joined; empty: none has."""
    with contextlib.suppress(OSError):
        return Path(f"{path}.lock").read_text(encoding="utf-8").strip()
    return ""


def _answers(path: Path) -> bool:
    """Does a desk listen there? One whose queue of connections is full stands still, and listens: nothing waits for it here."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as probe, wire.short(path) as name:
        probe.setblocking(False)
        try:
            probe.connect(name)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True
