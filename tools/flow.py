"""How far one decision walks through the core: ``python -m tools.flow``.

A node's worker dies of an ECC error, its host is isolated, and the node is relaunched: one command. Printed are the files of
core that the decision visits and how often it changes from one to another, by the calls of functions (a generator that goes on
is called again). These figures say how much a stranger must hold in the head; docs/design.md has them with a date.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from tests.unit.drive import Drive

import dlrover_core
from dlrover_core.job.incidents import ReportExit

CORE = Path(dlrover_core.__file__).parent
ERROR = "CUDA error: uncorrectable ECC error encountered"


class Flow(NamedTuple):
    """The calls of one command, each by its file, and the kinds of events that came of it."""

    files: tuple[str, ...]
    events: tuple[str, ...]

    @property
    def changes(self) -> int:
        """How often a call was in another file than the one before."""
        return sum(one != other for one, other in zip(self.files, self.files[1:], strict=False))


def walked() -> Flow:
    """The walk of a job of two nodes, after one like it: what is worked out once is worked out."""
    for warm in (True, False):
        drive, files = Drive(nodes_max=2, nproc=1).up(), list[str]()
        drive.wait(60)

        def note(frame: FrameType, what: str, _: object, files: list[str] = files) -> None:
            path = Path(frame.f_code.co_filename)
            if what == "call" and path.is_relative_to(CORE):
                files.append(str(path.relative_to(CORE)))

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            drive.engine.handle(ReportExit("worker-1-0", 1, 1, 1, error=ERROR), drive.now)
        finally:
            sys.setprofile(before)
        batch = drive.engine.take()
        assert batch is not None
        if not warm:
            return Flow(tuple(files), tuple(type(record.event).__name__ for record in batch.records))
    raise AssertionError


def main() -> int:
    """Print the figures."""
    flow = walked()
    print(f"{', '.join(flow.events)}")
    for file, calls in Counter(flow.files).most_common():
        print(f"{calls:5}  {file}")
    print(f"{len(flow.files)} calls in {len(set(flow.files))} files, {flow.changes} changes of file")
    return 0


if __name__ == "__main__":
    sys.exit(main())
