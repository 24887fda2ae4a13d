"""What an agent says to ranks that name their datasets: another one of a name is refused on the spot, and so are too many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_adapters.agent.checkpoints.ranks import Ranks
from dlrover_adapters.agent.checkpoints.vault import Caller, Refused
from dlrover_core.data.streams import ENDLESS
from dlrover_core.job.shards import CURSOR, DATASETS_MAX, Datasets, Terms

RANK, OTHER = Caller(1, 0, 0, 2), Caller(1, 1, 1, 2)
TRAIN = Terms("train", 100, 7, "shuffled", "f00d", 2, 0, CURSOR)


def site(*known: Terms) -> Any:
    """A node whose order has these."""
    return SimpleNamespace(order=SimpleNamespace(part=lambda _: Datasets(known)))


def ranks() -> Ranks:
    """Both of a generation have greeted."""
    found = Ranks()
    for caller in (RANK, OTHER):
        found.greeted(caller)
    return found


def test_another_one_of_a_name_is_refused_with_both_told() -> None:
    """Whoever has it: the job's log, or another rank of the node. The same one is welcome, and one that grew."""
    of_job = site(TRAIN)
    ranks().dataset(of_job, RANK, TRAIN._replace(global_batch=8))
    with pytest.raises(
        Refused, match=r"the job has it with 100 samples.*this one has 100 samples, seed 8.*another name"
    ):
        ranks().dataset(of_job, RANK, TRAIN._replace(seed=8))
    here = ranks()
    here.dataset(site(), RANK, TRAIN)
    with pytest.raises(
        Refused, match=r"another rank here has it with 100 samples.*this one has 99 samples.*another name"
    ):
        here.dataset(site(), OTHER, TRAIN._replace(size=99))


def test_a_name_that_a_partition_of_a_stream_has_is_refused() -> None:
    """Whoever has the other one; a job whose log has both goes on."""
    stream, within = TRAIN._replace(name="clicks", size=ENDLESS), TRAIN._replace(name="clicks/0")
    for known, terms in ((stream, within), (within, stream)):
        here = ranks()
        here.dataset(site(), RANK, known)
        for of_job, there in ((site(known), ranks()), (site(), here)):
            with pytest.raises(
                Refused, match=f"name: '{terms.name}', beside dataset '{known.name}': 'clicks/0' would be"
            ):
                there.dataset(of_job, OTHER, terms)
    ranks().dataset(site(stream, within), RANK, within)


def test_more_datasets_than_a_job_may_have_are_refused() -> None:
    """The leader would refuse the last one, and nobody would hear of it."""
    known = tuple(TRAIN._replace(name=f"d{number}") for number in range(DATASETS_MAX - 1))
    here = ranks()
    for terms in (TRAIN, TRAIN, *known):
        here.dataset(site(*known), RANK, terms)
    with pytest.raises(
        Refused, match=f"dataset 'more': the job has {DATASETS_MAX} datasets already: mix several into one"
    ):
        here.dataset(site(*known), OTHER, TRAIN._replace(name="more"))
