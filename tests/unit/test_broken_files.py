"""Whose file it is that cannot be read: the call stack tells, whatever the words."""

from __future__ import annotations

import pytest
from test_reading import said

from dlrover_core.diagnosis import files

HEAD = 'Traceback (most recent call last):\n  File "/w/train.py", line 9, in main\n    run()\n'


def cut(file: str, function: str, words: str = "EOFError: Ran out of input") -> str:
    """A traceback whose innermost call is in that file."""
    return f'{HEAD}  File "{file}", line 31, in {function}\n    x = load(f)\n{words}\n'


@pytest.mark.parametrize(
    ("file", "function", "owner"),
    [
        ("/w/zork/frob_dataset.py", "read", "data.sample"),
        ("/w/zork/frob.py", "__getitem__", "data.sample"),
        ("/w/zork/frob.py", "load_cached_rows", "data.sample"),
        ("/w/zork/frob.py", "resume_from", "checkpoint.corrupt"),
        ("/w/zork/frob.py", "read", "checkpoint.corrupt"),
        ("/opt/py/site-packages/torch/serialization.py", "load", "checkpoint.corrupt"),
        ("/opt/py/site-packages/torch/distributed/distributed_c10d.py", "_tensor_to_object", "checkpoint.corrupt"),
    ],
)
def test_a_pickle_that_ends_early_is_its_reader_s(file: str, function: str, owner: str) -> None:
    """Read by a data set it is a sample; read by whatever restores a state, or by nobody in particular, a checkpoint."""
    assert said(cut(file, function)) == owner


def test_the_innermost_reader_decides() -> None:
    """A data set that a checkpoint's loading opens reads samples, and the other way round."""
    outer = cut("/w/zork/resume.py", "resume").rsplit("EOFError", 1)[0]
    inner = cut("/w/zork/frob_dataset.py", "read").split("    run()\n", 1)[1]
    assert said(outer + inner) == "data.sample"


def test_a_database_without_a_server_waits_for_its_file() -> None:
    """SQLite's `OperationalError` is of a file's lock, other databases' of a server."""
    assert said(f"{HEAD}sqlite3.OperationalError: frob is locked\n") == "storage.lock"
    assert said(f"{HEAD}psycopg2.OperationalError: frob is locked\n") == "data.connection"


def test_other_signatures_stay() -> None:
    """Words that tell of no file, and signatures of other kinds, are left alone."""
    frames = [("/w/zork/frob_dataset.py", "3", "read")]
    assert files.owner("cuda.oom", "Ran out of input", frames) == ""
    assert files.owner("checkpoint.corrupt", "the header is damaged", frames) == ""
