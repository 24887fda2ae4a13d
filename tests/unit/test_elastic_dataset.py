"""`ElasticDataset`: every rank its own samples of one order, at any world size, and a position that only steps move."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlrover_adapters.torch import ElasticDataset, ElasticLoader  # noqa: E402
from dlrover_adapters.torch.data.dataset import DataEnded  # noqa: E402
from dlrover_adapters.torch.data.plan import division, steps  # noqa: E402
from dlrover_core.data.cut import Place  # noqa: E402
from dlrover_core.data.permutation import Order  # noqa: E402
from dlrover_core.data.quota import batches  # noqa: E402
from dlrover_core.errors import CoreError, SpecError  # noqa: E402
from dlrover_core.job.shards import Terms  # noqa: E402
from dlrover_core.runtime.checked import checked  # noqa: E402

SIZE, BATCH, MICRO = 103, 12, 2


def sample(index: int) -> Any:
    """A sample that says which it is."""
    return torch.tensor(index)


def dataset(rank: int = 0, world: int = 1, **more: Any) -> ElasticDataset:
    """One rank's."""
    given: dict[str, Any] = {"size": SIZE, "fetch": sample, "epochs": 2, "seed": 7, "ahead": 1000, **more}
    data = ElasticDataset("train", **given)
    data.divide(division(BATCH, MICRO, world, rank))
    return data


def drawn(data: ElasticDataset, **more: Any) -> list[list[int]]:
    """The micro-batches that a loader yields."""
    return [one.tolist() for one in DataLoader(data, batch_size=None, **more)]


def by_step(of: list[ElasticDataset]) -> Iterator[list[int]]:
    """Of each global step, the indices that all ranks take together; stand-ins left out."""
    loaded = [iter(DataLoader(one, batch_size=None)) for one in of]
    for each in zip(*(one.steps() for one in of), strict=True):
        found: list[int] = []
        for step, loader in zip(each, loaded, strict=True):
            for micro in step.micros:
                content = next(loader).tolist()
                found += content if micro.counts else []
        yield found
    assert all(next(one, None) is None for one in loaded)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("last", ["keep", "drop"])
def test_each_global_step_is_the_next_batch_of_the_order_at_every_world_size(world: int, last: str) -> None:
    """All ranks together take exactly the next B positions, each once, and an epoch's remainder is kept or left out."""
    found = list(by_step([dataset(rank, world, last=last) for rank in range(world)]))
    wanted = []
    for epoch in range(2):
        order = list(Order(SIZE, 7, epoch).indices(0, SIZE))
        wanted += [order[at : at + BATCH] for at in range(0, SIZE, BATCH)]
    assert found == [one for one in wanted if last == "keep" or len(one) == BATCH]


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_processes_yield_the_same_micro_batches_in_the_same_order(workers: int) -> None:
    """However many loader processes there are, a rank draws what it would draw itself."""
    data = dataset(1, 2)
    assert drawn(data, num_workers=workers, multiprocessing_context="fork") == drawn(data)


def test_loader_processes_that_are_spawned_begin_where_the_dataset_is() -> None:
    """The dataset is pickled to them with its position and its part of the world."""
    data = dataset(1, 2)
    for _ in range(9):
        data.step()
    assert drawn(data, num_workers=1, multiprocessing_context="spawn") == drawn(data)


@pytest.mark.nightly  # by day: spawned ones, and what pickle makes of a dataset
def test_loader_processes_of_a_forkserver() -> None:
    """As those that are spawned."""
    data = dataset(1, 2)
    data.step()
    assert drawn(data, num_workers=2, multiprocessing_context="forkserver") == drawn(data)


def test_what_a_loader_has_drawn_does_not_count() -> None:
    """Only steps move the position, and a dataset that goes on elsewhere begins with the first sample that did not count."""
    data = dataset(0, 2)
    loader = iter(DataLoader(data, batch_size=None, num_workers=2, prefetch_factor=4, multiprocessing_context="fork"))
    for _ in range(20):
        next(loader)
    assert data.place[1:3] == (0, 0)
    data.step()
    data.step()
    assert data.place[1:3] == (0, 24)
    assert data.samples == 24
    other = dataset(1, 3)
    other.load_state_dict(data.state_dict())
    assert next(by_step([other]))[:2] == list(Order(SIZE, 7, 0).indices(24 + 4, 24 + 6))


