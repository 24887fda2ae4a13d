"""The agent's half of checkpoints where somebody misbehaves: hostile packets, no memory, a full disk, a killed agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgpack
import pytest
from checkpoint_node import BOUND_S, HEAD, SCRIPTS, Gone, Make, run
from checkpoint_node import node as node  # noqa: PLC0414 - the fixture is taken over
from running import eventually

from dlrover_core.job.checkpoints import (
    Keep,
    ReportStorage,
)

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.slow_loop(
        reason="the main thread executes savers, as they die with it: under load that counts 60 to 110 ms"
    ),
]


def mode(path: str) -> int:
    """Who may open it."""
    return Path(path).stat().st_mode & 0o777


def test_hostile_packets_end_their_connection_only(node: Make) -> None:
    """Oversized, malformed and impossible packets are hung up on or refused; honest ranks go on."""
    script = """
    shelf = Shelf(vault)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    tell(os.environ["DLROVER_AGENT_SOCKET"])
    signal.sigwait([signal.SIGUSR1])
    shelf.save(1)
    tell(held(vault))
    """

    async def test() -> None:
        async with node(script) as one:
            await one.rig.start()
            agent = (await one.rig.told())[1]
            loop = asyncio.get_running_loop()
            path = str(Path(agent).with_name("vault.sock"))
            assert mode(path) == 0o600
            hello = {"op": "hello", "rank": 0, "local_rank": 0, "world": 1, "nproc": 1}
            arena = {"op": "arena", "layout": 1, "slots": 2, "table_bytes": 1, "blob_bytes": 1, "data_bytes": 2**45}
            for packets in (
                [b"\xc1"],
                [msgpack.packb([1])],
                [b"x" * (100 * 1024)],
                [msgpack.packb({"op": "inventory"})],
                [msgpack.packb(hello), msgpack.packb({"op": "borrow", "id": "x"})],
                [msgpack.packb(hello), msgpack.packb({**arena, "slots": -1})],
                [msgpack.packb(hello), msgpack.packb({"op": "nothing"})],
            ):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                    line.setblocking(False)
                    await loop.sock_connect(line, path)
                    for packet in packets:
                        await loop.sock_sendall(line, packet)
                    answers = [await asyncio.wait_for(loop.sock_recv(line, 65536), BOUND_S) for _ in packets]
                    assert answers[-1] == b"", packets
            for refused in (arena, {**arena, "slots": 9}, {"op": "borrow", "id": 99}, {"op": "ready", "id": 99}):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                    line.setblocking(False)
                    await loop.sock_connect(line, path)
                    for packet in (hello, refused):
                        await loop.sock_sendall(line, msgpack.packb(packet))
                        answer = msgpack.unpackb(await asyncio.wait_for(loop.sock_recv(line, 65536), BOUND_S))
                    assert "error" in answer, refused
            os.kill(one.rig.launcher.pids["rank 0"], signal.SIGUSR1)
            assert (await one.rig.told())[1:] == [[[0, 1, 1]]]
            await one.ended(1)

    run(test())


def test_memory_is_refused_before_it_is_used(node: Make, tmp_path: Path) -> None:
    """An arena that does not fit within the container's limit is refused in a sentence with numbers, and training goes on."""
    from dlrover_adapters.agent.checkpoints.budget import RESERVE_BYTES

    script = """
    from dlrover_adapters.torch.checkpoint.vault import VaultRefused
    told = []
    for size in (64 * MIB, 1 * MIB):
        try:
            Shelf(vault, size).keeps("")
            told.append("there")
        except VaultRefused as refused:
            told.append(str(refused))
    tell(*told, vault.gone)
    """

    async def test() -> None:
        async with node(script) as one:
            root = tmp_path / "root"
            await asyncio.to_thread(limited, root, 32 * 2**20 + RESERVE_BYTES)
            one.rig.launcher.vault.arenas._root = root
            await one.rig.start()
            _, refused, there, gone = await one.rig.told()
            assert refused.startswith("no memory for checkpoints: 129 MiB are needed, 32 MiB may be used")
            assert "the limit of control group /pod" in refused
            assert (there, gone) == ("there", "")
            await one.ended(1)

    run(test())


def limited(root: Path, left: int) -> None:
    """A machine of which a control group may use only so many bytes more."""
    group = root / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    (root / "proc/meminfo").write_text(f"MemAvailable: {2**40 // 1024} kB\n")
    (group / "memory.max").write_text(str(2**30 + left))
    (group / "memory.current").write_text(str(2**30))
    (group / "memory.stat").write_text("inactive_file 0\n")


