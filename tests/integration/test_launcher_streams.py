"""The Linux launcher's streams, and what torchrun's flags ask of it, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import psutil
import pytest
from launched import Make, run, zygote_of

from dlrover_adapters.agent.config import Streams
from dlrover_core.errors import LaunchFailed
from dlrover_core.runtime.launcher import WorkerStep


def test_streams_go_where_they_were_sent(rig: Make, tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Shown, redirected and teed streams are on the console or in files named by run, node, attempt and rank, or both."""

    async def test() -> None:
        script = "print('out', RANK); print('err', RANK, file=sys.stderr)"
        streams = {
            "redirects": (Streams.NONE, Streams.OUT),
            "tee": (Streams.ERR, Streams.NONE),
            "log_dir": str(tmp_path / "logs"),
        }
        async with rig(script, nproc=2, **streams) as one:
            ends = await one.run()
            assert [end.tail for end in ends] == ["err 0\n", "err 1\n"]

    run(test())
    console = capfd.readouterr()
    assert console.out == "out 0\n"
    assert sorted(console.err.splitlines()) == ["[default0]:err 0", "err 1"]
    logs = tmp_path / "logs/job_run_node/attempt_0"
    found = {str(path.relative_to(logs)): path.read_text() for path in logs.rglob("*") if path.is_file()}
    assert found == {"0/stderr.log": "err 0\n", "1/stdout.log": "out 1\n"}


def test_a_console_that_blocks_does_not_block_workers(rig: Make) -> None:
    """Workers print megabytes while nobody reads the console, and end all the same."""

    async def test() -> None:
        reader, writer = os.pipe()
        saved = os.dup(1)
        os.dup2(writer, 1)
        os.close(writer)
        try:
            async with rig("for _ in range(100): print('x' * 100_000)") as one:
                (end,) = await one.run()
                assert end.exit_code == 0
                os.close(reader)  # the console is gone: nothing waits for it any more
        finally:
            os.dup2(saved, 1)
            os.close(saved)

    run(test())


def test_foreign_rings_are_not_believed(rig: Make) -> None:
    """Whoever rings with garbage, for another generation or for a rank that is not here, is not heard."""
    script = """
    import msgpack
    def ring(*packets):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bell:
            bell.connect(os.environ["DLROVER_AGENT_SOCKET"])
            for one in packets:
                bell.send(one)
    step = lambda **fields: msgpack.packb({"generation": 1, "rank": 0, "step": 1, "told": True} | fields)
    ring(b"garbage"); ring(msgpack.packb([1])); ring(msgpack.packb({"step": 9})); ring(step(step="many"))
    ring(step(generation=0), step(rank=5), step(step=7), step(step=8))
    """

    async def test() -> None:
        async with rig(script) as one:
            await one.run()
            heard = [(one.step, one.first, one.told) for one in one.notices if isinstance(one, WorkerStep)]
            assert heard == [(7, True, True), (8, False, True)]

    run(test())


@pytest.mark.parametrize("after", range(4))
def test_closing_amid_forks(rig: Make, after: int) -> None:
    """A launcher that is closed while its zygote forks, or is being replaced, leaves nothing either."""

    async def test() -> None:
        others = psutil.Process().children(recursive=True)
        async with rig("", nproc=4) as one:
            if after >= 2:
                os.kill(zygote_of(one), signal.SIGKILL)
            for _ in range(after % 2):
                # Processes that wait for a seat die with their zygote: in that very moment none can have one.
                with contextlib.suppress(LaunchFailed) if after >= 2 else contextlib.nullcontext():
                    await one.run()
        assert psutil.Process().children(recursive=True) == others

    run(test())


