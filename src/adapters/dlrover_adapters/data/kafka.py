"""A Kafka topic as a stream, over confluent-kafka: partitions are assigned and sought by our ledger, and no group balances them.

    KafkaStream("kafka://a:9092,b:9092/clicks?group=training&security.protocol=SSL")

What is committed to the broker is for people and monitors to see. No reader asks for it.
"""

from __future__ import annotations

import os
import time
import urllib.parse
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dlrover_core.data.streams import (
    AccessRefused,
    Extent,
    Message,
    OffsetAhead,
    OffsetGone,
    StreamError,
    StreamGone,
    StreamUnavailable,
    UnknownPartition,
)
from dlrover_core.errors import SpecError

SCHEME = "kafka://"
GROUP = "dlrover"
ANSWER_S = 10.0
"""A broker that has not answered for so long is unavailable."""
CONSUMED_MAX = 4096
"""So many messages are taken over from the client at once."""
BUFFERED_MAX, BUFFERED_BYTES = 65_536, 16 * 2**20
"""A partition of which so many messages, or bytes, wait for their reader is paused."""
LOOK_S = 5.0
"""For so long partitions are taken to be those that were there."""
DROPPED_MAX = 10_000
"""A gap of so many messages is read and dropped. For a larger one the client seeks."""
OURS = ("group", "identity")
"""Parameters of the address that are not the client's."""
HOLES = (
    "offsets are left out between {} and {}, as in compacted topics and between transactions: such streams cannot be trained on "
    "by position; copy it into a topic without holes"
)
IDENTITIES = ("id", "name")
_FROM_BEFORE_FORK: list[Any] = []
"""Clients of the parent process. Their threads are not in this process, so that freeing them would wait for ever."""


class Address(NamedTuple):
    """What a ``kafka://`` address says.

    brokers: ``host:port``, separated by commas.
    topic: its name.
    group: under which consumed offsets are shown.
    identity: what positions are of: "id", this very topic, or "name", any topic of this name, as in a mirrored cluster.
    config: of the client, as librdkafka names it.
    """

    brokers: str
    topic: str
    group: str
    identity: str
    config: dict[str, Any]


def address_of(url: str) -> Address:
    """What ``url`` says. Raises: SpecError for one that is no ``kafka://host:port/topic``."""
    form = "give kafka://host:9092/topic, more hosts separated by commas"
    if not url.startswith(SCHEME):
        raise SpecError("stream", f"{shown(url)!r}: {form}")
    try:
        split = urllib.parse.urlsplit(url)
        given = urllib.parse.parse_qsl(split.query, strict_parsing=True) if split.query else []
    except ValueError as error:
        raise SpecError("stream", f"{shown(url)!r}: {error}; {form}") from error
    brokers, topic, asked = split.netloc, urllib.parse.unquote(split.path.strip("/")), dict(given)
    if not brokers or "@" in brokers or not topic or "/" in topic:
        raise SpecError("stream", f"{shown(url)!r}: {form}; user and password go into config=")
    identity = asked.pop("identity", "id")
    if identity not in IDENTITIES:
        raise SpecError("identity", f"{identity!r}: give {' or '.join(IDENTITIES)}")
    return Address(brokers, topic, asked.pop("group", GROUP), identity, asked)


def shown(url: str) -> str:
    """An address without what may be secret."""
    begin, at, rest = url.partition("?")[0].rpartition("@")
    return f"{SCHEME}...@{rest}" if at else begin + rest


