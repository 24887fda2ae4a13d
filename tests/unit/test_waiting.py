"""Why a group has no world: every reason, its time and its nodes; and where people read it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drive import SECOND, Drive

from dlrover_adapters.cli import live
from dlrover_adapters.cli.line import Line
from dlrover_adapters.cli.main import main
from dlrover_adapters.cli.read import NOBODY_LEADS, NOT_ASKED
from dlrover_adapters.http import client
from dlrover_core.errors import ConnectionLost
from dlrover_core.history import render, status_of
from dlrover_core.history.plain import plain
from dlrover_core.job import checkpoints, job, nodes, operations, waiting, world
from dlrover_core.job.checks import ReportCheck
from dlrover_core.job.state import CODEC
from dlrover_core.job.waiting import Wait
from dlrover_core.kernel.engine import Tick
from dlrover_core.kernel.log import LeaderInfo
from dlrover_core.logs.sqlite import SqliteLog
from dlrover_core.rules import membership
from dlrover_core.rules.model import MODEL
from dlrover_core.rules.reasons import reasons


def why(drive: Drive) -> Wait | None:
    """The reason now; the deadline of all rules is no later than the time that the reason names."""
    found, due = membership.why_waiting(drive.state, "worker", drive.now), MODEL.due(drive.state)
    if found is not None and found.until:
        assert due is not None
        assert due <= found.until
    return found


def test_every_deadline_leads_to_a_world_or_to_a_later_one() -> None:
    """A pause ends before the last call: at its end nothing may form, and a master that looked then would look for ever."""
    drive = Drive(nodes_min=2, nodes_max=4, nproc=1, max_restarts=100)
    for number in range(4):
        drive.join(f"worker-{number}-0")
    for number in range(8):
        if drive.members:
            drive.now += SECOND // 10
            for member in drive.members:
                drive.offer(member)
            drive.exit(drive.members[number % 4], number % 4, 1)
    assert not drive.members, "the program fails at once: a pause"
    drive.observe("worker-3-0", "gone")
    looks = 0
    while not drive.members:
        due = MODEL.due(drive.state)
        assert due is not None
        assert due > drive.now, "a deadline that is over"
        drive.now, looks = due, looks + 1
        drive.do(Tick())
    assert looks < 5


def suspended() -> Drive:
    """A person lets a job pause that trains."""
    drive = Drive().up()
    drive.do(job.SuspendJob("lunch"))
    return drive


def stopped() -> Drive:
    """A person stops a job that trains."""
    drive = Drive().up()
    drive.do(job.StopJob("home"))
    return drive


def failing() -> Drive:
    """A rank fails, no restart is left, and the others are asked for their evidence."""
    drive = Drive(max_restarts=0).up()
    drive.exit("worker-0-0", 0, 1, "ValueError: bad batch")
    return drive


def checked() -> Drive:
    """Both nodes are there and are checked; one has reported."""
    drive = Drive(precheck="basic")
    drive.join("worker-0-0")
    drive.join("worker-1-0")
    drive.do(ReportCheck("worker-1-0", 1, 1, ok=True))
    return drive


def unchecked() -> Drive:
    """Two of four nodes are there, and are checked once the last call is over."""
    drive = Drive(precheck="basic", nodes_min=2, nodes_max=4)
    drive.join("worker-0-0")
    drive.join("worker-1-0")
    return drive


def few() -> Drive:
    """One of at least two nodes is there; of the others one boots, one is planned."""
    drive = Drive(nodes_min=2, nodes_max=3)
    drive.join("worker-0-0")
    drive.observe("worker-1-0", "running")
    return drive


def without_stores() -> Drive:
    """Both nodes are there, and neither offers a store."""
    drive = Drive(nodes_max=2)
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(nodes.ReportJoined(node, "h", "a", 2))
    return drive


def without_the_first_store() -> Drive:
    """Both nodes are there, and only the node of rank 1 offers a store."""
    drive = without_stores()
    drive.offer("worker-1-0")
    return drive


def failing_at_once() -> Drive:
    """The only node's program has failed three times without a step."""
    drive = Drive(nodes_max=1, nproc=1, max_restarts=100)
    drive.join("worker-0-0")
    for _ in range(3):
        drive.now += SECOND // 10
        drive.offer("worker-0-0")
        drive.exit("worker-0-0", 0, 1)
    return drive


