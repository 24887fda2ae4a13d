"""Generated pages are fresh, links in pages lead somewhere, and pages name nothing that the code does not have."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dlrover_core.runtime.master import VERSION

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
NAMING = [one for one in PAGES if one.name not in ("renamed.md", "CHANGELOG.md", "torchs-own-tests.md")]
"""Pages about the present code: the others name what was, or another project's."""
FOREIGN = frozenset(
    {
        "spec.nodeName", "status.podIP", "AbortIncompleteMultipartUpload", "StatefulDataLoader", "ZeroRedundancyOptimizer",
        "all_gather_object", "broadcast_object_list", "CAP_SYSLOG", "etcd_disk_wal_fsync_duration_seconds", "adlfs", "paramiko",
        "--cert-file", "--client-cert-auth", "--election-timeout", "--heartbeat-interval", "--key-file", "--max-request-bytes",
        "--pre-vote", "--requeue", "RAY_JOB_STOP_WAIT_TIME_S",
    }
)  # fmt: skip
"""Names of Kubernetes, torch, etcd, S3, Slurm and packages."""


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """All of them; expressions, which are most of a tree, hold none."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.ClassDef):
            yield node
        left += [
            one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt | ast.ExceptHandler | ast.match_case)
        ]


@cache
def _code() -> tuple[frozenset[str], dict[str, set[str]], tuple[str, ...]]:
    """All words of the code; by class, what is defined or assigned in it, and its bases; all files."""
    words, members, files = set[str](), dict[str, set[str]](), list[str]()
    for folder in ("src", "tests", "tools", "examples", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            files.append(str(path.relative_to(ROOT)))
            if path.suffix not in (".py", ".toml", ".c", ".sh") or "results" in path.parts:
                continue
            text = path.read_text()
            words.update(re.findall(r"[A-Za-z_]\w*", text))
            if folder == "src" and path.suffix == ".py":
                for node in _classes(ast.parse(text)):
                    found = {getattr(one, key, "") for one in ast.walk(node) for key in ("name", "attr", "id")}
                    members.setdefault(node.name, set()).update(found)
    words.update(re.findall(r"\w+", (ROOT / "pyproject.toml").read_text()))
    return frozenset(words), members, (*files, *(one.name for one in ROOT.iterdir()))


def _unknown(span: str) -> bool:
    """Is this text between backticks a name, an option or a path that does not exist?"""
    words, members, files = _code()
    if span in FOREIGN:
        return False
    if re.fullmatch(r"([\w./-]+/|test_)(?!X\.)[\w.-]+\.(py|c|toml|sh)", span):
        path = re.sub(r"^(?:src/)?(core|adapters|backends)/", r"dlrover_\1/", span)
        return not any(f"/{one}".endswith(f"/{path}") for one in files)
    if re.fullmatch(r"[A-Z]\w*\.\w+(\(.*\))?", span):
        owner, _, name = span.partition("(")[0].partition(".")
        return name not in members[owner] if owner in members else owner not in words
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*(\(\))?", span) and re.search(r"[_.A-Z]", span):
        return not all(one in words or f"test_{one}" in words for one in span.rstrip("()").split("."))
    return bool(re.fullmatch(r"--[a-z][a-z-]+", span)) and span[2:].replace("-", "_") not in words


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11),
    reason="argparse words its help differently from version to version; the page is made with 3.11",
)
def test_commands_page_is_fresh() -> None:
    """docs/commands.md is what the commands print for --help (else: python -m tools.help_texts)."""
    from tools.help_texts import PAGE, page

    assert PAGE.read_text() == page()


def test_benchmark_table_is_fresh() -> None:
    """The table of benchmarks, and what README.md says is missed, are the results' (else: python -m tools.benchmark_table).

    Whether stale figures are marked is another test's question: git answers it.
    """
    from tools.benchmark_table import FRONT, PAGE, front, page, without_age

    assert without_age(PAGE.read_text()) == page(ages=False)
    assert FRONT.read_text() == front()


def test_chaos_page_is_fresh() -> None:
    """The tables in docs/chaos.md are what the code says (else: python -m tools.chaos_tables)."""
    from tools.chaos_tables import PAGE, page

    assert PAGE.read_text() == page(PAGE.read_text())


def test_matrix_is_fresh() -> None:
    """The table in docs/checkpoint.md is what the results say (else: python -m tools.matrix_table)."""
    from tools.matrix_table import PAGE, page

    assert PAGE.read_text() == page(PAGE.read_text())


def test_tables_of_job_files_are_fresh() -> None:
    """The tables in docs/jobs.md are what the parser goes by (else: python -m tools.job_table)."""
    from tools.job_table import PAGE, page

    assert PAGE.read_text() == page(PAGE.read_text())


@cache
def _anchors(page: Path) -> set[str]:
    """What a link to a heading of a page may end with."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """Every relative link in a page names a file that exists, and a heading in it."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        found = page.parent / target if target else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(found.resolve()), f"{page.name} links to {target}#{anchor}"


def test_names() -> None:
    """Every name, option and path between backticks exists; what is another project's is listed above.

    All pages in one test: to read all the code takes seconds, and tests side by side would each do it.
    """
    unknown = {}
    for page in NAMING:
        spans = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)))
        unknown[str(page.relative_to(ROOT))] = [one for one in sorted(spans) if _unknown(one)]
    assert len(unknown) > 15
    assert {page: names for page, names in unknown.items() if names} == {}


def test_the_master_writes_our_version_into_the_log() -> None:
    """The version in `LeaderStarted` is the distribution's."""
    assert f'version = "{VERSION}"' in (ROOT / "pyproject.toml").read_text().splitlines()
