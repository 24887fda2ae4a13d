"""Launchers that meet at a loopback address of one host: the token that nobody has to give them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli import run
from dlrover_adapters.http.token import loopback_token
from dlrover_core.errors import SpecError


def token_of(directory: Path, *flags: str) -> str:
    """The token of a launcher with these flags."""
    options = cli_options.parse([*flags, "train.py"])
    return run._token(options, cli_options.meeting(options), directory)


def at(host: str) -> tuple[str, ...]:
    """The flags of several nodes that meet at ``host``."""
    return ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:29777")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "[::1]"])
def test_launchers_behind_loopback_share_the_jobs_own_token(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one makes the token, for this user alone; the second one, and one that was given another, have theirs."""
    monkeypatch.delenv("DLROVER_TOKEN", raising=False)
    made = token_of(tmp_path, *at(host))
    assert token_of(tmp_path, *at(host)) == made
    assert (tmp_path / "loopback.token").stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["loopback.token"], "nothing else is left there"
    monkeypatch.setenv("DLROVER_TOKEN", "a-given-token")
    assert token_of(tmp_path, *at(host)) == "a-given-token"


@pytest.mark.parametrize("flags", [at("10.0.0.1"), at("host0"), ("--nnodes", "2", "--master", "10.0.0.1:1")])
def test_launchers_of_several_hosts_must_be_given_a_token(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody may come from elsewhere, no token of this host's alone is made."""
    monkeypatch.delenv("DLROVER_TOKEN", raising=False)
    with pytest.raises(SpecError, match="several hosts need one job token"):
        token_of(tmp_path, *flags)
    assert not list(tmp_path.iterdir())


def test_a_job_on_one_host_has_a_token_of_its_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is to join it, so nothing lies in its directory."""
    monkeypatch.delenv("DLROVER_TOKEN", raising=False)
    assert token_of(tmp_path) != token_of(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_launcher_that_was_killed_in_between_is_no_obstacle(tmp_path: Path) -> None:
    """A part that it left under our own process id is written anew."""
    (tmp_path / f"loopback.{os.getpid()}").write_text("half")
    assert loopback_token(tmp_path) == loopback_token(tmp_path)