def called() -> Drive:
    """Two of three nodes are there, which are enough, and the third has its time."""
    drive = Drive(nodes_min=2, nodes_max=3)
    drive.join("worker-0-0")
    drive.join("worker-1-0")
    return drive


REASONS: dict[Callable[[], Drive], Wait] = {
    suspended: Wait("worker", waiting.JOB, "the job is suspended"),
    stopped: Wait("worker", waiting.JOB, "the job is stopping"),
    failing: Wait("worker", waiting.END, "incident 1 (exception.ValueError) is about to fail the job"),
    checked: Wait("worker", waiting.CHECK, "check 1 runs: 1 of 2 nodes have not reported round 1"),
    unchecked: Wait("worker", waiting.CHECK, "2 nodes must pass a check first"),
    few: Wait(
        "worker",
        waiting.NODES,
        "1 of at least 2 nodes are there; missed: worker-1-0 (its agent has not joined), worker-2-0 (planned)",
        0,
        ("worker-1-0", "worker-2-0"),
    ),
    without_stores: Wait("worker", waiting.STORE, "none of its nodes offers a store"),
    without_the_first_store: Wait(
        "worker", waiting.STORE, "worker-0-0 offers no store", 1_030 * SECOND, ("worker-0-0",)
    ),
    failing_at_once: Wait("worker", waiting.PAUSE, "its program failed at once 3 times in a row", 1_000_800_000),
    called: Wait(
        "worker",
        waiting.LAST_CALL,
        "2 of 3 nodes are there; missed: worker-2-0 (planned)",
        1_030 * SECOND,
        ("worker-2-0",),
    ),
}


@pytest.mark.parametrize("story", REASONS, ids=lambda story: story.__name__)
def test_each_reason(story: Callable[[], Drive]) -> None:
    """What is waited for, in words, the nodes that are missed, and when time alone ends the wait."""
    drive = story()
    assert not (drive.members and drive.state.job.forms)
    assert why(drive) == REASONS[story]
    if REASONS[story].until:
        drive.now = REASONS[story].until - 1
        drive.wait(0)
        assert (drive.members, why(drive)) == ([], REASONS[story])
        drive.now += 1
        assert why(drive) is None
        drive.wait(0)
        assert drive.members != []


def test_a_world_waits_for_nothing() -> None:
    """Nor does a job that has ended show anything."""
    drive = Drive().up()
    assert why(drive) is None
    assert reasons(drive.state) == ()
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(world.ReportFinished(node, 1))
    assert drive.state.job.state == "succeeded"
    assert reasons(drive.state) == ()


def test_nodes_that_leave_are_named_so() -> None:
    """A node that is told to leave is missed as that; a place that nobody is in is named itself."""
    drive = Drive(nodes_min=2, nodes_max=2).up()
    drive.do(operations.DrainNode("worker-1-0", "a bad one"))
    assert why(drive) == Wait(
        "worker", waiting.NODES, "1 of at least 2 nodes are there; missed: worker-1-1 (planned)", 0, ("worker-1-1",)
    )


