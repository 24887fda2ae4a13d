"""What an etcd URL may say, what is wrong with those that are refused, and that no password is ever shown."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from dlrover_adapters.etcd.address import PASSWORD, Address, parse
from dlrover_core.errors import SpecError

SECRET = "hunter2"


def refused(url: str) -> str:
    """The message of the refusal."""
    with pytest.raises(SpecError) as caught:
        parse(url)
    assert caught.value.field == "log"
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_defaults() -> None:
    """One host is enough: etcd's port and our prefix, in the clear, without a user."""
    assert parse("etcd://h1") == Address(("h1:2379",), prefix="dlrover")
    assert not parse("etcd://h1").tls
    assert parse("etcd://h1/") == parse("etcd://h1")


def test_everything(tmp_path: Path) -> None:
    """All that a URL can say arrives."""
    pems = {name: tmp_path / f"{name}.pem" for name in ("cacert", "cert", "key")}
    for path in pems.values():
        path.write_text("x")
    query = "&".join(f"{name}={path}" for name, path in pems.items())
    found = parse(f"etcd://ann:{SECRET}@h1:1,h2,10.0.0.3:2380/a/b?{query}&archive=s3://bucket/x&ttl=2.5")
    assert found == Address(
        ("h1:1", "h2:2379", "10.0.0.3:2380"),
        "a/b",
        "ann",
        SECRET,
        str(pems["cacert"]),
        str(pems["cert"]),
        str(pems["key"]),
        "s3://bucket/x",
        2.5,
    )
    assert found.tls


@pytest.mark.parametrize(
    ("hosts", "endpoints"),
    [
        ("[::1]", ("[::1]:2379",)),
        ("[::1]:99", ("[::1]:99",)),
        ("[fe80::1]:1,[fe80::2],h3", ("[fe80::1]:1", "[fe80::2]:2379", "h3:2379")),
        ("h3:7,[::ffff:10.0.0.1]:8", ("h3:7", "[::ffff:10.0.0.1]:8")),
        ("h1:02379,h1,h1:2379", ("h1:2379",)),
        ("my_host-1.example.com:65535", ("my_host-1.example.com:65535",)),
    ],
)
def test_hosts(hosts: str, endpoints: tuple[str, ...]) -> None:
    """Names, IPv4 and IPv6 in brackets mix; a port may be left out; who is named twice is asked once."""
    assert parse(f"etcd://{hosts}/p").endpoints == endpoints


@pytest.mark.parametrize(
    "hosts",
    [
        *("h1,", ",h1", "h1 ,h2", "h 1", "[x]"),
        *("h1:", "h1:0", "h1:65536", "h1:x", "h1:-1", "h1:\uff12"),
        *("::1", "fe80::1:2379", "[::1", "[::1]2379"),
    ],
)
def test_wrong_hosts(hosts: str) -> None:
    """A host that is none is named, with the form to write it in."""
    message = refused(f"etcd://{hosts}/p")
    assert "is not HOST:PORT" in message
    assert "etcd://HOST:2379" in message


@pytest.mark.parametrize(
    "url", ["", "etcd:", "etcd://", "etcd:///p", "etcd://?ttl=5", "etcd:h1:2379/p", "etcd:/h1", "h1:2379"]
)
def test_urls_that_name_no_etcd(url: str) -> None:
    """A URL without hosts is refused with an example."""
    assert "names no etcd; say etcd://HOST:2379" in refused(url)


def test_escapes_are_undone_once() -> None:
    """What `%` hides in user, password and prefix is meant literally; a second level of it stays."""
    found = parse("etcd://a%40b%3Ac:p%2Fq%3F%23%25%40@h/x%20y%2Fz%2540%C3%A4")
    assert (found.user, found.password, found.prefix) == ("a@b:c", "p/q?#%@", "x y/z%40ä")


@pytest.mark.parametrize("part", ["user", "password", "prefix"])
def test_escapes_that_are_no_text(part: str) -> None:
    """Bytes that are not UTF-8 are refused, and it is said where they are."""
    said = {"user": "u", "password": "w", "prefix": "p"} | {part: "%ff"}
    assert f"the {part} is not UTF-8" in refused("etcd://{user}:{password}@h/{prefix}".format(**said))


def test_password_may_hold_an_at_sign_and_colons() -> None:
    """The last '@' ends the credentials and the first ':' the user."""
    found = parse("etcd://u:a:b@c@h/p")
    assert (found.user, found.password, found.endpoints) == ("u", "a:b@c", ("h:2379",))


def test_at_signs_elsewhere_are_no_credentials() -> None:
    """A prefix or a file name may hold an '@'."""
    found = parse("etcd://h:1/a@b?archive=/x@y")
    assert (found.user, found.prefix, found.archive, found.endpoints) == ("", "a@b", "/x@y", ("h:1",))


