"""A SQLite log whose pages changed places, as a file system that was put together wrongly leaves it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path

from dlrover_core.errors import LogError
from dlrover_core.testing.log_conformance import JOB, Pen

from .sqlite_logs import opened


def test_exchanged_pages_are_never_an_empty_log(tmp_path: Path) -> None:
    """Whichever two pages change places: readers find the job with what was written, or say that the log is damaged."""
    path, page_bytes = tmp_path / "log.db", 4096

    async def written() -> None:
        async with opened(path) as log:
            pen = Pen(await log.lead(JOB, "a"))
            for _ in range(3):
                await pen.write()

    async def read() -> list[str]:
        async with opened(path) as log:
            return await log.jobs()

    asyncio.run(written())
    whole = path.read_bytes()
    pages = [whole[at : at + page_bytes] for at in range(0, len(whole), page_bytes)]
    assert len(pages) > 3
    found: Counter[str] = Counter()
    for one, other in itertools.combinations(range(1, len(pages)), 2):
        swapped = list(pages)
        swapped[one], swapped[other] = pages[other], pages[one]
        path.write_bytes(b"".join(swapped))
        try:
            jobs = asyncio.run(read())
        except LogError:
            found["damaged"] += 1
        else:
            assert jobs == [JOB], (one, other, jobs)
            found["there"] += 1
    assert found["damaged"]