def test_a_run_that_changes_its_world_takes_each_sample_once() -> None:
    """4 ranks, then 2, then 3, then 1, changed in the middle of epochs: what is trained is the order, sample for sample."""
    found: list[int] = []
    state = dataset().state_dict()
    for world, count in ((4, 3), (2, 7), (3, 4), (1, 100)):
        ranks = [dataset(rank, world) for rank in range(world)]
        for one in ranks:
            one.load_state_dict(state)
        for step in itertools.islice(by_step(ranks), count):
            found += step
            for one in ranks:
                one.step()
        assert len({str(one.state_dict()) for one in ranks}) == 1
        state = ranks[0].state_dict()
    assert ranks[0].ended
    assert found == [index for epoch in range(2) for index in Order(SIZE, 7, epoch).indices(0, SIZE)]


def test_a_pickled_dataset_knows_its_place_and_its_part() -> None:
    """What a loader process gets is the dataset as it is now."""
    data = dataset(2, 3)
    data.step()
    other = pickle.loads(pickle.dumps(data))  # noqa: S301  # our own
    assert other.place == data.place
    assert other.division == data.division


def test_a_rank_without_samples_has_a_stand_in_and_all_ranks_the_same_rounds() -> None:
    """A short last batch leaves ranks without samples: they load one of weight zero, and all know how many rounds there are."""
    parts = [list(steps(batches(14, 12), division(12, 2, 4, rank), 0, 0)) for rank in range(4)]
    assert [[step.rounds for step in one] for one in parts] == [[2, 1]] * 4
    last = [one[-1].micros for one in parts]
    assert [[(micro.start, micro.end, micro.counts) for micro in one] for one in last] == [
        [(12, 13, True)], [(13, 14, True)], [(12, 13, False)], [(12, 13, False)],
    ]  # fmt: skip


def test_a_loop_without_elastic_batch_says_how_large_a_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset takes rank and world size from the launcher, and the script counts its steps."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = ElasticDataset("train", size=20, fetch=sample, order="file", global_batch=8, micro_batch=4, last="drop")
    for _content in DataLoader(data, batch_size=None):
        data.step()
    assert data.ended
    with pytest.raises(DataEnded, match="counted after the last of 1 epochs"):
        data.step()


