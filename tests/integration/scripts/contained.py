"""A backend for tests: the example's, whose agents are started through the command in ``wrap`` (a shell's words)."""

import importlib.util
import shlex
from dataclasses import replace
from pathlib import Path

from dlrover_core import BackendContext

EXAMPLE = Path(__file__).parents[3] / "examples" / "backends" / "ssh_like.py"
spec = importlib.util.spec_from_file_location("ssh_like_of_the_tests", EXAMPLE)
assert spec is not None
assert spec.loader is not None
ssh_like = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ssh_like)


def contained(here: BackendContext) -> object:
    """Its arguments are the command, and nothing else."""
    return ssh_like.SshLike(replace(here, command=(*shlex.split(here.args), *here.command), args=""))
