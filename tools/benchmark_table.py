"""Writes the table of benchmarks/README.md from benchmarks/results/*.json: ``python -m tools.benchmark_table``.

Each row says when it was measured, of which commit, on which machine and how often, as far as the result recorded that. A figure
is marked stale when code that it measures (``MEASURES`` in its script) is not what it was at its commit: git knows. The list of
missed targets in the README of the project is made here, too.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.figures import NO, NOT_DECIDED, Row

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
PAGE, FRONT = BENCHMARKS / "README.md", ROOT / "README.md"
NAMES = (
    "killed_worker", "killed_node", "killed_master", "hung_master", "cold_start", "join", "imports", "overhead", "heartbeats",
    "join_2000", "idle", "commands", "records", "replay", "etcd_append", "etcd_latency", "etcd_read", "failover", "etcd_growth",
    "simulate", "crashes", "goodput", "matcher", "diagnosis", "corpus", "straggler", "detectors", "import", "checkpoint",
    "layout", "digests", "roles", "detached", "data", "data_jobs", "leases", "k8s", "k8s_kills", "k8s_away",
    "k8s_silent", "k8s_notices", "k8s_masters", "ray",
)  # fmt: skip
HEAD, TAIL = "## Latest results", "## Reading them"
MISSED, OVER = "<!-- missed: made by tools/benchmark_table.py -->", "<!-- end -->"
NOT_RECORDED = "not recorded"
STALE = re.compile(r", \*\*stale: [^*]*\*\*")
BUSY = 1.0
"""A load before a benchmark above which its rows say it."""


# ---- what git knows


def _git(*words: str, root: Path) -> str | None:
    """What it prints; None: it cannot tell."""
    try:
        done = subprocess.run(
            ["/usr/bin/env", "git", "-c", "core.quotepath=off", *words],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


class Since(NamedTuple):
    """What changed in the tree since a commit: files that differ now, and for each commit since then the files it touched."""

    files: frozenset[str]
    commits: tuple[frozenset[str], ...]

    def touching(self, paths: Sequence[str]) -> int:
        """The number of commits since then that changed one of ``paths``, if it is not what it was; else 0."""

        def within(files: frozenset[str]) -> bool:
            return any(file == path or file.startswith(f"{path}/") for file in files for path in paths)

        return max(1, sum(map(within, self.commits))) if within(self.files) else 0


@functools.cache
def since(commit: str, root: Path = ROOT) -> Since | None:
    """What changed since ``commit``, changes that are not committed included. None: git does not know that commit."""
    files = _git("diff", "--name-only", "--no-renames", commit, "--", root=root)
    log = _git("log", "--format=%x00", "--name-only", "--no-renames", f"{commit}..HEAD", "--", root=root)
    if files is None or log is None:
        return None
    return Since(frozenset(files.split("\n")), tuple(frozenset(one.split("\n")) for one in log.split("\0")[1:]))


def measured_at(name: str, result: Mapping[str, Any], root: Path = ROOT) -> str:
    """The commit that a result measured. Where it does not say: the one that brought it, which is no older. Empty: unknown."""
    if told := str(result.get("commit") or ""):
        return told.rstrip("+")
    if (_git("rev-parse", "--is-shallow-repository", root=root) or "true").strip() != "false":
        return ""
    return (_git("log", "-1", "--format=%H", "--", f"benchmarks/results/{name}.json", root=root) or "").strip()


@functools.cache
def _constant(script: str, name: str) -> tuple[str, ...]:
    """Paths that a script of the benchmarks assigns to a name; ``*A_JOB`` among them stands for those of `_bench.py`."""
    for node in ast.parse((BENCHMARKS / f"{script}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            given = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            found: list[str] = []
            for one in given:
                found += _constant("_bench", "A_JOB") if isinstance(one, ast.Starred) else [ast.literal_eval(one)]
            return tuple(found)
    raise LookupError(f"benchmarks/{script}.py does not say what it measures: {name}")


def measures(name: str) -> tuple[str, ...]:
    """The paths that a benchmark measures, by its script."""
    return _constant(f"bench_{name}", "MEASURES")


def age(name: str, result: Mapping[str, Any], root: Path = ROOT) -> int | None:
    """Commits since a result that changed what it measures; None: git cannot tell."""
    commit = measured_at(name, result, root)
    changed = since(commit, root) if commit else None
    return changed.touching(measures(name)) if changed is not None else None


# ---- the table


def stored(name: str) -> dict[str, Any] | None:
    """A result; None: there is none that can be read."""
    try:
        told = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) and isinstance(told.get("rows"), list) else None


def rows_of(result: Mapping[str, Any]) -> list[Row]:
    """Its rows. Results from before rows said so name a constant peer in their own words."""
    constant = "a constant" in str(result.get("peer", ""))
    return [Row.stored(one, constant=constant and bool(one.get("peer"))) for one in result["rows"]]


def machine_of(result: Mapping[str, Any]) -> str:
    """The machine in words, without what only its owner understands."""
    made = result.get("machine")
    if not isinstance(made, Mapping):
        return NOT_RECORDED
    kernel = str(made.get("kernel", NOT_RECORDED)).partition("-")[0]
    words = [
        f"{made.get('cores', '?')} shared cores of {made.get('cpu', NOT_RECORDED)}",
        f"{made.get('memory_gib', '?')} GiB",
    ]
    return ", ".join(
        [*words, f"Linux {kernel}", f"Python {made.get('python', '?')}", f"torch {made.get('torch', '?')}"]
    )


def measured(result: Mapping[str, Any], machine: str, since_then: int | None) -> str:
    """The last cell: when, of what, where, and whether that still holds."""
    commit = str(result.get("commit") or "")
    at = str(result["at"])[:10] if result.get("at") else NOT_RECORDED
    cell = f"{at}, {f'`{commit}`' if commit else f'commit {NOT_RECORDED}'}, {machine}"
    load = result.get("load_before") or (0.0,)
    if load[0] > BUSY:
        cell += f", load {load[0]:.1f}"
    if since_then:
        cell += f", **stale: {since_then} commit{'s' * (since_then > 1)} since**"
    return cell


def _line(row: Row, where: str) -> str:
    verdict = f"**{row.verdict}**" if row.verdict == NO else row.verdict
    count = str(row.trials) + (
        f" / {len(row.peer)}" if row.peer and not row.constant and len(row.peer) != row.trials else ""
    )
    cells = (
        row.what.strip(),
        row.ours_text(),
        row.peer_text(),
        row.ratio_text(),
        row.target_text(),
        verdict,
        count,
        where,
    )
    return f"| {' | '.join(cells)} |"


def section(*, ages: bool = True) -> str:
    """The section with the table; ``ages``: stale figures are marked."""
    found = {name: result for name in NAMES if (result := stored(name)) is not None}
    machines = {words: f"M{number}" for number, words in enumerate(dict.fromkeys(map(machine_of, found.values())), 1)}
    lines = [
        HEAD,
        "",
        "One line for each figure. The lines in bold name a benchmark and its peer with its settings. Machines:",
        "",
    ]
    for words, short in machines.items():
        loops = [
            one["machine"]["loop_ms"]
            for one in found.values()
            if machine_of(one) == words and "loop_ms" in one["machine"]
        ]
        pace = f"{min(loops):g} to {max(loops):g} ms" if loops else NOT_RECORDED
        lines.append(f"- {short}: {words}; a loop of a million turns: {pace}")
    lines += ["", "| figure | ours | peer | ratio | target | met | n | measured |", "|---|---|---|---|---|---|---|---|"]
    for name in NAMES:
        result = found.get(name)
        if result is None:
            lines.append(f"| **{name}**: not measured | | | | | | | |")
            continue
        lines.append(f"| **{name}**, peer: {result.get('peer') or 'none'} | | | | | | | |")
        where = measured(result, machines[machine_of(result)], age(name, result) if ages else None)
        lines += [_line(row, where) for row in rows_of(result)]
    return "\n".join([*lines, "", ""])


def missed() -> str:
    """The targets that are missed, in words, and how many the noise leaves open."""
    every = [row for name in NAMES if (result := stored(name)) is not None for row in rows_of(result)]
    names = [
        f"- {row.what.strip()}: {row.ratio_text() if row.of == 'ratio' else row.ours_text()}, target {row.target_text()}"
        for row in every
        if row.verdict == NO
    ]
    verdicts = [row.verdict for row in every if row.verdict]
    open_ones = verdicts.count(NOT_DECIDED)
    count = f"Targets: {len(verdicts)}. Missed: {len(names)}. Not decided: {open_ones}"
    return "\n".join([f"{count}; the noise is larger there, or there was one trial.", *([""] * bool(names)), *names])


def page(*, ages: bool = True) -> str:
    """The page of benchmarks, with the section as the results and git say."""
    text = PAGE.read_text(encoding="utf-8")
    return text[: text.index(HEAD)] + section(ages=ages) + text[text.index(TAIL) :]


def front() -> str:
    """The README of the project, with the missed targets as the results say."""
    before, _, rest = FRONT.read_text(encoding="utf-8").partition(MISSED)
    return f"{before}{MISSED}\n{missed()}\n{OVER}{rest.partition(OVER)[2]}"


def without_age(text: str) -> str:
    """Without the marks of stale figures, which only git can make."""
    return STALE.sub("", text)


def said_stale(text: str) -> set[str]:
    """The benchmarks whose rows a page marks as stale."""
    found, name = set(), ""
    for line in text.splitlines():
        if begins := re.match(r"\| \*\*(\w+)\*\*", line):
            name = begins[1]
        elif line.startswith("|") and STALE.search(line):
            found.add(name)
    return found


if __name__ == "__main__":
    for file, text in ((PAGE, page()), (FRONT, front())):
        file.write_text(text, encoding="utf-8")
