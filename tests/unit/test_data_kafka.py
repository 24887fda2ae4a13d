"""Kafka: the port's promises on librdkafka's mock, the plan of several partitions, and what is said when something is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("confluent_kafka")

from kafka_brokers import Tansu, Writer, mock_broker
from torch import nn
from torch.utils.data import DataLoader

from dlrover_adapters.data import KafkaStream, kafka
from dlrover_adapters.data.kafka import address_of
from dlrover_adapters.data.stream_plan import Book, Run, divided
from dlrover_adapters.torch import ElasticStream, FlashCheckpoint
from dlrover_adapters.torch.checkpoint.positions import DataSource
from dlrover_core.data.cut import unpack
from dlrover_core.data.streams import (
    AccessRefused,
    Extent,
    Message,
    OffsetAhead,
    Stream,
    StreamError,
    StreamGone,
    StreamUnavailable,
    UnknownPartition,
)
from dlrover_core.errors import SpecError
from dlrover_core.testing.stream_conformance import StreamConformance


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    """One cluster for all tests: each has a topic of its own."""
    with mock_broker() as address:
        yield address


class KafkaStand:
    """A topic of the mock, which keeps 5 MiB of a partition."""

    partition = "0"

    def __init__(self, address: str, topic: str) -> None:
        self.url = f"kafka://{address}/{topic}?identity=name&log_level=0"
        self.writer = Writer(address, topic)
        self.writer.make()
        self.stream: Stream = KafkaStream(self.url)

    def write(self, count: int) -> None:
        """As the kit says."""
        self.writer.write(0, count)

    def values(self, messages: Sequence[Message]) -> list[int]:
        """Each message is a number."""
        return [int(one.value) for one in messages]

    def another(self) -> Stream:
        """Another client."""
        return KafkaStream(self.url)

    def trim(self) -> bool:
        """What is large drives out what is old."""
        self.writer.write(0, 6, pad=900_000)
        return True


class TestKafka(StreamConformance):
    """A topic."""

    @pytest.fixture(autouse=True)
    def _mock(self, mock: str, request: pytest.FixtureRequest) -> None:
        self.address, self.topic = mock, request.node.name

    @contextlib.contextmanager
    def make_stand(self) -> Iterator[KafkaStand]:
        """A new topic."""
        stand = KafkaStand(self.address, self.topic)
        yield stand
        stand.stream.close()


def opened(address: str, topic: str, **more: object) -> ElasticStream:
    """A stream of the mock's topic."""
    return ElasticStream(f"kafka://{address}/{topic}?identity=name&log_level=0", parse=int, **more)  # type: ignore[arg-type]


# ---- the plan


def test_batches_take_of_each_partition_its_share_of_what_there_is() -> None:
    """So none falls behind; what fills no batch waits."""
    extents = {"0": Extent(0, 30), "1": Extent(5, 15), "2": Extent(0, 0)}
    found = divided(extents, {"0": 0, "1": 5, "2": 0}, 8, 99)
    assert [sum(many for _, many in one) for one in found] == [8] * 5
    assert found[0] == (("0", 6), ("1", 2))
    book = Book(0, {})
    book.add({"0": 0, "1": 5, "2": 0}, found[:2])
    assert book.batch_at(8).pieces(8, 16) == [Run("0", 6, 6), Run("1", 7, 2)]
    assert book.batch_at(8).pieces(13, 15) == [Run("0", 11, 1), Run("1", 7, 1)]
    book.consume(8)
    assert book.offsets == {"0": 6, "1": 7, "2": 0}
    assert book.planned_to == {"0": 12, "1": 9, "2": 0}
    assert divided(extents, book.planned_to, 25, 9) == []


class Toy:
    """Partitions in memory."""

    name, fingerprint = "toy://toy", "toy:1"

    def __init__(self, **sizes: int) -> None:
        self.extent = {name[1:]: Extent(0, size) for name, size in sizes.items()}
        self.committed: list[Mapping[str, int]] = []
        self.unavailable = 0

    def extents(self) -> Mapping[str, Extent]:
        """As they are told to be."""
        if self.unavailable:
            self.unavailable -= 1
            raise StreamUnavailable("not now")
        return self.extent

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
        """Partition and offset."""
        end = min(offset + most, self.extent[partition].end)
        return [Message(one, 1000 * int(partition) + one) for one in range(offset, end)]

    def commit(self, offsets: Mapping[str, int], /) -> None:
        """Written down."""
        self.committed.append(dict(offsets))

    def close(self) -> None:
        """Nothing is open."""


