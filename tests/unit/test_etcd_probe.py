"""What an endpoint is, by how it takes our first words: a plain server is one whether it ends or resets the connection."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.etcd_cluster import certificates

from dlrover_adapters.etcd import probe
from dlrover_adapters.etcd.address import Address

SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@contextlib.contextmanager
def server(plain: bool, reset: bool) -> Iterator[str]:
    """Takes HTTP/2 if ``plain``; ends any other connection, by a reset or an end."""
    ear = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = ear.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(10)
                first = connection.recv(3)
                if plain and first == b"PRI":
                    connection.sendall(SETTINGS)
                elif reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    while not first.endswith(b"!"):  # all that came is read, so that the end is no reset
                        connection.settimeout(0.05)
                        try:
                            first = connection.recv(65536) or b"!"
                        except TimeoutError:
                            first = b"!"

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{ear.getsockname()[1]}"
    finally:
        ear.shutdown(socket.SHUT_RDWR)
        ear.close()
        thread.join(20)


@pytest.mark.parametrize("reset", [False, True])
def test_a_plain_server_is_one_however_it_hangs_up(reset: bool, tmp_path: Path) -> None:
    """Data that is not read turns a close into a reset: both mean that nobody understood our handshake."""
    with server(plain=True, reset=reset) as endpoint:
        found = probe.find(Address((endpoint,), cacert=str(certificates(tmp_path).cacert)), endpoint)
    assert found is not None
    assert found.ours
    assert "does not speak TLS" in found.reason


@pytest.mark.parametrize("reset", [False, True])
def test_a_dying_server_is_not_blamed_on_the_settings(reset: bool, tmp_path: Path) -> None:
    """Who hangs up on everything may come back: waiting helps, so this is no error of the configuration."""
    with server(plain=False, reset=reset) as endpoint:
        found = probe.find(Address((endpoint,), cacert=str(certificates(tmp_path).cacert)), endpoint)
    assert found is not None
    assert not found.ours
    assert "ended the connection during the TLS handshake" in found.reason
