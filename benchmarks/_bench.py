"""What every benchmark shares: its options, the machine in words, medians, the table, and the JSON it leaves behind.

A benchmark prints progress on stderr and its table on stdout; it ends with 0 when every target is met, with 1 when one is
missed, and with 2 when it could not measure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
MET, MISSED, BROKEN = 0, 1, 2
SHARED = "a shared, noisy machine: ours and the peer in turn, medians; figures of two runs may differ by a third"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: trials of ours, of the peer if there is one, and the target that ours or the ratio must meet.

    ``of`` says what the target is about: ``ours`` or ``ratio`` (ours / peer); ``most``: it is an upper bound.
    """

    what: str
    unit: str
    ours: Sequence[float]
    peer: Sequence[float] = ()
    target: float | None = None
    of: str = "ours"
    most: bool = True

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's, by medians."""
        return median(self.ours) / median(self.peer) if self.peer and median(self.peer) else None

    @property
    def met(self) -> bool | None:
        """Is the target met? None: there is none."""
        value = self.ratio if self.of == "ratio" else median(self.ours)
        if self.target is None or value is None:
            return None
        return value <= self.target if self.most else value >= self.target

    def cells(self) -> tuple[str, ...]:
        """As the table shows it."""
        sign = "<=" if self.most else ">="
        suffix = "x" if self.of == "ratio" else f" {self.unit}"
        target = f"{sign} {number(self.target)}{suffix}" if self.target is not None else ""
        return (
            self.what,
            f"{number(median(self.ours))} {self.unit}{spread(self.ours)}",
            f"{number(median(self.peer))} {self.unit}{spread(self.peer)}" if self.peer else "",
            f"{number(self.ratio)}x" if self.ratio is not None else "",
            target,
            {None: "", True: "yes", False: "NO"}[self.met],
        )


@dataclass(slots=True)
class Result:
    """One run of one benchmark. ``notes``: what a reader must know; ``details``: figures without a target."""

    name: str
    peer: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    began: float = field(default_factory=time.time)
    load_before: tuple[float, ...] = field(default_factory=os.getloadavg)

    def finish(self, path: Path | None) -> int:
        """Print the table, write the JSON, and say how it went."""
        print(f"\n{self.name}: ours against {self.peer}")
        print(table([("", "ours", "peer", "ratio", "target", "met"), *(row.cells() for row in self.rows)]))
        for note in (*self.notes, machine_line(), SHARED):
            print(f"  {note}")
        self._write(path or RESULTS / f"{self.name}.json")
        return MISSED if any(row.met is False for row in self.rows) else MET

    def _write(self, path: Path) -> None:
        rows = []
        for row in self.rows:
            shown = {"ours_median": median(row.ours), "peer_median": median(row.peer) if row.peer else None}
            rows.append({**asdict(row), **shown, "ratio": row.ratio, "met": row.met})
        told = {
            "benchmark": self.name,
            "peer": self.peer,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.began)),
            "took_s": round(time.time() - self.began, 1),
            "seed": self.seed,
            "machine": machine(),
            "load_before": self.load_before,
            "load_after": os.getloadavg(),
            "rows": rows,
            "notes": [*self.notes, SHARED],
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


def spread(values: Sequence[float]) -> str:
    """The extremes, for the table."""
    return f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""


def number(value: float | None) -> str:
    """Three figures, without an exponent."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


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
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _torch_version(),
    }


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