@pytest.mark.parametrize(
    ("world", "given", "told"),
    [
        (
            1,
            {"size": 1000},
            r"last: 'keep' of dataset 'train': .* 488 samples, not 512.*last=\"drop\", or .*ElasticBatch",
        ),
        (4, {"size": 1025}, "last: 'keep' of dataset 'train': .* 1 samples, not 512"),
        (3, {"size": 1024}, "global_batch: 512 of dataset 'train' is no multiple of 3 ranks times 16"),
        (
            3,
            {"size": 1024, "micro_batch": None},
            "global_batch: 512 of dataset 'train' is no multiple of 3 ranks times 170",
        ),
        (
            2,
            {"size": 1024, "micro_batch": 48},
            "global_batch: 512 of dataset 'train' is no multiple of 2 ranks times 48",
        ),
    ],
)
def test_steps_that_differ_are_refused_without_elastic_batch(
    monkeypatch: pytest.MonkeyPatch, world: int, given: dict[str, Any], told: str
) -> None:
    """A loop that counts micro-batches would save a position that it is not at, or train on a stand-in."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    data = ElasticDataset("train", **{"fetch": sample, "global_batch": 512, "micro_batch": 16, **given})
    with pytest.raises(SpecError, match=told):
        next(iter(DataLoader(data, batch_size=None)))
    with pytest.raises(SpecError, match=told):
        data.step()
    data.divide(division(512, 16, world, 0))
    next(iter(DataLoader(data, batch_size=None)))


@pytest.mark.parametrize("micro", [16, None])
def test_all_steps_are_alike_without_elastic_batch(monkeypatch: pytest.MonkeyPatch, micro: int | None) -> None:
    """Every step has as many micro-batches of one size on every rank, so that a loop may count them."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    found: list[int] = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        data = ElasticDataset(
            "train", size=1025, fetch=sample, epochs=2, last="drop", global_batch=128, micro_batch=micro, ahead=99
        )
        each = drawn(data)
        assert [len(one) for one in each] == [micro or 32] * (2 * 1024 // 4 // (micro or 32))
        found += [one for content in each for one in content]
    assert len(found) == 2048
    assert all(found.count(one) <= 2 for one in range(1025))


def test_a_position_between_steps_is_refused_without_elastic_batch() -> None:
    """Of a checkpoint that was made with another global batch: the epoch's last step would be short."""
    data = ElasticDataset("train", size=24, fetch=sample, global_batch=8, micro_batch=4)
    data.begin(position=12)
    with pytest.raises(SpecError, match=r"last: 'keep' of dataset 'train': .* 4 samples, not 8"):
        next(iter(data))


def test_draws_that_nobody_counts_are_told() -> None:
    """A loop that counts no step would save a position that stands still: it is stopped, with what to do."""
    data = dataset(ahead=1)
    with pytest.raises(
        CoreError, match=r"2 global steps were drawn, and none of them was counted.*data\.step\(\).*ahead=2"
    ):
        drawn(data)
    prefetched = dataset(ahead=2)
    content = iter(prefetched)
    ahead = [next(content) for _ in range(12)]
    for _ in range(8):
        prefetched.step()
        ahead += [next(content) for _ in range(6)]
    assert len(ahead) == 60


def test_an_iteration_again_in_persistent_loader_processes_is_refused() -> None:
    """They would begin where they began before."""
    loader = DataLoader(
        dataset(), batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    assert len(list(loader)) == 104
    with pytest.raises((SpecError, RuntimeError), match="persistent_workers"):
        list(loader)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"size": 0}, "size: 0 of dataset 'train': give 1 or more"),
        ({"size": 2.5}, "size: 2.5 of dataset"),
        ({"epochs": -1}, "epochs: -1 of dataset"),
        ({"ahead": -1}, "ahead: -1 of dataset"),
        ({"fetch": [1, 2]}, "fetch: a function from an index to a sample, got list"),
        ({"seed": -1}, "seed: -1"),
        ({"seed": "x"}, "seed: 'x': give 0 to 2^64 - 1"),
        ({"seed": 1.5}, "seed: 1.5: give 0"),
        ({"order": "sorted"}, "order: 'sorted'"),
        ({"last": "pad"}, "last: 'pad'"),
        ({"chunk": 0}, "chunk: 0"),
    ],
)
def test_what_cannot_be_right_is_refused_by_field_value_and_remedy(given: dict[str, Any], told: str) -> None:
    """At once, where the dataset is made."""
    with pytest.raises(SpecError) as refused:
        dataset(**given)
    assert str(refused.value).startswith(told)


def test_names_that_are_none_are_refused() -> None:
    """A name is what a position is found by."""
    with pytest.raises(SpecError, match="dataset: '' is no name"):
        ElasticDataset("", size=1, fetch=sample)
    with pytest.raises(SpecError, match="name: a text"):
        ElasticDataset(3, size=1, fetch=sample)  # type: ignore[arg-type]


