"""Complaints about strangers: heard, and bounded."""

from __future__ import annotations

import asyncio

import structlog
from structlog.testing import capture_logs

from dlrover_core.runtime.complaints import Complaints
from dlrover_core.testing.virtual_loop import run


def test_a_flood_is_a_few_lines_and_a_count() -> None:
    """The first few are told at once, the rest in one line with their number and the newest of them."""

    async def story() -> None:
        complaints = Complaints(structlog.get_logger(), first=2, every_s=10.0)
        with capture_logs() as logs:
            for number in range(1000):
                complaints.warning("token refused", peer=str(number))
            complaints.error("request failed", peer="x")
            assert [(line["event"], line["peer"]) for line in logs] == [
                ("token refused", "0"),
                ("token refused", "1"),
                ("request failed", "x"),
            ]
            await asyncio.sleep(10.0)
            assert logs[3:] == [
                {
                    "event": "token refused",
                    "log_level": "warning",
                    "suppressed": 998,
                    "within_s": 10.0,
                    "peer": "999",
                }
            ]

    run(story())


def test_a_flood_that_goes_on_costs_one_line_an_interval() -> None:
    """While it lasts nothing is told at once; after a quiet interval the next is."""

    async def story() -> None:
        complaints = Complaints(structlog.get_logger(), first=2, every_s=10.0)
        with capture_logs() as logs:
            for _ in range(300):
                complaints.info("again")
                await asyncio.sleep(0.1)
            assert len(logs) == 2 + 3
            assert sum(line.get("suppressed", 1) for line in logs) == 300
            await asyncio.sleep(21.0)
            logs.clear()
            complaints.info("again")
            assert logs == [{"event": "again", "log_level": "info"}]

    run(story())


def test_closing_tells_what_was_suppressed() -> None:
    """Nothing is lost at the end, and nothing is told twice."""

    async def story() -> None:
        complaints = Complaints(structlog.get_logger(), first=1, every_s=10.0)
        with capture_logs() as logs:
            for _ in range(5):
                complaints.warning("x")
            complaints.close()
            complaints.close()
            assert [line.get("suppressed") for line in logs] == [None, 4]

    run(story())


def test_strangers_words_are_cut_and_harmless() -> None:
    """What a stranger says of itself neither fills the log nor reaches a terminal as it is."""

    async def story() -> None:
        complaints = Complaints(structlog.get_logger())
        with capture_logs() as logs:
            complaints.warning("x", name="\x1b[2J" + "n" * 1_000_000, number=7)
        assert len(logs[0]["name"]) < 400
        assert logs[0]["name"].isprintable()
        assert logs[0]["number"] == 7

    run(story())
