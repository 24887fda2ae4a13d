"""The rest of the agent's process, which may be slow to import: the zygote is on its way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from dlrover_adapters.telemetry import light  # noqa: F401  # first of all

# isort: split

import structlog

from dlrover_adapters.agent import leftovers
from dlrover_adapters.agent.addresses import Addresses
from dlrover_adapters.agent.checkpoints.duty import CheckpointDuty
from dlrover_adapters.agent.checks.basic import Place
from dlrover_adapters.agent.checks.duty import CheckDuty
from dlrover_adapters.agent.config import LaunchConfig, birth_environment
from dlrover_adapters.agent.data_duty import DataDuty
from dlrover_adapters.agent.framework import load
from dlrover_adapters.agent.hang_duty import HangDuty
from dlrover_adapters.agent.launcher import LinuxLauncher
from dlrover_adapters.agent.log_watch import OutputWatch
from dlrover_adapters.agent.lookout import Lookout
from dlrover_adapters.agent.pace_watch import PaceWatch
from dlrover_adapters.agent.process import set_name, set_title
from dlrover_adapters.agent.spawn import Spawned
from dlrover_adapters.cli import unled
from dlrover_adapters.cli.scratch import MARK, roofs
from dlrover_adapters.http import tls
from dlrover_adapters.http.client import HttpDialer
from dlrover_adapters.telemetry.logs import Uncaught, run_threaded, set_up
from dlrover_backends.shared.process import MARK as NODE_MARK
from dlrover_core.errors import CoreError, SpecError, TokenRefused
from dlrover_core.host import cgroups, threads
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.duties import Duty
from dlrover_core.runtime.launcher import Notice, WorkerExit, WorkersLaunch
from dlrover_core.spec import JobSpec
from dlrover_core.words import plain

EX_OK, EX_FAULT, EX_LATER = 0, 1, 75
HOST = "DLROVER_HOST"
"""In the environment: the host's name, as its platform has it."""

LOOK_S, ALONE_S = 1.0, 10.0
"""How often it is looked whether a master is heard, and after what silence that is worth a word."""

WORDS_BYTES_MAX, ERROR_CHARS_MAX = 64 * 1024, 2000
LINE_CHARS_MAX = 300

log = structlog.get_logger("dlrover.agent")


def serve(
    raw: dict[str, Any], config: LaunchConfig, first: Spawned | None, control: socket.socket | None, node: str = ""
) -> int:
    """Be the agent that the settings describe, to its end.

    ``control`` leads to the launcher that keeps it. Without one a scheduler has started it, as ``node``, or as a standby, which a
    master names: then nobody but the master speaks to it, and it logs to stderr.
    """
    set_name("dlrover-agent")
    leftovers.adopt()
    name = _Name(node)
    set_up(Path(raw["control_log"]) if control is not None else None, raw["log_level"], role="agent", node=name)

    async def run() -> int:
        threads.install()
        asyncio.get_running_loop().set_exception_handler(Uncaught())
        return await _Process(raw, config, first, control, name).run()

    return run_threaded(lambda: asyncio.run(run()), EX_FAULT)


class _Name:
    """This node's name, which the log shows as soon as it is known."""

    def __init__(self, text: str = "") -> None:
        self.text = text or "?"

    def __str__(self) -> str:
        return self.text


class _Launcher(LinuxLauncher):
    """Tells which node it is that begins to work; and people, once per generation, that a worker of this node failed."""

    def __init__(
        self, config: LaunchConfig, first: Spawned | None, starting: Callable[[str], None], watch: OutputWatch | None
    ) -> None:
        super().__init__(config, first, watch)
        self._starting = starting
        self._node, self._told = config.node, 0

    async def start(self, launch: WorkersLaunch) -> None:
        self._node = launch.node or self._node
        self._starting(launch.node)
        await super().start(launch)

    def say(self, words: str) -> None:
        super().say(words)
        _say(words)

    async def notices(self) -> AsyncIterator[Notice]:
        async for notice in super().notices():
            if isinstance(notice, WorkerExit) and _failed(notice) and notice.generation > self._told:
                self._told = notice.generation
                _say(failure(self._node, notice))
            yield notice


def _failed(end: WorkerExit) -> bool:
    return not end.asked and end.exit_code != 0


