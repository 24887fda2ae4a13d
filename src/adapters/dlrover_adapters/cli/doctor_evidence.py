"""The check of evidence: what can be seen here of a failure beside workers' own deaths, output and error files."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from dlrover_adapters.agent import cgroup, kernel_log
from dlrover_adapters.cli.doctor_check import Finding, ok

ROOT = Path("/")


def evidence(root: Path = ROOT, kernel: str | None = None) -> Finding:
    """Which sources this machine offers. None of them is needed, so nothing here is a fault."""
    path = kernel_log.chosen_path(dict(os.environ)) if kernel is None else kernel
    kernel_said, readable = _kernel(path)
    group = cgroup.found(root)
    engine = _engine()
    said = f"workers' output, matched by {engine}; {kernel_said}; {_group(group)}"
    return ok(
        said,
        kernel_log=readable,
        cgroup=group.version if group is not None else 0,
        limited=group is not None and group.limited,
        matcher=engine,
    )


def _kernel(path: str) -> tuple[str, bool]:
    if not path:
        return f"the kernel's log is off ({kernel_log.VARIABLE})", False
    try:
        kernel_log.KernelLog(path).close()
    except OSError as error:
        why = error.strerror or str(error)
        return f"not the kernel's log ({path}: {why}), so GPUs' Xids and disks are not heard of", False
    return f"the kernel's log ({path})", True


def _group(group: cgroup.MemoryGroup | None) -> str:
    if group is None:
        return "no memory control group, so OOM kills are not counted"
    return f"OOM kills (cgroup version {group.version}, {'a limit' if group.limited else 'no limit in sight'})"


def _engine() -> str:
    """Who matches: what is installed under our entry point, or the standard library."""
    for one in metadata.entry_points(group="dlrover.matchers"):
        try:
            one.load()
        except (ImportError, AttributeError):
            continue
        return one.name
    return "re (slower; pip install 'dlrover-core[diagnosis]' for re2)"
