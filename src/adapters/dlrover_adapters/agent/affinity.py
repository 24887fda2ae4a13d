"""``--numa-binding``: which CPUs each worker may run on, asked once per agent of the library that trains. Blocking."""

from __future__ import annotations

import json
import os
import subprocess

from dlrover_core.errors import LaunchFailed

from .config import LaunchConfig, birth_environment
from .framework import load
from .spawn import module_command


def cpus_by_rank(config: LaunchConfig) -> tuple[tuple[int, ...], ...]:
    """The CPUs of each local rank. Raises `LaunchFailed` with what the library says."""
    module = load(config.framework).CPUS
    if not module:
        raise LaunchFailed(f"--numa-binding {config.numa}: {config.framework} does not know where devices are")
    command = (*module_command(module), config.numa, str(config.nproc))
    env = birth_environment(config, os.environ)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=config.ready_s, check=True)
        return tuple(tuple(one) for one in json.loads(done.stdout))
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise LaunchFailed(f"--numa-binding {config.numa}: {why}") from error
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise LaunchFailed(f"--numa-binding {config.numa}: {error}") from error
