"""Several hosts on one: a network namespace for each where that is permitted, an address of the loopback network where not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from commands import dlrover
from running import BIN, BOUND_S, Process, begin, eventually, processes, warmth

from dlrover_adapters.cli import scratch
from dlrover_core.job.state import JobState, fold
from dlrover_core.logs import open_log

if TYPE_CHECKING:
    from typing_extensions import Self

TOKEN = "of-the-tests"
PORT = 29400


class Net:
    """Hosts a, b and c: where each is, and what a command begins with to run there."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.addresses: dict[str, str] = {}
        self.prefixes: dict[str, list[str]] = {}
        self.options: dict[str, list[str]] = {}


@contextlib.contextmanager
def loopback() -> Iterator[Net]:
    """All on one host, each told its address. The port must be free, since it is everybody's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        net = Net(probe.getsockname()[1])
    for number, name in enumerate("abc", start=2):
        net.addresses[name], net.prefixes[name] = f"127.0.0.{number}", []
        net.options[name] = ["--local-addr", net.addresses[name]]
    yield net


@contextlib.contextmanager
def namespaces() -> Iterator[Net]:
    """One network namespace each, all plugged into a switch, which is a fourth. Raises `CalledProcessError` and `OSError`."""
    with contextlib.ExitStack() as stack:
        pids = {name: stack.enter_context(namespace()) for name in ("switch", "a", "b", "c")}
        net = Net(PORT)
        _inside(pids["switch"], "ip link add name br0 type bridge", "ip link set dev br0 up")
        for number, name in enumerate("abc", start=1):
            net.addresses[name] = f"10.77.0.{number}"
            net.prefixes[name], net.options[name] = ["/usr/bin/env", "nsenter", "-t", str(pids[name]), "-n"], []
            _inside(
                pids["switch"],
                f"ip link add name to-{name} type veth peer name eth0 netns {pids[name]}",
                f"ip link set dev to-{name} master br0 up",
            )
            _inside(pids[name], f"ip addr add {net.addresses[name]}/24 dev eth0", "ip link set dev eth0 up")
        yield net


@contextlib.contextmanager
def namespace() -> Iterator[int]:
    """A namespace with a loopback interface; it ends with the process that holds it."""
    hold = "ip link set dev lo up && echo up && exec cat"
    line = ["/usr/bin/env", "unshare", "-n", "sh", "-c", hold]
    holder = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != b"up\n":
                raise OSError("no network namespaces here")
            yield holder.pid
        finally:
            holder.kill()


def _inside(pid: int, *commands: str) -> None:
    for command in commands:
        subprocess.run(
            ["/usr/bin/env", "nsenter", "-t", str(pid), "-n", *command.split()], check=True, capture_output=True
        )


@contextlib.contextmanager
def best() -> Iterator[Net]:
    """Namespaces, or where they are not permitted loopback."""
    with contextlib.ExitStack() as stack:
        try:
            yield_to = stack.enter_context(namespaces())
        except (OSError, subprocess.CalledProcessError):
            yield_to = stack.enter_context(loopback())
        yield yield_to


class Host:
    """One host: its own state directory, and what runs there. Leave it to have all of it killed."""

    def __init__(self, net: Net, name: str, folder: Path) -> None:
        self.net, self.name, self.folder = net, name, folder / name
        self.folder.mkdir()
        self.state = self.folder / "state"
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}
        self._runs = 0

    @property
    def address(self) -> str:
        """Where the others reach it."""
        return self.net.addresses[self.name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for log in sorted(self.folder.glob("err-*")) + sorted(self.folder.glob("state/jobs/*/control.log")):
                sys.stderr.write(f"--- {log}\n{log.read_text()[-5000:]}\n")
            for job in sorted(self.folder.glob("state/jobs/*")):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    found = dlrover(["events", job.name, "--state-dir", str(self.state)]).stdout
                    sys.stderr.write(f"--- events of {job.name} on {self.name}\n{found[-12_000:]}\n")
        self.die()
        scratch.sweep()  # what was killed with its sweeper is swept by the next launcher: there will be none

    def start(self, *command: str, token: str = TOKEN, program: str = "dlrover-run") -> Self:
        """Run the command there, with this host's state directory and address."""
        self._runs += 1
        ours = ["--state-dir", str(self.state)]
        line = [*self.net.prefixes[self.name], str(BIN / program)]
        line += (
            [*command[:1], *ours, *command[1:]]
            if program == "dlrover"
            else [*ours, *self.net.options[self.name], *command]
        )
        born = {**os.environ, "DLROVER_TOKEN": token, "FOLDER": str(self.folder), **warmth(command, self.folder)}
        born |= self.environment
        out, err = self.folder / f"out-{self._runs}", self.folder / f"err-{self._runs}"
        self.process = begin(line, born, self.folder, out, err)
        return self

    def said(self) -> str:
        """What the newest command has said."""
        return (self.folder / f"err-{self._runs}").read_text(errors="replace")

    def says(self, words: str) -> None:
        """Wait until it has said this; one that has ended says nothing more."""

        def look() -> bool:
            over = self.process is None or self.process.poll() is not None
            said = self.said()
            assert words in said or not over, f"host {self.name} ended without {words!r}: {said[-600:]}"
            return words in said

        eventually(look, f"{words!r} of host {self.name}")

    def ended(self, bound_s: float = BOUND_S) -> int:
        """The exit status, when it has ended."""
        assert self.process is not None
        return self.process.wait(bound_s)

    def signal(self, number: signal.Signals = signal.SIGINT) -> None:
        """Signal the command, as Ctrl-C does."""
        assert self.process is not None
        self.process.send_signal(number)

    def processes(self, name: str = "") -> list[Process]:
        """What runs there."""
        return [one for one in processes(f"FOLDER={self.folder}") if name in ("", one.name)]

    def one(self, name: str) -> Process:
        """The first process of that name, as soon as there is one."""
        return eventually(lambda: next(iter(self.processes(name)), None), f"a {name} on host {self.name}")

    def die(self) -> None:
        """As if the plug were pulled: everything at once."""
        while found := self.processes():
            for one in found:
                with contextlib.suppress(ProcessLookupError):
                    one.kill()
        if self.process is not None:
            self.process.wait()

    def left(self) -> list[Process]:
        """What there still is, after a moment's patience."""
        with contextlib.suppress(AssertionError):
            eventually(lambda: not self.processes(), "the end of everything", 10.0)
        return self.processes()

    def told(self, rank: int) -> list[list[str]]:
        """What the script of a rank wrote down here."""
        path = self.folder / f"told-{rank}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def finish(self) -> None:
        """Let its scripts end."""
        (self.folder / "finish").touch()

    def status(self) -> dict[str, Any]:
        """What the master says that listens at this host's address; asked from there."""
        code = (
            "import asyncio, json, sys; from dlrover_adapters.http.client import fetch_status; "
            "print(json.dumps(asyncio.run(fetch_status(*sys.argv[1:]))))"
        )
        line = [*self.net.prefixes[self.name], sys.executable, "-c", code, f"{self.address}:{self.net.port}", TOKEN]
        return dict(json.loads(subprocess.run(line, check=True, capture_output=True, timeout=BOUND_S).stdout))

    def control_log(self, name: str = "many") -> str:
        """What the processes of a job logged here."""
        path = self.state / "jobs" / name / "control.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def job(self, name: str = "many") -> JobState:
        """The state of the job, from the log here."""
        return asyncio.run(_folded(f"sqlite://{self.state / 'log.db'}", name))

    def until(self, generation: int, size: int) -> JobState:
        """Wait until this generation trains on so many nodes."""

        def look() -> JobState | None:
            # Whoever reads a log that is only being made finds half of it.
            if "event=leading" not in self.control_log():
                return None
            state = self.job()
            world = state.world.worlds.get("worker")
            if world is None or not world.active or state.progress.of("worker").generation != world.generation:
                return None
            return state if (world.generation, len(world.members)) == (generation, size) else None

        return eventually(look, f"generation {generation} on {size} nodes")


async def _folded(url: str, name: str) -> JobState:
    async with open_log(url) as log:
        return fold([record async for record in log.read(name)])


def where(hosts: Sequence[Host], rank: int) -> dict[str, str]:
    """The environment that ``where.py`` saw as this rank, wherever it ran."""
    found = [host.folder / f"where-{rank}" for host in hosts if (host.folder / f"where-{rank}").exists()]
    assert len(found) == 1, f"rank {rank} ran on {found}"
    return dict(json.loads(found[0].read_text())["environment"])
