"""What one statement of SQLite decides: whose batch may land, whatever the leader that sends it believes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_core.kernel.log import AlreadyAppended, Appended, Conflict, Fenced, LeaderInfo, Snapshot
from dlrover_core.logs import tables
from dlrover_core.testing.log_conformance import make_batch


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[tables.sqlite3.Connection, int]]:
    """A job that leader 4 leads, with one batch of leader 3 in its log."""
    db = tables.connect(tmp_path / "log.db", create=True)
    number = tables.ensure_job(db, "j").id
    tables.set_leader(db, number, LeaderInfo(3, "a", ""))
    assert tables.append(db, number, make_batch(3, 1, 1)) == Appended(1)
    tables.set_leader(db, number, LeaderInfo(4, "b", ""))
    yield db, number
    db.close()


def test_no_older_token_appends(job: tuple[tables.sqlite3.Connection, int]) -> None:
    """A batch that fits the log's end is fenced all the same, and so is one from a leader that this log has never seen."""
    db, number = job
    assert tables.append(db, number, make_batch(3, 2, 2)) == Fenced(3, 4)
    assert tables.append(db, number, make_batch(5, 1, 2)) == Fenced(5, 4)
    assert tables.head(db, number) == 1
    assert tables.append(db, number, make_batch(4, 1, 2)) == Appended(2)


def test_each_batch_lands_once_and_at_the_end(job: tuple[tables.sqlite3.Connection, int]) -> None:
    """A repeated batch is known again; one that does not begin at the end meets a conflict."""
    db, number = job
    batch = make_batch(4, 1, 2, events=2)
    assert tables.append(db, number, batch) == Appended(3)
    assert tables.append(db, number, batch) == AlreadyAppended(3)
    assert tables.append(db, number, make_batch(4, 2, 3)) == Conflict(2, 3)
    assert tables.append(db, number, make_batch(4, 2, 5)) == Conflict(4, 3)


def test_no_older_token_keeps_a_snapshot(job: tuple[tables.sqlite3.Connection, int]) -> None:
    """Nor does a newer one that does not lead here."""
    db, number = job
    snapshot = Snapshot(1, "s", b"state")
    assert [tables.put_snapshot(db, number, token, snapshot) for token in (3, 5, 4)] == [False, False, True]
    assert tables.newest_snapshot(db, number) == snapshot
