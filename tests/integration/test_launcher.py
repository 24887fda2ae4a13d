"""The Linux launcher with real processes: the tree, the deaths, failures to start. No torch is needed for any of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from launched import Make, run, zygote_of

from dlrover_adapters.agent.config import LaunchConfig, Mode
from dlrover_adapters.agent.launcher import LinuxLauncher
from dlrover_core.errors import LaunchFailed
from dlrover_core.runtime.launcher import WorkerExit, WorkersStuck

Gone = Callable[[int], Awaitable[None]]


def descriptors() -> int:
    """How many are open here."""
    return len([*Path("/proc/self/fd").iterdir()])


# ---- the tree


def test_the_agent_is_the_parent_of_its_workers(rig: Make) -> None:
    """Workers are children of the agent, leaders of sessions of their own, and called what they are."""

    async def test() -> None:
        async with rig("tell(os.getpid(), os.getppid(), os.getsid(0)); forever()", nproc=2, job="j1", node="n1") as one:
            await one.start()
            for rank, (pid, parent, session) in (await one.all_told()).items():
                assert (parent, session) == (os.getpid(), pid)
                assert one.launcher.pids[f"rank {rank}"] == pid
                process = psutil.Process(pid)
                assert process.name() == f"worker-{rank}"
                assert " ".join(process.cmdline()).startswith(f"dlrover worker --job j1 --node n1 --rank {rank} ")
            zygote = psutil.Process(zygote_of(one))
            assert zygote.name() == "dlrover-zygote"
            assert "--job j1 --node n1" in " ".join(zygote.cmdline())

    run(test())


@pytest.mark.parametrize(
    ("script", "exit_code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('said why')", 1),
        ("raise ValueError('bad')", 1),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -11),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("raise KeyboardInterrupt", -2),
        ("def (", 1),
    ],
)
@pytest.mark.parametrize("preload", [(), None], ids=["forked", "executed"])
def test_exit_codes_are_those_of_a_fresh_interpreter(
    rig: Make, script: str, exit_code: int, preload: tuple[str, ...] | None
) -> None:
    """However a script ends, its exit code is what ``python script.py`` gives, and nobody asked for it."""

    async def test() -> None:
        async with rig(script, preload=preload) as one:
            (end,) = await one.run()
            assert (end.exit_code, end.asked, end.generation, end.step) == (exit_code, False, 1, -1)

    run(test())


def test_the_interpreter_ends_properly(rig: Make) -> None:
    """Exit handlers run, threads are waited for, buffers are flushed: a worker leaves by the interpreter's own end."""

    async def test() -> None:
        script = """
        import atexit, threading
        atexit.register(tell, "atexit")
        held = open(os.path.join(os.environ["FOLDER"], "buffered"), "w")
        held.write("flushed")
        threading.Timer(0.05, tell, ["thread"]).start()
        """
        async with rig(script) as one:
            (end,) = await one.run()
            assert end.exit_code == 0
            assert [(await one.told())[1] for _ in range(2)] == ["thread", "atexit"]
            assert (one.folder / "buffered").read_text() == "flushed"

    run(test())


def test_the_script_sees_a_fresh_interpreter(rig: Make) -> None:
    """`__main__`, argv, path, working directory, signals and streams are as ``python -u script.py`` gives them."""
    script = """
    import __main__
    look = lambda: [
        __main__.__file__, __name__, __spec__ is None, __package__ is None, sys.argv, sys.path[0], os.getcwd(),
        __main__ is sys.modules["__main__"], sorted(k for k in vars(__main__) if k.startswith("__")),
        [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD)][1:],
        signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.lexists("/proc/self/fd/" + fd)],
        sys.stdout.write_through, sys.orig_argv,
        sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), len(os.listdir("/proc/self/task")),
    ]
    tell(*look())
    """

    async def test() -> None:
        async with rig(script) as one:
            await one.run()
            _, *forked = await one.told()
            command = [sys.executable, "-u", str(one.folder / "script.py")]
            env = {**os.environ, "FOLDER": str(one.folder)}
            fresh = await asyncio.create_subprocess_exec(*command, env=env)
            await fresh.wait()
            _, *expected = await one.told()
            assert forked == expected

    run(test())