def test_a_step_of_unknown_size_a_global_batch_below_the_world_and_a_batch_of_none() -> None:
    """Each with what to give instead."""
    data = ElasticDataset("train", size=20, fetch=sample)
    with pytest.raises(SpecError, match="global_batch: dataset 'train' was not told"):
        iter(data).__next__()
    with pytest.raises(SpecError, match="global_batch: 2 is less than the world size of 3"):
        division(2, 1, 3, 0)
    with pytest.raises(SpecError, match="micro_batch: 0: give 1 or more"):
        division(2, 0, 1, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fetch_of_none_is_refused_with_its_index(workers: int) -> None:
    """A sample is never left out in silence, in a loader process neither."""
    first = next(Order(SIZE, 7, 0).indices(0, 1))
    data = dataset(fetch=lambda index: None if index == first else sample(index))
    with pytest.raises((SpecError, RuntimeError), match=f"fetch: None for index {first} of dataset 'train'"):
        drawn(data, num_workers=workers, **({"multiprocessing_context": "fork"} if workers else {}))


def test_a_position_in_other_data_is_refused() -> None:
    """Positions of another size, seed, order or source are positions of other samples."""
    state = dataset().state_dict()
    for other in ({"size": 104}, {"seed": 8}, {"order": "file"}, {"chunk": 4}, {"fingerprint": "f" * 64}):
        with pytest.raises(SpecError, match="data: the checkpoint's position is in dataset 'train' with"):
            dataset(**other).load_state_dict(state)
    with pytest.raises(SpecError, match="is of dataset 'val'"):
        dataset().load_state_dict({**state, "dataset": "val"})
    with pytest.raises(SpecError, match="is no position of dataset 'train'"):
        dataset().load_state_dict({"step": 3})
    dataset(epochs=5, last="drop").load_state_dict(state)


def test_a_checkpoint_without_a_position_is_refused_unless_the_script_says_where_to_begin() -> None:
    """It is told by name; `begin` says what it is to be taken for, and a checkpoint's own position comes before that."""
    with pytest.raises(
        SpecError, match=r"no position of dataset 'train'.*data\.begin\(epoch=\.\.\., position=\.\.\.\)"
    ):
        dataset().accept(None)
    data = dataset()
    data.begin(epoch=1, position=24)
    assert "begins at epoch 1, position 24, as begin() said" in data.accept(None)
    data.go_on(None)
    assert data.place[1:3] == (1, 24)
    data.go_on(Place("train", 0, 12, data.place.fingerprint))
    assert data.place[1:3] == (0, 12)
    with pytest.raises(SpecError, match="position: epoch 0, position 103"):
        data.begin(position=103)
    with pytest.raises(SpecError, match=r"epoch 9, position 1 of dataset 'train': give 0 to .*, in epochs 0 to"):
        dataset(epochs=2).begin(epoch=9, position=1)
    dataset(epochs=2).begin(epoch=2)
    dataset(epochs=0).begin(epoch=9, position=1)


def test_what_is_registered_fits_into_a_message() -> None:
    """Any seed does, and any number of samples; the batch is known once it is asked for."""
    data = ElasticDataset("train", size=2**62, fetch=str, epochs=2, seed=2**64 - 1, fingerprint="v1", global_batch=8)
    terms = checked(Terms, data.terms)
    assert (terms.size, terms.epochs, terms.global_batch, terms.assignment) == (2**62, 2, 8, "cursor")
    assert terms.fingerprint == data.place.fingerprint
    assert ElasticDataset("train", size=5, fetch=str).terms[-3] == 0


def test_a_loop_left_within_a_step_begins_that_step_anew() -> None:
    """Else each step after it would be made of the halves of two, and the samples of one half be trained by nobody."""
    data = ElasticDataset("t", size=16, order="file", global_batch=4, micro_batch=2, fetch=lambda index: index)
    loader = ElasticLoader(data)
    assert [next(iter(loader)).tolist() for _ in range(2)] == [[0, 1], [0, 1]]
    whole = iter(loader)
    assert [next(whole).tolist() for _ in range(2)] == [[0, 1], [2, 3]]


def test_two_threads_in_two_epochs_have_the_orders_of_theirs() -> None:
    """One draws ahead while the other makes steps: what is kept may be the other's at any time, what is returned may not."""
    data = dataset()

    class Swapped:
        """As if the other thread had put its order there between two looks."""

        def __set_name__(self, owner: type, name: str) -> None:
            pass

        def __get__(self, of: Any, _: type) -> Order:
            return of.__dict__["kept"]

        def __set__(self, of: Any, found: Order) -> None:
            if found.epoch == 0:
                of.__dict__["kept"] = found

    data.__dict__["kept"] = data.__dict__.pop("_order")
    swapping = type("Swapping", (ElasticDataset,), {"_order": Swapped()})
    data.__class__ = swapping
    assert data._order_of(1).epoch == 1
    assert data._order_of(0).epoch == 0
