"""What workers of a script imported in one run is imported before the fork in the next (``--preload auto``)."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from running import NO_TORCH

Make = Callable[..., Any]

OPTIMIZER = "import torch; torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()"
COUNTED = "import torch; from dlrover_adapters.torch import step; step(1)"
"""Either is a first step; the optimizer's costs each process that makes it seconds of imports."""

# What the script tells of itself it knew before its first step.
SCRIPT = """
loaded = [name in sys.modules for name in ("slowly", "slowly.parts", "of_mine")]
import of_mine
{before}
import slowly.parts
{steps}
tell(*loaded, slowly.VALUE, slowly.parts.PLACE)
"""


def run(test: Coroutine[Any, Any, None]) -> None:
    """On a loop of its own, within its bound."""
    asyncio.run(asyncio.wait_for(test, 100))


@pytest.fixture
def package(tmp_path: Path) -> dict[str, str]:
    """An installed package, a module of the script's own, and the environment in which both are found."""
    folder = tmp_path / "site-packages" / "slowly"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import os\nVALUE = os.environ.get('SLOWLY', 'unset')\n")
    (folder / "parts.py").write_text("import os\nPLACE = os.getpid()\n")
    (tmp_path / "of_mine.py").write_text("")
    found = os.environ.get("PYTHONPATH", "")
    source = Path(__file__).resolve().parents[2] / "src"
    paths = [source, source / "adapters", source / "backends", tmp_path, folder.parent, found]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths)), "DLROVER_WARM": "core"}


@pytest.fixture
def light(package: dict[str, str]) -> dict[str, str]:
    """The same, with what stands for torch: for scripts of which only the imports count."""
    return {**package, "PYTHONPATH": os.pathsep.join((NO_TORCH, package["PYTHONPATH"]))}


def test_the_second_run_forks_workers_that_have_what_the_first_imported(
    rig: Make, tmp_path: Path, package: dict[str, str]
) -> None:
    """Of installed packages only, never the script's own modules; and an edited script begins anew."""
    script, lists = SCRIPT.format(before="", steps=OPTIMIZER), tmp_path / "imports"

    async def told(text: str) -> list[Any]:
        async with rig(text, torch=True, env=package, imports=str(lists)) as one:
            await one.run()
            found: list[Any] = await one.told()
            return found[1:]

    async def test() -> None:
        first = await told(script)
        assert first[:3] == [False, False, False]
        (path,) = lists.iterdir()
        listed = json.loads(path.read_text())
        assert {"slowly", "slowly.parts"} <= set(listed["modules"])
        assert listed["local"] == ["of_mine"]
        assert not listed["cut"]
        second = await told(script)
        assert second[:3] == [True, True, False]
        assert second[4] != first[4]
        assert (await told(script + "\n# edited"))[:3] == [False, False, False]

    run(test())


def test_what_reads_a_variable_that_the_script_sets_is_never_imported_ahead(
    rig: Make, tmp_path: Path, light: dict[str, str]
) -> None:
    """``os.environ[...] = ...`` above an import has its effect in every run."""
    script, lists = SCRIPT.format(before="os.environ['SLOWLY'] = 'set'", steps=COUNTED), tmp_path / "imports"

    async def test() -> None:
        for _ in range(2):
            async with rig(script, torch=True, env=light, imports=str(lists)) as one:
                await one.run()
                assert (await one.told())[1:5] == [False, False, False, "set"]
        (path,) = lists.iterdir()
        listed = json.loads(path.read_text())
        assert "slowly reads SLOWLY" in listed["cut"]
        assert "slowly" not in listed["modules"]

    run(test())


# Only where it is told to, the script sets what an installed package reads.
SOMETIMES = """
import subprocess
loaded, before = "slowly" in sys.modules, os.environ.get("SLOWLY", "unset")
child = subprocess.Popen(["sleep", "60"])
first = os.getcwd()
os.chdir("/")
{joins}
if os.environ.get("SETS"):
    os.environ["SLOWLY"] = "set"
os.chdir(first)
import slowly
{steps}
tell(loaded, before, slowly.VALUE, os.getpid())
child.kill()
"""


