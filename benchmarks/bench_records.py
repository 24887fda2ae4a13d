"""How fast is a log read through its master, and what do readers that follow cost the master?

Reading: a history of 200,000 events (see `bench_replay`) lies in a SQLite log, and the real `Master` leads it in a process of its
own, with the real HTTP listener. Every trial is a fresh process (imports not counted), in turn:

- through the master: `open_log("http://HOST:PORT/bench")`, every record handed out one by one, as `dlrover events` reads them;
- the peer: the same of the log itself, `open_log("sqlite:...")`.

Both must find the same records: their number, and a checksum of their sequence numbers and times.

Following: one master in a process of its own, 200 agents that have joined and train in one world, each over a WebSocket of its
own, 1,000 heartbeats/s among them at an even pace, every tenth with a numbered command (a store offered and withdrawn in turn,
each an event on disk before it is answered). 20 readers in another process, each with connections of its own, follow the log
through the master, as `dlrover events --follow` does, from its head on. A trial is one master and windows of `--seconds`, with
readers and without in turn, `--turns` of each; the peer are those without. Measured are the times from a heartbeat, and from a
command, to its answer, and that every reader had every event. Readers are on other hosts in life: here their process has the
lowest priority, so that the master's time for what readers ask of it is measured, and not the cores that they use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import bench_replay
import structlog
from _agents import ANSWER, BEAT, BEAT_SEEN, GOODBYE, Broken, Joining, SimAgent, Swarm, dialled, room_for
from _bench import BROKEN, Result, Row, options, quantile, say
from _master import Running, started

from dlrover_core import open_log
from dlrover_core.diagnosis.stall import Pulse
from dlrover_core.job import world
from dlrover_core.kernel.wire import number_of
from dlrover_core.runtime.keeping import KeptBeat

MEASURES = (
    "src/adapters/dlrover_adapters/http",
    "src/dlrover_core/kernel",
    "src/dlrover_core/logs",
    "src/dlrover_core/runtime",
)

JOB = "bench"
RATE_TARGET, P99_TARGET = 100_000.0, 1.2
BEATS_PER_S, COMMAND_EVERY = 1000, 10
WARM_S, CHILD_LIMIT_S = 1.0, 300
SPARE_STORE = "10.9.9.9:2"
PULSE, KEPT = number_of(Pulse), number_of(KeptBeat)


class NotMeasurable(Exception):
    """A reader found something else than it should have, or nothing."""


# ---- in processes of their own


async def read(url: str) -> dict[str, Any]:
    """Read everything, as `dlrover events` does."""
    async with open_log(url) as log:
        events = check = 0
        cpu, began = time.process_time(), time.perf_counter()
        async for record in log.read(JOB):
            events += 1
            check = zlib.crc32(b"%d %d" % (record.seq, record.at), check)
        took = time.perf_counter() - began
    return {"events": events, "check": check, "took_s": took, "cpu_s": time.process_time() - cpu}


async def follow(url: str, readers: int) -> dict[str, Any]:
    """At each ``on`` on stdin begin to follow from the head on; at each ``off`` stop, once every reader has what there is."""
    got = 0
    while (await asyncio.to_thread(sys.stdin.readline)).strip() == "on":
        got += await followed_once(url, readers)
        print("off", flush=True)
    return {"events": got}


async def followed_once(url: str, readers: int) -> int:
    """From ``on`` to ``off``; how many events each reader got."""
    logs = [await open_log(url) for _ in range(readers)]
    head = await logs[0].head(JOB)
    seqs, news = [head] * readers, asyncio.Event()

    async def one(number: int) -> None:
        async for record in logs[number].follow(JOB, head):
            if record.seq != seqs[number] + 1:
                raise NotMeasurable(f"reader {number} got event {record.seq} after {seqs[number]}")
            seqs[number] = record.seq
            news.set()

    tasks = [asyncio.ensure_future(one(number)) for number in range(readers)]
    print("on", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    until = await logs[0].head(JOB)
    while min(seqs) < until:
        news.clear()
        waiting = asyncio.ensure_future(news.wait())
        await asyncio.wait({*tasks, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for task in tasks:
            if task.done():
                task.result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for log in logs:
        await log.close()
    return until - head


def child(mode: str, url: str, readers: int) -> int:
    """One reader's process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    import aiohttp  # noqa: F401  # not counted

    if mode == "follow":
        os.nice(19)
    print(json.dumps(asyncio.run(read(url) if mode == "read" else follow(url, readers))), flush=True)
    return 0


# ---- reading