@pytest.mark.parametrize("mode", [Mode.MODULE, Mode.RUN_PATH, Mode.COMMAND])
def test_other_ways_to_name_the_program(rig: Make, mode: Mode, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules, paths for runpy and plain commands run with their arguments and the environment of their rank."""

    async def test() -> None:
        argv = {
            Mode.MODULE: ("package.program", "--x", "${local_rank}"),
            Mode.RUN_PATH: (str(tmp_path / "script.py"), "--x", "${local_rank}"),
            Mode.COMMAND: (
                "/bin/sh",
                "-c",
                'exec "$0" "$@"',
                sys.executable,
                str(tmp_path / "script.py"),
                "--x",
                "${local_rank}",
            ),
        }[mode]
        async with rig("tell(__name__, sys.argv[1:], os.environ['GENERATION'])", argv=argv, mode=mode, nproc=2) as one:
            (tmp_path / "package").mkdir()
            (tmp_path / "package/__init__.py").touch()
            (tmp_path / "package/program.py").write_text((tmp_path / "script.py").read_text())
            assert [end.exit_code for end in await one.run()] == [0, 0]
            assert await one.all_told() == {rank: ["__main__", ["--x", str(rank)], "1"] for rank in range(2)}

    run(test())


def test_a_command_that_cannot_be_executed(rig: Make) -> None:
    """It says so, with the shell's exit code."""

    async def test() -> None:
        async with rig(argv=("/no/such/program",), mode=Mode.COMMAND) as one:
            (end,) = await one.run()
            assert (end.exit_code, "cannot execute '/no/such/program'" in end.tail) == (127, True)

    run(test())


def test_generations_follow_each_other(rig: Make) -> None:
    """A new generation starts when the old one is gone, from processes forked ahead, with its own numbers."""

    async def test() -> None:
        async with rig("tell(os.environ['GENERATION'], os.getpid()); forever()", nproc=2) as one:
            seen = set()
            for generation in range(1, 4):
                await one.start()
                told = await one.all_told()
                assert [words[0] for words in told.values()] == [str(generation)] * 2
                seen |= {words[1] for words in told.values()}
                assert await one.launcher.stop(0, 10)
                assert [(end.generation, end.asked, end.exit_code) for end in await one.exits(2)] == [
                    (generation, True, -9)
                ] * 2
            assert len(seen) == 6

    run(test())


# ---- deaths


def test_a_death_is_noticed_at_once_and_the_last_words_are_read(rig: Make) -> None:
    """The exit of a killed worker comes with its signal, its tail and its time; the others live on."""

    async def test() -> None:
        script = "print('out'); print('last words', file=sys.stderr); tell(); forever()"
        async with rig(script, nproc=2) as one:
            await one.start()
            await one.all_told()
            os.kill(one.launcher.pids["rank 1"], signal.SIGKILL)
            (end,) = await one.exits(1)
            assert (end.rank, end.exit_code, end.asked, end.tail) == (1, -9, False, "last words\n")
            assert "rank 0" in one.launcher.pids

    run(test())


def test_who_died_before_the_stop_was_not_asked(rig: Make, gone: Gone) -> None:
    """Of a generation that is stopped, those already dead keep their own exit."""

    async def test() -> None:
        script = "tell(); forever() if RANK else os._exit(5)"
        async with rig(script, nproc=2) as one:
            await one.start()
            await one.all_told()
            if "rank 0" in one.launcher.pids:
                await gone(one.launcher.pids["rank 0"])
            assert await one.launcher.stop(0, 10)
            assert [(end.exit_code, end.asked) for end in await one.exits(2)] == [(5, False), (-9, True)]

    run(test())


def test_grace_is_given_and_ends(rig: Make) -> None:
    """With grace, workers get SIGTERM and may end well; those that do not are killed after it."""

    async def test() -> None:
        script = """
        signal.signal(signal.SIGTERM, (lambda *_: sys.exit(0)) if RANK == 0 else signal.SIG_IGN)
        tell()
        forever()
        """
        async with rig(script, nproc=2) as one:
            await one.start()
            await one.all_told()
            assert await one.launcher.stop(2.0, 10)
            assert [(end.exit_code, end.asked) for end in await one.exits(2)] == [(0, True), (-9, True)]
            assert await one.launcher.stop(0, 10), "stopping nothing succeeds"

    run(test())


@pytest.mark.parametrize("how", ["same group", "own group"])
@pytest.mark.parametrize("end", ["killed", "stopped", "exits"])
def test_children_do_not_survive_their_worker(rig: Make, gone: Gone, how: str, end: str) -> None:
    """Whatever a worker started dies with it, grandchildren and process groups of their own included, and is reaped.

    What one leaves that ended well may live on until the node is told to stop.
    """
    script = f"""
    def child():
        if {how == "own group"}: os.setpgid(0, 0)
        pid = os.fork()
        tell("child" if pid else "grandchild", os.getpid())
        forever()
    if os.fork() == 0: child()
    {"sys.stdin.close(); signal.sigwait({signal.SIGUSR1})" if end == "exits" else "forever()"}
    """
    if end == "exits":
        script = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n" + "\n".join(
            line.removeprefix("    ") for line in script.splitlines()
        )

    async def test() -> None:
        async with rig(script) as one:
            await one.start()
            pids = [(await one.told())[2] for _ in range(2)]
            worker = one.launcher.pids["rank 0"]
            if end == "stopped":
                await one.launcher.stop(0, 10)
            else:
                os.kill(worker, signal.SIGKILL if end == "killed" else signal.SIGUSR1)
            if end == "exits":
                await one.exits(1)
                assert all(psutil.pid_exists(pid) for pid in pids)
                assert await one.launcher.stop(0, 10)
            for pid in pids:
                await gone(pid)
            if end != "exits":
                await one.exits(1)
        assert not [pid for pid in (worker, *pids) if psutil.pid_exists(pid)], "nobody is left, not even as a zombie"

    run(test())