def failure(node: str, end: WorkerExit) -> str:
    """What people are told at once: a worker that was killed has said nothing itself, and its restart may be all one sees."""
    from dlrover_core.history.phrases import exit_of, one_line  # a failure is rare, and an agent's start should be fast

    said = [line for line in end.error.splitlines() if line.strip()]
    about = f": {one_line(said[-1], LINE_CHARS_MAX)}" if said else ""
    return f"rank {end.rank} on {node} failed: {exit_of(end.exit_code)} (generation {end.generation}){about}"


def _say(words: str) -> None:
    """A whole line in one write: workers' output goes to the same place."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        sys.stderr.write(f"dlrover-run: {words}\n")
        sys.stderr.flush()


def _checks(raw: dict[str, Any], config: LaunchConfig) -> CheckDuty:
    temporary = next(iter(roofs()), "/tmp")  # noqa: S108  # only looked at
    run_dir = config.run_dir or temporary
    mark = f"{MARK}={os.environ[MARK]}" if os.environ.get(MARK) else ""
    place = Place((run_dir, temporary), config.nproc, tuple(raw["masters"]), mark=mark)
    return CheckDuty(
        place,
        env=lambda: birth_environment(config, os.environ),
        site=tuple(raw.get("check_scripts", ())),
        folder=run_dir,
        module=load(config.framework).CHECK,
    )


def _checkpoints(raw: dict[str, Any], config: LaunchConfig, launcher: LinuxLauncher) -> CheckpointDuty:
    files = (raw["tls_ca"], raw.get("tls_cert", ""), raw.get("tls_key", ""))
    # Where masters are spoken to in secret, states go between hosts in secret too, or not at all.
    bind = "" if files[0] and not files[1] else config.store_bind
    return CheckpointDuty(
        launcher,
        token=os.environ["DLROVER_TOKEN"].encode(),
        host=raw["address"],
        bind=bind,
        tls=files if all(files[:2]) else (),
        say=_say,
    )


def _dossiers(raw: dict[str, Any]) -> str:
    """Where what hung workers did is written down: beside the control log; without one, with the workers' output."""
    log_file = raw["control_log"]
    return os.path.dirname(os.path.abspath(log_file)) if log_file else str(raw["log_dir"] or raw["directory"])