def reading(url: str, token: str) -> dict[str, Any]:
    """A fresh process that reads everything."""
    line = [sys.executable, __file__, "--child", "read", "--url", url]
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        timeout=CHILD_LIMIT_S,
        env={**os.environ, "DLROVER_TOKEN": token},
        check=False,
    )
    if done.returncode:
        raise NotMeasurable(f"reading {url} failed: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def read_in_turn(
    folder: Path, chosen: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[float]]:
    """Through the master and from the log, so many times; and what the master's process used for an event, in microseconds."""
    made = asyncio.run(bench_replay.build(folder, chosen.seed, chosen.events))
    through, direct, used = list[dict[str, Any]](), list[dict[str, Any]](), list[float]()
    with started(folder, bench_replay.NODES) as master:
        for number in range(chosen.trials):
            before = master.cpu_s()
            through.append(reading(f"http://{master.address}/{JOB}", master.token))
            used.append(1e6 * (master.cpu_s() - before) / through[-1]["events"])
            direct.append(reading(f"sqlite://{folder}/log.db", master.token))
            ours, peer = through[-1], direct[-1]
            # The master decides now and then, for its nodes are gone: the log may have grown between the two.
            if not made["events"] <= ours["events"] <= peer["events"] <= ours["events"] + 1000:
                raise NotMeasurable(f"{ours['events']} events through the master, {peer['events']} in the log")
            if ours["events"] == peer["events"] and ours["check"] != peer["check"]:
                raise NotMeasurable("through the master other records are read than from the log")
            say(
                f"{number + 1}/{chosen.trials} {ours['events'] / ours['took_s']:,.0f} events/s through the master, "
                f"{peer['events'] / peer['took_s']:,.0f}/s from the log; {used[-1]:.1f} us of the master for an event"
            )
    return through, direct, used


# ---- following


class Window(NamedTuple):
    """Latencies of agents' requests over one period, in ms."""

    beats: list[float]
    commands: list[float]
    master_cpu: float
    """Share of one core that the master's process used."""

    def p99(self, what: str) -> float:
        """The 99th percentile of the `beats` or the `commands`, in ms."""
        return quantile(getattr(self, what), 0.99)


