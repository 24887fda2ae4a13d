"""Runs `scripts/saving.py` for one way of saving: ours under our agent, peers plainly, dlrover 0.6.1 in its own environment."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _bench import HERE, say
from _jobs import TORCH, Broken

SCRIPT = HERE / "scripts" / "saving.py"
DLROVER = "0.6.1"
OURS = ("ours", "ours_blocking")
LIMIT_S = 420.0
PAST_CACHES = "glibc.cpu.x86_non_temporal_threshold=0x1000000"
"""What the launcher sets for workers."""
DLROVER_TRIES = 3
GIB = float(2**30)
_LEFT = Path("/dev/shm/ckpt_shm_0")  # noqa: S108  # its name for it
"""What dlrover's engine leaves behind when nobody is there to clean up."""


def dlrover_python() -> Path:
    """The interpreter of its own environment, which is made where it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "dlrover-bench" / f"dlrover-{DLROVER}"
    python, done = home / "bin" / "python", home / "complete"
    if not done.exists():
        say(f"making dlrover's environment in {home}, once")
        venv.create(home, with_pip=True, clear=True)
        wanted = [f"torch=={TORCH}", "numpy", f"dlrover[k8s,torch]=={DLROVER}"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        done.touch()
    return python


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder for one run; its path is short because sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="dlb-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run(engine: str, options: Sequence[str], what: str = "saving") -> dict[str, Any]:
    """What one process measured. Raises `Broken`."""
    for left in range(DLROVER_TRIES if engine == "dlrover" else 1, 0, -1):
        try:
            return _run(engine, options, what)
        except Broken as error:
            # Outside of its agent dlrover's engine at times waits 60 s for a socket, and gives up.
            if left == 1:
                raise
            say(f"{engine} did not start, once more: {str(error)[-200:]}")
    raise AssertionError


def _run(engine: str, options: Sequence[str], what: str) -> dict[str, Any]:
    with folder() as place:
        out = place / "found.json"
        program = [str(SCRIPT), "--what", what, "--engine", engine, "--folder", str(place), "--out", str(out), *options]
        if engine in OURS or what != "saving":
            beside = Path(sys.executable).parent / "dlrover-run"
            launch = [str(beside), "--job-id", "bench", "--state-dir", str(place / "state"), "--nproc-per-node", "1"]
            command = [*launch, "--max-restarts", "0", *program]
        else:
            command = [str(dlrover_python()) if engine == "dlrover" else sys.executable, *program]
        strange = ("DLROVER", "VIRTUAL_ENV", "PYTHON", "GLIBC_TUNABLES")
        env = {key: value for key, value in os.environ.items() if not key.startswith(strange)}
        env |= {"DLROVER_TOKEN": secrets.token_hex(16), "TMPDIR": str(place)}
        if engine == "beside":
            env["GLIBC_TUNABLES"] = PAST_CACHES
        try:
            done = subprocess.run(
                command, cwd=place, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as late:
            raise Broken(f"{engine} does not end: {(late.stderr or b'')[-500:]!r}") from late
        finally:
            if engine == "dlrover":
                _LEFT.unlink(missing_ok=True)
        if not out.exists():
            raise Broken(f"{engine} measured nothing, and said: {(done.stdout + done.stderr)[-1500:]}")
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def per_gib(found: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Milliseconds per GiB of each warm save of some runs."""
    return [1000 * save[key] * GIB / one["size"] for one in found for save in one["saves"]]


def first_per_gib(found: Sequence[dict[str, Any]], key: str) -> list[float]:
    """The same of each run's first save."""
    return [1000 * one["first"][key] * GIB / one["size"] for one in found]
