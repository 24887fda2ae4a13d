"""The local backend: real processes that outlive masters, die with their launcher, and leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from local_nodes import BOUND_S, TOKEN, Fifo, run

from dlrover_adapters.cli.conformance_ours import ONE_HOST
from dlrover_backends.local import (
    LocalBackend,
    LocalCommand,
    LocalNodeHost,
    StaleToken,
)
from dlrover_backends.shared import process, wire
from dlrover_core.errors import ConnectionLost, CoreError, LaunchRefused
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import Changed, Listed
from dlrover_core.testing.backend_conformance import BackendConformance
from dlrover_core.testing.backend_stand import Stand, Watch, make_launch, watching

SRC = Path(__file__).parents[2] / "src"
# A stand-in for an agent: it lives until a signal ends it.
AGENT = (sys.executable, "-I", "-S", "-c", "import signal; signal.pause()")


def agent(node: NodeLaunch, token: int) -> LocalCommand:
    """Every node is the stand-in; one of a group named so is nonsense."""
    return LocalCommand(("/no/such/program",) if node.group == "nonsense" else AGENT)


def python(code: str, *args: str) -> Callable[[NodeLaunch, int], LocalCommand]:
    """Every node runs this code."""
    return lambda node, token: LocalCommand((sys.executable, "-I", "-S", "-c", textwrap.dedent(code), *args))


def lives(pid: int) -> bool:
    """Is it there, and no zombie?"""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_dead(*pids: int) -> None:
    """Wait until processes that may not be our children have ended."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                process.wait(BOUND_S)


class TestLocalBackend(BackendConformance):
    """The contract of backends, over real processes."""

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        """A state directory of this test's own."""
        self.path = tmp_path / "nodes.sock"

    @contextlib.asynccontextmanager
    async def make_backend(self) -> AsyncIterator[Stand]:
        """A host in this process, its nodes killed by their pid."""
        async with LocalNodeHost(self.path, agent) as host:

            async def kill(name: str) -> None:
                pid = host.pid(name)
                assert pid is not None
                os.kill(pid, signal.SIGKILL)

            yield Stand(LocalBackend(self.path), kill, cannot=ONE_HOST)

    def nonsense(self) -> NodeLaunch:
        """A program that is not there."""
        return make_launch()._replace(group="nonsense")


# ---- what a node is


def test_command(tmp_path: Path) -> None:
    """A node runs the composed command with what it adds to the environment, in the folder it names, in its own session."""
    code = "import os, sys; more = os.environ['MORE']; own = os.getsid(0) == os.getpid(); "
    code += "open(sys.argv[1], 'w').write(f'{os.getcwd()} {more} {own}\\n')"

    def command(node: NodeLaunch, token: int) -> LocalCommand:
        argv = (sys.executable, "-I", "-S", "-c", code, str(tmp_path / "said"))
        return LocalCommand(argv, {"MORE": f"{node.name}/{token}"}, str(tmp_path))

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", command), Fifo(tmp_path) as said:
            await LocalBackend(tmp_path / "s").launch(make_launch(), TOKEN)
            assert (await said.readline()).decode() == f"{tmp_path} {make_launch().name}/{TOKEN} True\n"

    run(story)


def test_exit_codes(tmp_path: Path) -> None:
    """Exit 0 is success; any other code and any signal is a failure, told in words."""

    async def story() -> None:
        code = "import os, sys, signal; n = int(sys.argv[1]); os.kill(os.getpid(), -n) if n < 0 else sys.exit(n)"

        def command(node: NodeLaunch, token: int) -> LocalCommand:
            return LocalCommand((sys.executable, "-I", "-S", "-c", code, node.group))

        async with LocalNodeHost(tmp_path / "s", command):
            backend = LocalBackend(tmp_path / "s")
            async with watching(backend) as watch:
                for index, (number, phase, reason) in enumerate(
                    [
                        (0, "succeeded", "exit code 0"),
                        (3, "failed", "exit code 3"),
                        (-15, "failed", "killed by SIGTERM"),
                    ]
                ):
                    node = make_launch(index)._replace(group=str(number))
                    await backend.launch(node, TOKEN)
                    ended = await watch.over(node.name)
                    assert (ended.phase, ended.exit_code, ended.reason) == (phase, number, reason)

    run(story)


