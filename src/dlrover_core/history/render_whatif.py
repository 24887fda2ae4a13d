"""Decisions side by side, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.history.phrases import one_line
from dlrover_core.history.render import table
from dlrover_core.history.whatif import Decision, WhatIf
from dlrover_core.job.incidents import ActionChosen, Diagnosed
from dlrover_core.words import count


def lines(found: WhatIf, *, asked: bool) -> Iterator[str]:
    """The comparison. ``asked``: for another policy; else the log was checked against itself."""
    yield f"job {found.job}: {count(len(found.decisions), 'decision')}, {_summary(found, asked=asked)}"
    for one in found.decisions:
        if asked or not one.exact:
            yield ""
            yield from _decision(one)
    if found.ended is not None:
        yield ""
        yield f"the job would have ended with incident {found.ended.incident} (#{found.ended.seq})" + _later(found)
    elif found.outlived:
        yield ""
        yield f"the job would not have ended at #{found.outlived}: what would have come then, no log knows" + _later(
            found
        )


def _summary(found: WhatIf, *, asked: bool) -> str:
    if asked:
        return f"{found.differ or 'none'} of them otherwise"
    return "each comes out as it was recorded" if found.exact else "not all come out as they were recorded"


def _later(found: WhatIf) -> str:
    return f"; {count(found.left_out, 'later verdict')} left out" if found.left_out else ""


def _decision(one: Decision) -> Iterator[str]:
    yield f"{' ' if one.same else '!'} incident {one.incident} #{one.seq}  {one_line(one.cause)}"
    rows = [("recorded", *_row(one.judged, one.done))]
    if not one.exact:
        rows.append(("instead", *_row(one.judged_instead, one.done_instead)))
    yield from table(rows, indent="    ")


def _row(judged: Diagnosed, done: ActionChosen | None) -> tuple[str, str, str]:
    verdict = f"{judged.verdict} {judged.signature}"
    if done is None:
        return verdict, "nothing", ""
    budget = f" ({done.budget} {done.budget_before} -> {done.budget_left})" if done.budget_before >= 0 else ""
    return verdict, f"{done.action} {done.node}", f"{one_line(done.rule)}{budget}"
