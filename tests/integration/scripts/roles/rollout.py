"""A rollout worker: calls every trainer that it is told of, again and again, and writes down whom it met."""

from __future__ import annotations

import contextlib
import socket

import diary

from dlrover_adapters import peers
from dlrover_adapters.plain import step

told, met, number = peers.Peers(0, {}), set[int](), 0
while not diary.over():
    with contextlib.suppress(TimeoutError):
        told = peers.wait(newer_than=told.version, timeout_s=diary.PAUSE_S)
        diary.tell(version=told.version, trainers=told.groups["trainer"])
    for address in told.of("trainer"):
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=10) as line:
            pid = int(line.recv(32) or b"0")
            if pid and pid not in met:
                met.add(pid)
                diary.tell(met=pid)
    number += 1
    step(number)