def test_grace(tmp_path: Path) -> None:
    """Deleting with a grace sends SIGTERM, which an agent may use to stop in its own way; it is gone with its own exit code."""
    code = """
        import signal, sys
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        open(sys.argv[1], "w").write("ready\\n")
        signal.sigwait({signal.SIGTERM})
        sys.exit(21)
    """

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", python(code, str(tmp_path / "said"))), Fifo(tmp_path) as said:
            backend = LocalBackend(tmp_path / "s")
            async with watching(backend) as watch:
                await backend.launch(make_launch(), TOKEN)
                await said.readline()
                await backend.delete(make_launch().name, TOKEN, BOUND_S)
                await watch.gone(make_launch().name)
                assert (watch.told[-1].node.phase, watch.told[-1].node.exit_code) == ("gone", 21)

    run(story)


def test_grace_ends(tmp_path: Path) -> None:
    """An agent that does not heed SIGTERM, or is stopped, is killed when the grace is over; a later deletion may shorten it."""
    code = """
        import signal, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1], "w").write("ready\\n")
        while True: signal.pause()
    """

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", python(code, str(tmp_path / "said"))) as host, Fifo(tmp_path) as said:
            backend = LocalBackend(tmp_path / "s")
            deaf, stopped, hurried = (make_launch(index).name for index in range(3))
            async with watching(backend) as watch:
                for index in range(3):
                    await backend.launch(make_launch(index), TOKEN)
                    await said.readline()
                os.kill(host.pid(stopped) or 0, signal.SIGSTOP)
                await backend.delete(deaf, TOKEN, 0.05)
                await backend.delete(stopped, TOKEN, 0.05)
                await backend.delete(hurried, TOKEN, 3600.0)
                await backend.delete(hurried, TOKEN, 0.0)
                await watch.gone(deaf, stopped, hurried)

    run(story)


BROOD = """
    import os, signal, subprocess, sys
    more = [sys.executable, "-I", "-S", "-c"]
    pause = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); [signal.pause() for _ in iter(int, 1)]"
    child = subprocess.Popen([*more, pause])
    fled = subprocess.Popen([*more, pause], start_new_session=True)
    bare = subprocess.Popen([*more, pause], env={})
    open(sys.argv[1], "w").write(f"{child.pid} {fled.pid} {bare.pid}\\n")
    signal.pause()
"""


@pytest.mark.parametrize("way", ["deleted", "deleted with grace", "killed"])
def test_nothing_of_a_node_is_left(tmp_path: Path, way: str) -> None:
    """When a node is told to be over, everything it started is dead: children, those in sessions of their own, those
    without its environment.
    """

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", python(BROOD, str(tmp_path / "said"))) as host, Fifo(tmp_path) as said:
            backend, name = LocalBackend(tmp_path / "s"), make_launch().name
            async with watching(backend) as watch:
                await backend.launch(make_launch(), TOKEN)
                brood = [int(word) for word in (await said.readline()).split()]
                assert all(psutil.pid_exists(pid) for pid in brood)
                if way == "killed":
                    os.kill(host.pid(name) or 0, signal.SIGKILL)
                    await watch.over(name)
                else:
                    await backend.delete(name, TOKEN, BOUND_S if way == "deleted with grace" else 0.0)
                    await watch.gone(name)
                # Dead and told; who reaps them is their next parent's business.
                assert [pid for pid in brood if lives(pid)] == []

    run(story)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (LocalCommand(("/no/such/program",)), "No such file"),
        (LocalCommand(("/etc/passwd",)), "denied"),
        (LocalCommand((*AGENT[:1],), cwd="/no/such/folder"), "No such file"),
        (LocalCommand(("a\0b",)), "null byte"),
        (LocalCommand(("x" * 300,)), "too long"),
    ],
)
def test_nonsense(tmp_path: Path, command: LocalCommand, says: str) -> None:
    """What cannot be executed is refused for good with the system's reason, and is not listed afterwards."""

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", lambda node, token: command):
            backend = LocalBackend(tmp_path / "s")
            async with watching(backend) as watch:
                with pytest.raises(LaunchRefused, match=says) as refused:
                    await backend.launch(make_launch(), TOKEN)
                assert refused.value.permanent
                await watch.gone(make_launch().name)

    run(story)


def test_bad_composition(tmp_path: Path) -> None:
    """A command that raises is a refusal that names the error; the host goes on."""

    def command(node: NodeLaunch, token: int) -> LocalCommand:
        if node.index == 0:
            raise KeyError("script")
        return LocalCommand(AGENT)

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", command):
            backend = LocalBackend(tmp_path / "s")
            with pytest.raises(LaunchRefused, match="KeyError: 'script'"):
                await backend.launch(make_launch(0), TOKEN)
            await backend.launch(make_launch(1), TOKEN)

    run(story)


