"""Data in real ranks under real agents: what entered the steps of the model's lineage is what the log proves, and each once.

The campaign `data_kills` does this to many jobs that also change their size.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from running import SCRIPTS, Job
from tools.campaign_data import BATCH, lineage, proof, proved

from dlrover_core.data.permutation import Order

LIMIT_S = 110.0
STEPS = 21

pytestmark = pytest.mark.timeout(int(LIMIT_S) + 60)


def test_what_entered_the_steps_is_what_the_log_proves(tmp_path: Path) -> None:
    """A rank is killed in mid-epoch: each step of the lineage has the samples that it always has, and the audit says as many."""
    script = [str(SCRIPTS / "data_ranks.py"), str(STEPS), str(tmp_path / "stored"), "1:11"]
    with Job(tmp_path, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", *script) as job:
        assert job.ended(LIMIT_S) == 0
        found = proved(job, STEPS)
        registered = [one["fields"]["global_batch"] for one in job.events("DatasetRegistered")]
    assert registered == [0, BATCH]
    assert (found["dataset"], found["generations"], found["resumed"]) == ("train", 2, 1)


@pytest.mark.nightly
def test_a_trainer_whose_rank_is_killed_counts_each_sample_once(tmp_path: Path) -> None:
    """Hugging Face's Trainer draws ahead on two ranks, one of which is killed in the second epoch."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    steps, size, batch, seed = 14, 40, 8, 3  # as in small_huggingface
    script = [str(SCRIPTS / "hf_ranks.py"), str(steps), "1:9"]
    with Job(tmp_path, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", *script) as job:
        assert job.ended(LIMIT_S) == 0, job.said()[-3000:]
        found = proof(job)
    every = [one for epoch in range(3) for one in Order(size, seed, epoch).indices(0, size)]
    made = lineage(tmp_path)
    assert list(made) == list(range(1, steps + 1))
    assert [sorted(made[step + 1]) for step in range(steps)] == [
        sorted(every[step * batch : (step + 1) * batch]) for step in range(steps)
    ]
    assert (found["samples"], found["generations"], found["findings"]) == (steps * batch, 2, [])