def test_workers_are_bound_to_their_cpus(rig: Make, tmp_path: Any) -> None:
    """Each rank runs where the framework says, forked and executed alike; the library is asked once, in a process of its own."""
    cpus = sorted(os.sched_getaffinity(0))
    (tmp_path / "fake_affinity.py").write_text(
        f"import sys\nassert sys.argv[1:] == ['node', '2']\nprint([[{cpus[0]}], {cpus}])"
    )

    async def test() -> None:
        for preload in (), None:
            async with rig("tell(sorted(os.sched_getaffinity(0)))", nproc=2, numa="node", preload=preload) as one:
                await one.run()
                assert await one.all_told() == {0: [[cpus[0]]], 1: [cpus]}

    run(test())


def test_a_binding_that_cannot_be_is_told(rig: Make) -> None:
    """Torch's own reason, before any worker is started. (Here: there is no GPU whose CPUs could be found.)"""

    async def test() -> None:
        with pytest.raises(LaunchFailed, match="--numa-binding node: "):
            async with rig(numa="node", torch=True, stores=False, env={"CUDA_VISIBLE_DEVICES": ""}):
                pass

    run(test())


def test_a_virtual_local_rank(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker is local rank 0 of one device, its own among the visible ones; arguments still know the real one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    script = "tell(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'], os.environ['RUN'], sys.argv[1])"

    async def test() -> None:
        async with rig(script, nproc=2, virtual_local_rank=True, run_id="mine") as one:
            one.launcher._config = one.launcher._config._replace(argv=(*one.launcher._config.argv, "${local_rank}"))
            await one.run()
            assert await one.all_told() == {0: ["0", "3", "mine", "0"], 1: ["0", "5", "mine", "1"]}

    run(test())


def test_a_full_disk_raises_nothing_in_workers(rig: Make) -> None:
    """Standard streams on a full device: print, write and flush go on, in the worker and in what it forks."""
    script = """
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1); os.dup2(full, 2)
    print("x" * 100_000, flush=True)
    sys.stdout.write("y"); sys.stderr.write("z\\n"); sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        print("child")
        os._exit(5)
    tell(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), type(sys.stdout).__name__, sys.stdout.mode, sys.stdout.buffer.name)
    """

    async def test() -> None:
        for preload in (), None:
            async with rig(script, preload=preload) as one:
                (end,) = await one.run()
                assert end.exit_code == 0
                assert (await one.told())[1:] == [5, "TextIOWrapper", "w", "<stdout>"]

    run(test())


def test_whoever_runs_on_too_long_is_ended_with_the_reason(rig: Make) -> None:
    """``finish_s`` after the first rank has ended well the others are killed; without it they may run on."""
    script = "tell(); forever() if RANK and os.environ['GENERATION'] == '1' else None"

    async def test() -> None:
        async with rig(script, nproc=2, finish_s=2.0) as one:
            done, late = await one.run()
            assert (done.exit_code, late.exit_code, late.asked) == (0, -9, False)
            assert late.error == "still running 2 s after rank 0 had ended well (finish_s)"
            assert [end.exit_code for end in await one.run()] == [0, 0]

    run(test())


def test_old_attempts_are_pruned_as_new_ones_start(rig: Make, tmp_path: Any) -> None:
    """Of many attempts the first and the newest stay, each with its own files."""

    async def test() -> None:
        streams = {"redirects": (Streams.OUT,), "log_dir": str(tmp_path / "logs"), "log_attempts_max": 3}
        async with rig("print(os.environ['GENERATION'])", **streams) as one:
            for _ in range(6):
                await one.run()

    run(test())
    place = tmp_path / "logs/job_run_node"
    found = {path.parent.parent.name: path.read_text() for path in place.rglob("stdout.log")}
    assert found == {"attempt_0": "1\n", "attempt_4": "5\n", "attempt_5": "6\n"}


def test_spares_are_as_many_as_workers(rig: Make) -> None:
    """However often they are asked for while some are being made."""

    async def test() -> None:
        async with rig("forever()", nproc=2) as one:
            nursery = one.launcher._nursery
            for _ in range(3):
                nursery.refill()
            await asyncio.gather(*nursery._tasks)
            assert len(nursery._spares) == 2

    run(test())
