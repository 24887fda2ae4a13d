"""Level "local": the vocabulary of faults on real processes, run by `dlrover-run` on this host.

```python
job = LocalJob(script="train.py", nodes=2, workers_per_node=2)
job.at_step(20).kill_node(1)
assert job.finish().lost_steps <= 1
```

What is said beforehand is a plan; `LocalJob.finish` starts the job, strikes, waits for its end, and leaves nothing behind, also
when the test is killed. Faults strike in their order, each as soon as its moment is seen: steps are read from the memory in
which workers count them, everything else from the job's log. A script that is to lose no steps tells their numbers by
`dlrover_adapters.torch.step` and goes on from its checkpoint; what others make after a restart counts as made again. One that
trains for as long as it takes may end when there is a file ``.chaos/struck`` in its working directory: everything has struck and
healed, and all is well again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from dlrover_core.errors import PlanError
from dlrover_core.sim import run as runs
from dlrover_core.sim import triggers
from dlrover_core.sim.faults import KINDS, LOCAL, Fault, checked, kinds
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.spec import DEFAULT_GROUP
from dlrover_core.testing import guard, inside, strikes
from dlrover_core.testing.proxy import Proxy
from dlrover_core.testing.watching import Launched, Watch

MARK = "DLROVER_CHAOS_MARK"
NAME = "chaos"
OURS = ".chaos"
"""What is not the script's in the job's folder: its standard streams, its state directory."""

SAID_CHARS_MAX = 4000
SETTINGS = {"heartbeat_s": 0.2, "progress_s": 0.2}
"""What differs from the defaults, so that the log tells of steps while one looks on."""


class LocalJob:
    """One job to be run by `dlrover-run`, and what is to happen to it.

    ``settings`` are those of the job's spec, ``options`` more words for `dlrover-run`. It runs in ``folder``, a temporary one
    unless said. ``log`` is the URL of an event log elsewhere; without one it is a file in that folder.
    """

    def __init__(
        self,
        *,
        script: str | Path,
        nodes: int = 2,
        workers_per_node: int = 1,
        args: Sequence[str] = (),
        scenario: Scenario | None = None,
        folder: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log: str | None = None,
        faults: Sequence[Fault] = (),
        timeout_s: float = 120.0,
    ) -> None:
        self.scenario = scenario or Scenario(nodes=nodes, workers_per_node=workers_per_node, spares=0)
        self.script, self.args, self.options = Path(script).absolute(), tuple(map(str, args)), tuple(options)
        self.settings = {**SETTINGS, **dict(self.scenario.settings), **(settings or {})}
        self.folder = Path(folder).absolute() if folder is not None else None
        self.env, self.log, self.timeout_s = dict(env or {}), log or "", timeout_s
        self.faults: list[Fault] = [checked(fault, LOCAL) for fault in faults]
        self.said = self.mark = ""
        self.notes: list[str] = []
        if not self.script.is_file():
            raise PlanError(f"there is no script {self.script}")

    @property
    def plan(self) -> Plan:
        """What is to happen, as data."""
        return Plan(LOCAL, self.scenario, tuple(self.faults))

    def at(self, when: str) -> Moment:
        """A moment, as `sim.triggers` describes them: its methods are the faults that exist at this level."""
        triggers.parse(when)
        return Moment(self, when)

    def at_step(self, step: int) -> Moment:
        """As soon as some worker has made this step."""
        return self.at(f"step {step}")

    def finish(self, timeout_s: float | None = None, *, strict: bool = True) -> runs.Run:
        """Run it to its end; what came of it.

        Raises `PlanError` for what this host cannot do and, if ``strict``, for a fault whose moment never came; `Stalled` when
        the job has not ended in time; `Broken` when its log has lost or changed what it had told.
        """
        run = asyncio.run(self._run(self.timeout_s if timeout_s is None else timeout_s))
        if strict and run.missed:
            raise PlanError(f"never came to pass before the job {run.outcome}: {'; '.join(map(str, run.missed))}")
        return run

    async def _run(self, timeout_s: float) -> runs.Run:
        strikes.check(self.plan.check().faults, self.log)
        async with contextlib.AsyncExitStack() as stack:
            held = await stack.enter_async_context(_guarded(self.folder, disk=self._has("disk_full")))
            self.mark, proxies = f"{MARK}={held.mark}", {}
            if self._has("partition"):
                for number in range(self.scenario.nodes):
                    proxies[f"{DEFAULT_GROUP}-{number}"] = await stack.enter_async_context(Proxy("127.0.0.1:0"))
            watch = Watch(self.plan, stack.enter_context(self._launched(held, proxies)))
            stack.push_async_callback(self._closed, watch, held.folder)
            try:
                await watch.run(timeout_s)
            except (runs.Stalled, PlanError) as error:
                said = (held.folder / OURS / "err").read_text(errors="replace")
                raise type(error)(f"{error}\n{said[-SAID_CHARS_MAX:]}") from error
            return await asyncio.get_running_loop().run_in_executor(None, watch.told)

    def _has(self, kind: str) -> bool:
        return any(fault.kind == kind for fault in self.faults)

    async def _closed(self, watch: Watch, folder: Path) -> None:
        await watch.strikes.close()
        await watch.close()
        watch.steps.close()
        self.notes = watch.strikes.notes
        self.said = (folder / OURS / "err").read_text(errors="replace")

    @contextlib.contextmanager
    def _launched(self, held: Guarded, proxies: dict[str, Proxy]) -> Iterator[Launched]:
        ours, errors = held.folder / OURS, held.folder / OURS / "inside"
        # All nodes share this host's cores: threads that spin for one another would slow everybody down.
        env = {"OMP_NUM_THREADS": "1", **os.environ, **self.env, MARK: held.mark, "DLROVER_TOKEN": uuid.uuid4().hex}
        if proxies or self._has("fail_worker"):
            env |= {
                "PYTHONPATH": strikes.install(errors, env.get("PYTHONPATH", "")),
                inside.ROUTES: strikes.routes(proxies),
                inside.ERRORS: str(errors),
            }
        state = ours / "state"
        database = state / "log.db"
        if database.exists():
            raise PlanError(f"{held.folder} has had a job already: give each its own folder")
        name = f"{NAME}-{held.mark[:8]}" if self.log else NAME
        with (ours / "out").open("wb") as out, (ours / "err").open("wb") as err:
            process = subprocess.Popen(
                self._command(state, name),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                cwd=held.folder,
                start_new_session=True,
            )
        held.watch(process.pid)
        site = strikes.Site(f"{MARK}={held.mark}", name, process.pid, state, errors, ours / "struck", database, proxies)
        try:
            yield Launched(process, self.log or f"sqlite://{quote(str(database))}", site)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _command(self, state: Path, name: str) -> list[str]:
        told, beside = self.scenario, Path(sys.executable).with_name("dlrover-run")
        program = str(beside) if beside.exists() else shutil.which("dlrover-run")
        if program is None:
            raise PlanError("no dlrover-run is installed here: pip install 'dlrover-core[torch]'")
        line = [program, "--state-dir", str(state), "--job-id", name, "--local-nodes", str(told.nodes)]
        line += ["--nproc-per-node", str(told.workers_per_node), "--standby", str(told.spares)]
        line += ["--max-restarts", str(told.max_restarts), "--relaunch-max", str(told.relaunch_max)]
        line += ["--on-join", told.on_join]
        if told.nodes_min:
            line += ["--nnodes", f"{told.nodes_min}:{told.nodes}"]
        if self.log:
            line += ["--log", self.log]
        for setting, value in self.settings.items():
            line += ["--set", f"{setting}={value}"]
        return [*line, *self.options, str(self.script), *self.args]


def curve(path: str | Path) -> list[tuple[int, str]]:
    """What a script wrote down as ``step value`` and perhaps more, a line for each step; a line that a kill cut short is none."""
    text = Path(path).read_text(encoding="utf-8")
    rows = (line.split() for line in text[: text.rfind("\n") + 1].splitlines())
    return [(int(row[0]), row[1]) for row in rows]


def same_curve(found: Sequence[tuple[int, str]], undisturbed: Sequence[tuple[int, str]]) -> None:
    """Every step has the value that it has in an undisturbed run, those made again too, and none is left out.

    Raises AssertionError with the first that is not as it should be.
    """
    expected, last = dict(undisturbed), 0
    for step, value in found:
        assert step <= last + 1, f"step {step} follows {last}: a state was restored from which nobody had saved"
        assert expected.get(step) == value, f"step {step} made {value}, undisturbed it makes {expected.get(step)}"
        last = step
    end = max(expected, default=0)
    assert last == end, f"the last step is {last}, undisturbed it is {end}"


class Moment:
    """When; ``job.at("step 100").kill_worker(2)`` says what. Every fault takes ``target``, ``amount`` and ``cause``."""

    def __init__(self, job: LocalJob, when: str) -> None:
        self._job, self._when = job, when

    def __getattr__(self, kind: str) -> Callable[..., LocalJob]:
        """A fault by its kind. Raises `PlanError` for one that does not exist at this level."""
        if kind.startswith("_"):
            raise AttributeError(kind)
        checked(Fault(self._when, kind), LOCAL)

        def strike(target: str | int = 0, amount: float = 0.0, cause: str = "") -> LocalJob:
            fault = checked(Fault(self._when, kind, target, amount, cause), LOCAL)
            self._job.faults.append(fault)
            return self._job

        strike.__doc__ = KINDS[kind].doc
        return strike

    def __dir__(self) -> list[str]:
        return sorted(kinds(LOCAL))


class Guarded(NamedTuple):
    """The process that cleans up if we cannot, what it looks for, and the job's folder."""

    process: subprocess.Popen[str]
    mark: str
    folder: Path

    def watch(self, pid: int) -> None:
        """This is the launcher."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{pid}\n")
        self.process.stdin.flush()


def _piped(line: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd="/"
    )


@contextlib.asynccontextmanager
async def _guarded(folder: Path | None, *, disk: bool) -> AsyncIterator[Guarded]:
    """A guard, gone when everything is. Raises `PlanError` where a disk of our own is needed and cannot be had."""
    mark, made = uuid.uuid4().hex, "" if folder else tempfile.mkdtemp(prefix="chaos-")
    folder = folder or Path(made)
    line = [sys.executable, "-I", "-S", guard.__file__, f"{MARK}={mark}", made, "", ""]
    if disk:
        line[-2:] = [str(folder / OURS / "state"), str(strikes.DISK_MIB)]
    (folder / OURS / "state").mkdir(parents=True, exist_ok=True)
    loop = asyncio.get_running_loop()
    process = _piped(line)
    assert process.stdin is not None and process.stdout is not None
    try:
        said = (await loop.run_in_executor(None, process.stdout.readline)).strip()
        if said != "ready":
            raise PlanError(f"disk_full needs a small file system, which cannot be mounted here: {said}; run as root")
        yield Guarded(process, mark, folder)
    finally:
        process.stdin.close()
        await loop.run_in_executor(None, process.wait)
        process.stdout.close()
