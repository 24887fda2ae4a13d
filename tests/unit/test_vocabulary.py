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


@pytest.mark.parametrize(
    ("words", "end", "likely"),
    [
        # Words of no program that is known, before an end that tells nothing: a bare end, a launcher's word, a general symptom.
        ("frobfs: libfabric: could not open the endpoint", "RuntimeError: NCCL error: unhandled system error", "efa.error"),
        ("zork: unable to spawn a process for shard 7", "MPI_ABORT was invoked on rank 0", "processes.exhausted"),
        ("frob7: rdma: retries exceeded, giving up on that peer", "Aborted (core dumped)", "ib.retry_exceeded"),
        ("zorkd: job killed: memory usage limit", "Exited with exit code 143.", "cgroup.oom"),
        ("frob: quantum decoder failed: no video stream in shard 7", "Segmentation fault (core dumped)", "data.sample"),
        # A runtime of another language says so in one line.
        ("frobtran: severe (29): file not found, unit 15", "MPI_ABORT was invoked on rank 0", "exception.FileNotFoundError"),
    ],
)  # fmt: skip
def test_a_symptom_is_explained_by_words_beside_it(words: str, end: str, likely: str) -> None:
    """Where all that is known is an end or a general symptom, the first words that fail say what it is likely about."""
    found = answer(f"step 10 loss 2.1\n{words}\n{end}\n")
    assert found is not None
    assert (found.judgement.signature, found.unknown) == (likely, True)
    assert found.judgement.action not in EVICTS


@pytest.mark.parametrize(
    ("words", "end", "kept"),
    [
        # What was lived through, what says no more than the end itself, and what does not kill anybody.
        ("frob: the loader failed to decode a sample, skipping it", "Segmentation fault (core dumped)", "exit.sigsegv"),
        ("launcher: container 3 failed", "Aborted (core dumped)", "exit.sigabrt"),
        ("frob: failed to decode a sample of the archive", "Killed", "exit.sigkill"),
        (
            "frob: failed to decode a sample of the archive",
            RAISED.format("KeyError: 'x'").strip(),
            "exception.KeyError",
        ),
    ],
)
def test_what_does_not_explain_a_symptom(words: str, end: str, kept: str) -> None:
    """A guess displaces no cause that is known, and no kill that it cannot have led to."""
    found = answer(f"step 10 loss 2.1\n{words}\n{end}\n")
    assert found is not None
    assert found.judgement.signature == kept


def test_a_warning_explains_a_symptom_only_where_nothing_else_does() -> None:
    """Libraries warn of what ends them a moment later; a line that fails outright comes first."""
    warned, failed = (
        "WARNING: ray: the node is dead, it missed heartbeats",
        "frob: cannot go on: disk full",
    )
    alone = answer(f"{warned}\nAborted (core dumped)\n")
    both = answer(f"{warned}\n{failed}\nAborted (core dumped)\n")
    assert alone is not None
    assert both is not None
    assert (alone.judgement.signature, both.judgement.signature) == ("ray.node_died", "disk.full")


@pytest.mark.parametrize(
    ("raised", "likely"),
    [
        # By its words, though anybody raises that type; by the words of its chain; by the library whose own type it is.
        ("AssertionError: frob: the checkpoint does not match this model", "checkpoint.mismatch"),
        ("zorkclient.FrobError: it did not work", "exception.FrobError"),
        ("wandb.errors.FrobError: it did not work", "tracker.unreachable"),
        ("botocore.frob.FrobError: it did not work", "data.connection"),
    ],
)
def test_an_exception_is_likely_about_its_words_or_its_library(raised: str, likely: str) -> None:
    """What a type tells nothing of, its message does, or the purpose of the library that it belongs to."""
    found = answer(RAISED.format(raised))
    assert found is not None
    assert found.judgement.signature == likely


def test_an_exception_is_likely_about_what_it_was_raised_for() -> None:
    """Of a chain whose root tells nothing, the other exceptions' words count."""
    chain = (
        RAISED.format("FrobError: 17") + "\nThe above exception was the direct cause of the following exception:\n\n"
    )
    found = answer(chain + RAISED.format("ZorkError: could not decode archive member 7"))
    assert found is not None
    assert found.judgement.signature == "data.sample"


def test_a_tracker_s_connection_is_the_tracker_s() -> None:
    """A name without an address, or a refusal, is of the server that the library speaks to; without such a library it stays."""
    head = 'Traceback (most recent call last):\n  File "/w/train.py", line 7, in step\n    x\n'
    library = '  File "/opt/py/site-packages/mlflow/zork.py", line 31, in send\n    x\n'
    words = "ConnectionError: [Errno -2] Name or service not known\n"
    tracked, other = answer(f"{head}{library}{words}"), answer(f"{head}{words}")
    assert tracked is not None
    assert other is not None
    assert (tracked.judgement.signature, other.judgement.signature) == ("tracker.unreachable", "net.dns")


def test_a_guess_is_never_sure() -> None:
    """Consequences that a signature knows are answered surely where nothing else is there; guessed ones are not."""
    known = answer(
        "[rank0]: torch.distributed.DistStoreError: Timed out after 6 seconds waiting for workers. 1/2 workers joined."
    )
    guessed = answer("frobnicator: the peers of the collective did not join in time")
    assert known is not None
    assert guessed is not None
    assert (known.unknown, guessed.unknown) == (False, True)