def test_password_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both are taken as they are, but for the line's end, and only where a user is named."""
    monkeypatch.setenv(PASSWORD, "100%25 ")
    assert parse("etcd://ann@h").password == "100%25 "
    assert parse("etcd://h").password == ""
    (tmp_path / "file").write_text(" 100%25\n")
    assert parse(f"etcd://ann@h?password_file={tmp_path}/file").password == " 100%25"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("etcd://ann@h", f"user 'ann' needs a password: set {PASSWORD}"),
        ("etcd://ann:@h", "user 'ann' needs a password"),
        (f"etcd://:{SECRET}@h", "a password is given and no user; say etcd://USER@HOST"),
        ("etcd://h?password_file=/dev/null", "a password is given and no user"),
        (f"etcd://ann:{SECRET}@h?password_file=/dev/null", "leave one of them out"),
        ("etcd://ann@h?password_file=/dev/null", "user 'ann' needs a password"),
        ("etcd://ann@h?password_file=/nowhere/file", "?password_file=/nowhere/file cannot be read: No such file"),
        ("etcd://h?cacert=/nowhere/ca", "?cacert=/nowhere/ca cannot be read: No such file"),
        ("etcd://h?cert=/dev/null", "a client certificate needs both, ?cert=FILE&key=FILE"),
        ("etcd://h?key=/dev/null", "a client certificate needs both"),
        ("etcd://h?tls=1", "?tls is not known; there are: cacert, cert, key, password_file, archive, ttl"),
        (f"etcd://h?password={SECRET}", "?password is not known"),
        (f"etcd://h?{SECRET}", "is not OPTION=VALUE&OPTION=VALUE"),
        ("etcd://h?ttl=", "?ttl needs one value"),
        ("etcd://h?ttl=5&ttl=6", "?ttl needs one value"),
        ("etcd://h?ttl=5&&", "is not OPTION=VALUE"),
        ("etcd://h#frag", "a '#' has no meaning here; write %23"),
        ("etcd://h/a%0Ab", "holds control characters"),
        ("etcd://h/ux&cacert=/ca.pem", "the first option begins with '?'"),
    ],
)
def test_wrong_parts(url: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every refusal says which part is wrong, and never the password."""
    monkeypatch.delenv(PASSWORD, raising=False)
    assert says in refused(url)


def test_certificate_that_is_no_text(tmp_path: Path) -> None:
    """A DER file where a PEM file belongs is found out here, not by grpc's silence."""
    (tmp_path / "ca.der").write_bytes(b"0\x82\x03\xff")
    assert "cannot be read: it is not text" in refused(f"etcd://h?cacert={tmp_path}/ca.der")


@pytest.mark.parametrize("ttl", ["1.9", "0", "-5", "601", "nan", "inf", "five", "5s"])
def test_ttl_out_of_bounds(ttl: str) -> None:
    """No etcd grants a lease below two seconds, and a leader that is missed after ten minutes is no leader."""
    assert f"?ttl={ttl} is not a number of seconds from 2 to 600" in refused(f"etcd://h?ttl={ttl}")


def test_ttl_at_its_bounds() -> None:
    """Both bounds are allowed; without the option there is none."""
    assert (parse("etcd://h?ttl=2").ttl_s, parse("etcd://h?ttl=600").ttl_s, parse("etcd://h").ttl_s) == (
        2.0,
        600.0,
        None,
    )


@pytest.mark.parametrize("password", [SECRET, f"a@{SECRET}", f"{SECRET}@b@c", f"{SECRET}:x", f"x:{SECRET}"])
@pytest.mark.parametrize("broken", ["/p", "/p#f", "/p?tls=1", "/p?ttl=x", ":x/p", "/%0A"])
def test_password_is_never_shown(password: str, broken: str) -> None:
    """Neither where the URL is right, nor in any refusal of a wrong one."""
    url = f"etcd://ann:{password}@h{broken}"
    if broken != "/p":
        refused(url)
        return
    found = parse(url)
    assert found.password == password
    assert SECRET not in repr(found) + str(found) + found.shown
    assert found.shown == "etcd://ann@h:2379/p"


@pytest.mark.parametrize("password", [f"a/{SECRET}", f"{SECRET}/a", f"{SECRET}?a", f"a#{SECRET}", f"a/b@{SECRET}"])
def test_password_that_should_have_been_escaped(password: str) -> None:
    """It makes the URL a wrong one, is still not shown, and the way to write it is."""
    assert "in a password write %2F for '/'" in refused(f"etcd://ann:{password}@h/p")
    assert parse(f"etcd://ann:{quote(password, safe='')}@h/p").password == password


def test_archive_credentials_are_not_shown() -> None:
    """The archive's URL may hold a password of its own."""
    found = parse(f"etcd://h/p?archive=ftp://u:{SECRET}@other/x")
    assert SECRET in found.archive
    assert SECRET not in repr(found) + found.shown
    assert SECRET not in refused(f"etcd://h:x/p?archive=ftp://u:{SECRET}@other/x")
