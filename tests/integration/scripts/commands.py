"""`dlrover COMMAND` in a process forked from one that has imported it: else the imports cost half a second each time."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

BOUND_S = 90.0
IMPORTED = (
    "dlrover_adapters.cli.main",
    "dlrover_core.history",
    "dlrover_core.logs.sqlite",
    "dlrover_adapters.http.client",
    "pytest",
)


def dlrover(
    words: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What ``dlrover WORDS`` prints and with what it ends. ``env``: all of its environment; ``cwd``: this directory, if none."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        environment = dict(os.environ if env is None else env)
        process = context.Process(target=_run, args=(list(words), environment, str(out), str(err), cwd))
        process.start()
        process.join(BOUND_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["dlrover", *words], BOUND_S, out.read_text(), err.read_text())
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(["dlrover", *words], code, out.read_text(), err.read_text())


def said(
    command: str,
    words: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    status: int | None = 0,
    bound_s: float = BOUND_S,
) -> str:
    """What a command of ours prints on either stream; it must end with this ``status``, if one is given."""
    if command == "dlrover":
        done = dlrover(words, env, cwd)
    else:
        done = subprocess.run(
            [str(Path(sys.executable).with_name(command)), *words],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
    told = done.stdout + done.stderr
    assert status in {None, done.returncode}, f"{command} {' '.join(words)}: {done.returncode}\n{told}"
    return told


def _run(words: list[str], environment: dict[str, str], out: str, err: str, cwd: Path | None) -> None:
    """The whole life of the forked process."""
    if cwd is not None:
        os.chdir(cwd)
    from dlrover_adapters.cli.main import main  # only this process needs it

    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.exit(main(words))