AGENT = """
import asyncio, os, sys
sys.path.insert(0, SCRIPTS)
from dlrover_adapters.agent.checkpoints.duty import CheckpointDuty
from dlrover_adapters.agent.config import LaunchConfig
from dlrover_adapters.agent.launcher import LinuxLauncher
from dlrover_core.job.orders import Order, Work
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.keeping import KeptBeat
from dlrover_core.runtime.launcher import WorkersLaunch

async def main():
    folder, place = sys.argv[1:]
    env = {"FOLDER": folder, "PYTHONPATH": os.environ["PYTHONPATH"]}
    config = LaunchConfig((folder + "/script.py",), env=env, stores=False, run_dir=place, framework="bare")
    launcher = LinuxLauncher(config)
    await launcher.open()
    duty = CheckpointDuty(launcher, token=b"x", host="127.0.0.1", bind="127.0.0.1")
    desk = Desk("n-0-0", "run", Order(leave=False, reason="", grace_us=0, work=Work(generation=1)), lambda command: None)
    running = asyncio.ensure_future(duty.run(desk))
    await launcher.start(WorkersLaunch("run", 1, 0, 1, 1, 0, 1, "127.0.0.1:1", 0, 3))
    while KeptBeat not in desk.told or not launcher.saving.address:
        await asyncio.sleep(0.01)
    print(*launcher.pids.values(), flush=True)
    await running
asyncio.run(main())
"""


RUNNING = pytest.mark.nightly(reason="a stopped saver stands for it in make test: whoever ends that one ends any")


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=RUNNING), True], ids=["running", "its saver stopped"])
def test_nothing_outlives_a_killed_agent(rig: Make, gone: Gone, tmp_path: Path, stopped: bool) -> None:
    """SIGKILL of the agent ends saver, zygote and workers; nobody holds the arena any more, so its memory is free."""
    text = HEAD.replace("NPROC", "1") + ("shelf = Shelf(vault)\nshelf.keeps('')\nshelf.save(1)\nforever()\n")

    async def test() -> None:
        with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as ending:
            async with rig(text) as one:
                agent_file = tmp_path / "agent.py"
                agent_file.write_text(AGENT.replace("SCRIPTS", repr(str(SCRIPTS))))
                line = [sys.executable, str(agent_file), str(tmp_path), place]
                env = {**os.environ, "PYTHONPATH": one.launcher._config.env["PYTHONPATH"]}
                agent = await asyncio.create_subprocess_exec(*line, env=env, stdout=asyncio.subprocess.PIPE)
                assert agent.stdout is not None
                ending.callback(agent.kill)
                pids = [int(word) for word in (await agent.stdout.readline()).split() if int(word)]
                assert len(pids) == 3, "zygote, saver and worker"
                arena = inodes(agent.pid)
                assert len(arena) == 1
                await asyncio.to_thread(
                    eventually, lambda: all(holders(arena, pids)[1:]), "saver and worker have it mapped"
                )
                if stopped:
                    os.kill(pids[1], signal.SIGSTOP)
                ending.pop_all().close()
                await agent.wait()
                for pid in pids:
                    await gone(pid)
                assert not any(
                    await asyncio.to_thread(lambda: holders(arena, everybody()))
                )  # as many maps as there are

    run(test())


def inodes(pid: int) -> set[str]:
    """The arenas that a process has open or mapped."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:dlrover-arena" in line:
                found.add(line.split()[4])
    return found


def everybody() -> list[int]:
    """All processes of this machine."""
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]


def holders(arena: set[str], pids: list[int]) -> list[bool]:
    """Who of them has these arenas."""
    return [bool(arena & inodes(pid)) for pid in pids]


def test_a_full_disk(node: Make, tmp_path: Path) -> None:
    """A storage without room is a failure in words: nothing of the step is there, and what comes later is written."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=False).returncode:  # noqa: S607
        pytest.skip("tmpfs cannot be mounted here")
    script = """
    shelf = Shelf(vault, 4 * MIB)
    shelf.keeps(os.environ["FOLDER"] + "/small/ckpt")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    shelf.save(4, due=True)
    tell("saved")
    signal.sigwait([signal.SIGUSR1])
    shelf.save(5, due=True)
    forever()
    """

    async def test() -> None:
        async with node(script) as one:
            await one.rig.start()
            await one.rig.told()
            await one.until(lambda: one.of(ReportStorage))
            assert "No space left" in one.of(ReportStorage)[0].reason
            assert not list((small / "ckpt").glob("step-*/part-*"))
            remount = ["mount", "-o", "remount,size=64m", str(small)]
            subprocess.run(remount, check=True)  # noqa: ASYNC221
            os.kill(one.rig.launcher.pids["rank 0"], signal.SIGUSR1)
            await one.until(lambda: one.kept.written)
            assert one.kept.written[0].step in {4, 5}
            assert await one.rig.launcher.stop(0.0, 5.0)

    try:
        run(test())
    finally:
        subprocess.run(["umount", str(small)], check=True)  # noqa: S607


def test_a_script_that_ends_well_is_waited_for(node: Make) -> None:
    """The last step that was due is written, committed and sealed before the agent says that its workers have finished."""
    script = """
    shelf = Shelf(vault)
    shelf.keeps(os.environ["FOLDER"] + "/ckpt")
    shelf.save(4, due=True)
    """

    async def test() -> None:
        async with node(script) as one:
            await one.rig.start()
            await one.ended(1)
            assert not one.desk.at_rest.is_set()
            await one.until(lambda: one.kept.written)
            assert not one.desk.at_rest.is_set()
            one.order(Keep(4, 1))
            await asyncio.wait_for(one.desk.at_rest.wait(), BOUND_S)
            assert (one.rig.folder / "ckpt" / "step-0000000004" / "manifest.json").exists()

    run(test())
