"""Groups with programs of their own: what their processes are, and that they fail each by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import WITHOUT_TORCH, Job, eventually

from dlrover_adapters.agent.config import PLAIN, Mode
from dlrover_core.runtime.launcher import WorkerExit, WorkerStep

Make = Callable[..., Any]
TORCHES = ("libtorch", "/torch/_C", "_dynamo")
HINTS = ("TORCH", "PYTORCH", "OMP_NUM_THREADS", "MASTER_ADDR", "RES_OPTIONS", "GLIBC_TUNABLES")


def run(story: Coroutine[Any, Any, None]) -> None:
    """Run a story to its end."""
    asyncio.run(story)


def with_torch(pids: list[int]) -> list[int]:
    """Those of these processes that have mapped one of torch's libraries."""
    found = []
    for one in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            maps = Path(f"/proc/{one}/maps").read_text()
            found += [one] if any(word in maps for word in TORCHES) else []
    return found


def family() -> list[int]:
    """All processes below this one that live."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):  # it has ended meanwhile
            found += [one.pid] if one.status() != psutil.STATUS_ZOMBIE else []
    return found


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without torch's variables."""
    for name in [one for one in os.environ if one.startswith(HINTS)]:
        monkeypatch.delenv(name)
    return dict


SCRIPT = """
    import os, sys
    from dlrover_adapters.plain import phase, step
    with phase("warming"):
        step(7)
    tell([one for one in sys.modules if one.partition(".")[0] == "torch"], sorted(os.environ), os.environ["DLROVER_GROUP"])
    forever()
"""


def test_no_process_of_a_plain_group_has_torch(rig: Make, clean: None) -> None:
    """Neither workers, forked or executed, nor zygote, nor spares; they have none of its variables, and their steps are told."""

    async def story() -> None:
        for preload in (("json",), None):
            fields: dict[str, Any] = {"framework": PLAIN, "stores": False, "preload": preload, "group": "rollout"}
            async with rig(SCRIPT, nproc=2, **fields) as one:
                await one.start(store="")
                for modules, names, group in (await one.all_told()).values():
                    assert (modules, group) == ([], "rollout")
                    assert [name for name in names if name.startswith(HINTS)] == []
                step = await one.until(lambda notice: isinstance(notice, WorkerStep))
                assert (step.step, step.told, step.first) == (7, True, True)
                living = family()
                assert len(living) >= 2
                assert with_torch(living) == []

    run(story())


def test_a_plain_worker_is_told_its_rank_and_nothing_of_torch(rig: Make, clean: None) -> None:
    """Ranks, group and role; of a program that is not Python the same."""

    async def story() -> None:
        fields: dict[str, Any] = {"framework": PLAIN, "stores": False, "group": "rollout", "role": "rollout"}
        names = "RANK WORLD_SIZE ROLE_NAME DLROVER_GROUP DLROVER_PLACE MASTER_PORT"
        code = f"tell({{one: os.environ.get(one) for one in {names!r}.split()}})"
        async with rig(code, **fields) as one:
            await one.run(store="", node="rollout-3-0")
            assert (await one.told())[1] == {
                "RANK": "0",
                "WORLD_SIZE": "1",
                "ROLE_NAME": "rollout",
                "DLROVER_GROUP": "rollout",
                "DLROVER_PLACE": "3",
                "MASTER_PORT": None,
            }
        shell = ("sh", "-c", 'env > "$FOLDER/env"')
        async with rig(mode=Mode.COMMAND, argv=shell, **fields) as one:
            (end,) = await one.run(store="", node="rollout-3-0")
            assert end.exit_code == 0
            told = dict(line.partition("=")[::2] for line in (one.folder / "env").read_text().splitlines())
            assert (told["DLROVER_GROUP"], told["DLROVER_PLACE"], told["RANK"]) == ("rollout", "3", "0")
            assert [name for name in told if name.startswith(HINTS)] == []

    run(story())


