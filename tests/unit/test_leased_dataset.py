"""`ElasticDataset(assign="lease")`: what it refuses, what a loader process sends, and when a batch counts."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dlrover_adapters.agent.slot import StepSlot  # noqa: E402
from dlrover_adapters.data import FolderStream, Followed, leases  # noqa: E402
from dlrover_adapters.data.leases import Wait  # noqa: E402
from dlrover_adapters.torch import ElasticDataset, ElasticStream, FlashCheckpoint, steps  # noqa: E402
from dlrover_adapters.torch.data.leased import Lent  # noqa: E402
from dlrover_core.data.in_work import InWork  # noqa: E402
from dlrover_core.data.poison import VARIABLE, Spot, told  # noqa: E402
from dlrover_core.data.ranges import Ranges, Span  # noqa: E402
from dlrover_core.data.trained import Trained  # noqa: E402
from dlrover_core.errors import SpecError  # noqa: E402
from dlrover_core.job.shards import LEASE, MODEL_LEASE, Terms  # noqa: E402


def sample(index: int) -> Any:
    """A sample that says which it is."""
    return torch.tensor(index)


def dataset(**more: Any) -> ElasticDataset:
    """Of ten samples, as they lie."""
    given = {
        "size": 10,
        "fetch": sample,
        "order": "file",
        "micro_batch": 2,
        "assign": "lease",
        "lineage": "server",
        **more,
    }
    return ElasticDataset("eval", **given)


class Line:
    """An agent that hands out what it is given, and hears what was used. ``gone``: sessions that hold nothing any more."""

    session = 5

    def __init__(self, *answers: Any) -> None:
        self.answers, self.used = list(answers), list[Span]()
        self.claimed, self.gone = list[Span](), set[int]()
        self.began: list[Any] = []
        self.back: list[Any] = []

    def claim(self, _dataset: str, span: Span, holder: int) -> bool:
        """A batch of a loader process."""
        self.claimed += [] if holder in self.gone else [span]
        return holder not in self.gone

    def restored(self, terms: Terms, of: int, step: int, spans: Ranges) -> None:
        """Where a generation goes on."""
        self.began.append((terms.assignment, of, step, tuple(spans)))

    def open(self, terms: Terms, shard: int) -> None:
        """A dataset is opened."""
        self.opened = (terms, shard)

    def draw(self, _dataset: str, _most: int, acked: Any, _within_s: float) -> Any:
        """The next answer."""
        self.used += acked
        return self.answers.pop(0)

    def acked(self, _dataset: str, spans: Any) -> None:
        """These were used."""
        self.used += spans

    def returned(self, _dataset: str, spans: Any) -> None:
        """These were not, and others are to have them."""
        self.back += [(span, len(self.used)) for span in spans]


def agent(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> Line:
    """This process's agent answers so."""
    line = Line(*answers)
    monkeypatch.setattr(leases, "line_of_process", lambda _name: line)
    return line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"assign": "rows"}, 'assign: \'rows\' of dataset .*give "cursor" or "lease"'),
        ({"lineage": "none"}, "lineage: 'none' of dataset"),
        ({"assign": "cursor"}, 'lineage: "server" of dataset .* goes with assign="lease" alone'),
        ({"global_batch": 8}, "global_batch: dataset .* no use"),
        ({"last": "drop"}, "last: dataset .* no use"),
        ({"shard": 0}, "shard: 0 of dataset"),
    ],
)
def test_what_cannot_be(more: dict[str, Any], words: str) -> None:
    """Field, value, and what to write."""
    with pytest.raises(SpecError, match=words):
        dataset(**more)


def test_a_stream_is_not_leased(tmp_path: Path) -> None:
    """A stream has no size to be divided, so `ElasticDataset.of` and `ElasticStream` refuse ``assign="lease"``."""
    (tmp_path / "a.jsonl").write_text("1\n")
    followed = Followed(FolderStream(tmp_path, kind="jsonl"))
    with pytest.raises(SpecError, match="'clicks': a stream has no size to be divided; leave assign= out"):
        ElasticDataset.of("clicks", followed, assign="lease", lineage="server")
    with pytest.raises(SpecError, match="assign: 'lease': a stream has no size to divide into leases"):
        ElasticStream(f"folder://{tmp_path}", assign="lease")


