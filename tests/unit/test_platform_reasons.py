"""A backend's word about a node's end reaches the verdict: through `Observed`, `NodeFailed` and the table."""

from __future__ import annotations

import signal

import pytest
from drive import Drive

from dlrover_backends.shared import process
from dlrover_core.diagnosis import signatures
from dlrover_core.diagnosis.classify import of_platform
from dlrover_core.job import incidents, nodes

TABLE = signatures.table()
WORDS = {
    code.partition(":")[2]: one.id for one in TABLE.by_id.values() for code in one.codes if code.startswith("reason:")
}


@pytest.mark.parametrize("detail", ["", ": container trainer, with some words of the platform's"])
def test_a_platforms_own_word_decides(detail: str) -> None:
    """Every reason that a signature claims is known by it, alone and before a colon and whatever the platform adds."""
    wrong = {
        word: found.signature
        for word, known in WORDS.items()
        if (found := of_platform(TABLE, "failed", 137, f"{word}{detail}")).signature != known
    }
    assert not wrong


@pytest.mark.parametrize("word", ["OOMKilled", "Preempted", "Evicted", "NODE_FAIL"])
def test_the_word_survives_on_its_way(word: str) -> None:
    """What a backend observes is in the log word for word, and the incident's verdict is the signature's."""
    job = Drive(nodes_min=1, nodes_max=2).up()
    job.observe("worker-0-0", "failed", 137, f"{word}: by the platform")
    failed = next(one.event for one in job.new if isinstance(one.event, nodes.NodeFailed))
    assert (failed.exit_code, failed.reason) == (137, f"{word}: by the platform")
    told = next(one.event for one in job.new if isinstance(one.event, incidents.Diagnosed))
    assert told.signature == WORDS[word]


def test_what_the_local_backend_says_is_understood() -> None:
    """It knows how the process ended and no more: a signal's name, or a code, has the verdict of that signal or code."""
    for code, known in ((-signal.SIGKILL, "exit.sigkill"), (-signal.SIGSEGV, "exit.sigsegv")):
        assert of_platform(TABLE, "failed", code, process.told(code)).signature == known
