"""The URL of a log that is read through masters."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from dlrover_adapters.cli.places import log_url, shown, through_masters
from dlrover_adapters.http.log_address import parse, with_options
from dlrover_core.errors import SpecError

TOKEN = "the-token-of-this-job"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment."""
    monkeypatch.setenv("DLROVER_TOKEN", TOKEN)
    monkeypatch.delenv("DLROVER_PROXY_AUTHORIZATION", raising=False)


def test_masters_of_a_job() -> None:
    """One or several, with the port that masters have; the token goes where agents show it."""
    one = parse("http://head/digits")
    assert (one.masters, one.job, one.prefix, one.headers) == (
        ("head:29400",),
        "digits",
        "",
        {"Authorization": f"Bearer {TOKEN}"},
    )
    several = parse("HTTPS://h1:1,[::1]:2,h1:1/a%20b")
    assert (several.scheme, several.masters, several.job) == ("https", ("h1:1", "[::1]:2"), "a b")
    assert several.shown == "https://h1:1,[::1]:2/a b"
    assert parse("http://head").job == ""
    assert TOKEN not in repr(one)


def test_behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path comes first and its port is HTTP's own; Authorization is for the proxy, the token has a header of its own."""
    found = parse("http://localhost:8001/api/v1/namespaces/ml/services/digits:29400/proxy/digits")
    assert (found.masters, found.job) == (("localhost:8001",), "digits")
    assert found.prefix == "/api/v1/namespaces/ml/services/digits:29400/proxy"
    assert found.headers == {"X-DLRover-Token": TOKEN}
    monkeypatch.setenv("DLROVER_PROXY_AUTHORIZATION", "Bearer theirs")
    found = parse("https://api/x/digits")
    assert found.masters == ("api:443",)
    assert found.headers == {"Authorization": "Bearer theirs", "X-DLRover-Token": TOKEN}


def test_options(tmp_path: Path) -> None:
    """The token may lie in a file; what the command line names does not displace what the URL says."""
    file = tmp_path / "a token"
    file.write_text("another-token\n")
    url = with_options("https://h/j", token_file=str(file), cacert="ca.pem")
    found = parse(url)
    assert (found.token, found.cacert) == ("another-token", "ca.pem")
    assert with_options(url, token_file="other", cacert="") == url
    assert with_options("http://h/j") == "http://h/j"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http:///digits", "names no master; say http://HOST:29400/JOB"),
        ("http:digits", "names no master"),
        ("http://secret-token@h/digits", "does not belong into a URL"),
        ("http://h:0/digits", "'h:0' is not HOST:PORT"),
        ("http://h:99999/digits", "'h:99999' is not HOST:PORT"),
        ("http://h,/digits", "'' is not HOST:PORT"),
        ("http://h/digits#7", "write %23"),
        ("http://h/di%ff", "not UTF-8"),
        ("http://h/j?token=x", "?token is not known; there are: cacert, token_file"),
        ("http://h/j?cacert", "not OPTION=VALUE"),
        ("http://h/j?token_file=", "?token_file needs one value"),
        ("http://h/j?cacert=x.pem", "?cacert is for https://"),
        ("http://h/j?token_file=/nowhere/at/all", "cannot be read"),
    ],
)
def test_what_is_wrong_is_said(url: str, words: str) -> None:
    """Which part, and what to write; never a token."""
    with pytest.raises(SpecError) as caught:
        parse(url)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


def given(tmp_path: Path, **named: str) -> argparse.Namespace:
    """A command's arguments."""
    return argparse.Namespace(
        **{"job": None, "log": None, "state_dir": tmp_path, "token_file": None, "tls_ca": None, **named}
    )


def test_a_url_in_place_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the log's URL and the job's name at once; the command's own token and CA go with it, or what the launcher keeps."""
    args = given(tmp_path, job="https://h:1/digits", tls_ca="ca.pem", token_file="tok")
    (tmp_path / "tok").write_text(TOKEN)
    through_masters(args)
    assert (args.job, args.log) == ("digits", "https://h:1/digits?token_file=tok&cacert=ca.pem")
    assert shown(log_url(args.log, args.state_dir)) == "https://h:1/digits"

    args = given(tmp_path, log=f"https://h:1/digits?cacert=ca.pem&token_file={tmp_path}/tok")
    through_masters(args)
    assert (args.job, args.tls_ca, args.token_file) == ("digits", "ca.pem", f"{tmp_path}/tok")

    monkeypatch.delenv("DLROVER_TOKEN")
    kept = tmp_path / "jobs" / "digits" / "token"
    kept.parent.mkdir(parents=True)
    kept.write_text(TOKEN)
    args = given(tmp_path, job="other", log="http://h:1")
    through_masters(args)
    assert (args.job, args.log) == ("other", "http://h:1")
    args = given(tmp_path, job="http://h:1/digits")
    through_masters(args)
    assert parse(args.log).token == TOKEN

    with pytest.raises(SpecError, match="names no job; say"):
        through_masters(given(tmp_path, job="http://h:1"))
    with pytest.raises(SpecError, match="leave --log out"):
        through_masters(given(tmp_path, job="http://h:1/j", log="sqlite:x"))
    for untouched in (given(tmp_path, job="digits", log="sqlite:x"), given(tmp_path)):
        before = dict(vars(untouched))
        through_masters(untouched)
        assert vars(untouched) == before