def test_a_script_that_sets_such_a_variable_only_now_begins_again_without_the_list(
    rig: Make, tmp_path: Path, light: dict[str, str]
) -> None:
    """All ranks, in their own processes and at no cost; and the next workers are forked without the list."""
    script, lists = SOMETIMES.format(joins="", steps=COUNTED), tmp_path / "imports"

    async def test() -> None:
        for env in (light, light | {"SETS": "1"}):
            async with rig(script, torch=True, env=env, imports=str(lists), nproc=2) as one:
                for loaded in (False, False) if "SETS" in env else (False,):
                    await one.start()
                    pids = [one.launcher.pids[f"rank {rank}"] for rank in range(2)]
                    value = "set" if "SETS" in env else "unset"
                    assert await one.all_told() == {
                        0: [loaded, "unset", value, pids[0]],
                        1: [loaded, "unset", value, pids[1]],
                    }
                    assert [(gone.exit_code, gone.error) for gone in await one.exits(2)] == [(0, ""), (0, "")]
                    await one.launcher.stop(0.0, 10.0)
        assert one.launcher.refused == {"auto": "the script sets SLOWLY, which slowly reads when it is imported"}
        (path,) = lists.iterdir()
        assert json.loads(path.read_text())["modules"] == []

    run(test())


JOINS = """
import torch.distributed
torch.distributed.init_process_group("gloo", init_method=f"file://{os.environ['FOLDER']}/store", rank=RANK, world_size=2)
"""


@pytest.mark.nightly(reason="a script whose ranks have not joined yet stands for it in make test")
def test_ranks_that_have_joined_each_other_end_and_begin_again_together(
    rig: Make, tmp_path: Path, package: dict[str, str]
) -> None:
    """One that began again alone would keep the others waiting. The failure says why, and is known."""
    lists = tmp_path / "imports"

    async def test() -> None:
        script = SOMETIMES.format(joins=JOINS, steps=OPTIMIZER)
        async with rig(script, torch=True, env=package, imports=str(lists), nproc=2) as one:
            await one.run()
        (tmp_path / "store").unlink(missing_ok=True)
        async with rig(script, torch=True, env=package | {"SETS": "1"}, imports=str(lists), nproc=2) as one:
            gone = await one.run()
            assert [(one.exit_code, one.error.partition(":")[0]) for one in gone] == [(1, "ImportedAheadError")] * 2
            await one.launcher.stop(0.0, 10.0)
            (tmp_path / "store").unlink(missing_ok=True)
            await one.start()
            assert {rank: told[:3] for rank, told in (await one.all_told()).items()} == {
                rank: [False, "unset", "set"] for rank in range(2)
            }

    run(test())


ELSEWHERE = """
ahead = [name in sys.modules for name in ("slowly", "looks_at_argv")]
import looks_at_argv
sys.path.insert(0, os.path.join(os.environ["FOLDER"], "other", "site-packages"))
import slowly
{steps}
tell(ahead, slowly.VALUE, looks_at_argv.ARGV == sys.argv)
"""


def test_a_script_s_own_path_and_arguments_have_their_effect_in_every_run(
    rig: Make, tmp_path: Path, light: dict[str, str]
) -> None:
    """Packages that it finds in a folder of its own are never imported ahead; what looks at ``sys.argv`` sees the script's."""
    (tmp_path / "other" / "site-packages").mkdir(parents=True)
    (tmp_path / "other" / "site-packages" / "slowly.py").write_text("VALUE = 'other'")
    (tmp_path / "site-packages" / "looks_at_argv.py").write_text("import sys\nARGV = sys.argv")

    async def test() -> None:
        for ahead in (False, True):
            async with rig(
                ELSEWHERE.format(steps=COUNTED), torch=True, env=light, imports=str(tmp_path / "imports")
            ) as one:
                await one.run()
                assert (await one.told())[1:] == [[False, ahead], "other", True]
                assert one.launcher.refused == {}

    run(test())


