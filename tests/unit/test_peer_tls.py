"""States from saver to saver over TLS: certificates of the job, and of nobody else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from saver_nodes import OURS, Between, Home, Node, opened, same
from saver_nodes import node as node  # noqa: PLC0414 - the fixture is taken over
from saver_nodes import tls as tls  # noqa: PLC0414 - the fixture is taken over

from dlrover_adapters.checkpoint import peer_line
from dlrover_adapters.checkpoint.peer_line import MAGIC
from dlrover_adapters.checkpoint.peers import (
    PeerFailed,
    StrangerRefused,
    Tls,
    fetch,
    send,
)


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
