"""The job token: where it comes from, what it may be, and how it is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrover_adapters.http import token as tokens
from dlrover_adapters.http.token import load_token, make_token, require_token
from dlrover_core.errors import SpecError


def test_made() -> None:
    """A made token is long, its own, and one that we take."""
    made = {make_token() for _ in range(100)}
    assert len(made) == 100
    assert all(len(token) >= 40 and load_token({"DLROVER_TOKEN": token}) == token for token in made)


def test_environment() -> None:
    """The token is what DLROVER_TOKEN says, without the newline that `$(cat file)` may leave; unset or empty is none."""
    assert load_token({"DLROVER_TOKEN": "correct-horse\n"}) == "correct-horse"
    assert load_token({}) == load_token({"DLROVER_TOKEN": " "}) == ""  # the empty token is the answer


def test_file(tmp_path: Path) -> None:
    """A named file is read, and wins over the environment."""
    (tmp_path / "token").write_text("battery-staple\n")
    assert load_token({"DLROVER_TOKEN": "correct-horse"}, tmp_path / "token") == "battery-staple"


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"sh0rt", b"two words", b"x" * 1025, b"tab\tinside", "schlüssel-wort".encode(), b"\xff" * 9],
    ids=range(8),
)
def test_nonsense(tmp_path: Path, content: bytes) -> None:
    """What cannot be a token is refused with the name of the place it came from, and is not repeated in the message."""
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(SpecError) as error:
        load_token({}, tmp_path / "token")
    assert "token" in error.value.field
    assert not content.strip() or content.decode("latin-1").strip() not in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    """A file that is not there is an error that names it, never a job without a token."""
    with pytest.raises(SpecError, match="nowhere cannot be read: No such file"):
        load_token({"DLROVER_TOKEN": "correct-horse"}, tmp_path / "nowhere")


def test_wrong_file_is_not_read_whole() -> None:
    """A path to something endless is refused, not read for ever."""
    with pytest.raises(SpecError, match="characters"):
        load_token({}, "/dev/urandom" if not Path("/dev/full").exists() else "/dev/full")


def test_required() -> None:
    """A job on several hosts without a token is told the lines to run."""
    assert require_token({"DLROVER_TOKEN": "correct-horse"}) == "correct-horse"
    with pytest.raises(SpecError) as error:
        require_token({})
    assert "export DLROVER_TOKEN=" in str(error.value)
    assert "--token-file" in str(error.value)


def test_same() -> None:
    """Only equal tokens are the same; no token is the same as nothing, not even as no token; any bytes may be shown."""
    assert tokens.same("correct-horse", "correct-horse")
    assert not tokens.same("correct-horse", "correct-hors")
    assert not tokens.same("", "")
    assert not tokens.same("\udcff", "correct-horse")


def test_header() -> None:
    """A token travels as a bearer token; other schemes show none."""
    header = tokens.authorization("correct-horse")
    assert header == {"Authorization": "Bearer correct-horse"}
    assert tokens.shown(header["Authorization"]) == "correct-horse"
    assert [tokens.shown(other) for other in (None, "", "Basic eDp5", "correct-horse")] == [""] * 4
    assert tokens.authorization("") == {}
