"""Words that no signature knows: what they are likely about is told as a guess, and never as more."""

from __future__ import annotations

import pytest

from dlrover_core.diagnosis import answers, classify, offline, reading, rows, vocabulary
from dlrover_core.diagnosis.answers import Answer
from dlrover_core.diagnosis.matching import Matcher, matcher
from dlrover_core.diagnosis.procedure import EVICTS, KNOWN
from dlrover_core.diagnosis.signatures import table

RAISED = 'Traceback (most recent call last):\n  File "/w/train.py", line 7, in step\n    x\n{0}\n'


def answer(text: str) -> Answer | None:
    """What a log says."""
    lines = text.strip("\n").split("\n")
    given = [rows.Text("0.log", range(1, len(lines) + 1), lines)]
    return answers.answer(reading.read(given, matcher(table())))


@pytest.mark.parametrize(
    ("text", "likely", "verdict"),
    [
        ("frobnicator: the peers of the collective did not join in time", "nccl.timeout", "CASC"),
        (RAISED.format("RuntimeError: quantum backend: failed to allocate tiles in NPU HBM"), "cuda.oom", "RES"),
        (RAISED.format("FrobError: could not decode archive member 7"), "data.sample", "DATA"),
        (RAISED.format("RuntimeError: zorkfs: the mount of the file server was lost"), "storage.gone", "DATA"),
        ("zorkd: fatal: spot capacity ended, this host leaves", "k8s.preempted", "PLAT"),
    ],
)
def test_unknown_words_are_a_guess(text: str, likely: str, verdict: str) -> None:
    """The family is named, the answer is "unknown", it says where to look, and no host is given up for it."""
    found = answer(text)
    assert found is not None
    assert (found.judgement.signature, found.judgement.verdict) == (likely, verdict)
    assert found.unknown
    assert found.judgement.confidence < KNOWN
    assert found.judgement.action not in EVICTS
    assert found.next


@pytest.mark.parametrize(
    "text",
    [
        "step 100 | loss 2.1\nepoch done without errors\nall ranks joined the collective in time",
        "WARNING: connection to the tracker timed out, will retry",
        "0 errors, 0 failures on 8 GPUs",
        "frobnicator: could not frob the widget",
    ],
)
def test_what_is_no_failure_or_about_nothing_is_no_guess(text: str) -> None:
    """A log that went well, what was lived through, and words of no family: nothing is said."""
    assert answer(text) is None


def test_a_run_that_goes_on_has_not_failed() -> None:
    """Steps after the words say that they ended nothing."""
    assert (
        answer("rank 3: a peer of the collective was lost\n" + "".join(f"step {at} loss 2.1\n" for at in range(5)))
        is None
    )


def test_what_is_known_is_never_guessed() -> None:
    """Words that a signature knows, and a type that tells, count before any vocabulary."""
    found = answer(RAISED.format("KeyError: 'peers of the collective timed out'"))
    assert found is not None
    assert found.judgement.signature == "exception.KeyError"


def test_a_job_is_never_judged_by_it() -> None:
    """What an agent's or a master's own classification says of such words is what it always was."""
    text = RAISED.format("RuntimeError: zorkfs: the mount of the file server was lost")
    assert vocabulary.likeliest(text) == "storage.gone"
    assert classify.of_exit(table(), 1, text, "").signature == "exception.RuntimeError"
    assert (
        offline.diagnose([offline.Observation(0.0, "error", "n", "h", 0, text, 1)]).signature
        == "exception.RuntimeError"
    )


def test_every_family_is_a_published_signature() -> None:
    """What a guess names can be looked up."""
    names = [name for name, _ in vocabulary.families()]
    assert len(names) > 20
    assert [name for name in names if table().get(name) is None] == []


@pytest.mark.parametrize(
    ("line", "signature"),
    [
        ("OSError: [Errno 116] Veraltetes Datei-Handle: '/mnt/x'", "storage.stale_handle"),
        ("thread 'main' panicked: shard: Custom { error: Stale (os error 116) }", "storage.stale_handle"),
        ("H5FD__sec2_open(): unable to open file: errno = 107, error message = 'x'", "storage.gone"),
        ("write to shard 3 gave errno 122", "disk.full"),
        ("node7:1:2 [0] NCCL WARN NET/IBext: Got completion from peer 10.0.0.7<4> with status=12 opcode=9", "ib.retry_exceeded"),
        ("rxe0: wc_status=4 on qp 77", "ib.fatal"),
        ("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: new words", "xla.oom"),
        ("jax.errors.JaxRuntimeError: DEADLINE_EXCEEDED: new words", "jax.barrier_timeout"),
        ("n7:1:2 [0] some_new_call:88 NCCL WARN NET/OFI words of a later version", "efa.error"),
        ("SignalException: Process 40121 got signal: 1", "exit.signal"),
        ("x1921c1s2b0n0: call gave ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY", "cuda.oom"),
    ],
)  # fmt: skip
def test_a_code_is_known_whatever_the_words(line: str, signature: str) -> None:
    """Error numbers, work completions and XLA's statuses mean the same in any wording."""
    hit = Matcher.best(matcher(table()).scan(line, "log"))
    assert hit is not None
    assert hit.signature.id == signature
