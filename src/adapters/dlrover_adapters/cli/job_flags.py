"""The options of jobs with several groups of nodes. Light to import."""

from __future__ import annotations

import argparse

from dlrover_adapters.cli.torchrun_flags import Given


def add(ours: argparse._ArgumentGroup) -> None:
    """All of them."""
    ours.add_argument(
        "--job",
        action=Given,
        dest="job_file",
        default=None,
        metavar="FILE.toml",
        help="the job's groups, each with a program, nodes, processes and settings of its own (docs/jobs.md), in place of SCRIPT",
    )
    ours.add_argument(
        "--role-groups",
        action=Given,
        default=None,
        metavar="NAME:N,...",
        help="groups that all run SCRIPT: trainer:2,rollout:4:6,evaluator:1, as NAME:NODES or NAME:MIN:MAX; DLROVER_GROUP and "
        "ROLE_NAME in a worker's environment say which it is of",
    )
    ours.add_argument("--job-schema", action="store_true", help="print the JSON schema of job files, and run nothing")