def test_it_has_no_position() -> None:
    """A checkpoint, steps and batches of all ranks are refused by what to do."""
    data = dataset()
    assert data.terms == Terms("eval", 10, 0, "file", "size=10 seed=0 order=file", 1, 0, LEASE)
    for wrong in (lambda: data.place, data.step, data.state_dict, lambda: data.division):
        with pytest.raises(SpecError, match=r"leave it out of FlashCheckpoint"):
            wrong()
    with pytest.raises(SpecError, match="leave it out of FlashCheckpoint"):
        FlashCheckpoint("", model=torch.nn.Linear(1, 1), data=data)
    cursor = ElasticDataset("train", size=10, fetch=sample)
    with pytest.raises(SpecError, match="is not leased"):
        cursor.over([])
    with pytest.raises(SpecError, match="is not leased"):
        cursor.done()


def test_a_batch_counts_when_the_next_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with `done` sooner; waits are gone through."""
    line = agent(monkeypatch, Span(0, 4), Wait("others have it"), Span(8, 10), None)
    batches = iter(dataset(shard=4))
    assert next(batches).tolist() == [0, 1]
    assert line.used == []
    assert next(batches).tolist() == [2, 3]
    assert next(batches).tolist() == [8, 9]
    assert line.used == [(0, 2), (2, 4)]
    assert list(batches) == []
    assert line.used == [(0, 2), (2, 4), (8, 10)]


def test_what_a_loader_process_read_ahead_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends positions with its batches, and says so when it has nothing; `over` counts what the script has used."""
    data = pickle.loads(pickle.dumps(dataset(shard=4)))  # noqa: S301  # as a spawned loader process gets it
    child = agent(monkeypatch, Span(0, 4), Wait("others have it"), Span(8, 9), None)
    monkeypatch.setattr("dlrover_adapters.torch.data.dataset.get_worker_info", lambda: True)
    with pytest.raises(SpecError, match=r"loader: dataset 'eval' is leased.*iterate over data.over\(loader\)"):
        next(iter(data))
    list(data.over(()))
    sent = list(data)
    assert [(one.start, one.end) for one in sent] == [(0, 2), (2, 4), (0, 0), (8, 9)]
    assert sent[2] == Lent("others have it", 0, 0)
    assert child.used == []
    parent = agent(monkeypatch)
    used = [(batch.tolist(), list(parent.used)) for batch in dataset().over(sent)]
    assert used == [([0, 1], []), ([2, 3], [(0, 2)]), ([8], [(0, 2), (2, 4)])]
    assert parent.used[-1] == (8, 9)


def test_quarantined_samples_are_left_out_and_suspected_ranges_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of which nothing is left counts without being seen; the next failure of a suspected range names half of it."""
    spots = (Spot("eval", 1, 2), Spot("eval", 1, 8), Spot("eval", 1, 9), Spot("eval", 1, -1, 0, 4, 6))
    monkeypatch.setenv(VARIABLE, told(spots, 1))
    line = agent(monkeypatch, Span(0, 10), None)
    data = dataset(shard=10, epochs=1)
    assert [batch.tolist() for batch in data] == [[0, 1], [3], [4], [5], [6, 7]]
    assert sorted(line.used) == [(0, 2), (2, 4), (4, 5), (5, 6), (6, 8), (8, 10)]
    assert data.left_out == (2, 8, 9)


def test_what_is_in_work_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sample that is fetched, and the batch that the script has, in this process and in the parent of a loader."""
    slot = StepSlot()
    monkeypatch.setattr(steps, "_signal", steps.StepSignal(1, 0, str(tmp_path / "nobody"), slot.fd))

    def fetch(index: int) -> Any:
        if index == 4:
            raise ValueError("bad sample")
        return sample(index)

    agent(monkeypatch, Span(12, 16))
    data = dataset(shard=4, epochs=2, fetch=fetch)
    batches = iter(data)
    next(batches)
    assert slot.in_work("") == InWork("eval", 1, 2, 4, -1, 8, False).text
    with pytest.raises(ValueError, match="bad sample"):
        next(batches)
    assert slot.in_work("ValueError: bad sample") == InWork("eval", 1, 4, 5, 4, 8, True).text
    for _ in data.over([Lent("one", 3, 4)]):
        assert slot.in_work("") == InWork("eval", 0, 3, 4, 3, 8, False).text
    assert slot.in_work("") == ""
    slot.close()


