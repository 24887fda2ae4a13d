"""Figures of benchmarks: intervals, verdicts, the table that is made of them, and which of them are stale."""

from __future__ import annotations

import random
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tools import benchmark_table
from tools.benchmark_table import BENCHMARKS, NAMES, PAGE, ROOT, age, measures, said_stale, since, stored
from tools.figures import NO, NOT_DECIDED, YES, Row, interval, rate_interval, share_interval

Trials = tuple[float, ...]


def git(folder: Path, *words: str) -> str:
    """What git prints in that folder."""
    identity = (
        "-c",
        "user.name=A",
        "-c",
        "user.email=a@b.c",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "commit.gpgsign=false",
    )
    done = subprocess.run(
        ["/usr/bin/env", "git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two files in two folders, of one commit."""
    git(tmp_path, "init", "-q")
    for name in ("src/fast/a.py", "src/slow/b.py"):
        write(tmp_path, name, "1")
    return commit(tmp_path, "begin")


def write(folder: Path, name: str, text: str) -> None:
    """One file."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def commit(folder: Path, words: str) -> Path:
    """Commit all there is."""
    git(folder, "add", ".")
    git(folder, "commit", "-qm", words)
    since.cache_clear()
    return folder


# ---- intervals and verdicts


@pytest.mark.parametrize(
    ("count", "expected"), [(1, None), (2, (1, 2)), (5, (1, 5)), (6, (1, 6)), (9, (2, 8)), (30, (10, 21))]
)
def test_an_interval_is_of_order_statistics(count: int, expected: tuple[float, float] | None) -> None:
    """Six values are the fewest whose range holds the median in 95 of 100 cases; of thirty the 10th to the 21st do."""
    assert interval(range(count, 0, -1)) == expected


def test_an_interval_holds_the_median() -> None:
    """Of skewed values with a known median, in at least 95 of 100 cases."""
    chance, holds = random.Random(4), 0
    for _ in range(1000):
        low, high = interval([chance.expovariate(1.0) for _ in range(15)]) or (0, 0)
        holds += low <= 0.6931 <= high
    assert holds >= 950


def test_an_interval_of_a_quantile() -> None:
    """Of 200 values the 95th percentile is bounded; of 50 nothing bounds the 99th."""
    assert interval(range(1, 201), 0.95) == (184, 197)
    assert interval(range(50), 0.99) is None


def test_an_interval_of_a_rate() -> None:
    """None in three trials may still be one in each; none in thirteen is below 0.3; five in one trial is Garwood's interval."""
    assert rate_interval(0, 3) == (0.0, pytest.approx(1.23, abs=0.005))
    assert rate_interval(0, 13)[1] < 0.3
    assert rate_interval(5, 1) == (pytest.approx(1.62, abs=0.005), pytest.approx(11.67, abs=0.005))


def test_an_interval_of_a_share() -> None:
    """200 of 200 is at least 98 %, and 10 of 10 only 72 %."""
    assert share_interval(200, 200)[0] == pytest.approx(0.981, abs=0.001)
    assert share_interval(10, 10)[0] == pytest.approx(0.722, abs=0.001)


@pytest.mark.parametrize(
    ("ours", "target", "most", "expected"),
    [
        ((1.0, 2.0, 3.0), 3.0, True, YES),
        ((1.0, 2.0, 3.0), 2.9, True, NOT_DECIDED),
        ((1.0, 2.0, 3.0), 0.9, True, NO),
        ((1.0, 2.0, 3.0), 1.0, False, YES),
        ((1.0, 2.0, 3.0), 3.1, False, NO),
        ((2.0,), 3.0, True, NOT_DECIDED),
    ],
)
def test_a_target_inside_the_noise_is_not_met(ours: Trials, target: float, most: bool, expected: str) -> None:
    """Met is a target that lies beyond the whole interval; one trial decides nothing."""
    assert Row("it", "s", ours, target=target, most=most).verdict == expected


def test_counts_have_no_noise() -> None:
    """What is counted over all trials, and what is computed, meets its target or does not."""
    assert Row("lost", "jobs", [0.0], target=0.0).verdict == YES
    assert Row("lost", "jobs", [1.0], target=0.0).verdict == NO
    assert Row("goodput", "%", [0.99], target=0.98, most=False, exact=True).verdict == YES


def test_ratios_are_of_pairs() -> None:
    """A drift that hits both sides of each pair leaves the ratio alone, which a ratio of medians would not."""
    row = Row("it", "s", [1.0, 2.0, 4.0], [2.0, 4.0, 8.0], 0.5, "ratio")
    assert (row.ratio, row.ratio_interval, row.verdict) == (0.5, (0.5, 0.5), YES)
    drifting = Row("it", "s", [1.0, 20.0, 3.0], [1.0, 10.0, 6.0])
    assert drifting.ratio == 1.0
    assert statistics.median(drifting.ours) / statistics.median(drifting.peer) == 0.5


def test_no_ratio_without_pairs() -> None:
    """A constant as a peer gets none, nor does a peer that was measured less often; a target of a ratio is then open."""
    constant = Row("it", "/s", [3.0, 4.0], [2.0], constant=True)
    assert (constant.ratio, constant.ratio_text()) == (None, "")
    assert constant.peer_text() == "2 /s; a constant, not run here"
    assert Row("it", "s", [1.0, 2.0, 3.0], [9.0, 9.0], 0.5, "ratio").verdict == NOT_DECIDED


def test_a_row_of_an_older_result_is_read() -> None:
    """Fields that a result does not have are as if it had nothing to say; those that are not known are left alone."""
    told = {
        "what": "it",
        "unit": "s",
        "ours": [1.0],
        "peer": [],
        "target": 2.0,
        "of": "ours",
        "most": True,
        "met": True,
        "old": 1,
    }
    assert Row.stored(told) == Row("it", "s", [1.0], [], 2.0)


# ---- the table


def test_every_benchmark_is_in_the_table_and_says_what_it_measures() -> None:
    """A new benchmark is added to the table, and all paths that benchmarks measure are there."""
    assert {f"bench_{name}" for name in NAMES} == {one.stem for one in BENCHMARKS.glob("bench_*.py")}
    for name in NAMES:
        assert [one for one in measures(name) if not (ROOT / one).exists()] == [], name


def result(**fields: Any) -> dict[str, Any]:
    """A result as they are stored."""
    row = {
        "what": "it",
        "unit": "s",
        "ours": [1.0, 2.0],
        "peer": [2.0, 4.0],
        "target": 1.0,
        "of": "ratio",
        "most": True,
    }
    made = {
        "cpu": "C",
        "cores": 2,
        "memory_gib": 8.0,
        "kernel": "6.1.2-their-build",
        "python": "3.11.7",
        "torch": "none",
    }
    return {"benchmark": "it", "peer": "another", "machine": made, "rows": [row], **fields}


def test_every_row_bears_its_own_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Date, commit, machine, load and n stand in each row; what a result did not record is said not to be recorded."""
    results = {
        "join": result(at="2026-11-20T18:29:50Z", commit="abc123", load_before=[3.25, 0, 0]),
        "idle": result(machine={**result()["machine"], "cpu": "D"}),
    }
    monkeypatch.setattr(benchmark_table, "stored", results.get)
    monkeypatch.setattr(benchmark_table, "age", lambda name, _: 3 if name == "join" else None)
    text = benchmark_table.section()
    begin = "| it | 1.5 s (1 to 2) | 3 s | 0.5x (0.5 to 0.5) | <= 1x | yes | 2 |"
    assert f"{begin} 2026-11-20, `abc123`, M1, load 3.2, **stale: 3 commits since** |" in text
    assert f"{begin} not recorded, commit not recorded, M2 |" in text
    assert "- M2: 2 shared cores of D, 8.0 GiB, Linux 6.1.2, Python 3.11.7" in text
    assert "| **overhead**: not measured |" in text
    assert said_stale(text) == {"join"}


def test_a_broken_result_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is half written, or is something else, does not stop the table."""
    monkeypatch.setattr(benchmark_table, "BENCHMARKS", tmp_path)
    for text in ("{", "[]", '{"rows": 1}'):
        write(tmp_path, "results/join.json", text)
        assert stored("join") is None


# ---- stale figures


def test_a_figure_is_stale_when_what_it_measures_changed(repository: Path) -> None:
    """Commits elsewhere do not count; those that touch a path do, and so does a change that is not committed."""
    begin = git(repository, "rev-parse", "HEAD")
    write(repository, "src/slow/b.py", "2")
    commit(repository, "elsewhere")
    assert found(repository, begin) == 0
    write(repository, "src/fast/a.py", "2")
    since.cache_clear()
    assert found(repository, begin) == 1
    commit(repository, "it")
    write(repository, "src/fast/new.py", "1")
    commit(repository, "more of it")
    assert found(repository, begin) == 2


def found(repository: Path, begin: str) -> int:
    """Commits since then that changed src/fast."""
    changed = since(begin, repository)
    assert changed is not None
    return changed.touching(("src/fast",))


def test_what_is_as_it_was_is_not_stale(repository: Path) -> None:
    """A change that was taken back, and a merge of changes elsewhere, leave a figure as good as it was."""
    begin = git(repository, "rev-parse", "HEAD")
    write(repository, "src/fast/a.py", "2")
    commit(repository, "it")
    git(repository, "revert", "--no-edit", "HEAD")
    git(repository, "checkout", "-qb", "side", begin)
    write(repository, "src/slow/b.py", "2")
    commit(repository, "elsewhere")
    git(repository, "checkout", "-q", "main")
    git(repository, "merge", "-q", "--no-edit", "side")
    since.cache_clear()
    assert found(repository, begin) == 0


def test_a_merge_brings_what_makes_a_figure_stale(repository: Path) -> None:
    """What a branch changed counts once it is merged, by the branch's own commits."""
    git(repository, "checkout", "-qb", "side")
    for text in ("2", "3"):
        write(repository, "src/fast/a.py", text)
        commit(repository, text)
    git(repository, "checkout", "-q", "main")
    write(repository, "src/slow/b.py", "2")
    commit(repository, "measured here")
    measured = git(repository, "rev-parse", "HEAD")
    git(repository, "merge", "-q", "--no-edit", "side")
    since.cache_clear()
    assert found(repository, measured) == 2


def test_a_shallow_clone_does_not_guess(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without the history nobody knows the age of a result that does not say its commit, or whose commit is not there."""
    begin = git(repository, "rev-parse", "HEAD")
    write(repository, "benchmarks/results/import.json", "{}")
    commit(repository, "a result")
    write(repository, "src/dlrover_core/__init__.py", "2")
    commit(repository, "it")
    assert age("import", {}, repository) == 1
    assert age("import", {"commit": f"{begin[:12]}+"}, repository) == 1
    shallow = tmp_path_factory.mktemp("shallow")
    git(shallow, "clone", "-q", "--depth", "1", f"file://{repository}", ".")
    assert age("import", {}, shallow) is None
    assert age("import", {"commit": begin}, shallow) is None
    assert age("import", {"commit": git(shallow, "rev-parse", "HEAD")}, shallow) == 0


def test_stale_figures_are_marked() -> None:
    """The table marks those figures whose code has changed, and no others (else: python -m tools.benchmark_table)."""
    ages = {name: age(name, told) for name in NAMES if (told := stored(name)) is not None}
    known = {name for name, changed in ages.items() if changed is not None}
    if not known:
        pytest.skip("no git history here")
    assert said_stale(PAGE.read_text()) & known == {name for name in known if ages[name]}
