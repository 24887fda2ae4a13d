"""Writes docs/diagrams/*.mmd, the Mermaid state diagrams of every lifecycle: ``python -m tools.diagrams``.

With ``--check`` it writes nothing and fails when one is stale; tests/unit/test_lifecycle.py does the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dlrover_core.job import node_lifecycle

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "diagrams"


def diagrams() -> dict[str, str]:
    """The text of each diagram by its file name."""
    from dlrover_core.job import incident_lifecycle, job

    lifecycles = (job.LIFECYCLE, node_lifecycle.LIFECYCLE, incident_lifecycle.INCIDENT, incident_lifecycle.ACTION)
    return {f"{lifecycle.name}.mmd": lifecycle.diagram() for lifecycle in lifecycles}


def stale() -> list[str]:
    """The files that are not what the code says."""
    return [
        name for name, text in diagrams().items() if not (FOLDER / name).exists() or (FOLDER / name).read_text() != text
    ]


def main(arguments: list[str]) -> int:
    """Write the diagrams, or only look."""
    if "--check" in arguments:
        for name in stale():
            print(f"docs/diagrams/{name} is stale: run python -m tools.diagrams")
        return 1 if stale() else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in diagrams().items():
        (FOLDER / name).write_text(text)
        print(f"docs/diagrams/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
