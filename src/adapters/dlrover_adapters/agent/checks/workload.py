"""What a node can do: its workers compute, alone, and then with those of its partners, over a store of the leader's choosing.

The processes are those of ``module`` (`Framework.CHECK`), one for each worker of the node. Each says how it went in its last
line, as JSON. A node is as fit as its worst worker, and as fast as its slowest. Without a module there is nothing to compute.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

from .processes import Command, Ended, run

LINE_MAX = 300


class Work(NamedTuple):
    """Of which round of which check; this node's ``rank`` among ``size`` that work together, over ``store``; its first rank.

    ``unfit`` says what is wrong with it already: then its partners are only told not to wait.
    """

    number: int
    round: int
    rank: int
    size: int
    store: str
    node: str
    first_rank: int
    unfit: str = ""


class Result(NamedTuple):
    """As `dlrover_core.job.checks.ReportCheck`."""

    ok: bool
    fit: bool
    took_us: int = 0
    alone_us: int = 0
    what: str = ""


async def work(
    task: Work, nproc: int, env: Mapping[str, str], limit_s: float, *, module: str, folder: str | None = None
) -> Result:
    """Have it done, within the limit."""
    if not module:
        return Result(not task.unfit, not task.unfit, what=task.unfit)
    with contextlib.ExitStack() as stack:
        if not task.store:
            # Alone: its own workers meet over a file.
            task = task._replace(store=f"file:{stack.enter_context(tempfile.TemporaryDirectory(dir=folder))}/store")
        return await _work(task, nproc, env, limit_s, module, folder)


async def _work(
    task: Work, nproc: int, env: Mapping[str, str], limit_s: float, module: str, folder: str | None
) -> Result:
    commands = [
        Command((module,), {**env, **_told(task, nproc, local, limit_s)}, module=True) for local in range(nproc)
    ]
    try:
        ended = await run(commands, limit_s, folder)
    except OSError as error:
        return Result(False, False, what=f"workload: cannot be started: {error}")
    if task.unfit:
        return Result(False, False, what=task.unfit)
    return worst([_result(local, one, limit_s) for local, one in enumerate(ended)])


def _told(task: Work, nproc: int, local: int, limit_s: float) -> dict[str, str]:
    # One store serves all groups and rounds that meet there: each has a prefix of its own.
    prefix = f"dlrover-check-{task.number}-{task.round}"
    told = {
        "RANK": task.rank * nproc + local,
        "WORLD_SIZE": task.size * nproc,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": nproc,
        "DLROVER_CHECK_STORE": task.store,
        "DLROVER_CHECK_PREFIX": prefix,
        "DLROVER_CHECK_UNFIT": task.unfit[:LINE_MAX],
        # It must have said what it waited for before it is killed for waiting.
        "DLROVER_CHECK_LIMIT_S": max(1.0, limit_s * 0.9),
        "DLROVER_CHECK_NODE": task.node,
        "DLROVER_CHECK_RANK": task.first_rank + local,
    }
    return {name: str(one) for name, one in told.items()}


def _result(local: int, ended: Ended, limit_s: float) -> Result:
    try:
        told: dict[str, Any] = json.loads(ended.last_line)
        return Result(
            bool(told["ok"]),
            bool(told["fit"]),
            round(float(told["took_s"]) * 1e6),
            round(float(told["alone_s"]) * 1e6),
            str(told["what"])[:LINE_MAX],
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        how = f"did not end within {limit_s:g} s" if ended.exit_code is None else f"exit code {ended.exit_code}"
        said = f": {ended.last_line[:LINE_MAX]}" if ended.last_line else ""
        return Result(False, False, what=f"workload: local rank {local} {how}{said}")


def worst(results: list[Result]) -> Result:
    """That of the node: fit and well if all are, the words of the first that is not, the longest times."""
    first = next((one for one in results if not one.fit), None) or next((one for one in results if not one.ok), None)
    return Result(
        all(one.ok for one in results),
        all(one.fit for one in results),
        max(one.took_us for one in results),
        max(one.alone_us for one in results),
        first.what if first is not None else "",
    )
