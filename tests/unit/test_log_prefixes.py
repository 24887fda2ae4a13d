"""The prefixes of teed output on the console: torchrun's, and by place where a job has several groups."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dlrover_adapters.agent.config import LaunchConfig, Streams
from dlrover_adapters.agent.logs import rank_files
from dlrover_adapters.cli.agent import launch_config
from dlrover_adapters.cli.settings import Settings
from dlrover_core.runtime.launcher import WorkersLaunch
from dlrover_core.spec import GroupSpec, JobSpec

TRAINER, ROLLOUT = GroupSpec("trainer"), GroupSpec("rollout", 4, 4, coupling="each")


def config_of(*groups: GroupSpec, role: str = "rollout") -> LaunchConfig:
    """The launch configuration of an agent of such a job."""
    spec = JobSpec("j", groups).to_json()
    settings = Settings(spec, "r", "memory:", "/d", ("train.py",), 1, "script", role=role, tee=(Streams.OUT,))
    raw: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(settings)))
    return launch_config(raw, "j", "")._replace(tee=(Streams.OUT,) * 2)


def prefix(config: LaunchConfig, node: str, local_rank: int = 0, nproc: int = 1) -> str:
    """What stands before each line of a worker."""
    launch = WorkersLaunch("r", 1, 0, nproc, nproc, 0, 1, "", 0, 3, node=node)
    return rank_files(config, "/run", "/logs", launch, local_rank).stdout.prefix.decode()


def test_nodes_of_one_group_are_told_apart() -> None:
    """Each rollout trains alone, as local rank 0 of rank 0: only its place says which it is."""
    config = config_of(TRAINER, ROLLOUT)
    assert [prefix(config, f"rollout-{place}-{place + 1}") for place in (0, 3)] == ["[rollout0]:", "[rollout3]:"]
    assert prefix(config, "rollout-3-0", local_rank=1, nproc=2) == "[rollout3.1]:"


def test_a_job_of_one_group_has_torchruns_prefixes() -> None:
    """Scripts and people that read torchrun's output find the same."""
    config = config_of(GroupSpec(nodes_max=4), role="default")
    assert prefix(config, "worker-3-0", local_rank=1, nproc=2) == "[default1]:"


def test_a_template_may_name_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside torchrun's names."""
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${place} ${role_name} ${rank} ${local_rank}>")
    assert prefix(config_of(TRAINER, ROLLOUT), "rollout-3-0") == "<rollout-3 rollout 0 0>"