def test_a_list_that_leaves_threads_behind_is_cut_and_remembered(
    rig: Make, tmp_path: Path, light: dict[str, str]
) -> None:
    """Modules before the one that starts a thread are kept; a later run does not try the others again."""
    threaded = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "site-packages" / "threaded.py").write_text(threaded)
    script, lists = SCRIPT.format(before="import slowly, threaded", steps=COUNTED), tmp_path / "imports"

    async def test() -> None:
        async with rig(script, torch=True, env=light, imports=str(lists)) as one:
            await one.run()
        (path,) = lists.iterdir()
        assert "threaded" in json.loads(path.read_text())["modules"]
        for _ in range(2):
            async with rig(script, torch=True, env=light, imports=str(lists)) as one:
                await one.run()
                assert (await one.told())[1:4] == [True, False, False]
                assert one.launcher.refused == {}
            listed = json.loads(path.read_text())
            assert "slowly" in listed["modules"]
            assert "threaded: it leaves threads running" in listed["cut"]
            assert not {"threaded", "slowly.parts"} & set(listed["modules"])

    run(test())


LIGHTNING = """
import os, sys
ahead = "lightning_utilities.core.rank_zero" in sys.modules
import lightning_utilities.core.rank_zero, lightning_fabric.utilities.rank_zero, torchmetrics.utilities.prints, torch
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
lightning, metrics = lightning_fabric.utilities.rank_zero.rank_zero_only, torchmetrics.utilities.prints.rank_zero_only
tell(ahead, lightning.rank, metrics.rank)
"""


@pytest.mark.nightly(reason="tests of reseed() in test_warmth.py stand for it in make test")
@pytest.mark.skipif(importlib.util.find_spec("lightning_fabric") is None, reason="needs lightning")
def test_lightning_knows_its_rank_when_it_was_imported_before_the_fork(
    rig: Make, tmp_path: Path, package: dict[str, str]
) -> None:
    """It asks for the rank when it is imported; what prints on rank 0 alone does so in every run."""

    async def test() -> None:
        for ahead in (False, True):
            async with rig(LIGHTNING, torch=True, env=package, imports=str(tmp_path / "imports"), nproc=2) as one:
                await one.start(first_rank=4, world_size=6)
                assert await one.all_told() == {4: [ahead, 4, 0], 5: [ahead, 5, 1]}
                await one.exits(2)

    run(test())


COMPILED = """
import os, sys, torch
ahead = "torch._inductor.compile_fx" in sys.modules
NUMBER = float(os.environ["NUMBER"])
given = torch.ones(2, 16)
right = torch.allclose(torch.compile(lambda one: one.sin() + NUMBER)(given), given.sin() + NUMBER)
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
tell(ahead, bool(right), counters["inductor"]["fxgraph_cache_miss"], AsyncCompile.submit(os.getpid).result() == os.getpid())
"""


@pytest.mark.nightly(reason="a second run with a small package stands for it in make test")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_inductor_imported_before_the_fork_compiles_in_workers(
    rig: Make, tmp_path: Path, package: dict[str, str]
) -> None:
    """Kernels that its cache lacks, and with threads of its own: the warm process has none."""
    env = package | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "2"}

    async def test() -> None:
        for number, ahead in ((1, False), (2, True)):
            told = env | {"NUMBER": str(number)}
            async with rig(COMPILED, torch=True, env=told, imports=str(tmp_path / "imports")) as one:
                await one.run()
                assert await one.told() == [0, ahead, True, 1, True]
                assert one.launcher.refused == {}

    run(test())