def train(data: ElasticStream, steps: int) -> list[int]:
    """The samples of so many global steps."""
    found: list[int] = []
    for number, one in enumerate(data, 1):
        found += one.tolist()
        data.step()
        if number == steps:
            break
    return found


def test_the_offsets_of_all_partitions_are_in_the_cut() -> None:
    """A new world goes on with the next message of each partition, from the cut alone."""
    toy = Toy(p0=20, p1=10)
    data = ElasticStream(toy, global_batch=6)
    source = DataSource({("data",): data})
    first = train(data, 2)
    cut = unpack(source.cut())
    assert {one.dataset: one.position for one in cut} == {"toy": 12, "toy/0": 8, "toy/1": 4}
    assert toy.committed == [{"0": 4, "1": 2}]
    other = ElasticStream(toy, global_batch=3)
    again = DataSource({("data",): other})
    assert list(again.accept(cut)) == []
    again.load({"cut": cut, "data.cut": cut} | dict.fromkeys(again.roots(), cut))
    assert other.samples == 12
    assert sorted(first + train(other, 6)) == sorted([*range(20), *range(1000, 1010)])
    with pytest.raises(SpecError, match="no offsets of its partitions"):
        list(again.accept(cut[:1]))


def test_a_scripts_own_checkpoint_has_the_offsets() -> None:
    """As plain numbers."""
    toy = Toy(p0=6, p1=6)
    data = ElasticStream(toy, global_batch=4)
    first = train(data, 1)
    other = ElasticStream(toy, global_batch=4)
    other.load_state_dict(data.state_dict())
    assert sorted(first + train(other, 2)) == [*range(6), *range(1000, 1006)]
    with pytest.raises(SpecError, match="no position of stream"):
        other.load_state_dict({"position": 3})


def test_what_is_wrong_with_partitions_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Removed before consumed, gone, made anew; new ones are taken."""
    toy = Toy(p0=10)
    data = ElasticStream(toy, global_batch=4)
    state = (train(data, 1), data.state_dict())[1]

    def resumed(lost: str = "refuse") -> ElasticStream:
        found = ElasticStream(toy, global_batch=4, lost=lost)
        found.load_state_dict(state)
        return found

    toy.extent = {"0": Extent(6, 10)}
    with pytest.raises(StreamError, match=r'2 messages were removed .* begin at 6: give lost="skip"'):
        train(resumed(), 1)
    assert train(resumed("skip"), 1) == [6, 7, 8, 9]
    toy.extent = {"1": Extent(0, 9)}
    with pytest.raises(UnknownPartition, match=r'partition 0 is gone; it was consumed up to offset 4: .*lost="skip"'):
        train(resumed(), 1)
    caplog.clear()
    assert train(resumed("skip"), 2) == list(range(1000, 1008))
    assert caplog.text.count("partition 0 is gone; it was consumed up to offset 4") == 1
    toy.extent = {"0": Extent(0, 2)}
    with pytest.raises(OffsetAhead, match="made anew"):
        train(resumed(), 1)
    toy.extent = {"0": Extent(0, 6), "7": Extent(2, 4)}
    caplog.clear()
    assert train(resumed(), 1) == [4, 5, 7002, 7003]
    assert "partition 7 is new, and is read from offset 2 on" in caplog.text


def test_a_broker_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, and training goes on when it is back."""
    monkeypatch.setattr("dlrover_adapters.torch.data.stream.WAIT_S", 0.01)
    toy = Toy(p0=8)
    data = ElasticStream(toy, global_batch=4)
    toy.unavailable = 3
    assert train(data, 2) == list(range(8))
    assert not toy.unavailable


def test_the_end_is_that_of_the_first_look(caplog: pytest.LogCaptureFixture) -> None:
    """What comes while a batch is waited for is in it, and partitions that were there at first are not new."""

    class Growing(Toy):
        def extents(self) -> Mapping[str, Extent]:
            found, self.extent = self.extent, {one: Extent(0, end + 2) for one, (_, end) in self.extent.items()}
            return found

    assert train(ElasticStream(Growing(p0=5, p1=1), global_batch=8, begin="end"), 1) == [
        5,
        6,
        7,
        8,
        1001,
        1002,
        1003,
        1004,
    ]
    assert not caplog.text


