"""Whom a log accuses: no node is named, isolated or relaunched for what it did not do alone."""

from __future__ import annotations

import pytest
from test_reading import ERROR, WATCHDOG, answer


def test_whoever_only_complains_is_not_named() -> None:
    """One host alone wrote: it says that others do not answer, and nobody is at fault for that."""
    found = answer("gpu-7: " + WATCHDOG.format(0).strip())
    assert (found.judgement.verdict, found.rank, found.host, found.node) == ("CASC", -1, "", "")


def test_a_link_has_two_ends() -> None:
    """The host that tells of a failed link is named beside a host that goes on, not alone."""
    warn = "gpu-07:4711:4803 [3] NCCL WARN NET/IB : Got completion from peer with status=IBV_WC_RETRY_EXC_ERR(12) vendor err 129"
    alone = answer(warn)
    assert (alone.judgement.verdict, alone.host) == ("NET", "")
    beside = answer("gpu-08:911:990 [1] NCCL INFO Channel 00 : 8[1] -> 9[2] via P2P\n" + warn)
    assert beside.host == "gpu-07"


@pytest.mark.parametrize(
    ("path", "action"), [("/mnt/nfs/runs/step7.pt", "wait"), ("/tmp/torch_x", "relaunch"), ("/scratch/x", "relaunch")]
)
def test_a_full_disk_that_all_hosts_share_takes_no_node_out(path: str, action: str) -> None:
    """A new host has no more room there."""
    text = ERROR.format("", f"OSError: [Errno 28] No space left on device: '{path}'")
    assert answer("\n".join(f"gpu-7: {line}" for line in text.splitlines())).judgement.action == action


def test_a_host_without_another_beside_it_is_not_isolated() -> None:
    """Files are used up on the only host that is known: whether the others have the same, nobody says."""
    found = answer("gpu-7: OSError: [Errno 23] Too many open files in system")
    assert (found.judgement.signature, found.judgement.action) == ("host.files", "check")


@pytest.mark.parametrize(
    ("why", "action"),
    [
        ("Task launch for StepId=31.4 failed on node c4n17: Unable to layout tasks on given cpus", "retry"),
        ("Task launch for StepId=31.4 failed on node c4n17: Communication connection failure", "relaunch"),
    ],
)
def test_a_request_that_does_not_fit_takes_no_node_out(why: str, action: str) -> None:
    """What was asked for does not fit on another node either."""
    found = answer(f"srun: error: {why}\nsrun: error: Application launch failed\nsrun: Job step aborted")
    assert (found.judgement.signature, found.judgement.action) == ("slurm.launch_failed", action)
