"""The example of a scheduler of one's own is short, self-contained, works, and keeps the contract of backends."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from dlrover_core.job.orders import NodeLaunch
from dlrover_core.testing import BackendConformance, Stand

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "custom_scheduler.py"


def test_example_is_short_and_imports_the_public_names_alone() -> None:
    """The example has under 60 lines, and of ours it imports `from dlrover_core import ...` and nothing else."""
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 60
    assert set(re.findall(r"^\s*(?:from|import) (dlrover\S*)", text, re.MULTILINE)) == {"dlrover_core"}


def test_example_runs_a_job_through_a_dead_node() -> None:
    """The example's job succeeds though it loses a node on the way."""
    run = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=60, check=True)
    assert "succeeded after 100 steps" in run.stdout
    assert " NodeFailed IncidentOpened " in run.stdout
    assert run.stdout.count("IncidentClosed") == 1


def toy_scheduler() -> type:
    """The class, loaded from the example's file."""
    spec = importlib.util.spec_from_file_location("custom_scheduler", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ToyScheduler


ToyScheduler = toy_scheduler()


class TestToyScheduler(BackendConformance):
    """The toy scheduler keeps the contract of all backends."""

    @contextlib.asynccontextmanager
    async def make_backend(self) -> AsyncIterator[Stand]:
        """An empty one, whose nodes do nothing until they are cancelled."""

        async def live(_: NodeLaunch) -> str:
            await asyncio.get_running_loop().create_future()
            return ""

        backend = ToyScheduler(live)

        async def kill(name: str) -> None:
            backend.tasks[name].cancel()

        yield Stand(backend, kill, cannot=dict.fromkeys(("waits", "lost", "notices", "avoid"), "it is a toy"))
        for task in backend.tasks.values():
            task.cancel()
        await asyncio.gather(*backend.tasks.values(), return_exceptions=True)