def test_a_worker_that_cannot_be_killed_is_told(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """If workers do not die within the kill wait, stop says no and names them."""

    async def test() -> None:
        async with rig("tell(); forever()") as one:
            await one.start()
            await one.told()
            pid = one.launcher.pids["rank 0"]
            with monkeypatch.context() as patch:
                patch.setattr(signal, "pidfd_send_signal", lambda *_: None)
                patch.setattr(os, "killpg", lambda *_: None)
                assert not await one.launcher.stop(0, 0.05)
            assert await one.until(lambda notice: isinstance(notice, WorkersStuck)) == WorkersStuck(1, (pid,))
            assert await one.launcher.stop(0, 10)

    run(test())


# ---- our own processes die


def test_the_zygote_may_die(rig: Make) -> None:
    """Workers live on without their zygote, and the next generation comes from another one."""

    async def test() -> None:
        async with rig("tell(os.getpid()); forever()", nproc=2) as one:
            await one.start()
            first = await one.all_told()
            old = zygote_of(one)
            os.kill(old, signal.SIGKILL)
            # More workers than there are spares: some must come from the new zygote.
            assert await one.launcher.stop(0, 10)
            await one.exits(2)
            for _ in range(2):
                await one.start()
                assert await one.all_told() != first
                await one.launcher.stop(0, 10)
                await one.exits(2)
            assert zygote_of(one) not in {0, old}

    run(test())


def test_a_stopped_zygote_and_a_stopped_spare_hold_up_nobody(rig: Make) -> None:
    """A spare that is stopped is not made a worker, and a zygote that does not answer for ``hung_s`` is replaced."""

    async def test() -> None:
        async with rig("tell(os.getpid()); forever()", hung_s=1.0) as one:
            nursery = one.launcher._nursery
            assert nursery is not None
            await asyncio.gather(*nursery._tasks)  # the spare is there
            (spare,) = nursery._spares
            os.kill(spare.child.pid, signal.SIGSTOP)
            await asyncio.to_thread(os.waitid, os.P_PID, spare.child.pid, os.WSTOPPED | os.WNOWAIT)
            await one.start()
            (words,) = (await one.all_told()).values()
            assert words != [spare.child.pid]
            old = zygote_of(one)
            os.kill(old, signal.SIGSTOP)
            assert await one.launcher.stop(0, 10)
            await one.exits(1)
            await one.start()
            assert await one.all_told() != {0: words}
            assert zygote_of(one) not in {0, old}

    run(test())


AGENT = """
import asyncio, os, sys
from dlrover_adapters.agent.config import LaunchConfig
from dlrover_adapters.agent.launcher import LinuxLauncher
from dlrover_core.runtime.launcher import WorkersLaunch

async def main():
    folder = sys.argv[1]
    env = {"FOLDER": folder, "PYTHONPATH": os.environ["PYTHONPATH"]}
    config = LaunchConfig((folder + "/script.py",), nproc=2, framework="bare", stores=False, env=env)
    launcher = LinuxLauncher(config._replace(run_dir=sys.argv[2]))
    await launcher.open()
    await launcher.start(WorkersLaunch("run", 1, 0, 2, 2, 0, 1, "h:1", 0, 3))
    print(launcher.pids["zygote"], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_nothing_outlives_a_killed_agent(rig: Make, gone: Gone, tmp_path: Any) -> None:
    """SIGKILL of the agent ends its workers, their children, the spares and the zygote."""
    script = """
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
    tell(os.getpid())
    forever()
    """

    async def test() -> None:
        # The path of a socket is short.
        with tempfile.TemporaryDirectory() as place:
            async with rig(script) as one:
                (tmp_path / "agent.py").write_text(AGENT)
                line = [sys.executable, str(tmp_path / "agent.py"), str(tmp_path), place]
                env = {**os.environ, "PYTHONPATH": one.launcher._config.env["PYTHONPATH"]}
                agent = await asyncio.create_subprocess_exec(*line, env=env, stdout=asyncio.subprocess.PIPE)
                assert agent.stdout is not None
                zygote = int(await agent.stdout.readline())
                pids = [zygote, *[(await one.told())[1] for _ in range(4)]]
                pids += [child.pid for child in psutil.Process(agent.pid).children(recursive=True)]
                agent.kill()
                await agent.wait()
                for pid in pids:
                    await gone(pid)

    run(test())


def test_close_leaves_nothing(rig: Make) -> None:
    """After close there is no process, no file, no descriptor and no thread of the launcher's."""

    async def test() -> None:
        fds, others = descriptors(), psutil.Process().children(recursive=True)
        async with rig("tell(); forever()", nproc=2) as one:
            await one.start()
            await one.all_told()
        assert descriptors() == fds
        assert psutil.Process().children(recursive=True) == others
        ends = [notice for notice in one.notices if isinstance(notice, WorkerExit)]
        assert [(end.asked, end.exit_code) for end in ends] == [(True, -9)] * 2, "and every exit was told"

    run(test())


# ---- failures to start


def test_a_framework_that_is_not_there(rig: Make) -> None:
    """Workers that could never be started are an error of open, which names what is missing; nothing is left."""

    async def test() -> None:
        with pytest.raises(LaunchFailed, match="no_such_framework"):
            async with rig("", framework="no_such_framework"):
                pass

    run(test())


def test_an_unusable_zygote_gives_way(rig: Make, tmp_path: Any) -> None:
    """Where forking from the framework is not safe, workers are executed instead."""

    async def test() -> None:
        async with rig("tell(os.getppid())", framework="sick") as one:
            (end,) = await one.run()
            assert end.exit_code == 0
            assert await one.told() == [0, os.getpid()]
            assert zygote_of(one) == 0

    text = (tmp_path / "bare.py").read_text()
    (tmp_path / "sick.py").write_text(text.replace('refusal_in_child(): return ""', "refusal_in_child(): os._exit(9)"))
    run(test())


def test_long_socket_paths_are_refused(tmp_path: Any) -> None:
    """A run folder too deep for a Unix socket is an error that says so."""

    async def test() -> None:
        deep = tmp_path / ("d" * 100)
        launcher = LinuxLauncher(LaunchConfig(("x.py",), run_dir=str(deep), preload=None, stores=False))
        with pytest.raises(LaunchFailed, match="too long for a Unix socket"):
            await launcher.open()
        assert list(deep.iterdir()) == []

    run(test())