class KafkaStream:
    """The messages of one topic. Its partitions are ``"0"``, ``"1"`` ...

    url: ``kafka://host:port[,host:port]/topic``. Of its parameters ``group`` and ``identity`` are as of `Address`; all others are
    the client's settings. config: more of these, such as ``sasl.password``, or functions.
    """

    def __init__(self, url: str, *, config: Mapping[str, Any] | None = None) -> None:
        """Raises: SpecError for an address or a setting that cannot be right, or without confluent-kafka; `StreamError`."""
        self._address = address_of(url)
        self._config = {**self._address.config, **(config or {})}
        self.topic = self._address.topic
        self.name = f"{SCHEME}{self._address.brokers}/{self.topic}"
        self._client: _Client | None = None
        self._id = ""
        self._fingerprint = f"kafka:{self._identity()}"

    @property
    def fingerprint(self) -> str:
        """Of the topic's id, where the broker has ids; one that is deleted and made anew has another."""
        return self._fingerprint

    def extents(self) -> Mapping[str, Extent]:
        """All partitions, as their leaders know them."""
        client = self._connected()
        return {str(one): extent for one, extent in client.extents(client.known_partitions()).items()}

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
        """Messages from ``offset`` on. Where messages are missing in the partition, the next one there is."""
        number = _number(partition)
        found = self._connected().read(number, offset, most, wait_s)
        return [
            Message(at, value, at_ms * 1000 if kind else 0) for at, value, (kind, at_ms) in zip(*found, strict=True)
        ]

    def values(self, partition: str, offset: int, most: int, wait_s: float) -> list[Any]:
        """As `read`, the values alone. Raises: `StreamError`, also where offsets are left out."""
        client, number = self._connected(), _number(partition)
        offsets, values, _ = client.read(number, offset, most, wait_s)
        if offsets and (offsets[0], offsets[-1]) != (offset, offset + len(offsets) - 1):
            raise StreamError(f"{self.name}, partition {partition}: {HOLES.format(offset, offsets[-1])}")
        if not offsets and client.passed(number, offset):
            raise StreamError(
                f"{self.name}, partition {partition}: {HOLES.format(offset, client.passed(number, offset))}"
            )
        return values

    def commit(self, offsets: Mapping[str, int], /) -> None:
        """Show in the group what is consumed; the broker's answer is not waited for."""
        self._connected().commit(offsets)

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None and self._client.process == os.getpid():
            self._client.close()
        self._client = None

    def _connected(self) -> _Client:
        if self._client is not None and self._client.process != os.getpid():
            _FROM_BEFORE_FORK.append(self._client)
            self._client = None
        if self._client is None:
            self._client = _Client(self.name, self._address, self._config, self._id)
        return self._client

    def _identity(self) -> str:
        client = self._connected()
        client.partitions()
        if self._address.identity == "id":
            self._id = client.id = client.topic_id()
        return self._id or f"name={self.topic}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}


def _number(partition: str) -> int:
    return int(partition) if partition.isascii() and partition.isdecimal() else -1


class _Taken(NamedTuple):
    """Fields of messages, in order; of a stamp its kind, 0 for none, and milliseconds since 1970."""

    offsets: list[int]
    values: list[Any]
    stamps: list[tuple[int, int]]


class _Buffer:
    """Messages of one partition that wait for their reader, and how many bytes they are.

    Fields of messages, not the messages: Python's collector goes through objects again and again, and leaves bytes alone.
    """

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._values: list[Any] = []
        self._stamps: list[tuple[int, int]] = []
        self._at = self.size = 0

    def __len__(self) -> int:
        return len(self._offsets) - self._at

    @property
    def end(self) -> int:
        """The offset after the last message."""
        return self._offsets[-1] + 1

    def add(self, messages: list[Any]) -> None:
        if self._at:
            for one in (self._offsets, self._values, self._stamps):
                del one[: self._at]
            self._at = 0
        self._offsets += [one.offset() for one in messages]
        self._values += [one.value() for one in messages]
        self._stamps += [one.timestamp() for one in messages]
        self.size += sum(map(len, messages))

    def drop(self, offset: int) -> None:
        """All before ``offset``."""
        self._at = bisect_left(self._offsets, offset, self._at)

    def take(self, most: int) -> _Taken:
        part = slice(self._at, self._at + most)
        taken = _Taken(self._offsets[part], self._values[part], self._stamps[part])
        self._at += len(taken.offsets)
        if not self:
            self._offsets, self._values, self._stamps = [], [], []
            self._at = self.size = 0
        return taken


