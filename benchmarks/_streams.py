"""Messages a second from a Kafka topic: a bare loop of confluent-kafka's client, and `ElasticStream` over the same client."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

from _bench import HERE

MESSAGES = 120_000
"""So many of 100 bytes fit into what the mock keeps."""
PARTITIONS = 4
BATCH = 512
LIMIT_S = 60.0
QUIET = {"log_level": 0}


@contextlib.contextmanager
def broker() -> Iterator[str]:
    """The mock's address; it is a process of its own."""
    line = [sys.executable, str(HERE / "scripts" / "kafka_broker.py"), str(MESSAGES)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def bare(address: str) -> float:
    """Values by batches, as a script without us takes them."""
    from confluent_kafka import Consumer, TopicPartition

    settings = {"bootstrap.servers": address, "group.id": "bare", "enable.auto.commit": False, "fetch.wait.max.ms": 100}
    consumer = Consumer({**settings, **QUIET})
    consumer.assign([TopicPartition("bench", one, 0) for one in range(PARTITIONS)])
    consumer.consume(BATCH, LIMIT_S)
    began, seen = time.perf_counter(), 0
    while seen < MESSAGES // BATCH * BATCH - BATCH:
        values = [one.value() for one in consumer.consume(BATCH, LIMIT_S) if one.error() is None]
        seen += len(values)
    took = time.perf_counter() - began
    consumer.close()
    return seen / took


def elastic(address: str) -> float:
    """Values by global batches, each of which is counted."""
    from dlrover_adapters.torch import ElasticStream

    url = f"kafka://{address}/bench?identity=name&log_level=0"
    data = ElasticStream(url, global_batch=BATCH, collate=lambda values: values)
    began, seen = 0.0, 0
    for values in data:
        data.step()
        if not began:
            began = time.perf_counter()
            continue
        seen += len(values)
        if seen == MESSAGES // BATCH * BATCH - BATCH:
            break
    took = time.perf_counter() - began
    data.stream.close()
    return seen / took
