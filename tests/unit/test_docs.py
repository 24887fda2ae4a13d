"""Pages that are generated are not stale, and links in pages lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from dlrover_core.runtime.master import VERSION

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """Every relative link in a page names a file that exists."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_master_writes_our_version_into_the_log() -> None:
    """The version in `LeaderStarted` is the distribution's."""
    assert f'version = "{VERSION}"' in (ROOT / "pyproject.toml").read_text().splitlines()