def test_room(tmp_path: Path) -> None:
    """A full host refuses for now, not for good; a death makes room."""

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", agent, limit=2) as host:
            backend = LocalBackend(tmp_path / "s")
            async with watching(backend) as watch:
                assert await backend.room("worker") == 2
                for index in range(2):
                    await backend.launch(make_launch(index), TOKEN)
                assert await backend.room("worker") == 0
                with pytest.raises(LaunchRefused) as refused:
                    await backend.launch(make_launch(2), TOKEN)
                assert not refused.value.permanent
                os.kill(host.pid(make_launch(0).name) or 0, signal.SIGKILL)
                await watch.over(make_launch(0).name)
                await backend.launch(make_launch(2), TOKEN)

    run(story)


def test_stale_token(tmp_path: Path) -> None:
    """A deposed master learns from the refusal that it is deposed, and by whom."""

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", agent):
            backend = LocalBackend(tmp_path / "s")
            await backend.delete("nobody", TOKEN, 0.0)
            with pytest.raises(StaleToken) as stale:
                await backend.launch(make_launch(), TOKEN - 1)
            assert (stale.value.token, stale.value.highest) == (TOKEN - 1, TOKEN)

    run(story)


# ---- who lives how long


MASTER = """
    import asyncio, sys
    from dlrover_backends.local import LocalBackend
    from dlrover_core.testing.backend_stand import make_launch
    async def main():
        await LocalBackend(sys.argv[1]).launch(make_launch(int(sys.argv[2])), int(sys.argv[3]))
        print("launched", flush=True)
        await asyncio.Event().wait()
    asyncio.run(main())
"""

LAUNCHER = """
    import asyncio, sys
    from dlrover_backends.local import LocalBackend, LocalCommand, LocalNodeHost
    from dlrover_core.testing.backend_stand import make_launch
    async def main():
        host = LocalNodeHost(sys.argv[1], lambda node, token: LocalCommand(tuple(sys.argv[2:])))
        async with host:
            for index in range(3):
                await LocalBackend(sys.argv[1]).launch(make_launch(index), 1)
            print(*(host.pid(make_launch(index).name) for index in range(3)), flush=True)
            await asyncio.Event().wait()
    asyncio.run(main())
"""


def start(code: str, *args: str) -> subprocess.Popen[bytes]:
    """A process of ours that says one line; its log goes nowhere."""
    path = os.pathsep.join(str(SRC / folder) for folder in (".", "adapters", "backends"))
    quiet = "import structlog, sys; structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))\n"
    argv = [sys.executable, "-c", quiet + textwrap.dedent(code), *args]
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)


def test_nodes_survive_their_master(tmp_path: Path) -> None:
    """A master is killed: its nodes run on, and the next one finds them listed with the same processes."""

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", agent) as host:
            name, pids = make_launch(0).name, set()
            for index, token in ((0, 1), (1, 2)):
                master = await asyncio.to_thread(start, MASTER, str(tmp_path / "s"), str(index), str(token))
                with master:
                    assert master.stdout is not None
                    assert await asyncio.to_thread(master.stdout.readline) == b"launched\n"
                    pids.add(host.pid(name))
                    master.kill()
                async with watching(LocalBackend(tmp_path / "s")) as watch:
                    assert watch.nodes[name].phase == "running"
            assert pids == {host.pid(name)} != {None}

    run(story)


def test_nodes_die_with_their_launcher(tmp_path: Path) -> None:
    """The launcher is killed with SIGKILL: the kernel kills every agent."""
    with start(LAUNCHER, str(tmp_path / "s"), *AGENT) as launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert [psutil.pid_exists(pid) for pid in pids] == [True] * 3
        launcher.kill()
    wait_dead(*pids)


def test_a_dead_launchers_socket_is_replaced(tmp_path: Path) -> None:
    """The socket that a killed launcher left behind does not stop the next one; one that is served does."""
    with start(LAUNCHER, str(tmp_path / "s"), *AGENT) as launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        launcher.kill()
    wait_dead(*pids)
    assert (tmp_path / "s").is_socket()

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", agent):
            await LocalBackend(tmp_path / "s").launch(make_launch(), TOKEN)
            with pytest.raises(CoreError, match="another launcher serves"):
                await LocalNodeHost(tmp_path / "s", agent).open()
            assert await LocalBackend(tmp_path / "s").room("worker") is None

    run(story)


