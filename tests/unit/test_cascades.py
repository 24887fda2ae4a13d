"""Whom do the complaints of ranks mean?"""

from __future__ import annotations

import pytest

from dlrover_core.diagnosis.cascades import Member, named
from dlrover_core.diagnosis.evidence import Evidence
from dlrover_core.diagnosis.matching import Matcher
from dlrover_core.diagnosis.signatures import table

MEMBERS = [Member("worker-0-0", "a", 0, 2), Member("worker-1-0", "10.77.0.2", 2, 2)]


def complaint(subject: str) -> Evidence:
    """Of rank 0 about somebody."""
    return Evidence(1, 0, "worker-0-0", 0, -9, 5, "", "CASC", "store.timeout", 0.6, subject=subject)


@pytest.mark.parametrize(
    ("subject", "meant"),
    [
        ("3", {(3, "worker-1-0", "10.77.0.2")}),
        ("10.77.0.2:41", {(-1, "worker-1-0", "10.77.0.2")}),
        ("10.77.0.2, 52885", {(-1, "worker-1-0", "10.77.0.2")}),
        ("10.77.0.1, 52885", set()),
        ("52885", set()),
    ],
)
def test_a_number_that_no_rank_has_names_no_rank(subject: str, meant: set[tuple[int, str, str]]) -> None:
    """Torch's store says "(10.77.0.1, 52885)": that is a port, and there are four ranks."""
    assert named([complaint(subject)], MEMBERS) == meant


def test_a_store_that_times_out_names_the_host_without_its_port() -> None:
    """Also where nobody knows how many ranks there were, as in `dlrover diagnose`."""
    words = "The client socket has timed out after 2000ms while trying to connect to (10.77.0.1, 52885)."
    hits = Matcher(table()).scan(words, "log")
    assert [(one.signature.id, one.subject) for one in hits] == [("store.timeout", "10.77.0.1")]
