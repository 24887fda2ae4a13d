"""Which rank of the job a local rank is, and whom node lists, events and daemons name."""

from __future__ import annotations

import pytest
from test_reading import ERROR, answer

from dlrover_core.diagnosis import launchers, layout, who

FAILED = "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -11) local_rank: 3 (pid: 47) of binary: python\n"
AGENT = """\
  group_rank=1
  group_world_size=2
  local_ranks=[0, 1, 2, 3]
  role_ranks=[4, 5, 6, 7]
  global_ranks=[4, 5, 6, 7]
"""
SUMMARY = """\
  time      : 2026-04-05_09:49:54
  host      : gpu-9
  rank      : 11 (local_rank: 3)
  exitcode  : 1 (pid: 4711)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""
EVENT = (
    '{"type":"Warning","reason":"OOMKilling","message":"Memory cgroup out of memory: Killed process 4711 (python)",'
    '"source":{"component":"kernel-monitor","host":"gpu-7"}}'
)


@pytest.mark.parametrize(
    ("before", "rank"),
    [
        ("", 3),
        (AGENT, 7),
        ("torchrun --nnodes=4 --nproc_per_node=8 --node_rank=2 train.py\n", 19),
        ("NODE_RANK=1\nNNODES=2\nGPUS_PER_NODE=4\n", 7),
        ("torchrun --nnodes=4 --nproc_per_node=8 train.py\n", -1),  # which of the four nodes, nobody says
        ("torchrun --nnodes=2:4 --nproc_per_node=8 train.py\n", -1),
        ("torchrun --nnodes=1 --nproc_per_node=8 train.py\n", 3),
        ("NODE_RANK=1 NNODES=2 GPUS_PER_NODE=4\nNODE_RANK=0 NNODES=2 GPUS_PER_NODE=4\n", -1),  # two nodes in one log
    ],
)
def test_a_local_rank_is_told_as_the_job_s(before: str, rank: int) -> None:
    """The host's number times its processes, or the list of its ranks, gives the first."""
    assert answer(before + FAILED).rank == rank


def test_a_summary_gives_the_rank_of_a_prefix() -> None:
    """`[default3]:` numbers the processes of one host: the summary says which rank of the job that is."""
    text = "".join(f"[default3]: {line}\n" for line in ERROR.format("", "KeyError: 'x'").splitlines())
    found = answer(text + SUMMARY)
    assert (found.judgement.signature, found.rank, found.host) == ("exception.KeyError", 11, "gpu-9")


def test_deepspeed_s_table_of_ranks() -> None:
    """A table of all hosts counts for the host that is known."""
    lines = [
        "global_rank_mapping=defaultdict(<class 'list'>, {'gpu-1': [0, 1, 2, 3], 'gpu-2': [4, 5, 6, 7]})",
        "node_rank=1",
    ]
    told = layout.learn(lines, ())
    assert [told.rank(host, 2) for host in ("gpu-1", "gpu-2")] == [2, 6]
    (end,) = launchers.ends(["[ERROR] ['python', '-u', 'train.py', '--local_rank=2'] exits with return code = -11"])
    assert (end.local, end.code) == (2, -11)


def test_one_line_on_many_ranks_names_none() -> None:
    """A line of srun tells of all ranks of a host at once: the host is named, and no rank."""
    found = answer("srun: error: gpu12: tasks 0-7: Killed")
    assert (found.rank, found.host) == (-1, "gpu12")
    found = answer("srun: error: gpu12: task 5: Killed")
    assert (found.rank, found.host) == (5, "gpu12")


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("slurmctld: error: Nodes gpu13 not responding, setting DOWN", "gpu13"),
        ("slurmctld: error: Nodes gpu[12-13] not responding, setting DOWN", ""),
        ("slurmstepd-gpu13: error: Detected 1 oom_kill event in StepId=77.0.", "gpu13"),
        (EVENT, "gpu-7"),
    ],
)
def test_whom_a_scheduler_or_an_event_names(line: str, host: str) -> None:
    """A daemon's name holds its host, a list of several hosts is none of them, and an event has its source."""
    assert answer(line).host == host


def test_an_event_s_object() -> None:
    """An event is about a pod or a node, and says so below its first level."""
    pod = '{"message":"x","involvedObject":{"kind":"Pod","name":"job-worker-3"}}'
    assert who.peel(pod).who.pod == "job-worker-3"
    node = '{"message":"x","regarding":{"kind":"Node","name":"gpu-7"}}'
    assert who.peel(node).who.host == "gpu-7"
