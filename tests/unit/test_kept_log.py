"""Which log a command reads that names only a job: that of the job's launch on this host."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from dlrover_adapters.cli import places

ETCD = "etcd://e1:2379/dlrover"


def settings(state: Path, said: object) -> None:
    """What a launcher of the job ``digits`` wrote down."""
    folder = state / "jobs" / "digits"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(said if isinstance(said, str) else json.dumps(said))


def asked(state: Path, **more: object) -> str:
    """The log that `dlrover status digits --state-dir STATE` reads."""
    args = argparse.Namespace(**{"job": "digits", "log": None, "state_dir": state, **more})
    places.through_masters(args)
    return places.log_url(args.log, state)


def test_a_job_is_found_by_what_its_launcher_wrote_down(tmp_path: Path) -> None:
    """Whoever launched it with --log need not say it again, on this host."""
    settings(tmp_path, {"log": ETCD})
    assert asked(tmp_path) == ETCD
    assert asked(tmp_path, log="etcd://other:2379/x") == "etcd://other:2379/x"
    assert asked(tmp_path, job=None) == places.log_url(None, tmp_path)
    assert asked(tmp_path, job="another") == places.log_url(None, tmp_path)


@pytest.mark.parametrize("said", ["", "no JSON", "[]", {}, {"log": 7}])
def test_what_cannot_be_read_says_nothing(tmp_path: Path, said: object) -> None:
    """Then it is the state directory's log, as for a job that was launched elsewhere."""
    settings(tmp_path, said)
    assert asked(tmp_path) == places.log_url(None, tmp_path)


def test_the_state_directorys_own_log_needs_no_name(tmp_path: Path) -> None:
    """A job without --log is read as ever."""
    settings(tmp_path, {"log": places.log_url(None, tmp_path)})
    assert places.kept_log(tmp_path, "digits") == ""