class _Client:
    """The connections of one process."""

    def __init__(self, name: str, address: Address, config: Mapping[str, Any], topic_id: str) -> None:
        kafka = _library()
        self.id = topic_id
        """The id of the topic that was opened. Empty if the broker gives none, or if the address says ``identity=name``."""
        self.process = os.getpid()
        self._kafka, self._name, self._topic = kafka, name, address.topic
        self._refused = ""
        given = {
            "socket.timeout.ms": int(ANSWER_S * 1000),
            "fetch.wait.max.ms": 100,
            **config,
            "bootstrap.servers": address.brokers,
            "error_cb": self._on_error,
        }
        ours = {
            "group.id": address.group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
        }
        try:
            self._admin = kafka.admin.AdminClient(given)
            self._consumer = kafka.Consumer({**given, **ours})
        except (kafka.KafkaException, TypeError, ValueError) as error:
            raise SpecError("config", f"the client for {name} refuses it: {_words(error)}") from error
        self._partitions: list[int] = []
        self._looked = -LOOK_S
        self._buffers: dict[int, _Buffer] = {}
        self._next: dict[int, int] = {}
        self._paused: set[int] = set()
        self._eof: dict[int, int] = {}

    def close(self) -> None:
        self._consumer.close()

    # ---- what there is

    def partitions(self) -> list[int]:
        """Raises: `StreamGone`, `AccessRefused`, `StreamUnavailable`."""
        topics = self._asked(lambda: self._consumer.list_topics(self._topic, timeout=ANSWER_S)).topics
        found = topics[self._topic]
        if found.error is not None:
            raise self._error(found.error)
        self._partitions, self._looked = sorted(found.partitions), time.monotonic()
        return self._partitions

    def known_partitions(self) -> list[int]:
        """The same, without asking each time. Raises `StreamGone` for another topic of the name, too."""
        if time.monotonic() - self._looked >= LOOK_S:
            # The admin client asks first: librdkafka 2.16 may crash in a client that read the old topic and hears of the new one.
            self._check_same()
            self.partitions()
        return self._partitions

    def _check_same(self) -> None:
        """Raises `StreamGone` where the topic was deleted and made anew: the offsets of then are other messages now."""
        now = self.topic_id() if self.id else ""
        if now and now != self.id:
            raise StreamGone(
                f"{self._name}: the topic was deleted and made anew while it was read (its id was {self.id}, and is {now}): its "
                "offsets are other messages now; begin under another name"
            )

    def topic_id(self) -> str:
        """Empty: the broker has no ids."""
        collection = self._kafka.TopicCollection([self._topic])
        future = self._admin.describe_topics(collection, request_timeout=ANSWER_S)[self._topic]
        try:
            found = str(self._asked(future.result).topic_id or "")
        except AccessRefused:
            return ""
        return "" if not found.strip("A=") else found

    def extents(self, partitions: Sequence[int]) -> dict[int, Extent]:
        spec, level = self._kafka.admin.OffsetSpec, self._kafka.IsolationLevel.READ_COMMITTED
        ends = []
        for which in (spec.earliest(), spec.latest()):
            asked = {self._at(one): which for one in partitions}
            futures = self._admin.list_offsets(asked, isolation_level=level, request_timeout=ANSWER_S)
            ends.append({at.partition: self._asked(one.result).offset for at, one in futures.items()})
        first, end = ends
        return {one: Extent(first[one], max(first[one], end[one])) for one in partitions}

    def commit(self, offsets: Mapping[str, int]) -> None:
        told = [self._at(int(partition), offset) for partition, offset in offsets.items()]
        self._asked(lambda: self._consumer.commit(offsets=told, asynchronous=True))

    # ---- reading

    def read(self, number: int, offset: int, most: int, wait_s: float) -> _Taken:
        """Without a message where none came in time."""
        self._turn_to(number, offset)
        until = time.monotonic() + wait_s
        while True:
            buffer = self._buffers[number]
            buffer.drop(offset)
            left = until - time.monotonic()
            if len(buffer) >= most or left <= 0 or (buffer and buffer.end >= self._known_end(number)):
                break
            self._fill(number, offset, left)
        if not self._buffers[number]:
            refused, self._refused = self._refused, ""  # whoever asks again hears what the broker says then
            if refused:
                raise AccessRefused(refused)
        taken = self._buffers[number].take(most)
        if taken.offsets:
            self._next[number] = taken.offsets[-1] + 1
            self._resume(number)
        return taken

    def passed(self, number: int, offset: int) -> int:
        """The end of a partition, where the client has come there without a message at ``offset`` or after; else 0."""
        end = self._eof.get(number, 0)
        return end if end > offset and not self._buffers[number] else 0

    def _known_end(self, number: int) -> int:
        """The end of a partition when it was last read from, as its leader said; 0: not known."""
        known = self._consumer.get_watermark_offsets(self._at(number), cached=True)
        return int(known[1]) if known else 0

    def _turn_to(self, number: int, offset: int) -> None:
        """The next message of the partition that comes is to be that at ``offset``, or one a few before it."""
        if number in self._next and 0 <= offset - self._next[number] <= DROPPED_MAX:
            return
        if number not in self._partitions and number not in self.partitions():
            raise UnknownPartition(f"{self._name} has no partition {number}, or none any more")
        self._check(number, offset)
        at = self._at(number, offset)
        if number in self._next:
            self._asked(lambda: self._consumer.incremental_unassign([self._at(number)]))
        self._asked(lambda: self._consumer.incremental_assign([at]))
        self._buffers[number], self._next[number] = _Buffer(), offset
        self._resume(number)  # the client keeps a pause beyond an assignment
        self._eof.pop(number, None)

    def _check(self, number: int, offset: int) -> None:
        self._check_same()
        first, end = self.extents([number])[number]
        if offset < first:
            raise OffsetGone(self._name, str(number), offset, first)
        if offset > end:
            raise OffsetAhead(self._name, str(number), offset, end)

    def _fill(self, number: int, offset: int, wait_s: float) -> None:
        """Take over what has come. What is of other partitions waits for its readers."""
        self._resume(number, waits=True)
        first = self._consumer.poll(wait_s)
        if first is None:
            return
        come = [first, *self._consumer.consume(CONSUMED_MAX - 1, 0)]
        wrong = [one for one in come if one.error() is not None]
        come = [one for one in come if one.error() is None] if wrong else come
        self._refused = "" if come else self._refused
        whose = [one.partition() for one in come]
        for each in set(whose):
            if each in self._buffers:
                self._buffers[each].add([one for one, its in zip(come, whose, strict=True) if its == each])
        for one in wrong:
            if one.error().code() == self._kafka.KafkaError._PARTITION_EOF:
                self._eof[one.partition()] = one.offset()
            self._failed(one.partition(), one.error())
        if number not in self._next:
            self._turn_to(number, offset)
        for each, buffer in self._buffers.items():
            full = len(buffer) >= BUFFERED_MAX or buffer.size >= BUFFERED_BYTES
            if full and each not in self._paused and each != number:
                self._paused.add(each)
                self._consumer.pause([self._at(each)])

    def _failed(self, number: int, error: Any) -> None:
        """Raises what an error event means, if it does not mend itself."""
        codes = self._kafka.KafkaError
        if error.code() == codes._PARTITION_EOF:
            return
        if error.code() in {codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE}:
            # Its next reader looks what there is, and assigns it anew.
            if self._next.pop(number, None) is not None:
                self._asked(lambda: self._consumer.incremental_unassign([self._at(number)]))
            return
        found = self._error(error)
        if not isinstance(found, StreamUnavailable):
            raise found

    def _resume(self, number: int, *, waits: bool = False) -> None:
        """Fetch a paused partition again, once its buffer is empty, or somebody waits for more than there is."""
        if number in self._paused and (waits or not self._buffers[number]):
            self._paused.discard(number)
            self._consumer.resume([self._at(number)])

    # ---- errors

    def _at(self, number: int, offset: int | None = None) -> Any:
        made = self._kafka.TopicPartition
        return made(self._topic, number) if offset is None else made(self._topic, number, offset)

    def _on_error(self, error: Any) -> None:
        found = self._error(error)
        if isinstance(found, AccessRefused):
            self._refused = str(found)

    def _asked(self, call: Callable[[], Any]) -> Any:
        refused, self._refused = self._refused, ""
        try:
            return call()
        except self._kafka.KafkaException as error:
            found, refused = self._error(error.args[0]), self._refused or refused
            if refused and isinstance(found, StreamUnavailable):
                raise AccessRefused(refused) from error
            raise found from error

    def _error(self, error: Any) -> StreamError:
        codes, code = self._kafka.KafkaError, error.code()
        if code in {codes.UNKNOWN_TOPIC_OR_PART, codes._UNKNOWN_TOPIC, codes.UNKNOWN_TOPIC_ID}:
            return StreamGone(
                f"{self._name}: the brokers have no such topic, or none any more: give one that exists, or make it anew and "
                "begin under another name"
            )
        if code == codes._UNKNOWN_PARTITION:
            return UnknownPartition(f"{self._name}: {error.str()}")
        if code in {
            codes.TOPIC_AUTHORIZATION_FAILED, codes.GROUP_AUTHORIZATION_FAILED, codes.CLUSTER_AUTHORIZATION_FAILED,
            codes.SASL_AUTHENTICATION_FAILED, codes._AUTHENTICATION,
        }:  # fmt: skip
            return AccessRefused(
                f"{self._name} may not be read: {error.str()}; let this user describe and read the topic and read group "
                "group=, or give other credentials in config="
            )
        return StreamUnavailable(f"{self._name} cannot be read now: {error.str()}; look at its brokers")


def _library() -> Any:
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise SpecError("stream", "kafka:// needs confluent-kafka: pip install 'dlrover-core[kafka]'") from error
    return confluent_kafka


def _words(error: Exception) -> str:
    first = error.args[0] if error.args else error
    return str(first.str()) if hasattr(first, "str") else str(first)
