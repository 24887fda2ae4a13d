"""A mock broker of librdkafka with MESSAGES messages of 100 bytes in 4 partitions. Prints its address; ends with its input."""

from __future__ import annotations

import sys

from confluent_kafka import Producer

PARTITIONS = 4


def main(messages: int) -> None:
    owner = Producer({"bootstrap.servers": "none", "test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = owner.list_topics(timeout=30).brokers.values()
    address = f"{broker.host}:{broker.port}"
    writer = Producer({"bootstrap.servers": address, "queue.buffering.max.messages": messages + 1, "log_level": 0})
    for number in range(messages):
        writer.produce("bench", b"%0100d" % number, partition=number % PARTITIONS)
    if writer.flush(60):
        raise SystemExit("the mock did not take all messages")
    print(address, flush=True)
    sys.stdin.read()


main(int(sys.argv[1]))