def test_holes_are_refused() -> None:
    """A compacted topic has no positions."""

    class Compacted(Toy):
        def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
            return [one for one in super().read(partition, offset, most, wait_s) if one.offset != 2]

    with pytest.raises(StreamError, match="offsets are left out"):
        train(ElasticStream(Compacted(p0=8), global_batch=4), 1)


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("http://a/b", "stream"),
        ("kafka://a:9092", "stream"),
        ("kafka://u:p@a/b", "stream"),
        ("kafka://a/b?identity=x", "identity"),
    ],
)
def test_addresses_are_looked_at(url: str, field: str) -> None:
    """Field, value, remedy; no password is told."""
    with pytest.raises(SpecError) as caught:
        address_of(url)
    assert caught.value.field == field
    assert "u:p" not in str(caught.value)


def test_bad_input_is_refused() -> None:
    """Before anything is read."""
    for given, field in (({"begin": "now"}, "begin"), ({"lost": "no"}, "lost"), ({"config": {"a": 1}}, "config")):
        with pytest.raises(SpecError) as caught:
            ElasticStream(Toy(p0=1), **given)  # type: ignore[arg-type]
        assert caught.value.field == field
    with pytest.raises(SpecError, match="62 at most"):
        train(ElasticStream(Toy(**{f"p{one}": 1 for one in range(63)}), global_batch=1), 1)
    loader = DataLoader(ElasticStream(Toy(p0=1), global_batch=1), batch_size=None, num_workers=1)
    with pytest.raises(RuntimeError, match="num_workers: stream 'toy' is read in the process that trains"):
        next(iter(loader))
    with pytest.raises(SpecError, match=r"config: the client .* refuses it: No such configuration property"):
        KafkaStream("kafka://a:1/t?no.such=1")


# ---- on the mock and on a broker


def test_a_topic_of_several_partitions_is_trained_on_once(mock: str) -> None:
    """Every message of each partition, in order, and on from the offsets in another process's client."""
    writer = Writer(mock, "several")
    for partition, count in enumerate((9, 5, 0, 2)):
        writer.write(partition, count)
    data = opened(mock, "several", global_batch=4)
    first = train(data, 2)
    other = opened(mock, "several", global_batch=4)
    other.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert sorted(first + train(other, 2)) == list(range(16))
    assert other.offsets == {"0": 9, "1": 5, "2": 0, "3": 2}


def test_a_forked_process_has_clients_of_its_own(mock: str) -> None:
    """A copy of a stream that was read before the fork reads on in the child."""
    Writer(mock, "forked").write(0, 3)
    stream = KafkaStream(f"kafka://{mock}/forked?identity=name&log_level=0")
    assert len(stream.read("0", 0, 1, 30.0)) == 1
    child = os.fork()
    if not child:
        os._exit(0 if [one.value for one in stream.read("0", 1, 2, 30.0)] else 1)
    assert os.waitpid(child, 0)[1] == 0


class Client:
    """A client's consumer, of which a test changes what comes."""

    def __init__(self, stream: KafkaStream, drop: Container[int] = ()) -> None:
        self.client = stream._connected()
        self._real, self._drop = self.client._consumer, drop
        self.client._consumer = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _kept(self, one: Any) -> bool:
        return one.error() is not None or one.offset() not in self._drop

    def poll(self, wait_s: float) -> Any:
        """As the consumer's; a message that compaction has removed does not come."""
        found = self._real.poll(wait_s)
        return found if found is None or self._kept(found) else None

    def consume(self, most: int, wait_s: float) -> list[Any]:
        """As `poll`."""
        return [one for one in self._real.consume(most, wait_s) if self._kept(one)]


@pytest.mark.parametrize(
    ("drop", "told"), [({0}, "between 0 and 3"), ({2}, "between 0 and 3"), ({3}, "between 3 and 4")]
)
def test_offsets_that_are_left_out_are_told(mock: str, drop: set[int], told: str) -> None:
    """As compaction leaves them, and the end of a transaction at the end of a partition: nobody waits for what never comes."""
    topic = f"compacted-{min(drop)}"
    Writer(mock, topic).write(0, 4)
    stream = KafkaStream(f"kafka://{mock}/{topic}?identity=name&log_level=0")
    Client(stream, drop)
    taken = 0

    def read_on() -> None:
        nonlocal taken
        for _ in range(100):
            taken += len(stream.values("0", taken, 4, 0.3))

    with pytest.raises(StreamError, match=f"offsets are left out {told}"):
        read_on()
    assert taken == (3 if drop == {3} else 0)
    stream.close()


