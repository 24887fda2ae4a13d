"""Which host is which: torchrun's rule, where masters and stores listen, and seats."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dlrover_adapters.cli import hosts


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.0.0.9", True),
        ("::1", True),
        (socket.gethostname(), True),
        ("192.0.2.7", False),
        ("2001:db8::7", False),
        ("no-such-host.invalid", False),
        ("a" * 300, False),
    ],
)
def test_is_this_machine(host: str, ours: bool) -> None:
    """Loopback, our own name, and addresses that packets to would not leave us for."""
    assert hosts.is_this_machine(host) == ours


def test_a_literal_loopback_address_stays_one() -> None:
    """Who says 127.0.0.2 means it: masters and stores are there, and nowhere else. Taken is told from not ours."""
    with hosts.bind("127.0.0.2", 0) as port:
        host, number = port.getsockname()
        assert host == "127.0.0.2"
        with pytest.raises(OSError) as taken:
            hosts.bind("127.0.0.2", number)
        assert hosts.is_taken(taken.value)
        assert hosts.place(f"127.0.0.2:{number}", "") == ("127.0.0.1", "127.0.0.1")


def test_a_name_that_is_loopback_only_here_is_served_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give their own name a loopback address: masters then listen on all, and stores on what leads to the world."""
    monkeypatch.setattr(hosts, "resolved", lambda _: ["127.0.1.1"])
    monkeypatch.setattr(hosts, "source", lambda address: "10.0.0.5" if address == "192.0.2.1" else "")
    with hosts.bind("node1", 0) as port:
        assert port.getsockname()[0] in ("::", "0.0.0.0")
    assert hosts.place("node1:29400", "") == ("10.0.0.5", "10.0.0.5")


def test_what_is_stated_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """--local-addr: listened at where it is ours, and told to the others in any case."""
    assert hosts.place("192.0.2.1:29400", "127.0.0.3") == ("127.0.0.3", "127.0.0.3")
    monkeypatch.setattr(hosts, "source", lambda _: "10.0.0.5")
    assert hosts.place("192.0.2.1:29400", "198.51.100.4") == ("0.0.0.0", "198.51.100.4")


def test_no_way_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a route cannot be reached by the others either."""
    monkeypatch.setattr(hosts, "source", lambda _: "")
    with pytest.raises(hosts.SpecError, match="name this host's address with --local-addr"):
        hosts.place("192.0.2.1:29400", "")


def test_addresses_of_both_families() -> None:
    """Put together and taken apart."""
    for host in ("10.0.0.1", "fd00::1", "node1"):
        assert hosts.split(hosts.joined(host, 29400)) == (host, 29400)
    assert hosts.joined("fd00::1", 1) == "[fd00::1]:1"


def test_a_seat_is_held_by_one(tmp_path: Path) -> None:
    """The next launcher gets the next seat; a seat that is free again has the name it had, and no other directory has it."""
    with hosts.seat(tmp_path) as first, hosts.seat(tmp_path) as second:
        assert (first.number, second.number) == (0, 1)
        assert first.name != second.name
        assert oct((tmp_path / "seat-0").stat().st_mode & 0o777) == "0o600"
    (tmp_path / "other").mkdir()
    with hosts.seat(tmp_path) as again, hosts.seat(tmp_path / "other") as elsewhere:
        assert (again.number, again.name) == (0, first.name)
        assert elsewhere.name != again.name