def test_a_sample_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere: nothing is left out in silence."""
    agent(monkeypatch, Span(0, 2), None)
    with pytest.raises(SpecError, match="None for index 0 of dataset 'eval'"):
        next(iter(dataset(fetch=lambda _: None)))


def test_a_loop_that_breaks_off_may_be_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next loop gets the rest of the shard, and its first question says that the batch before it was used, as `done` does."""
    line = agent(monkeypatch, Span(0, 6), Span(8, 10), None)
    data = dataset(shard=6)
    assert [batch.tolist() for _, batch in zip(range(1), data, strict=False)] == [[0, 1]]
    assert line.used == []
    assert [batch.tolist() for _, batch in zip(range(1), data, strict=False)] == [[2, 3]]
    data.done()
    assert line.used == [(0, 4)]
    assert [batch.tolist() for batch in data] == [[4, 5], [8, 9]]
    assert line.used == [(0, 4), (4, 6), (8, 10)]


def test_a_loop_over_a_loader_may_say_that_its_present_batch_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before it breaks off, where nobody asks for the next one."""
    line, data = agent(monkeypatch), dataset()
    sent = [Lent("one", 0, 2), Lent("two", 2, 4)]
    for _ in data.over(sent):
        break
    assert line.used == []
    for batch in data.over(sent[1:]):
        assert (batch, line.used) == ("two", [(0, 2)])
        data.done()
        break
    assert line.used == [(0, 2), (2, 4)]


def test_a_batch_whose_fetch_fails_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the script goes on after the error: no sample is left with a worker that has forgotten it."""
    agent(monkeypatch, Span(0, 6), None)
    broken = {2}

    def fetch(index: int) -> Any:
        if index in broken:
            broken.clear()
            raise OSError("a damaged record")
        return sample(index)

    data, used = dataset(shard=6, fetch=fetch), []
    for _ in range(2):
        try:
            used += [batch.tolist() for batch in data]
        except OSError:
            used.append("failed")
    assert used == ["failed", [2, 3], [4, 5]]


