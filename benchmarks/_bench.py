"""What every benchmark shares: its options, the machine in words, medians, the table, and the JSON it leaves behind.

A benchmark prints progress on stderr and its table on stdout; it ends with 0 when no target is missed, with 1 when one is, and
with 2 when it could not measure. In ``MEASURES`` it names the paths that it measures: a figure is stale when they have changed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from tools.figures import NO, YES, Row, number  # noqa: E402

__all__ = ["Row", "number"]  # what others take from here

RESULTS = HERE / "results"
MET, MISSED, BROKEN = 0, 1, 2
LOOP = 1_000_000
A_JOB = (
    "src/adapters/dlrover_adapters/agent",
    "src/adapters/dlrover_adapters/cli",
    "src/adapters/dlrover_adapters/http",
    "src/backends",
    "src/dlrover_core/job",
    "src/dlrover_core/kernel",
    "src/dlrover_core/logs",
    "src/dlrover_core/rules",
    "src/dlrover_core/runtime",
)
"""What every benchmark measures that launches a job."""


@dataclass(slots=True)
class Result:
    """One run of one benchmark. ``notes``: what a reader must know; ``details``: figures without a target.

    Make it before anything is measured: it keeps when that was, of which commit, and how busy the machine was.
    """

    name: str
    peer: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    began: float = field(default_factory=time.time)
    load_before: tuple[float, ...] = field(default_factory=os.getloadavg)
    commit: str = field(default_factory=lambda: commit())

    def finish(self, path: Path | None) -> int:
        """Print the table, write the JSON, and say how it went."""
        print(f"\n{self.name}: ours against {self.peer}")
        cells = [
            (
                one.what,
                one.ours_text(),
                one.peer_text(),
                one.ratio_text(),
                one.target_text(),
                one.verdict,
                str(one.trials),
            )
            for one in self.rows
        ]
        print(table([("", "ours", "peer", "ratio", "target", "met", "n"), *cells]))
        for note in (*self.notes, machine_line()):
            print(f"  {note}")
        self.write(path)
        return MISSED if any(row.verdict == NO for row in self.rows) else MET

    def write(self, path: Path | None) -> None:
        """Write the JSON; once is enough, and more often keeps what a run that breaks off has measured."""
        path = path or RESULTS / f"{self.name}.json"
        rows = []
        for row in self.rows:
            shown: dict[str, Any] = {"ours_median": row.figure, "peer_median": row.peer_figure, "ratio": row.ratio}
            shown |= {"n": row.trials, "ratio_interval": row.ratio_interval, "verdict": row.verdict}
            rows.append({**asdict(row), **shown, "met": {YES: True, NO: False}.get(row.verdict)})
        told = {
            "benchmark": self.name,
            "peer": self.peer,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.began)),
            "took_s": round(time.time() - self.began, 1),
            "seed": self.seed,
            "commit": self.commit,
            "machine": machine(),
            "load_before": self.load_before,
            "load_after": os.getloadavg(),
            "rows": rows,
            "notes": self.notes,
            "details": self.details,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(rounded(told), indent=1, ensure_ascii=False) + "\n"
        path.write_text(_anywhere(text), encoding="utf-8")
        say(f"written to {path}")


def _anywhere(text: str) -> str:
    """Without this machine's folders: a result is read elsewhere."""
    return text.replace(f"{RESULTS.parents[1]}/", "").replace(str(Path.home()), "~")


def options(about: str | None, trials: int = 5, more: Callable[[argparse.ArgumentParser], None] | None = None) -> Any:
    """The parsed command line: ``--trials``, ``--json``, and what ``more`` adds. SIGTERM cleans up from here on."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=trials, metavar="N", help=f"trials of each (default {trials})")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the result goes (default results/NAME.json)")
    if more is not None:
        more(parser)
    return parser.parse_args()


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"  .. {text}", file=sys.stderr, flush=True)


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of the others do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def rounded(value: Any) -> Any:
    """The same with floats of six figures, for a file that people read too."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns, aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 1024**2, 1),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": _torch_version(),
        "loop_ms": loop_ms(),
    }


def loop_ms() -> float:
    """Milliseconds of a plain loop, the best of five: tells machines apart that call their processor the same."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(LOOP):
            pass
        best = min(best, time.perf_counter() - began)
    return round(1000 * best, 1)


def commit() -> str:
    """The commit of this tree, with ``+`` where files of it are changed; empty outside of a repository."""

    def git(*words: str) -> str:
        line = ["/usr/bin/env", "git", *words]
        return subprocess.run(line, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", ".", ":!results")
    return git("rev-parse", "--short=12", "HEAD") + "+" * bool(changed)


def machine_line() -> str:
    """The same in one line, with what else runs."""
    seen = machine()
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    return (
        f"on {seen['cores']} cores of {seen['cpu']}, {seen['memory_gib']} GiB, Linux {seen['kernel']}, "
        f"Python {seen['python']}, torch {seen['torch']}, load {load}"
    )


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _torch_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"
