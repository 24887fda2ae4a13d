"""Whole incidents as raw observations: words, codes and reasons in, one judgement out."""

from __future__ import annotations

import itertools
import json

import pytest

from dlrover_core.diagnosis.offline import Observation, diagnose

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus."
TIMEOUT = (
    "[Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=91, OpType=ALLREDUCE, Timeout(ms)=600000)"
)
PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4242"
BUG = "Traceback (most recent call last):\n  File \"/job/train.py\", line 31, in load\nKeyError: 'image'"


def cascades(ranks: range, at_s: float, text: str = TIMEOUT) -> list[Observation]:
    """These ranks complain, two to a node."""
    return [Observation(at_s + rank / 100, "log", f"n{rank // 2}", rank=rank, text=text.format(rank)) for rank in ranks]


def test_the_kernels_word_is_the_root_in_any_order() -> None:
    """A GPU that fell off the bus, under the noise of all others: node and host are named, whatever came first."""
    seen = [
        Observation(0, "kernel", host="gpu-17", text=XID),
        Observation(1, "exit", "n1", "gpu-17", rank=2, exit_code=-6),
        *cascades(range(4, 6), 2),
    ]
    for order in itertools.permutations(seen):
        found = diagnose(order)
        assert (found.signature, found.blamed, found.host, found.action) == (
            "xid.fallen_off",
            "n1",
            "gpu-17",
            "isolate",
        )
        assert len(found.discarded) == 3


def test_an_exception_is_the_programs_and_its_rank_is_named() -> None:
    """Whoever raised while the others lost their peer: no node is to blame."""
    found = diagnose(
        [
            Observation(5, "error", "n0", rank=0, text=PEER, exit_code=1),
            Observation(0, "error", "n1", rank=3, text=BUG, exit_code=1),
        ]
    )
    assert (found.verdict, found.signature, found.rank, found.blamed) == ("USER", "exception.KeyError", 3, "")
    assert "train.py:31" in found.root.place


def test_a_platforms_reason_wins() -> None:
    """What was pre-empted explains who was killed there and who complains elsewhere."""
    found = diagnose(
        [
            Observation(0, "exit", "n1", rank=2, exit_code=-9),
            Observation(1, "error", "n0", rank=0, text=PEER, exit_code=1),
            Observation(12, "platform", "n1", phase="failed", exit_code=137, reason="PreemptionByScheduler"),
        ]
    )
    assert (found.verdict, found.blamed, found.action) == ("PLAT", "n1", "relaunch")
    assert found.signature.endswith(".preempted")


def test_what_a_detector_says_is_taken_by_its_name() -> None:
    """Checks, hangs and the like name their signature."""
    found = diagnose([Observation(0, "check", "n1", "h1", text="check.failed"), *cascades(range(2), 1)])
    assert (found.signature, found.blamed) == ("check.failed", "n1")


def test_nothing_that_is_known_is_nothing_to_judge() -> None:
    """Lines without a meaning are no incident."""
    with pytest.raises(ValueError, match="nothing was seen"):
        diagnose([Observation(0, "log", "n0", rank=0, text="epoch 3, loss 2.1")])


def test_a_users_own_signatures_count() -> None:
    """A line that only the user's table knows is evidence like any other."""
    own = {
        "id": "ours.lake", "title": "the lake is dry", "class": "DATA", "action": "wait", "scope": "job",
        "sources": ["log", "error"], "patterns": ["the lake is dry"],
    }  # fmt: skip
    found = diagnose(
        [Observation(0, "log", "n0", rank=0, text="ERROR the lake is dry"), *cascades(range(2, 4), 1)],
        json.dumps([own]),
    )
    assert (found.signature, found.verdict, found.action) == ("ours.lake", "DATA", "wait")
