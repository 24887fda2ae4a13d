"""States from saver to saver over TLS: certificates of the job, and of nobody else."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from saver_nodes import IDLE_S, OURS, Between, Home, Node, fetched, opened, same, until
from saver_nodes import node as node  # noqa: PLC0414 - the fixture is taken over

from dlrover_adapters.checkpoint import peer_line
from dlrover_adapters.checkpoint.peer_door import STRANGERS_MAX
from dlrover_adapters.checkpoint.peer_line import GREETING_S, MAGIC
from dlrover_adapters.checkpoint.peers import (
    PeerFailed,
    StrangerRefused,
    Tls,
    fetch,
    send,
)


def _certificates(folder: Path) -> dict[str, Tls]:
    """Two CAs with a node's certificate each."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here to make certificates")

    def openssl(*line: str) -> None:
        subprocess.run(["/usr/bin/env", "openssl", *line], check=True, capture_output=True, cwd=folder)

    made = {}
    for name in ("ours", "theirs"):
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl(
            "req", "-x509", *curve, "-subj", f"/CN={name}-ca", "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem",
            "-addext", "keyUsage=critical,keyCertSign",
        )  # fmt: skip
        openssl("req", *curve, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", f"{name}-ca.pem", "-CAkey", f"{name}-ca.key",
            "-CAcreateserial", "-days", "2", "-out", f"{name}.pem",
        )  # fmt: skip
        made[name] = Tls(*(str(folder / f"{name}{end}") for end in ("-ca.pem", ".pem", ".key")))
    return made


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    """Certificates of this job's CA, and of another one."""
    return _certificates(tmp_path_factory.mktemp("certificates"))


def test_tls(node: Callable[..., Node], tls: dict[str, Tls]) -> None:
    """With certificates everything is encrypted: a state passes, and its bytes are not to be seen on the way."""
    sealed = OURS._replace(tls=tls["ours"])
    peer, home = node(sealed), Home()
    view = home.save(1)
    seen = bytearray()

    def look(piece: bytearray, passed: int) -> bytes:
        seen.extend(piece)
        return piece

    wanted = peer.has(view)
    with Between(peer.address, look) as between:
        found = opened(fetch(between.address, wanted, sealed, generation=1).fd)
    assert same(view, found)
    assert bytes(view.data[:64]) not in seen
    assert MAGIC not in seen
    assert not send(peer.address, Home(1).save(2), sealed, generation=1).had


def test_tls_strangers(node: Callable[..., Node], tls: dict[str, Tls], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another CA's certificate, none, and no TLS at the other end: nothing passes, with the right token too."""
    monkeypatch.setattr(peer_line, "GREETING_S", 0.5)  # both ends wait for the other one's first word
    sealed = OURS._replace(tls=tls["ours"])
    peer, plain = node(sealed), node()
    wanted = peer.has(Home().save(1))
    plain.has(Home().save(1))
    for credentials, address in (
        (OURS._replace(tls=tls["theirs"]), peer.address),
        (OURS._replace(tls=Tls(tls["ours"].ca, *tls["theirs"][1:])), peer.address),
        (OURS, peer.address),
        (sealed, plain.address),
    ):
        with pytest.raises(PeerFailed):
            fetch(address, wanted, credentials, generation=1, idle_s=1.0)


def test_tls_nobody_in_between(node: Callable[..., Node], tls: dict[str, Tls], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who relays the challenge with another certificate, of the right CA too, fails: the certificate is part of the proof."""
    sealed = OURS._replace(tls=tls["ours"])
    peer = node(sealed)
    wanted = peer.has(Home().save(1))
    monkeypatch.setattr(peer_line.Tls, "shown", lambda _self: b"another certificate")
    with pytest.raises(StrangerRefused, match="token"):
        fetch(peer.address, wanted, sealed, generation=1)


@pytest.mark.parametrize("encrypted", [False, True])
def test_strangers_keep_nobody_out(node: Callable[..., Node], tls: dict[str, Tls], encrypted: bool) -> None:
    """1,000 connections that never greet, and more all the time: copies and fetches go through; the oldest strangers are left."""
    credentials = OURS._replace(tls=tls["ours"]) if encrypted else OURS
    peer, home = node(credentials), Home(1)
    host, _, port = peer.address.rpartition(":")
    wanted, stop = peer.has(Home().save(1)), threading.Event()

    def stranger() -> socket.socket:
        return socket.create_connection((host, int(port)), timeout=IDLE_S)

    strangers = [stranger() for _ in range(1000)]

    def more() -> None:
        while not stop.wait(0.01):
            strangers.append(stranger())

    thread = threading.Thread(target=more)
    thread.start()
    try:
        for step in range(1, 4):
            began = time.monotonic()
            assert send(peer.address, home.save(step), credentials, generation=1).size
            assert fetched(peer, wanted, credentials)
            assert time.monotonic() - began < GREETING_S  # no time-out of a stranger was waited for
    finally:
        stop.set()
        thread.join()
    until(lambda: len(peer.server._door) <= STRANGERS_MAX)
    strangers[0].settimeout(IDLE_S)
    with contextlib.suppress(ConnectionResetError):
        while strangers[0].recv(1024):  # what there is of a greeting, and then the end
            pass
    for one in strangers:
        one.close()