def test_what_a_planned_change_waits_for() -> None:
    """Its newcomers, then its ranks to look for the boundary, then to reach it: what `plans` decides by."""
    drive = Drive(nodes_max=2, nproc=1, on_join="planned").up()
    drive.do(checkpoints.ReportKeeping("worker-0-0", 1, "file:///c", 2, 10, 3, True, 1 << 30, 2))
    drive.do(operations.DrainNode("worker-1-0", "a bad one"))
    begins = "planned change 1 (worker-1-1 joins, worker-1-0 leaves) waits for "
    deadline = drive.state.plans.by_group["worker"].deadline

    def waits(words: str, *names: str) -> None:
        assert why(drive) == Wait("worker", waiting.PLAN, begins + words, deadline, names)

    waits("worker-1-1 to be ready", "worker-1-1")
    drive.join("worker-1-1")
    waits("worker-0-0, worker-1-0 to look for its boundary", "worker-0-0", "worker-1-0")
    drive.do(checkpoints.ReportArmed("worker-0-0", 1))
    waits("worker-1-0 to look for its boundary", "worker-1-0")
    drive.do(checkpoints.ReportArmed("worker-1-0", 1))
    drive.do(checkpoints.ReportHeld("worker-1-0", 1, (7,), 1))
    waits("worker-0-0 to reach its boundary", "worker-0-0")
    (line,) = render.waiting(reasons(drive.state), deadline)
    assert line == f"worker: {begins}worker-0-0 to reach its boundary"
    drive.do(checkpoints.ReportHeld("worker-0-0", 1, (7,), 1))
    assert drive.members == ["worker-0-0", "worker-1-1"]
    assert why(drive) is None


