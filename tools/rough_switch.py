"""A network of TUN devices in user space: carries packets between network namespaces, loses, delays and cuts as it is told.

    python tools/rough_switch.py NAME=PID=ADDRESS ...      a device eth0 with that address in each process's network namespace

It prints ``up``, and then obeys JSON objects on its standard input, one a line; each replaces the one before:

    {"cuts": [["a", "b"]], "loss": 0.05, "delay_s": 0.1, "spare": ["z"]}

Packets from a to b are dropped, of the others 5 %, and each is late by up to twice 0.1 s, so that some overtake others. What a
host in ``spare`` sends or gets is left alone. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from typing import Any, NamedTuple

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
BYTES_MAX, WAITING_MAX = 65_536, 20_000
MTU = 9000


class Port(NamedTuple):
    """A host's device."""

    name: str
    fd: int
    address: bytes


def plugged(name: str, pid: str, address: str) -> Port:
    """Make a device in the network namespace of a process, ``self`` for our own. Raises `OSError` and `CalledProcessError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        _enter(libc, there)
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
        for words in (f"addr add {address}/24 dev eth0", f"link set dev eth0 mtu {MTU} up"):
            subprocess.run(["/usr/bin/env", "ip", *words.split()], check=True, capture_output=True)
    finally:
        _enter(libc, home)
        os.close(home)
        os.close(there)
    return Port(name, fd, bytes(map(int, address.split("."))))


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Switch:
    """Carries packets between ports."""

    def __init__(self, ports: list[Port]) -> None:
        self._ports = {one.fd: one for one in ports}
        self._at = {one.address: one for one in ports}
        self._told: dict[str, Any] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._spare: set[str] = set()
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self._dice = random.Random(0)

    def obey(self, line: str) -> None:
        """Do as an object says from now on."""
        self._told = json.loads(line)
        self._cuts = {(one, other) for one, other in self._told.get("cuts", ())}
        self._spare = set(self._told.get("spare", ()))

    def run(self) -> None:
        """Carry until standard input ends."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        for fd in self._ports:
            poll.register(fd, select.POLLIN)
        said = b""
        while True:
            pause_s = self._waiting[0][0] - time.monotonic() if self._waiting else 3600.0
            for fd, _ in poll.poll(max(0.0, pause_s) * 1000):
                if fd in self._ports:
                    self._take(self._ports[fd])
                    continue
                more = os.read(0, BYTES_MAX)
                if not more:
                    return
                *lines, said = (said + more).split(b"\n")
                for line in lines:
                    self.obey(line.decode())
            self._send_due()

    def _take(self, port: Port) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                packet = os.read(port.fd, BYTES_MAX)
                target = self._at.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if target is not None:
                    self._carry(port, target, packet)

    def _carry(self, source: Port, target: Port, packet: bytes) -> None:
        late_s = 0.0
        if not {source.name, target.name} & self._spare:
            if (source.name, target.name) in self._cuts or self._dice.random() < self._told.get("loss", 0.0):
                return
            late_s = self._told.get("delay_s", 0.0) * 2 * self._dice.random()
        if late_s and len(self._waiting) < WAITING_MAX:
            self._number += 1
            heapq.heappush(self._waiting, (time.monotonic() + late_s, self._number, target.fd, packet))
        else:
            _written(target.fd, packet)

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, fd, packet = heapq.heappop(self._waiting)
            _written(fd, packet)


def _written(fd: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # a full device drops it
        os.write(fd, packet)


def main() -> None:
    """As the first lines say."""
    ports = []
    for word in sys.argv[1:]:
        name, pid, address = word.split("=")
        ports.append(plugged(name, pid, address))
    print("up", flush=True)
    Switch(ports).run()


if __name__ == "__main__":
    main()
