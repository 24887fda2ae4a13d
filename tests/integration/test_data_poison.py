"""Poison samples in real ranks under real agents: one cannot be fetched, one kills its worker in the step."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import dlrover
from running import SCRIPTS, Job
from tools.campaign_data import lineage, proof

RAISES, KILLS, SIZE = 13, 29, 48
"""As in the script."""
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(2 * int(LIMIT_S) + 60)


def _line(folder: Path, poison: str, loaders: int) -> list[str]:
    script = [str(SCRIPTS / "data_poison.py"), str(folder / "stored"), poison, str(loaders)]
    return ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", *script]


def test_both_are_found_and_left_out_and_all_others_are_trained_once(tmp_path: Path) -> None:
    """The job ends well; the log names both, and what it proves is what entered the steps."""
    with Job(tmp_path, *_line(tmp_path, "quarantine", 1)) as job:
        assert job.ended(LIMIT_S) == 0
        found = [one["fields"] for one in job.events("RangeQuarantined")]
        dataset = proof(job)
        shown = job.dlrover("data")
        report = job.dlrover("report")
    assert sorted(one["sample"] for one in found) == [RAISES, KILLS]
    assert {one["sample"]: one["signature"] for one in found} == {RAISES: "exception.ValueError", KILLS: "exit.sigkill"}
    trained = sorted(index for samples in lineage(tmp_path).values() for index in samples)
    assert trained == [index for index in range(SIZE) if index not in (RAISES, KILLS)]
    assert [(one["sample"], one["times"]) for one in dataset["quarantined"]] == [(RAISES, 1), (KILLS, 1)]
    assert f"quarantined: samples {RAISES}, {KILLS}; left out 2 times so far" in shown
    assert f"2 samples quarantined (samples {RAISES}, {KILLS})" in report


@pytest.mark.nightly
@pytest.mark.parametrize(("many", "restarts"), [(2, 3), (4, 5)])
def test_a_batch_of_which_nothing_is_left_is_gone_over(many: int, restarts: int, tmp_path: Path) -> None:
    """So many poison samples in a row: the job goes on with the next batch. The short form is in tests/unit/test_in_work.py."""
    script = [str(SCRIPTS / "data_poison_batch.py"), str(tmp_path / "stored"), str(many)]
    with Job(tmp_path, "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), *script) as job:
        assert job.ended(2 * LIMIT_S) == 0, job.said()[-3000:]
        dataset = proof(job)
        shown = job.dlrover("data")
    poison = [*range(12, 12 + many)]
    assert f"positions [12, {12 + many}) of epoch 0 count as consumed, and the optimizer makes no step" in job.said()
    assert [(one["sample"], one["times"]) for one in dataset["quarantined"]] == [(one, 1) for one in poison]
    assert f"quarantined: samples {', '.join(map(str, poison))}; left out {many} times so far" in shown
    trained = sorted(index for samples in lineage(tmp_path).values() for index in samples)
    assert trained == [index for index in range(24) if index not in poison]


@pytest.mark.nightly
def test_a_message_that_parse_cannot_read_is_left_out(tmp_path: Path) -> None:
    """Of a stream; it is named by partition and offset. The short form is in tests/unit/test_stream_left.py."""
    (tmp_path / "clicks").mkdir()
    (tmp_path / "clicks" / "a.jsonl").write_text(
        "".join((str(at) if at != RAISES else '"bad"') + "\n" for at in range(32))
    )
    script = [str(SCRIPTS / "kafka_ranks.py"), "4", str(tmp_path / "stored"), f"folder://{tmp_path}/clicks"]
    launch = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", *script]
    with Job(tmp_path, *launch, env={"PACE_S": "0"}) as job:
        assert job.ended(LIMIT_S) == 0, job.said()[-3000:]
        (found,) = [one["fields"] for one in job.events("RangeQuarantined")]
        shown = job.dlrover("data")
        verified = dlrover(["data", "verify", job.name, "--state-dir", str(job.state)]).stdout
    assert (found["sample"], found["signature"]) == (RAISES, "exception.ValueError")
    assert found["dataset"].startswith("clicks/")
    assert sorted(one for its in lineage(tmp_path).values() for one in its) == [at for at in range(32) if at != RAISES]
    assert f"quarantined: sample {RAISES}; left out 1 time so far" in shown
    assert f"sample {RAISES} is quarantined (exception.ValueError" in verified


@pytest.mark.nightly
def test_a_script_may_have_the_job_end(tmp_path: Path) -> None:
    """`poison="fail"`: the launcher's last words name the sample. The short form is in tests/unit/test_poison.py."""
    with Job(tmp_path, *_line(tmp_path, "fail", 0)) as job:
        assert job.ended(LIMIT_S) != 0
        chosen = [one["fields"]["rule"] for one in job.events("ActionChosen")]
    assert any(one.startswith("data.poison: sample") and "of dataset 'train'" in one for one in chosen)