def test_a_partition_whose_reader_lags_is_paused_and_goes_on(mock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is fetched again as soon as its reader waits for more than its buffer has, and after a seek."""
    monkeypatch.setattr(kafka, "BUFFERED_MAX", 5)
    writer = Writer(mock, "paused")
    writer.write(0, 4)
    writer.write(1, 20)
    stream = KafkaStream(f"kafka://{mock}/paused?identity=name&log_level=0&fetch.message.max.bytes=200")
    client = stream._connected()
    assert stream.values("1", 0, 1, 30.0)
    at = 0
    while 1 not in client._paused:
        at += len(stream.values("0", at, 1, 0.5))
        writer.write(0, 1)
    later = writer.written
    writer.write(1, 2)  # of those before, all may have come in one answer
    assert 5 <= len(client._buffers[1]) <= 19
    found = stream.values("1", 1, 21, 30.0)
    assert 1 not in client._paused
    while len(found) < 21:
        found += stream.values("1", 1 + len(found), 21 - len(found), 30.0)
    assert [int(one) for one in found] == [*range(5, 24), *range(later, later + 2)]
    client._paused.add(1)
    client._consumer.pause([client._at(1)])
    assert [int(one) for one in stream.values("1", 2, 3, 30.0)] == [6, 7, 8]
    stream.close()


def test_a_refusal_is_told_once_and_what_the_broker_says_after_counts(mock: str) -> None:
    """A right that was given back meanwhile ends it; one that is lost ends training even while messages are waited for."""
    Writer(mock, "rights").write(0, 2)
    stream = KafkaStream(f"kafka://{mock}/rights?identity=name&log_level=0")
    client = stream._connected()
    refused = client._kafka.KafkaError(client._kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED)
    client._on_error(refused)
    assert [int(one) for one in stream.values("0", 0, 2, 30.0)] == [0, 1]
    client._on_error(refused)
    with pytest.raises(AccessRefused, match="may not be read"):
        stream.values("0", 2, 1, 0.1)
    assert list(stream.values("0", 2, 1, 0.1)) == []
    client._on_error(refused)
    with pytest.raises(AccessRefused, match="may not be read"):
        stream.values("0", 2, 1, 0.0)  # the time is over before the client says that nothing comes
    client._on_error(refused)
    with pytest.raises(AccessRefused, match="may not be read"):
        client._asked(_unavailable(client))
    with pytest.raises(StreamUnavailable):
        client._asked(_unavailable(client))
    stream.close()


def _unavailable(client: Any) -> Any:
    def call() -> None:
        raise client._kafka.KafkaException(client._kafka.KafkaError(client._kafka.KafkaError._ALL_BROKERS_DOWN))

    return call


def test_the_broker_is_told_what_is_on_storage(mock: str) -> None:
    """With a checkpoint, not before: the offsets of its state. Without one, what was consumed."""
    toy = Toy(p0=40)
    data = ElasticStream(toy, global_batch=4)
    source = DataSource({("data",): data})
    source.by_storage()
    source.stored(30)
    train(data, 2)
    source.saved(31, due=True)
    train(data, 2)
    source.saved(32, due=True)
    train(data, 1)
    assert toy.committed == []
    source.stored(30)
    assert toy.committed == []
    source.stored(31)
    assert toy.committed == [{"0": 8}]
    source.stored(32)
    source.stored(32)
    assert toy.committed == [{"0": 8}, {"0": 16}]


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_broker_is_told_of_states_that_no_step_follows(tmp_path: Path, *, by_hand: bool) -> None:
    """With an agent, whose word the test says: by the next `save`, and before the script's end, which sends the last state."""
    toy, model = Toy(p0=40), nn.Linear(1, 1)
    data = ElasticStream(toy, global_batch=4)
    ckpt = FlashCheckpoint(str(tmp_path), model=model, data=data, every=1, store_every=1000)
    assert ckpt.restore() == 0
    ckpt._capture.data.by_storage()
    engine = ckpt._engine
    assert engine is not None
    for step in (1, 2):
        train(data, 2)
        if by_hand:
            assert ckpt.save(step)
        else:
            ckpt.step(step)
            ckpt.wait()
        assert engine.control is not None
        if by_hand and step == 1:
            assert toy.committed == []
            engine.control.committed = 1 + step
    assert toy.committed == ([{"0": 8}] if by_hand else [])
    control, waited = engine.control, list[float]()

    def pause(pause_s: float) -> None:
        waited.append(pause_s)
        control.committed = 1 + 2

    engine.pause = pause
    ckpt.close()
    assert toy.committed[-1] == {"0": 16}
    assert len(waited) == 1


def test_of_states_that_storage_never_gets_a_few_are_remembered() -> None:
    """Not one for each save of a long run; without an agent, none."""
    data = ElasticStream(Toy(p0=4000), global_batch=1)
    source = DataSource({("data",): data})
    for step in range(200):
        if step == 1:
            assert not source.awaits()
            source.by_storage()
        source.saved(step, due=step % 2 == 0)
    assert (len(source._saved), len(source._due)) == (16, 64)


def test_a_topic_that_is_not_there_is_told(mock: str) -> None:
    """With what to do."""
    with pytest.raises(StreamGone, match="no such topic, or none any more: give one that exists"):
        KafkaStream(f"kafka://{mock}/absent?identity=name&log_level=0")


def test_a_real_broker_is_stopped_and_a_topic_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a broker that is away, empty, or back with another topic of the same name is taken for."""
    broker = Tansu(tmp_path)
    broker.start()
    try:
        broker.create("clicks", 2)
        writer = Writer(broker.address, "clicks")
        writer.write(0, 6)
        writer.write(1, 2)
        url = f"kafka://{broker.address}/clicks?socket.timeout.ms=1000&log_level=0&reconnect.backoff.max.ms=200"
        data = ElasticStream(url, parse=int, global_batch=4)
        assert sorted(train(data, 2)) == list(range(8))
        state, print_of = data.state_dict(), data.stream.fingerprint
        broker.stop()
        with monkeypatch.context() as hurried:
            hurried.setattr("dlrover_adapters.data.kafka.ANSWER_S", 0.5)
            with pytest.raises(StreamUnavailable, match="cannot be read now"):
                KafkaStream(url)
        broker.start()
        with pytest.raises(StreamGone):
            KafkaStream(url)
        broker.create("clicks", 2)
        again = ElasticStream(url, parse=int, global_batch=4)
        assert again.stream.fingerprint != print_of
        with pytest.raises(SpecError, match="positions are of other samples"):
            again.load_state_dict(state)
    finally:
        broker.stop()


def test_a_topic_made_anew_in_mid_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its offsets would go on, with other messages: by whoever plans, and by whoever begins to read, in a pickled copy, too.

    Neither has read here: librdkafka 2.16 ends a process with SIGSEGV where a client that reads hears of the new topic.
    """
    monkeypatch.setattr(kafka, "LOOK_S", 0.0)
    broker = Tansu(tmp_path)
    broker.start()
    try:
        url = f"kafka://{broker.address}/clicks?log_level=0"
        broker.create("clicks", 1)
        Writer(broker.address, "clicks").write(0, 8)
        stream, named = KafkaStream(url), KafkaStream(f"{url}&identity=name")
        copy = pickle.loads(pickle.dumps(stream))  # noqa: S301  # of our own making
        assert stream.extents() == named.extents() == copy.extents() == {"0": Extent(0, 8)}
        broker.delete("clicks")
        broker.create("clicks", 1)
        Writer(broker.address, "clicks").write(0, 16)
        for ask in (stream.extents, copy.extents, lambda: copy.read("0", 8, 1, 0.0)):
            with pytest.raises(
                StreamGone, match=r"deleted and made anew while it was read .* begin under another name"
            ):
                ask()
        assert named.extents() == {"0": Extent(0, 16)}
    finally:
        broker.stop()


def test_training_ends_where_its_topic_was_made_anew(mock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 looks each few seconds, when it plans. A broker that does not tell ids now says nothing."""
    Writer(mock, "anew").write(0, 8)
    data = opened(mock, "anew", global_batch=4)
    assert isinstance(data.stream, KafkaStream)
    client = data.stream._connected()
    monkeypatch.setattr(client, "id", "AAA1")
    answers = iter(("AAA1", "", "AAA2"))
    monkeypatch.setattr(client, "topic_id", lambda: next(answers))
    client._looked = -kafka.LOOK_S
    assert train(data, 2) == list(range(8))
    Writer(mock, "anew").write(0, 4)
    client._looked = -kafka.LOOK_S
    with pytest.raises(StreamGone, match=r"its id was AAA1, and is AAA2"):
        train(data, 1)