class _Process:
    """One agent, from before it has a name to its last words."""

    def __init__(
        self,
        raw: dict[str, Any],
        config: LaunchConfig,
        first: Spawned | None,
        control: socket.socket | None,
        name: _Name,
    ) -> None:
        config = config._replace(cgroup=cgroups.name_of(os.environ.get(MARK, ""), os.environ.get(NODE_MARK, "")))
        self._config, self._control, self._name = config, control, name
        self._joining, self._masters = bool(raw["joining"]), tuple(raw["masters"])
        spec = JobSpec.from_json(raw["spec"])
        self._patience_s, self._abandoned = spec.launch_s, False
        lookout = Lookout.of_this_machine(spec.signatures) if raw.get("detect", True) else None
        self._launcher = _Launcher(config, first, self._begins, lookout)
        looking: list[Duty] = [] if lookout is None else [lookout, PaceWatch(self._launcher.slots)]
        reached = config.store_host or config.store_bind
        addresses = Addresses(address=reached, bind=config.store_bind, say=_say)
        self._launcher.addresses = addresses
        hangs = HangDuty(self._launcher, _dossiers(raw))
        self._agent = Agent(
            config.node,
            launcher=self._launcher,
            dialer=HttpDialer(os.environ["DLROVER_TOKEN"], job=spec.job, tls=tls.dialled(raw["tls_ca"])),
            masters=raw["masters"],
            boot=secrets.randbits(62),
            host=os.environ.get(HOST) or socket.gethostname(),
            address=raw["address"],
            run=raw["run"],
            seat=raw["seat"],
            place=raw["place"],
            dial_before_name=self._joining or control is None,
            duties=[
                *looking,
                addresses,
                hangs,
                _checks(raw, config),
                _checkpoints(raw, config, self._launcher),
                DataDuty(self._launcher, _say),
            ],
        )

    async def run(self) -> int:
        """Get warm; once named, be that node until told to leave."""
        loop = asyncio.get_running_loop()
        if self._control is not None:
            self._control.setblocking(False)
            loop.add_reader(self._control, self._hear, self._control)
        else:
            if self._agent.node:
                self._named(self._agent.node)
            else:
                set_title(f"dlrover agent --job {self._config.job} --standby")
            log.info("agent begins", job=self._config.job, masters=",".join(self._masters), pid=os.getpid())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._agent.part, f"the agent got {number.name}")
        opening = asyncio.ensure_future(self._launcher.open())
        opening.add_done_callback(self._opened)
        minding = asyncio.ensure_future(self._mind_master())
        try:
            await self._agent.run()
        except CoreError as error:
            log.error("agent ends", error=f"{type(error).__name__}: {error}")
            self._tell(error=str(error), refused=isinstance(error, TokenRefused))
            if not self._joining:
                print(f"dlrover agent {self._name}: {error}", file=sys.stderr)
            return EX_FAULT
        finally:
            minding.cancel()
            await asyncio.gather(minding, return_exceptions=True)
        self._tell(ending=self._agent.ending)
        return self._left() if self._control is None else EX_OK

    def _left(self) -> int:
        """Say why the node of a scheduler goes; its exit status."""
        ending, who = self._agent.ending, f"node {self._name}" if self._agent.node else "a standby"
        _say(f"{who} of job {self._config.job} goes: {ending.outcome or 'it leaves'} ({plain(ending.reason)})")
        return EX_LATER if self._abandoned else EX_OK

    async def _mind_master(self) -> None:
        """Say when masters are silent, and how workers fare then.

        Where it is not the launcher's to end it, go when that lasts and there is no worker to go on for.
        """
        alone, told = False, dict[str, Any]()
        while True:
            await asyncio.sleep(LOOK_S)
            silent_s = self._agent.unmastered_s
            if not self._joining and self._control is not None:
                said: dict[str, Any] = {"alone": silent_s > ALONE_S, **unled.said(self._agent)}
                if said != told:
                    self._tell(**said)
                told = said
                continue
            if (silent_s > ALONE_S) != alone:
                alone = not alone
                self._tell(alone=alone)
                if self._control is None:
                    where = f"job {self._config.job} at {', '.join(self._masters)}"
                    _say(
                        f"no master of {where} answers; asked again" if alone else f"a master of {where} answers again"
                    )
            if silent_s > self._patience_s and not any(who.startswith("rank") for who in self._launcher.pids):
                self._tell(abandoned=True)
                self._abandoned = True
                self._agent.leave(f"no master was heard for {self._patience_s:g} s")

    def _begins(self, node: str) -> None:
        """Its first world: in a joining job the master has given the name."""
        if node and node != self._name.text:
            self._named(node)
            self._tell(node=node)

    def _named(self, node: str) -> None:
        self._name.text = node
        set_title(f"dlrover agent --job {self._config.job} --node {node}")
        self._launcher.named(node)

    # ---- the launcher's socket

    def _hear(self, control: socket.socket) -> None:
        """A name, masters, or whether we hang; at the end of the socket the launcher is dead, and we are about to be."""
        try:
            said = control.recv(WORDS_BYTES_MAX)
        except BlockingIOError:
            return
        except ConnectionError:
            said = b""
        if not said:
            asyncio.get_running_loop().remove_reader(control)
            self._agent.leave("the launcher is gone")
            return
        told = json.loads(said)
        if told.get("ask"):
            self._tell(here=True)
        if told.get("masters"):
            self._find(told["masters"])
        node = told.get("node")
        if node:
            self._named(node)
            self._agent.name(node)

    def _find(self, masters: Sequence[str]) -> None:
        """The masters have moved."""
        try:
            self._agent.masters_are(masters)
        except SpecError as error:
            log.warning("these masters are not looked for", reason=str(error))
        else:
            log.info("masters have moved", masters=", ".join(masters))

    def _opened(self, opening: asyncio.Future[None]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            for preload, reason in self._launcher.refused.items():
                what = f"--preload {preload} is left out" if preload else "workers are not forked but started afresh"
                _say(f"{what}: {reason}")
            self._tell(warm=True)

    def _tell(self, *, error: str = "", **words: object) -> None:
        if self._control is None:
            return
        if error:
            words["error"] = plain(error, ERROR_CHARS_MAX)  # the launcher reads packets of a bounded size
        with contextlib.suppress(OSError):  # the launcher is dead, and we are about to be
            self._control.send(json.dumps(words).encode())
