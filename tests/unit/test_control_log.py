"""The control log on a full disk: lines are lost and counted, and nobody dies of them."""

from __future__ import annotations

import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_adapters.telemetry import logs
from dlrover_adapters.telemetry.logs import LogFile


@pytest.fixture
def no_more_than() -> Iterator[None]:
    """A bound on the size of files, whose signal is ignored, as the interpreter does: writes fail then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.usefixtures("no_more_than")
def test_lines_without_room_are_lost_and_counted(tmp_path: Path) -> None:
    """A line that fits half ends there; when there is room again the next lines say how many are missing."""
    path = tmp_path / "control.log"
    log = LogFile(path)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    log.write("first\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, most))
    assert [log.write(line) for line in ("second\n", "third\n", "fourth\n")] == [7, 6, 7]
    assert log.lost == 3
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    log.write("fifth\n")
    assert path.read_text() == "first\nsec\n3 lines were lost here: the disk took none\nfifth\n"
    assert log.lost == 0


def test_other_errors_are_told(tmp_path: Path) -> None:
    """A log that cannot be opened at all is no full disk."""
    with pytest.raises(IsADirectoryError):
        LogFile(tmp_path)


def test_a_log_that_was_removed_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its folder is gone lines are lost and counted, by those who had it open and by those who start only then."""
    monkeypatch.setattr(logs, "LOOK_S", 0.0)
    folder = tmp_path / "job"
    folder.mkdir()
    path = folder / "control.log"
    old = LogFile(path)
    old.write("first\n")
    shutil.rmtree(folder)
    new = LogFile(path)
    new.write("second\n")
    assert new.lost == 1
    folder.mkdir()
    new.write("third\n")
    old.write("fourth\n")
    assert path.read_text() == "1 lines were lost here: the disk took none\nthird\nfourth\n"