def test_an_exception_of_a_plain_worker_is_known(rig: Make) -> None:
    """As one of a worker with torch is: by its own words, not by the end of its output."""

    async def story() -> None:
        async with rig("raise ValueError('no such game')", framework=PLAIN, stores=False) as one:
            (end,) = await one.run(store="")
            assert isinstance(end, WorkerExit)
            assert (end.exit_code, end.error) == (1, "ValueError: no such game")

    run(story())


def test_a_plain_program_that_tells_no_step_never_hangs(rig: Make) -> None:
    """Nobody can know; one that has told a step is looked at as any other."""

    async def story() -> None:
        for line, pulses in (("", False), ("from dlrover_adapters.plain import step; step(1)", True)):
            async with rig(f"{line}\ntell()\nforever()", framework=PLAIN, stores=False) as one:
                await one.start(store="")
                await one.told()
                if pulses:
                    await one.until(lambda notice: isinstance(notice, WorkerStep))
                assert (one.launcher.pulse() is not None) == pulses

    run(story())


def test_a_process_with_torch_is_told_from_others() -> None:
    """What `with_torch` looks for is what a process with torch has (else the tests above prove nothing)."""
    code = "import torch, sys; sys.stdout.write(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert any(word in maps for word in TORCHES)


STEPPING = """
import os, pathlib, sys, time
from dlrover_adapters.torch import step
folder, who = pathlib.Path(os.environ["FOLDER"]), os.environ["DLROVER_GROUP"] + os.environ["DLROVER_PLACE"]
with open(folder / who, "a") as file:
    print(os.getpid(), os.environ["WORLD_SIZE"], os.environ["WHO"], *sys.argv[1:], file=file)
number = 0
while not (folder / "finish").exists():
    number += 1
    step(number)
    time.sleep(0.02)
"""

THREE = """
env = { WHO = "all" }
preload = []

[groups.trainer]
program = "train.py"
args = ["--lr", "0.1"]
nodes = 2

[groups.rollout]
program = "rollout.py"
env = { WHO = "rollout" }

[groups.tool]
command = ["sh", "-c"]
args = ["echo $$ $WORLD_SIZE $WHO $0 >> $FOLDER/tool$DLROVER_PLACE; until test -e $FOLDER/finish; do sleep 0.1; done"]
"""


def test_three_groups_run_three_programs_and_fail_each_by_itself(tmp_path: Path) -> None:
    """A killed rollout worker comes back alone; whoever is of another group does not notice."""
    for name in ("train.py", "rollout.py"):
        (tmp_path / name).write_text(STEPPING)
    (tmp_path / "job.toml").write_text(THREE)

    def told(who: str, count: int) -> list[list[str]]:
        def look() -> list[list[str]] | None:
            path = tmp_path / who
            lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
            return lines if len(lines) >= count else None

        return eventually(look, f"{count} starts of {who}")

    with Job(tmp_path, "--job", str(tmp_path / "job.toml"), env=WITHOUT_TORCH) as job:
        before = {who: told(who, 1) for who in ("trainer0", "trainer1", "rollout0", "tool0")}
        assert [line[1:] for lines in before.values() for line in lines] == [
            *(["2", "all", "--lr", "0.1"],) * 2,
            ["1", "rollout"],
            ["1", "all", "sh"],
        ]
        os.kill(int(before["rollout0"][0][0]), signal.SIGKILL)
        first, second = told("rollout0", 2)
        assert first[1:] == second[1:]
        job.until(lambda status: not status["open_incidents"], "the end of the incident")
        job.finish()
        assert job.ended() == 0
        assert {who: told(who, 1) for who in ("trainer0", "trainer1", "tool0")} == {
            who: lines for who, lines in before.items() if who != "rollout0"
        }
        worlds = [one["fields"]["group"] for one in job.events("WorldFormed")]
        assert sorted(worlds) == ["rollout", "rollout", "tool", "trainer"]
        assert job.left() == []
