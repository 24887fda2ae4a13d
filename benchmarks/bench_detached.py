"""A detached job loses its launcher, and on etcd its leading master: does training notice, and who answers how soon?

A job of 2 workers is started with ``dlrover-run --detach``, which returns. Each trial: ``dlrover attach`` is typed, to its first
line; then the job's supervisor, all that is left of its launcher, is killed with SIGKILL, and the masters die with it. Measured:
steps made twice, workers started anew, and seconds until a new leader has decided something (`LeaderStarted`). The same job with
its log in an etcd of one member, lease 2 s: its leading master is killed alone, once another one is in reserve.

There is no peer: a job of torchrun's ends with its terminal, and a job under ``nohup`` with its agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from _bench import BROKEN, Result, Row, options, say
from _etcd import Cluster
from _jobs import LIMIT_S, OURS, Broken, Job, Line, clock_offset, kept, marked

from dlrover_core.job.job import LeaderStarted
from dlrover_core.kernel.events import Record
from dlrover_core.logs import open_log

MEASURES = (
    "src/adapters/dlrover_adapters/cli",
    "src/adapters/dlrover_adapters/etcd",
    "src/adapters/dlrover_adapters/http",
    "src/backends",
    "src/dlrover_core/logs",
    "src/dlrover_core/runtime",
)

TTL_S = 2.0
BEGUN, MORE = 20, 50  # steps
MASTERS = 2
ENDS_S = 20.0


class Blow(NamedTuple):
    """The effects of one kill: seconds until a new leader, steps made twice, workers restarted."""

    led_s: float
    lost: int
    restarts: int


class Detached(NamedTuple):
    """A detached job that trains, and where its log is."""

    job: Job
    log: str

    def until(self, true: Callable[[list[Line]], bool], what: str) -> list[Line]:
        """The diary, once ``true`` accepts it. Raises `Broken`."""
        deadline = time.monotonic() + LIMIT_S
        while not true(lines := self.job.lines()):
            if time.monotonic() > deadline:
                raise Broken(f"{what}: not within {LIMIT_S:g} s; it said: {self.job.said()}")
            time.sleep(0.01)
        return lines

    def records(self) -> list[Record]:
        """All of its log."""

        async def read() -> list[Record]:
            async with open_log(self.log) as log:
                return [record async for record in log.read("bench")]

        return asyncio.run(read())

    def pids(self, name: str) -> list[int]:
        """Its processes of this name."""
        found = []
        for pid in marked(self.job.mark):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    found.append(pid)
        return found

    def dlrover(self, verb: str) -> subprocess.Popen[str]:
        """A command about it, as somebody types it; only its standard error is read."""
        line = [str(Path(sys.executable).parent / "dlrover"), verb, "bench", "--state-dir", str(self.job.folder)]
        return subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def attach_s(self) -> float:
        """How long `dlrover attach` takes to its first words."""
        began = time.monotonic()
        command = self.dlrover("attach")
        assert command.stderr is not None
        said = command.stderr.readline()
        took = time.monotonic() - began
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=LIMIT_S)
        if "attached to job bench" not in said:
            raise Broken(f"dlrover attach said {said!r}")
        return took

    def leader(self) -> int:
        """The process that leads. Raises `Broken`."""

        async def look() -> str:
            async with open_log(self.log) as log:
                found = await log.leader("bench")
                return found.holder if found is not None else ""

        holder = asyncio.run(look())
        if not holder:
            raise Broken("nobody leads")
        return int(holder.split("/")[1])

    def reserved(self) -> None:
        """Wait until a master is in reserve."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.pids("dlrover-master")) < MASTERS:
            if time.monotonic() > deadline:
                raise Broken("no master in reserve")
            time.sleep(0.1)

    def strike(self, victims: Sequence[int]) -> Blow:
        """Kill these processes, and look what follows."""
        before = list(self.job.lines())
        workers, highest = {line.pid for line in before}, max(line.step for line in before)
        offset, killed = clock_offset(), time.monotonic()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        led = self._led(killed + offset) - offset - killed
        lines = self.until(lambda lines: lines[-1].step >= highest + MORE, f"{MORE} steps after the kill")
        steps = [(line.rank, line.step) for line in lines if line.what == "step"]
        return Blow(led, len(steps) - len(set(steps)), len({line.pid for line in lines} - workers))

    def _led(self, after: float) -> float:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            led = [one.at / 1e6 for one in self.records() if isinstance(one.event, LeaderStarted)]
            found = [at for at in led if at > after]
            if found:
                return found[0]
            time.sleep(0.05)
        raise Broken("no new leader")


@contextlib.contextmanager
def detached(log: str = "") -> Iterator[Detached]:
    """A job that trains and belongs to nobody; stopped at the end. ``log``: in place of the state directory's own."""
    launch = ("--detach", "--nproc-per-node", "2", *(("--log", log) if log else ()))
    with kept(lambda folder: Job(OURS, folder, ["--steps", "1000000"], launch)) as job:
        made = Detached(job, log or f"sqlite://{job.folder / 'log.db'}")
        if job.wait():
            raise Broken(f"dlrover-run --detach: {job.said()}")
        try:
            made.until(lambda lines: any(line.what == "step" and line.step >= BEGUN for line in lines), "first steps")
            yield made
        finally:
            made.dlrover("stop").communicate(timeout=LIMIT_S)
            deadline = time.monotonic() + ENDS_S
            while marked(job.mark) and time.monotonic() < deadline:
                time.sleep(0.05)


def main() -> int:
    """Trials, one after the other."""
    chosen = options(__doc__)
    result = Result("detached", "nobody: no other launcher's job outlives it")
    attached, launchers, masters = list[float](), list[Blow](), list[Blow]()
    try:
        with Cluster(1) as cluster:
            for trial in range(chosen.trials):
                with detached() as made:
                    attached.append(made.attach_s())
                    launchers.append(made.strike(made.pids("dlrover-super")))
                with detached(cluster.url(f"bench-{trial}", ttl=f"{TTL_S:g}")) as made:
                    made.reserved()
                    masters.append(made.strike([made.leader()]))
                say(
                    f"{trial + 1}/{chosen.trials}: attach answers after {attached[-1]:.2f} s; launcher killed: led again after "
                    f"{launchers[-1].led_s:.2f} s, {launchers[-1].lost} steps lost, {launchers[-1].restarts} workers anew; on "
                    f"etcd: {masters[-1].led_s:.2f} s, {masters[-1].restarts} workers anew"
                )
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    n = chosen.trials
    worst = {"lost": max(one.lost for one in launchers), "restarts": max(one.restarts for one in launchers)}
    result.rows += [
        Row(
            "launcher killed (detached): steps lost (worst)",
            "steps",
            [float(worst["lost"])],
            target=0.0,
            exact=True,
            n=n,
        ),
        Row(
            "launcher killed (detached): workers restarted (worst)",
            "workers",
            [float(worst["restarts"])],
            target=0.0,
            n=n,
        ),
        Row("launcher killed (detached): a new leader decides", "s", [one.led_s for one in launchers]),
        Row("dlrover attach answers", "s", attached, target=0.5),
        Row(
            f"leading master of a launched job on etcd killed (lease {TTL_S:g} s): decisions again",
            "s",
            [one.led_s for one in masters],
            target=TTL_S + 1.0,
        ),
        Row(
            "leading master of a launched job on etcd killed: workers restarted (worst)",
            "workers",
            [float(max(one.restarts for one in masters))],
            target=0.0,
            n=n,
        ),
    ]
    result.details = {"launcher": [one._asdict() for one in launchers], "etcd": [one._asdict() for one in masters]}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