class Pacing:
    """Heartbeats at an even pace, one agent after another; each is timed, and so is each command among them."""

    def __init__(self, agents: list[SimAgent]) -> None:
        self._agents = agents
        self._turn = 0
        self._beats, self._commands = dict[int, float](), dict[int, tuple[int, float]]()
        self._offers = [True] * len(agents)
        self.beats, self.commands = list[float](), list[float]()

    def say(self, due: float) -> None:
        """The next one's heartbeat, if it has its answer to the last; its time counts from when it was due."""
        agent = self._agents[self._turn % len(self._agents)]
        self._turn += 1
        number = agent.number
        if number in self._beats:
            return
        self._beats[number] = due
        kept = KeptBeat(agent.generation, held=(1,))
        beat = (BEAT, (agent.generation, self._turn, 10, ((PULSE, Pulse(self._turn, 3_000, 20_000)), (KEPT, kept))))
        # Every tenth heartbeat of all, so that each agent has its turn.
        if (self._turn + self._turn // len(self._agents)) % COMMAND_EVERY or number in self._commands:
            agent.say(beat)
            return
        offers = self._offers[number] = not self._offers[number]
        self._commands[number] = (agent.next_number, due)
        agent.say(beat, agent.command((world.WithdrawStore if offers else world.OfferStore)(agent.name, SPARE_STORE)))

    def heard(self, agent: SimAgent, message: Any) -> bool:
        """An answer: to the heartbeat, or to the command."""
        kind, fields = message
        if kind == BEAT_SEEN and agent.number in self._beats:
            self.beats.append(1000 * (time.perf_counter() - self._beats.pop(agent.number)))
        elif kind == ANSWER and agent.number in self._commands and fields[0] == self._commands[agent.number][0]:
            self.commands.append(1000 * (time.perf_counter() - self._commands.pop(agent.number)[1]))
        elif kind == GOODBYE:
            raise Broken(f"{agent.name} was told {message}")
        return False


def window(swarm: Swarm, agents: list[SimAgent], master: Running, seconds: float, beats_per_s: int) -> Window:
    """So many seconds of heartbeats."""
    pacing, every = Pacing(agents), 1 / beats_per_s
    began = due = time.perf_counter()
    before = master.cpu_s()
    while (now := time.perf_counter()) - began < seconds:
        while due <= now:
            pacing.say(due)
            due += every
        swarm.look(pacing.heard, max(0.0, due - time.perf_counter()))
    used = (master.cpu_s() - before) / (time.perf_counter() - began)
    # What is still under way belongs to no window.
    while pacing._beats or pacing._commands:
        if swarm.look(pacing.heard, 10.0) is None:
            raise Broken("the master does not answer any more")
    if len(pacing.beats) < seconds * beats_per_s * 0.5:
        raise NotMeasurable(f"only {len(pacing.beats)} heartbeats in {seconds:g} s: this machine is too busy")
    return Window(pacing.beats, pacing.commands, used)


class Followers:
    """The process of the readers, which follow or not."""

    def __init__(self, master: Running, readers: int) -> None:
        url = f"http://{master.address}/{JOB}"
        line = [sys.executable, __file__, "--child", "follow", "--url", url, "--readers", str(readers)]
        born = {**os.environ, "DLROVER_TOKEN": master.token}
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=born)

    def turn(self, word: str) -> None:
        """Let them follow, or no more."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        if self._process.stdout.readline().strip() != word:
            raise NotMeasurable("a reader failed, or missed an event")

    def end(self) -> int:
        """How many events each has got."""
        out, _ = self._process.communicate("\n", timeout=CHILD_LIMIT_S)
        return int(json.loads(out)["events"])

    def kill(self) -> None:
        """Whatever it does."""
        self._process.kill()
        self._process.communicate()


def pair(number: int, chosen: argparse.Namespace) -> tuple[Window, Window, int]:
    """One master: windows with readers and without, put together, and how many events each reader got."""
    folder = Path(tempfile.mkdtemp(prefix="dlb-"))
    windows: dict[bool, list[Window]] = {True: [], False: []}
    try:
        with started(folder, chosen.agents) as master:
            agents = dialled(range(chosen.agents), master.address, master.token)
            swarm, joining = Swarm(agents), Joining(agents)
            joining.greet()
            swarm.run(joining.heard)
            followers = Followers(master, chosen.readers)
            try:
                window(swarm, agents, master, WARM_S, chosen.beats)
                for turn in range(2 * chosen.turns):
                    busy = bool((turn + number) % 2)
                    if busy:
                        followers.turn("on")
                    windows[busy].append(window(swarm, agents, master, chosen.seconds, chosen.beats))
                    if busy:
                        followers.turn("off")
                got = followers.end()
            finally:
                followers.kill()
            swarm.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with_, without = (together(windows[busy]) for busy in (True, False))
    if got < len(with_.commands):
        raise NotMeasurable(f"readers had {got} events, {len(with_.commands)} were committed")
    return with_, without, got


def together(those: list[Window]) -> Window:
    """Several windows as one."""
    beats, commands = ([ms for one in those for ms in getattr(one, what)] for what in ("beats", "commands"))
    return Window(beats, commands, sum(one.master_cpu for one in those) / len(those))


def main() -> int:
    """Trials, one after the other."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--events", type=int, default=200_000, metavar="N", help="of the history (default 200000)")
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the history (default 0)")
        parser.add_argument("--agents", type=int, default=200, metavar="N", help="agents (default 200)")
        parser.add_argument("--readers", type=int, default=20, metavar="N", help="readers that follow (default 20)")
        parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of each window (default 2)")
        parser.add_argument(
            "--beats", type=int, default=BEATS_PER_S, metavar="N", help=f"heartbeats/s (default {BEATS_PER_S})"
        )
        parser.add_argument(
            "--turns", type=int, default=5, metavar="N", help="windows with readers, and without (default 5)"
        )
        parser.add_argument("--only", choices=("read", "follow"), help="one half of it")
        parser.add_argument("--child", choices=("read", "follow"), help=argparse.SUPPRESS)
        parser.add_argument("--url", default="", help=argparse.SUPPRESS)

    chosen = options(__doc__, trials=7, more=more)
    if chosen.child:
        return child(chosen.child, chosen.url, chosen.readers)
    room_for(chosen.agents)
    result = Result("records", "the SQLite log itself; the same master without readers", seed=chosen.seed)
    try:
        if chosen.only != "follow":
            folder = Path(tempfile.mkdtemp(prefix="dlb-"))
            try:
                through, direct, used = read_in_turn(folder, chosen)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            rates = [[one["events"] / one["took_s"] for one in those] for those in (through, direct)]
            result.rows += [
                Row("records read through the master", "/s", rates[0], rates[1], RATE_TARGET, most=False),
                Row("CPU of the master for a record", "us", used),
            ]
        if chosen.only != "read":
            found = list[tuple[Window, Window, int]]()
            for number in range(chosen.trials):
                found.append(pair(number, chosen))
                with_, without, got = found[-1]
                say(
                    f"{number + 1}/{chosen.trials} p99 of a heartbeat {with_.p99('beats'):.2f} ms with {chosen.readers} readers, "
                    f"{without.p99('beats'):.2f} ms without; of a command {with_.p99('commands'):.2f} and "
                    f"{without.p99('commands'):.2f} ms; the master used {with_.master_cpu:.2f} and {without.master_cpu:.2f} "
                    f"cores; {got} events each"
                )
            for what, words in (("beats", "heartbeat"), ("commands", "command, on disk,")):
                result.rows.append(
                    Row(
                        f"{words} to answer, p99, {chosen.readers} readers following",
                        "ms",
                        [one.p99(what) for one, _, _ in found],
                        [one.p99(what) for _, one, _ in found],
                        P99_TARGET,
                        of="ratio",
                    )
                )
            cores = [[one.master_cpu for one in those] for those in zip(*((a, b) for a, b, _ in found), strict=True)]
            result.rows.append(Row("cores that the master used", "", *cores))
    except (
        Broken,
        NotMeasurable,
        bench_replay.NotMeasurable,
        OSError,
        RuntimeError,
        subprocess.SubprocessError,
    ) as error:
        say(f"nothing measured: {error}")
        return BROKEN
    result.notes.append(f"{chosen.agents} agents, {chosen.beats} heartbeats/s, every {COMMAND_EVERY}th with a command")
    result.details = {name: getattr(chosen, name) for name in ("events", "agents", "readers", "seconds", "turns")}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
