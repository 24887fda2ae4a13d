"""Write down what a script can see of its launcher: environment, arguments, directory, name and path."""

import json
import os
import sys
from pathlib import Path

NAMES = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "OMP_NUM_THREADS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCHELASTIC_USE_AGENT_STORE",
]
ONLY_THERE = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


class Pickled:
    """Must be found as ``__main__.Pickled``."""


seen = {
    "environment": {name: os.environ.get(name) for name in NAMES},
    "present": {name: name in os.environ for name in ONLY_THERE},
    "argv": sys.argv,
    "cwd": str(Path.cwd()),
    "name": __name__,
    "file": __file__,
    "path": sys.path[0],
    "package": __package__,
    "spec": getattr(__spec__, "name", None),
    "pickled": Pickled.__module__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "unbuffered": sys.stdout.write_through,
}
Path(os.environ["FOLDER"], f"where-{os.environ['RANK']}").write_text(json.dumps(seen))
