"""What one death was, and which of several was first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.diagnosis.classify import exception_name, node_death, root, worker_death
from dlrover_core.diagnosis.evidence import Evidence

TRACEBACK = "Traceback (most recent call last):\n  File 'train.py', line 3\nValueError: bad batch"


@pytest.mark.parametrize(
    ("code", "error", "tail", "verdict", "signature"),
    [
        (-9, "", "", "PLAT", "exit.sigkill"),
        (-15, "", "", "PLAT", "exit.sigterm"),
        (-11, "", "", "SOFT", "exit.sigsegv"),
        (-7, "", "", "RES", "exit.sigbus"),
        (-6, "", "", "SOFT", "exit.sigabrt"),
        (-35, "", "", "SOFT", "exit.signal35"),
        (-4, "", "", "SOFT", "exit.signal4"),
        (-9999, "", "", "SOFT", "exit.signal9999"),
        (1, TRACEBACK, "", "USER", "exception.ValueError"),
        (1, "", TRACEBACK, "USER", "exception.ValueError"),
        (1, "", "some words", "USER", "exit.code1"),
        (3, "", "", "USER", "exit.code3"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried", "", "RES", "memory.exhausted"),
        (-9, "", "DefaultCPUAllocator: can't allocate memory", "RES", "memory.exhausted"),
        (1, "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]", "", "CASC", "peer.lost"),
        (1, "torch.distributed.DistBackendError: NCCL communicator was aborted", "", "CASC", "peer.lost"),
        (-6, "", "ncclRemoteError: A call failed possibly due to a network error", "CASC", "peer.lost"),
        (1, "RuntimeError: Connection reset by peer", "", "CASC", "peer.lost"),
        (1, "DistStoreError: Socket Timeout", "", "CASC", "peer.lost"),
    ],
)
def test_a_workers_death(code: int, error: str, tail: str, verdict: str, signature: str) -> None:
    """Signals, exceptions, memory and a peer's loss are told apart by code and text."""
    assert worker_death(code, error, tail)[:2] == (verdict, signature)


@pytest.mark.parametrize(
    ("how", "code", "reason", "verdict", "signature"),
    [
        ("lost", 0, "silent", "PLAT", "node.silent"),
        ("failed", 137, "OOMKilled", "RES", "node.oom"),
        ("failed", -9, "SIGKILL", "PLAT", "node.sigkill"),
        ("failed", 1, "", "PLAT", "node.failed"),
        ("gone", 0, "not listed", "PLAT", "node.gone"),
    ],
)
def test_a_nodes_death(how: str, code: int, reason: str, verdict: str, signature: str) -> None:
    """A node is silent, out of memory, killed, failed or gone."""
    assert node_death(how, code, reason)[:2] == (verdict, signature)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (TRACEBACK, "ValueError"),
        ("my.pkg.Odd: it is", "Odd"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("", "unknown"),
        ("!!!", "unknown"),
    ],
)
def test_the_exceptions_name(text: str, name: str) -> None:
    """The name is the last line's class, without its package."""
    assert exception_name(text) == name


def _death(seq: int, at: int, rank: int, verdict: str) -> Evidence:
    return Evidence(seq, at, f"worker-{rank}-0", rank, -9, 5, "", verdict, f"{verdict}.{rank}", 0.5)


CASES = [
    # The earliest wins...
    (_death(5, 100, 0, "USER"), [_death(4, 200, 1, "USER"), _death(6, 300, 2, "SOFT")]),
    # ... by when it died, not by when that was known,
    (_death(9, 50, 0, "USER"), [_death(1, 60, 1, "USER")]),
    # ... but a cascade only where there is nothing else,
    (_death(9, 900, 0, "USER"), [_death(1, 10, 1, "CASC"), _death(2, 20, 2, "CASC")]),
    (_death(1, 10, 1, "CASC"), [_death(2, 20, 2, "CASC")]),
    # ... and a node's death before any worker's.
    (_death(9, 900, -1, "PLAT"), [_death(1, 10, 1, "USER"), _death(2, 20, 2, "CASC")]),
]


@pytest.mark.parametrize(("first", "others"), CASES)
def test_the_root_in_any_order(first: Evidence, others: list[Evidence]) -> None:
    """The likeliest first cause is the same in whatever order the deaths are known."""
    for order in itertools.permutations([first, *others]):
        assert root(tuple(order)) == first


def test_the_root_found_pair_by_pair() -> None:
    """Judging death by death as evidence comes gives what judging all at once would."""
    for first, others in CASES:
        for order in itertools.permutations([first, *others]):
            known = order[0]
            for death in order[1:]:
                known = root((known, death))
            assert known == first


@given(st.integers(-(2**31), 2**31), st.text(max_size=200), st.text(max_size=200))
def test_any_death_has_a_verdict(code: int, error: str, tail: str) -> None:
    """Whatever a worker's last words are, classifying them gives a verdict with a confidence between 0 and 1."""
    verdict = worker_death(code, error, tail)
    assert verdict.verdict in {"USER", "PLAT", "RES", "SOFT", "CASC"}
    assert 0 < verdict.confidence <= 1
    assert verdict.signature
