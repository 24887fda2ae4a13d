"""What one death was, and which of several was first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.diagnosis.classify import (
    exception_name,
    node_death,
    of_exception,
    of_exit,
    of_platform,
    place_of,
    root,
    worker_death,
)
from dlrover_core.diagnosis.evidence import CLASSES, PRINTED, USER, Evidence
from dlrover_core.diagnosis.signatures import own, table

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
        (1, "", "some words", "SOFT", "exit.silent"),
        (137, "", "", "PLAT", "exit.sigkill"),
        (139, "", "", "SOFT", "exit.sigsegv"),
        (247, "", "", "RES", "exit.oom"),
        (140, "", "", "SOFT", "exit.signal12"),
        (127, "", "", "USER", "exit.not_started"),
        (202, "", "", "HW", "exit.check"),
        (3, "", "", "USER", "exit.code3"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried", "", "RES", "cuda.oom"),
        (-9, "", "DefaultCPUAllocator: can't allocate memory", "RES", "memory.host"),
        (1, "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]", "", "CASC", "gloo.peer"),
        (1, "torch.distributed.DistBackendError: NCCL communicator was aborted", "", "CASC", "nccl.aborted"),
        (-6, "", "ncclRemoteError: A call failed possibly due to a network error", "CASC", "nccl.remote"),
        (1, "RuntimeError: Connection reset by peer", "", "CASC", "gloo.peer"),
        (1, "DistStoreError: Socket Timeout", "", "CASC", "store.timeout"),
    ],
)
def test_a_workers_death(code: int, error: str, tail: str, verdict: str, signature: str) -> None:
    """Signals, exceptions, memory and a peer's loss are told apart by code and text."""
    assert worker_death(code, error, tail)[:2] == (verdict, signature)


