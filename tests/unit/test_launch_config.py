"""What a node's launcher is told, and the environment its workers are born with."""

from __future__ import annotations

import pytest

from dlrover_adapters.agent.config import LaunchConfig, Mode, Streams, birth_environment, parse_streams, rank_overrides
from dlrover_adapters.torch.environment import NON_TEMPORAL
from dlrover_core.errors import SpecError

NONE, OUT, ERR, ALL = Streams.NONE, Streams.OUT, Streams.ERR, Streams.ALL


@pytest.mark.parametrize(
    ("text", "streams"),
    [
        ("0", (NONE, NONE, NONE)),
        ("3", (ALL, ALL, ALL)),
        ("0:1,1:3", (OUT, ALL, NONE)),
        ("2:2", (NONE, NONE, ERR)),
    ],
)
def test_streams_are_written_as_for_torchrun(text: str, streams: tuple[Streams, ...]) -> None:
    """One number is for all local ranks; a list names some, the others have none."""
    assert parse_streams("tee", text, 3) == streams


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("4", "none of 0"),
        ("", "none of 0"),
        ("a:1", "LOCAL_RANK:VALUE"),
        ("0:1,2", "LOCAL_RANK:VALUE"),
        ("7:1", "rank 7"),
    ],
)
def test_wrong_streams_are_named(text: str, complaint: str) -> None:
    """The error names the flag and what is wrong with its value."""
    with pytest.raises(SpecError, match=complaint) as caught:
        parse_streams("redirects", text, 3)
    assert caught.value.field == "redirects"


def test_torch_reads_streams_alike() -> None:
    """Torchrun itself understands the same texts in the same way."""
    from torch.distributed.elastic.multiprocessing import Std, to_map

    for text in ("0", "1", "2", "3", "0:1,1:3", "1:2"):
        theirs = to_map(Std.from_str(text), 3)
        assert [int(one) for one in parse_streams("tee", text, 3)] == [int(theirs[rank]) for rank in range(3)]


def test_tee_goes_to_both_and_redirect_to_the_file_only() -> None:
    """What is redirected is not shown; what is teed is in the file and on the console; the rest is only shown."""
    config = LaunchConfig(("train.py",), nproc=3, redirects=(OUT, NONE, ALL), tee=(NONE, ERR, ERR))
    assert [config.redirected(rank) for rank in range(3)] == [OUT, ERR, ALL]
    assert [config.shown(rank) for rank in range(3)] == [ERR, ALL, ERR]


@pytest.mark.parametrize(
    ("nproc", "inherited", "threads"),
    [(1, {}, None), (2, {}, "1"), (2, {"OMP_NUM_THREADS": "4"}, "4"), (1, {"OMP_NUM_THREADS": "4"}, "4")],
)
def test_omp_num_threads_is_torchruns(nproc: int, inherited: dict[str, str], threads: str | None) -> None:
    """Several workers on a node have one OpenMP thread each, unless the user says how many."""
    env = birth_environment(LaunchConfig(("train.py",), nproc=nproc), inherited)
    assert env.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("inherited", "told"),
    [
        ("", f"{NON_TEMPORAL}=0x1000000"),
        ("glibc.malloc.check=1", f"glibc.malloc.check=1:{NON_TEMPORAL}=0x1000000"),
        (f"{NON_TEMPORAL}=0x4040", f"{NON_TEMPORAL}=0x4040"),
    ],
)
def test_only_large_copies_go_past_the_caches(inherited: str, told: str) -> None:
    """From 16 MiB on, which no core's cache holds: whoever copies less reads it next. What the user says stands."""
    env = birth_environment(LaunchConfig(("train.py",)), {"GLIBC_TUNABLES": inherited})
    assert env["GLIBC_TUNABLES"] == told


def test_a_lost_question_to_a_name_server_costs_a_second() -> None:
    """Torch asks one for every connection that it makes; glibc alone would wait for 5 s. What the user says stands."""
    assert birth_environment(LaunchConfig(("train.py",)), {})["RES_OPTIONS"] == "timeout:1 attempts:5"
    assert birth_environment(LaunchConfig(("train.py",)), {"RES_OPTIONS": "rotate"})["RES_OPTIONS"] == "rotate"


def test_workers_are_born_without_our_secrets() -> None:
    """The job's token stays with the agent; what the user sets arrives."""
    born = {"DLROVER_TOKEN": "x", "DLROVER_ETCD_PASSWORD": "y", "HOME": "/root"}
    env = birth_environment(LaunchConfig(("train.py",), env={"MINE": "1"}), born)
    assert not {"DLROVER_TOKEN", "DLROVER_ETCD_PASSWORD"} & env.keys()
    assert (env["MINE"], env["HOME"], env["PYTORCH_NVML_BASED_CUDA_CHECK"]) == ("1", "/root", "1")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (LaunchConfig(()), "argv"),
        (LaunchConfig(("a.py",), nproc=0), "nproc"),
        (LaunchConfig(("a.py",), nproc=2, tee=(OUT,)), "tee"),
        (LaunchConfig(("a.py",), run_dir="here"), "run_dir"),
    ],
)
def test_what_cannot_work_is_refused(config: LaunchConfig, field: str) -> None:
    """A wrong configuration is an error that names the setting, before anything is started."""
    with pytest.raises(SpecError) as caught:
        config.checked()
    assert caught.value.field == field


def test_commands_have_no_zygote() -> None:
    """What is not Python, and what was asked to preload nothing, is executed afresh."""
    assert LaunchConfig(("a.py",)).warm
    assert not LaunchConfig(("a.py",), preload=None).warm
    assert not LaunchConfig(("a.out",), mode=Mode.COMMAND).warm


@pytest.mark.parametrize(
    ("scheduled", "told"), [({"NODE_RANK": ""}, {"NODE_RANK": "3"}), ({"NODE_RANK": "7"}, {}), ({}, {})]
)
def test_dlrovers_names_of_a_place_are_filled_in(scheduled: dict[str, str], told: dict[str, str]) -> None:
    """A pod that waited for its name has ``NODE_RANK`` without a value: workers find their node's place in it."""
    config = LaunchConfig(("train.py",))
    assert rank_overrides(config, 0, "worker-3-1", scheduled) == {"DLROVER_PLACE": "3", **told}
    assert rank_overrides(config, 0, "", scheduled) == {}