def test_persistent_loader_processes_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they had read ahead was thrown away: they hang up, so that the agent hands it out again."""
    data = dataset(shard=4)
    list(data.over(()))
    agent(monkeypatch, Span(0, 4), Span(0, 4), None)
    hung_up: list[str] = []
    monkeypatch.setattr(leases, "hang_up", hung_up.append)
    monkeypatch.setattr("dlrover_adapters.torch.data.dataset.get_worker_info", lambda: True)
    assert next(iter(data)).start == 0
    assert [one.start for one in data] == [0, 2]
    assert hung_up == ["eval"]


class Processes:
    """A loader whose processes draw what the agent was given back when they begin."""

    num_workers = 2

    def __init__(self, line: Line) -> None:
        self.line = line

    def __iter__(self) -> Iterator[Lent]:
        for span, _ in self.line.back:
            yield Lent(list(range(*span)), *span, 6)


@pytest.mark.parametrize("suspended", [False, True])
@pytest.mark.parametrize("lineage", ["server", "model"])
def test_loader_processes_get_the_rest_of_a_shard_that_a_loop_left(
    monkeypatch: pytest.MonkeyPatch, lineage: str, *, suspended: bool
) -> None:
    """The script's process gives it back before they begin, after it has said what was used: nobody else could use it.

    It does so where the loop only stands still, too, and that one has nothing of the shard any more.
    """
    line = agent(monkeypatch, Span(0, 6), None, None)
    if suspended:
        data = begun(lineage)
        loop = iter(data)
        assert next(loop).tolist() == [0, 1]
    else:
        data, loop = looked_at(lineage), iter(())
    assert list(data.over(Processes(line))) == [[2, 3, 4, 5]]
    assert line.back == [((2, 6), 1)]
    assert line.used[0] == (0, 2)
    assert [*line.used, *line.claimed] == [(0, 2), (2, 6)]
    assert list(loop) == list(data) == []
    assert line.back == [((2, 6), 1)]


@pytest.mark.parametrize("lineage", ["server", "model"])
def test_a_loop_takes_over_what_another_has_in_hand(monkeypatch: pytest.MonkeyPatch, lineage: str) -> None:
    """Of two loops in turn each sample comes once, and none stays with the one that stands still."""
    line = agent(monkeypatch, Span(0, 6), Span(6, 10), None, None)
    data = begun(lineage)
    first, second = iter(data), iter(data)
    assert next(first).tolist() == [0, 1]
    assert [next(second).tolist() for _ in range(2)] == [[2, 3], [4, 5]]
    assert next(second).tolist() == [6, 7]
    assert [one.tolist() for one in first] == [[8, 9]]
    assert list(second) == []
    assert sorted(line.used) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]


@pytest.mark.parametrize("lineage", ["server", "model"])
def test_a_forked_process_has_nothing_of_its_parent(monkeypatch: pytest.MonkeyPatch, lineage: str) -> None:
    """Neither what its parent put back, nor what it used, nor what a loop of it has in hand."""
    line = agent(monkeypatch, Span(0, 6), Span(6, 10), Span(10, 12), None)
    data = looked_at(lineage, epochs=2)
    list(data.over(type("Here", (), {"num_workers": 0, "__iter__": lambda _: iter(())})()))
    again = iter(data)
    assert [next(again).tolist() for _ in range(3)] == [[2, 3], [4, 5], [6, 7]]
    data._leased.work.put_back(Span(12, 14))
    before = list(line.used)
    monkeypatch.setattr("os.getpid", lambda: 1)
    monkeypatch.setattr("dlrover_adapters.torch.data.dataset.get_worker_info", lambda: True)
    again.close()
    assert [(one.start, one.end) for one in data] == [(10, 12)]
    assert line.used == before


def looked_at(lineage: str, **more: Any) -> ElasticDataset:
    """A dataset whose first batch was taken by a loop that broke off."""
    data = begun(lineage, **more)
    assert next(iter(data)).tolist() == [0, 1]
    return data


def begun(lineage: str, **more: Any) -> ElasticDataset:
    """A dataset from which may be drawn."""
    data = dataset(shard=6, lineage=lineage, **more)
    if lineage == "model":
        data._leased.go_on((0, 0), Ranges(), first=True)
    return data


# ---- with a model that is restored


def of_model(**more: Any) -> ElasticDataset:
    """The same, saved with a model."""
    return dataset(lineage="model", **more)


def test_what_is_trained_is_what_the_script_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is this rank's as it is taken; it is in the model once the script calls step(), before a save."""
    line = agent(monkeypatch, Span(4, 6), Span(6, 8), Wait("others have it"), None)
    data = of_model()
    assert data.terms == Terms("eval", 10, 0, "file", "size=10 seed=0 order=file", 1, 0, MODEL_LEASE)
    ckpt = FlashCheckpoint("", model=torch.nn.Linear(1, 1), data=data)
    leased = data.leased
    assert leased is not None
    with pytest.raises(
        SpecError, match=r"lineage: \"model\" of .* FlashCheckpoint\(data=...\) and call restore\(\) before"
    ):
        next(iter(data))
    ckpt._capture.data.leased.go_on((1, 3), b"")
    assert line.began == [(MODEL_LEASE, 1, 3, ())]
    leased.go_on((1, 3), Ranges([(0, 4)]), first=True)
    batches = iter(data)
    assert next(batches).tolist() == [4, 5]
    assert line.used == [(4, 6)]
    with pytest.raises(
        SpecError, match=r"data.step\(\) was never called: call it on each rank after each optimizer step"
    ):
        _ = leased.trained
    data.step()
    assert next(batches).tolist() == [6, 7]
    assert tuple(leased.trained.spans) == ((0, 6),)
    data.step()
    assert tuple(leased.trained.spans) == ((0, 8),)
    with pytest.raises(SpecError, match="restore once, before the first batch"):
        leased.go_on((1, 3), Ranges(), first=True)
    assert list(batches) == []


def test_a_rank_takes_what_its_loader_process_has_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is gone it takes nothing: others have that. With pauses it hears that there is nothing now."""
    line = agent(monkeypatch, Span(0, 4), Wait("others have it"), None)
    data = of_model(shard=4)
    leased = data.leased
    assert leased is not None
    leased.go_on((0, 0), Ranges(), first=False)
    assert line.began == []
    leased._counted = True
    sent = list(leased.in_loader())
    assert [(one.start, one.end, one.session) for one in sent] == [(0, 2, 5), (2, 4, 5), (0, 0, 0)]
    sent[1] = sent[1]._replace(session=4)
    line.gone.add(4)
    got = list(data.over(sent, pauses=True))
    assert [one if one is None else one.tolist() for one in got] == [[0, 1], None]
    assert line.claimed == [(0, 2)]
    data.step()
    assert tuple(leased.trained.spans) == ((0, 2),)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "does not say on which samples of dataset 'eval' it was trained"),
        (
            Trained("eval", "size=9 seed=0", Ranges()),
            "'size=9 seed=0'.* give the same size, seed, order, source and epochs",
        ),
        (Trained("eval", "size=10 seed=0 order=file", Ranges([(0, 11)])), "up to position 10 over all epochs"),
    ],
)
def test_another_checkpoint_is_refused(found: Trained | None, words: str) -> None:
    """With what it was trained on, and what to do."""
    leased = of_model().leased
    assert leased is not None
    with pytest.raises(SpecError, match=f"data: .*{words}"):
        leased.accept(found)
