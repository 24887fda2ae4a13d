"""Writes the tables of docs/jobs.md from the table of fields that the parser reads job files by: ``python -m tools.job_table``.

A table stands between two comments, ``<!-- group fields -->`` and ``<!-- end -->``; the rest of the page is written by hand.
"""

from __future__ import annotations

from pathlib import Path

from dlrover_adapters.cli.job_fields import GROUP_FIELDS, JOB_FIELDS, RESOURCE_FIELDS, Field

PAGE = Path(__file__).resolve().parent.parent / "docs" / "jobs.md"
TABLES = {"group fields": GROUP_FIELDS, "resource fields": RESOURCE_FIELDS, "job fields": JOB_FIELDS}


def table(fields: tuple[Field, ...]) -> str:
    """One table."""
    lines = ["| field | values | default | what it does |", "|---|---|---|---|"]
    for one in fields:
        also = f" (or `{one.also}`)" if one.also else ""
        values = one.kind.words().replace("|", "\\|")
        lines.append(f"| `{one.name}`{also} | {values} | {one.default or '-'} | {one.doc} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its tables as they should be."""
    for name, fields in TABLES.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        text = f"{before}{begin}{table(fields)}\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