def test_a_store_of_a_node_that_is_too_many_leads() -> None:
    """Three of four nodes make a world of two; where the third alone offers a store, it takes the place of rank 0."""
    drive = Drive(nodes_min=2, nodes_max=4, unit=2)
    for one in range(3):
        drive.do(nodes.ReportJoined(f"worker-{one}-0", "h", "a", 2))
    drive.offer("worker-2-0")
    drive.wait(31)
    assert drive.members == ["worker-2-0", "worker-1-0"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A log of `called`, whose master is gone."""

    async def write() -> None:
        log = await SqliteLog.open(tmp_path / "log.db", CODEC)
        lead = await log.lead("j", "a")
        for batch in called().batches:
            await lead.append(batch)
        await lead.resign()
        await log.close()

    asyncio.run(write())
    return f"sqlite://{tmp_path}/log.db"


def test_the_commands_ask_the_leader(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status` and `explain`, as text and as JSON, say what the leader answers; they work nothing out themselves."""
    words, leader = "2 of 3 nodes are there; missed: worker-2-0 (planned)", asked(monkeypatch, "here:1")
    for command in ("status", "explain"):
        assert main([command, "j", "--log", url, "--master", "gone:1,here:1"]) == 0
        assert f"worker has no world: {words}, 1 h 00 min left" in capsys.readouterr().out
        assert main([command, "j", "--log", url, "--master", "here:1", "--json"]) == 0
        (told,) = json.loads(capsys.readouterr().out)["waits"]
        assert (told["why"], told["words"], told["nodes"]) == ("last call", words, ["worker-2-0"])
    assert leader == ["gone:1", "here:1", "here:1"] * 2


def test_without_a_leader_nothing_is_waited_for(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From the log alone nobody knows what would be decided: `status` says that nobody leads."""
    for command in ("status", "explain"):
        assert main([command, "j", "--log", url]) == 0
        assert "has no world" not in (told := capsys.readouterr().out)
        assert (NOBODY_LEADS in told) == (command == "status")
        assert main([command, "j", "--log", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["waits"] is None


def test_a_leader_that_cannot_be_asked_is_said(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status` of a job without a world says what it lacks to know the reason."""
    asked(monkeypatch, "here:1")

    async def leads(*_: object) -> LeaderInfo:
        return LeaderInfo(1, "a", "gone:1")

    monkeypatch.setattr(SqliteLog, "leader", leads)
    assert main(["status", "j", "--log", url]) == 0
    assert NOT_ASKED in capsys.readouterr().out


def asked(monkeypatch: pytest.MonkeyPatch, leader: str) -> list[str]:
    """Masters of which one leads `called`, with an hour left; the addresses that are asked."""
    (wait,) = reasons(called().state)
    answer = {
        "job": "j",
        "role": "leader",
        "waits": [wait._replace(until=time.time_ns() // 1000 + 3600 * SECOND)._asdict()],
    }
    addresses: list[str] = []

    async def fetch(address: str, token: str, **_: object) -> dict[str, Any]:
        addresses.append(address)
        if address != leader:
            raise ConnectionLost(f"nobody at {address}")
        return dict(json.loads(json.dumps(answer)))

    monkeypatch.setattr(client, "fetch_status", fetch)
    monkeypatch.setenv("DLROVER_TOKEN", "of-the-job")
    return addresses


@pytest.mark.parametrize("command", ["status", "events", "report", "explain"])
def test_reading_loads_no_rule(url: str, command: str) -> None:
    """Of a live job, too, and where a master is asked: whoever reads a log decides nothing."""
    asks = ["--master", "127.0.0.1:9"] if command in ("status", "explain") else []
    code = (
        "import sys; from dlrover_adapters.cli.main import main; status = main(sys.argv[1:]);"
        "print([name for name in sys.modules if name.startswith('dlrover_core.rules')], file=sys.stderr); sys.exit(status)"
    )
    words = [sys.executable, "-c", code, command, "j", "--log", url, *asks]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout
    assert done.stderr.splitlines()[-1] == "[]"


def test_people_read_it() -> None:
    """In the status, for people and for programs; and of a leader whose log is out of reach."""
    drive = called()
    waits = reasons(drive.state, drive.now)
    told = status_of(drive.state, drive.records[-1])._replace(waits=waits)
    words = "2 of 3 nodes are there; missed: worker-2-0 (planned)"
    assert f"  worker has no world: {words}, 29.0 s left" in render.status(told, drive.now + SECOND)
    assert json.loads(json.dumps(plain(told)))["waits"] == [
        {"group": "worker", "why": "last call", "words": words, "until": 1_030 * SECOND, "nodes": ["worker-2-0"]}
    ]
    said = {"waits": [one._asdict() for one in waits]}
    assert f"  worker has no world: {words}" in list(live.lines(live.Told("here:1", said)))
    status = {"state": "created", "step": -1, "generation": 0, "degraded": "", "last_incident": "", **said}
    assert Line("j").text(status, 1.0).endswith(f"generation 0  worker has no world: {words}")


def line_of(drive: Drive) -> str:
    """What `dlrover-run` shows of a job."""
    waits = [one._asdict() for one in reasons(drive.state, drive.now)]
    status = {"state": drive.state.job.state, "step": -1, "generation": 1, "degraded": "", "last_incident": ""}
    return Line("j").text({**status, "waits": waits}, 1.0)


@pytest.mark.parametrize("made", [suspended, stopped, failing, called], ids=lambda made: made.__name__)
def test_the_live_line_in_every_state(made: Callable[[], Drive]) -> None:
    """It names each group that has no world and why; the state of the job is its first word, and is not said twice."""
    drive = made()
    waits = {
        "failing": "  worker has no world: incident 1 (exception.ValueError) is about to fail the job",
        "called": "  worker has no world: 2 of 3 nodes are there; missed: worker-2-0 (planned)",
    }
    assert line_of(drive) == f"[j] {drive.state.job.state}  step 0  0.0/s  generation 1{waits.get(made.__name__, '')}"


def test_the_live_line_of_a_planned_change() -> None:
    """The world runs on: the line says nothing of it."""
    drive = Drive(nodes_max=2, nproc=1, on_join="planned").up()
    drive.do(checkpoints.ReportKeeping("worker-0-0", 1, "file:///c", 2, 10, 3, True, 1 << 30, 2))
    drive.do(operations.DrainNode("worker-1-0", "a bad one"))
    assert [one.why for one in reasons(drive.state)] == [waiting.PLAN]
    assert line_of(drive) == "[j] running  step 0  0.0/s  generation 1"