def test_closing(tmp_path: Path) -> None:
    """A host that closes has ended every node, in whatever phase, and removed its socket; closing again does nothing."""

    async def story() -> None:
        host = LocalNodeHost(tmp_path / "s", agent)
        await host.open()
        backend = LocalBackend(tmp_path / "s")
        await asyncio.gather(*(backend.launch(make_launch(index), TOKEN) for index in range(3)))
        pids = [host.pid(make_launch(index).name) or 0 for index in range(3)]
        late = asyncio.ensure_future(backend.launch(make_launch(3), TOKEN))
        await host.close(grace_s=BOUND_S)
        await host.close()
        await asyncio.gather(late, return_exceptions=True)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert not (tmp_path / "s").exists()

    run(story)


def test_host_comes_back(tmp_path: Path) -> None:
    """Who observes survives the loss of the host: it is told the list again, and what is not on it is gone."""

    async def story() -> None:
        backend = LocalBackend(tmp_path / "s")
        async with LocalNodeHost(tmp_path / "s", agent) as host:
            watch = Watch(backend)
            watching = asyncio.ensure_future(watch.run())
            await backend.launch(make_launch(0), TOKEN)
            await watch.running(make_launch(0).name)
            del host
        with pytest.raises(ConnectionLost, match="no node host answers"):
            await backend.room("worker")
        async with LocalNodeHost(tmp_path / "s", agent):
            await backend.launch(make_launch(1), TOKEN)
            await watch.running(make_launch(1).name)
            assert sum(isinstance(seen, Listed) for seen in watch.told) == 2
            assert set(watch.nodes) == {make_launch(1).name}
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    run(story)


# ---- the socket


def test_socket_is_private_and_may_lie_deep(tmp_path: Path) -> None:
    """The socket is its user's alone, and its path may be longer than a socket address."""
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)

    async def story() -> None:
        async with LocalNodeHost(deep / "nodes.sock", agent):
            assert stat.S_IMODE((deep / "nodes.sock").stat().st_mode) == 0o600
            assert await LocalBackend(deep / "nodes.sock").room("worker") is None

    run(story)


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\5\x91\xa3who", b"\0\0\0\1\x90", b"\0\0"]
)
def test_garbage(tmp_path: Path, garbage: bytes) -> None:
    """Bytes that are no order end their conversation and nothing else."""

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", agent):
            async with wire.connect(tmp_path / "s") as (reader, writer):
                writer.write(garbage)
                writer.write_eof()
                assert await reader.read() == b""
            await LocalBackend(tmp_path / "s").launch(make_launch(), TOKEN)

    run(story)


def test_slow_observer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that observes and never reads is cut off once it lags too far; others are told everything meanwhile."""
    monkeypatch.setattr("dlrover_backends.shared.observers.UNREAD_MAX", 0)

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", agent):
            backend = LocalBackend(tmp_path / "s")
            seen = backend.observe()
            assert await anext(seen) == Listed(())
            # The first change is one too many: the connection is cut and the next word is a list.
            await backend.launch(make_launch(), TOKEN)
            listed = await anext(seen)
            assert isinstance(listed, Listed)
            assert [node.name for node in listed.nodes] == [make_launch().name]
            await seen.aclose()

    run(story)


def test_main_thread_only(tmp_path: Path) -> None:
    """A host outside the main thread is refused: the kernel would end its nodes with that thread."""

    async def story() -> None:
        def elsewhere() -> None:
            asyncio.run(LocalNodeHost(tmp_path / "s", agent).open())

        with pytest.raises(RuntimeError, match="main thread"):
            await asyncio.to_thread(elsewhere)

    run(story)


def test_ages(tmp_path: Path) -> None:
    """A list says how long ago each node became what it is; a change is fresh."""

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", agent):
            backend = LocalBackend(tmp_path / "s")
            async with watching(backend) as watch:
                await backend.launch(make_launch(), TOKEN)
                await watch.running(make_launch().name)
                fresh = watch.told[-1]
                assert isinstance(fresh, Changed)
            async with watching(backend) as later:
                assert later.nodes[make_launch().name].age_us > fresh.node.age_us
                assert later.nodes[make_launch().name].host == os.uname().nodename

    run(story)


def test_signals_in_words() -> None:
    """Exit codes are told by name where there is one."""
    assert [process.told(code) for code in (0, 7, -9, -40)] == [
        "exit code 0", "exit code 7", "killed by SIGKILL", "killed by signal 40",
    ]  # fmt: skip
