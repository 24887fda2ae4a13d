"""What Ray's records say of a node.

As Ray 2.60 has written them: exit codes, the end of file, `ray.kill`, a failed runtime environment, a host that was lost; the
memory monitor, and a pre-empted host (drained, then ended), in `RECORDED`; a raylet that SIGTERM ended.
By hand, from the names of Ray's fields: idle ends, unschedulable, intended exits.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlrover_backends.k8s import endings as k8s_endings
from dlrover_backends.ray import keeper
from dlrover_backends.ray.endings import ending, observation
from dlrover_backends.ray.records import Actor, Group, Host, Place, Snapshot
from dlrover_backends.shared import last_words
from dlrover_core.diagnosis import signatures
from dlrover_core.diagnosis.classify import USAGE_WORD, of_platform
from dlrover_core.diagnosis.ladder import proven
from dlrover_core.runtime.backend import PRINTED, Observation

DIED = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
EOF = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was "
    "killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed"
)
OOM = (
    "The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: Task was "
    "killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1) was 15.32GB / 16.00GB (0.9575)"
)
PIP = """Could not create the actor because its associated runtime env failed to be created.
[Node 10.0.0.1] Traceback (most recent call last):
  File "pip.py", line 394, in create
    pip_dir_bytes = await task
RuntimeError: Please install virtualenv to enable pip runtime env."""
NO_FOLDER = """ray::Keeper.__init__() (pid=4735, ip=10.0.0.1, actor_id=74)
  File "keeper.py", line 92, in _start
    raise FileNotFoundError(
FileNotFoundError: /data/job is not on host a"""


def died(reason: str, message: str, **more: object) -> dict[str, object]:
    """An ``ActorDiedErrorContext``."""
    return {"actor_died_error_context": {"reason": reason, "error_message": message, **more}}


def host_died(why: str, message: str = "health check failed") -> dict[str, object]:
    """An actor's end because of its host's."""
    info = {"reason": why, "reason_message": message}
    return died("NODE_DIED", "The actor died because its node has died.", node_death_info=info)


@pytest.mark.parametrize(
    ("cause", "phase", "code", "reason"),
    [
        (
            died("WORKER_DIED", f"{DIED}Worker exits unexpectedly. Worker exits with an exit code 7."),
            "failed",
            7,
            "exit code 7",
        ),
        (died("WORKER_DIED", f"{DIED}Worker exits with an exit code 137."), "failed", 137, "killed by SIGKILL"),
        (
            died(
                "WORKER_DIED", f"{DIED}Worker exits with an exit code 137. The worker may have exceeded K8s pod memory"
            ),
            "failed",
            137,
            "killed by SIGKILL",
        ),
        (
            died(
                "WORKER_DIED",
                f"{DIED}Worker exits with an exit code 2.\n noise {'x' * 400}\n{USAGE_WORD}script: 'a.py'\n",
            ),
            "failed",
            2,
            f"exit code 2{PRINTED}{USAGE_WORD}script: 'a.py'",
        ),
        (
            died("WORKER_DIED", f"{DIED}Worker exits with an exit code 1.\n {'x' * 400}\nOSError: no space"),
            "failed",
            1,
            f"exit code 1{PRINTED}xxx",
        ),
        (
            died("WORKER_DIED", "Worker exit type: INTENDED_USER_EXIT Worker exit detail: done"),
            "succeeded",
            0,
            "exit code 0",
        ),
        (
            died("WORKER_DIED", DIED + EOF),
            "failed",
            -1,
            "WORKER_DIED: Worker unexpectedly exits with a connection error code 2. End of file.",
        ),
        (died("RAY_KILL", "The actor is dead because it was killed by `ray.kill`."), "failed", -9, "RAY_KILL: "),
        (died("WORKER_DIED", OOM), "failed", 137, "NODE_OUT_OF_MEMORY: Task was killed due to the node running low"),
        ({"oom_context": {"error_message": "memory"}}, "failed", 137, "NODE_OUT_OF_MEMORY: memory"),
        (
            {"runtime_env_failed_context": {"error_message": PIP}},
            "failed",
            1,
            "RUNTIME_ENV_SETUP_FAILED: RuntimeError: Please",
        ),
        ({"actor_unschedulable_context": {"error_message": "no place"}}, "failed", 1, "Unschedulable: no place"),
        (
            {"creation_task_failure_context": {"formatted_exception_string": NO_FOLDER}},
            "failed",
            1,
            "the keeper cannot start its agent: FileNotFoundError: /data/job is not on host a",
        ),
        (host_died("UNEXPECTED_TERMINATION"), "lost", 0, "NODE_DIED: UNEXPECTED_TERMINATION: health check failed"),
        (host_died("EXPECTED_TERMINATION", "received SIGTERM"), "failed", -1, "EXPECTED_TERMINATION: received SIGTERM"),
        (host_died("AUTOSCALER_DRAIN_IDLE"), "failed", -1, "AUTOSCALER_DRAIN_IDLE: health check failed"),
        (host_died("AUTOSCALER_DRAIN_PREEMPTED"), "failed", -1, "DRAIN_NODE_REASON_PREEMPTION: "),
        ({}, "failed", -1, "ACTOR_DIED: Ray does not say why"),
    ],
)
def test_a_death_cause(cause: dict[str, object], phase: str, code: int, reason: str) -> None:
    """Each cause is a phase, an exit code, and a reason that diagnosis knows; a host that is only not heard is lost."""
    seen = ending(cause)
    assert seen[:2] == (phase, code)
    assert seen[2].startswith(reason)
    assert len(seen[2].partition(PRINTED)[2] or seen[2]) <= 300


def test_platforms_cut_last_words_alike() -> None:
    """Of a long text its end counts; of the launcher's own words, which only exit status 2 shows, their beginning."""
    long = "\n".join(map(str, range(200)))
    for code, printed, told in (
        (2, f"usage\n{USAGE_WORD}{long}", f"{USAGE_WORD}{long}".split("\n")[0]),
        (3, f"{USAGE_WORD}{long}", "198 199"),
        (2, long, "198 199"),
        (2, " \n", ""),
    ):
        terminated = {"exitCode": code, "reason": "Error", "message": printed}
        pod = {
            "metadata": {"name": "n"},
            "status": {"phase": "Failed", "containerStatuses": [{"name": "main", "state": {"terminated": terminated}}]},
        }
        seen = k8s_endings.observation(pod).reason
        assert seen == ending(died("", f"Worker exits with an exit code {code}.{printed}"))[2]
        words = seen.partition(PRINTED)[2]
        assert len(words) == (last_words.CHARS_MAX if told else 0)
        assert words.startswith(told) if told.startswith(USAGE_WORD) else words.endswith(told)


def test_an_agents_last_words(tmp_path: Path) -> None:
    """Ray is handed what the agent itself has written, without what was there before it; of no file, and no failure, nothing."""
    with (tmp_path / "err").open("w+b", buffering=0) as err:
        err.write(b"of Ray's own\n")
        since = keeper.size_of(err.fileno())
        assert keeper.last_words(err.fileno(), since) == ""
        err.write(b"x" * 3000 + b"\nno such file\n")
        words = keeper.last_words(err.fileno(), since)
        assert words.endswith("x\nno such file")
        assert len(words) < keeper.WORDS_MAX
        err.truncate(0)
        err.seek(0)
        err.write(b"anew")
        assert keeper.last_words(err.fileno(), since) == "anew", "the file was begun anew"
    assert keeper.last_words(err_closed(), 0) == ""
    ends = [keeper.ended(code, "words") for code in (2, 0, -9, None)]
    assert [one.code for one in ends] == [2, 0, 137, 1]
    assert [getattr(one, "unexpected_error_traceback", "") for one in ends] == ["words", "", "", ""]


def err_closed() -> int:
    """A descriptor that is none."""
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    return writing


TABLE = signatures.table()
RECORDED = {
    "the memory monitor": {
        "oom_context": {
            "error_message": (
                "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: fdd0) was "
                "5.35GB used / 23.54GB limit (0.227174)\nOOM kill reason: Memory usage 5710942208B exceeded threshold of "
                "1263825536B (5.0% of 25276510208B limit)\nObject store memory usage: [- objects spillable: 0\n"
            )
        }
    },
    "pre-emption": {
        "actor_died_error_context": {
            "error_message": (
                "The actor died because its node has died. Node Id: 1872\n\tthe actor's node was preempted: spot is over"
            ),
            "node_death_info": {"reason": "AUTOSCALER_DRAIN_PREEMPTED", "reason_message": "spot is over"},
            "reason": "NODE_DIED",
        }
    },
    "SIGTERM to the raylet": {
        "actor_died_error_context": {
            "error_message": (
                "The actor died because its node has died. Node Id: 80df\n\tthe actor's node was terminated expectedly: "
                "received SIGTERM"
            ),
            "node_death_info": {"reason": "EXPECTED_TERMINATION", "reason_message": "received SIGTERM"},
            "reason": "NODE_DIED",
        }
    },
}


@pytest.mark.parametrize(
    ("what", "signature", "is_free"),
    [
        ("the memory monitor", "ray.oom", False),
        ("pre-emption", "ray.preempted", True),
        ("SIGTERM to the raylet", "ray.preempted", True),
    ],
)
def test_what_a_recorded_cause_is_taken_for(what: str, signature: str, *, is_free: bool) -> None:
    """What the platform took on purpose is charged to nobody; what ran out of memory is."""
    phase, code, reason = ending(RECORDED[what])
    found = of_platform(TABLE, phase, code, reason)
    assert found.signature == signature, reason
    assert proven(found.verdict, found.signature) is is_free


def test_a_host_that_died_is_told_from_one_that_was_taken() -> None:
    """Nobody pre-empted a raylet that was killed, or is not heard."""
    by_raylet = seen(Actor("x", "n", host_id="4", pid=7), host=Host("4", "d", alive=False, ended=True))
    for phase, code, reason in (ending(host_died("UNEXPECTED_TERMINATION")), by_raylet[1:4]):
        assert of_platform(TABLE, phase, code, reason).signature == "ray.node_died"


BIG, SMALL = {"CPU": 8.0, "memory": float(64 << 30)}, {"CPU": 2.0}
HOSTS = {"1": Host("1", "a", has=BIG), "2": Host("2", "b", has=SMALL), "3": Host("3", "c", alive=False, has=BIG)}
PENDING = Actor("x", "n", state="PENDING_CREATION")


def seen(
    actor: Actor, *, group: Group | None = None, place: Place | None = None, wall_s: float = 1000.0, **hosts: Host
) -> Observation:
    """What is observed of a node."""
    snapshot = Snapshot({actor.name: actor}, {**HOSTS, **{one.id: one for one in hosts.values()}}, {})
    return observation(actor, snapshot, group, place or Place(), wall_s)


@pytest.mark.parametrize(
    ("group", "place", "waits"),
    [
        (Group("g", "n"), Place({"CPU": 1.0}), ""),
        (None, Place({"CPU": 1.0}), ""),
        (
            Group("g", "n", "PENDING", "INFEASIBLE"),
            Place({"CPU": 64.0, "GPU": 1.0}),
            "Unschedulable: no host has CPU=64,GPU=1; the largest has CPU=8,memory=65536Mi",
        ),
        (
            Group("g", "n", "PENDING", "INFEASIBLE"),
            Place({"CPU": 4.0}),
            "Unschedulable: no host with CPU=4 has the labels that are asked for",
        ),
        (Group("g", "n", "PENDING", "QUEUED"), Place({"CPU": 8.0}), "NO_RESOURCES: CPU=8 are not free on any one host"),
        (Group("g", "n", "PENDING", "INFEASIBLE"), Place({"CPU": 4.0}, ("a",)), "avoided hosts: a"),
        (Group("g", "n", "PENDING", "QUEUED"), Place({"CPU": 1.0}, ("a",)), "NO_RESOURCES: CPU=1"),
    ],
)
def test_why_a_node_waits(group: Group | None, place: Place, waits: str) -> None:
    """A pending node says what is in its way: nothing, no room, no such host, or only hosts that it is to avoid."""
    node = seen(PENDING, group=group, place=place)
    assert node.phase == "pending"
    assert node.waits.startswith(waits)
    assert bool(node.waits) is bool(waits)


def test_a_host_that_is_drained() -> None:
    """A drain is a notice, with the time that is left; without a deadline it is a notice all the same."""
    actor = Actor("x", "n", host_id="1", pid=7)
    assert seen(actor)[:2] == ("n", "running")
    assert seen(actor).host == "a"
    due = seen(actor, host=HOSTS["1"]._replace(drain_ms=1_030_000))
    assert (due.phase, due.notice, due.notice_us) == ("running", "Ray drains a", 30_000_000)
    assert seen(actor, host=HOSTS["1"]._replace(drain_ms=900_000)).notice_us == 1
    assert seen(actor, host=HOSTS["1"]._replace(drain_ms=0))[6:8] == ("Ray drains a", 0)


def test_a_host_that_is_lost() -> None:
    """An actor that Ray believes alive on a host that it has given up is lost; its name remains."""
    node = seen(Actor("x", "n", host_id="3", pid=7))
    assert (node.phase, node.host) == ("lost", "c")
    assert node.reason


def test_how_long_ago_it_ended() -> None:
    """The age of an end is by the cluster's clock, and never negative."""
    dead = Actor("x", "n", state="DEAD", host_id="1", ended_ms=997_000)
    assert seen(dead).age_us == 3_000_000
    assert seen(dead, wall_s=900.0).age_us == 0
