"""A stranger on the host: holds connections to ports, or sends bytes that mean nothing. It imports nothing of ours.

rough_stranger.py hold SECONDS CONNECTIONS HOST:PORT ...
rough_stranger.py bytes SEED STREAMS HOST:PORT ...
"""

import contextlib
import random
import resource
import socket
import sys
import time
from collections.abc import Sequence

CONNECT_S = 0.5


def dialled(place: str) -> "socket.socket | None":
    """A connection; None where nobody answers."""
    host, _, port = place.rpartition(":")
    with contextlib.suppress(OSError):
        return socket.create_connection((host, int(port)), CONNECT_S)
    return None


def hold(seconds: float, connections: int, places: Sequence[str]) -> int:
    """Hold so many connections to each place until the time is over; how many there were."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections * len(places) + 64
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, wanted), hard), hard))
    until, held = time.monotonic() + seconds, list[socket.socket]()
    for _ in range(connections):
        for place in places:
            if time.monotonic() < until and (one := dialled(place)) is not None:
                held.append(one)
    time.sleep(max(0.0, until - time.monotonic()))
    return len(held)


def streams(seed: int, count: int, places: Sequence[str]) -> int:
    """Send so many streams of bytes to each place; how many were taken."""
    dice, taken = random.Random(seed), 0
    for place in (one for one in places for _ in range(count)):
        words = (
            dice.randbytes(dice.choice((1, 17, 4096, 70_000))),
            b"\xff\xff\xff\xff" + dice.randbytes(64),
            b"GET /" + dice.randbytes(40).hex().encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST /status HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + dice.randbytes(100),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(300),
            b"\0" * 512,
        )
        if (one := dialled(place)) is not None:
            with one, contextlib.suppress(OSError):
                one.sendall(dice.choice(words))
                taken += 1
    return taken


if __name__ == "__main__":
    mode, first, second, *rest = sys.argv[1:]
    print(hold(float(first), int(second), rest) if mode == "hold" else streams(int(first), int(second), rest))