@pytest.mark.parametrize(
    ("how", "code", "reason", "verdict", "signature"),
    [
        ("lost", 0, "silent", "PLAT", "node.silent"),
        ("failed", 137, "OOMKilled", "RES", "k8s.oom"),
        ("failed", -9, "SIGKILL", "PLAT", "exit.sigkill"),
        ("failed", 137, "", "PLAT", "exit.sigkill"),
        ("failed", 201, "hardware: driver", "HW", "exit.check"),
        ("failed", 137, "Evicted: The node was low on resource: memory.", "RES", "k8s.evicted"),
        ("gone", 0, "DeletionByTaintManager", "PLAT", "k8s.preempted"),
        ("failed", 0, "UnexpectedAdmissionError", "PLAT", "k8s.admission"),
        ("failed", 1, "DeviceUnhealthy: nvidia.com/gpu GPU-3fa1", "HW", "k8s.device"),
        ("failed", 0, "refused for good: no quota", "USER", "node.refused"),
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
    assert verdict.verdict in CLASSES
    assert 0 < verdict.confidence <= 1
    assert verdict.signature


BAD_BATCH = """Traceback (most recent call last):
  File "/home/a/run_{run}/proj/train.py", line 88, in <module>
    main()
  File "/opt/conda/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1511, in _call_impl
    return forward(*args)
  File "/home/a/run_{run}/proj/data.py", line 7, in collate
    return batch["x"]
  File "/opt/conda/lib/python3.11/site-packages/lib.py", line 3, in __getitem__
    raise KeyError(key)
KeyError: 'x'
"""
HANDLED = BAD_BATCH.format(run=1) + "WARNING the sample is skipped\n"
WENT_ON = BAD_BATCH + "falling back to eager\nstep 1\nstep 2\nstep 3\nstep 4\n"
TABLE = table()


@pytest.mark.parametrize(
    ("code", "error", "tail", "signature"),
    [
        # Whoever printed an exception, went on and ended otherwise had handled it, and what it says with it.
        (-11, "", WENT_ON, "exit.sigsegv"),
        (-6, "", WENT_ON, "exit.sigabrt"),
        (3, "", WENT_ON, of_exit(table(), 3, "", "").signature),
        (-11, "", WENT_ON.replace("KeyError: 'x'", "torch.OutOfMemoryError: CUDA out of memory."), "exit.sigsegv"),
        (-11, "", WENT_ON + "CUDA error: uncorrectable ECC error encountered", "cuda.ecc"),
        # Ended with 1, it may have been it; what comes later and says more is it.
        (1, "", WENT_ON, "exception.KeyError"),
        (1, "", WENT_ON + "OSError: [Errno 28] No space left on device", "disk.full"),
        # What a process says of its own abort is not going on.
        (
            -6,
            "",
            BAD_BATCH + "terminate called after throwing\n  what():  x\nframe #0: a\nframe #1: b\nAborted",
            "exception.KeyError",
        ),
        (3, "", BAD_BATCH, "exception.KeyError"),
        # An exception that was handled is not why a process was killed, or failed later.
        (-9, "", HANDLED, "exit.sigkill"),
        (-15, "", HANDLED, "exit.sigterm"),
        (
            1,
            "",
            HANDLED + "Traceback (most recent call last):\n  File 'a.py', line 1\nIndexError: 3",
            "exception.IndexError",
        ),
        # What is lost behind a peer's end is in the tail.
        (
            1,
            "RuntimeError: Connection closed by peer [10.0.0.1]",
            "CUDA error: uncorrectable ECC error encountered",
            "cuda.ecc",
        ),
        (1, "RuntimeError: Connection closed by peer [10.0.0.1]", "", "gloo.peer"),
        # The exception that ended it counts more than other words around it.
        (1, "KeyError: 'x'", "NCCL communicator was aborted on rank 3.", "exception.KeyError"),
        (
            1,
            "",
            "socket.cc NCCL WARN Call to connect returned Connection refused, retrying\n" + BAD_BATCH,
            "exception.KeyError",
        ),
        (
            -6,
            "",
            "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: unknown error",
            "cuda.launch_failure",
        ),
        # A warning and advice are no failure.
        (-9, "", "NCCL WARN NET/IB : mlx5_3:1 Got non-fatal async event: port error(10)", "exit.sigkill"),
        (1, "", "For debugging consider passing CUDA_LAUNCH_BLOCKING=1", "exit.silent"),
        (1, "my.pkg.Odd: it is", "", "exception.Odd"),
    ],
)
def test_words_in_their_order(code: int, error: str, tail: str, signature: str) -> None:
    """The exception that ended a process comes first, what the tail knows beside it next, and the code last."""
    assert of_exit(TABLE, code, error, tail).signature == signature


def test_one_place_on_any_host() -> None:
    """A place is the type and the user's own last frame, whatever folder the run is in and whatever prefix a log puts before."""
    place = "KeyError at proj/data.py:7 in collate"
    prefixed = "".join(f"[rank3]: {line}\n" for line in BAD_BATCH.format(run=4).splitlines())
    for text in (BAD_BATCH.format(run=1), BAD_BATCH.format(run=22), prefixed, HANDLED.replace("WARNING", "x")):
        assert place_of(text).endswith(" at proj/data.py:7 in collate")
    assert place_of(prefixed) == place
    found = of_exit(TABLE, 1, BAD_BATCH.format(run=7), "")
    assert (found.place, found.subject, found.line) == (place, "KeyError", "KeyError: 'x'")
    assert of_exit(TABLE, 1, "KeyError: 'x'", BAD_BATCH.format(run=7)).place == place


def test_a_place_where_there_is_little() -> None:
    """The last frame where none is the user's, no place without frames, and the inner one of a data loader's traceback."""
    library = 'Traceback (most recent call last):\n  File "/opt/lib/python3.11/json/decoder.py", line 5, in decode\nValueError: x'
    assert place_of(library) == "ValueError at json/decoder.py:5 in decode"
    assert place_of("ValueError: x") == ""
    loader = library + "\n\nKeyError: Caught KeyError in DataLoader worker process 0.\nOriginal " + BAD_BATCH
    assert place_of(loader) == "KeyError at proj/data.py:7 in collate"


def test_an_exception_or_nothing() -> None:
    """Any text of an exception has a signature, and no text has none."""
    assert of_exception(TABLE, " \n") is None
    found = of_exception(TABLE, "OSError: [Errno 28] No space left on device: '/ckpt/a'")
    assert found is not None
    assert found.signature == "disk.full"


def test_a_users_codes_and_reasons() -> None:
    """A user's table decides for its own codes and words."""
    mine = table(
        own(
            """[[signature]]
id = "mine.stop"
title = "t"
class = "PLAT"
action = "relaunch"
sources = ["exit", "platform"]
codes = ["exit:77", "reason:Recalled"]
""",
            "mine.toml",
        )
    )
    assert of_exit(mine, 77, "", "").signature == "mine.stop"
    assert of_platform(mine, "failed", 0, "Recalled").signature == "mine.stop"
    assert of_platform(TABLE, "failed", 0, "Recalled").signature == "node.failed"


def test_a_launcher_that_cannot_run_its_line() -> None:
    """The status of wrong usage, with our launcher's own words: no other node can run it either. Neither alone says so."""
    words = "dlrover-run: error: script: 'train.py' is not a file; for a module say -m, for a program --no-python"
    told = f"exit code 2{PRINTED}Warning: x {words}"
    found = of_platform(TABLE, "failed", 2, told)
    assert (found.signature, found.verdict, found.line) == ("launcher.usage", USER, words)
    assert of_platform(TABLE, "failed", 1, told).signature == "node.failed"
    assert of_platform(TABLE, "failed", 2, f"exit code 2{PRINTED}train.py: error: --data").signature == "node.failed"
    assert of_platform(TABLE, "failed", 2, "Evicted: low on memory").signature != "launcher.usage"
