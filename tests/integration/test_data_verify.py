"""`dlrover data` and its audit, read from etcd and through a master: the same proof as from the log's own file."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, redirect_stdout

import pytest
from leading_records import Leading
from leading_records import token as token  # noqa: PLC0414 - the fixture is taken over
from tests.unit.drive import Drive
from tools.etcd_cluster import Cluster

from dlrover_adapters.cli.data import _changes
from dlrover_adapters.cli.main import main
from dlrover_core.data.cut import Place, cut_of, pack
from dlrover_core.job import checkpoints, shards
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.log import Appended
from dlrover_core.logs import open_log

BOUND_S = 60.0

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.slow_loop(reason="the loops of commands, which import etcd's client in them and serve nobody"),
]


def consumed() -> Drive:
    """A job of which two states have told what they had consumed; one sample is in quarantine."""
    drive = Drive(nodes_max=2, nproc=1, max_restarts=3).up()
    drive.do(shards.RegisterDataset("worker-0-0", 1, "train", 100, 7, "shuffled", "f00d", 3, 4, "cursor"))
    for _ in range(2):
        drive.exit("worker-1-0", 1, 1, "ValueError: bad", work="fetch 0 12 13 17 8 train")
        drive.run(2)
    drive.do(checkpoints.ReportKeeping("worker-0-0", 3, "file:///c", 2, 10, 3, True, 1 << 30, 1))
    for step in (10, 20):
        places = cut_of((Place("train", 0, 4 * step, "f00d"), Place("train/quarantined/17", 0, 1)))
        drive.do(checkpoints.CommitCheckpoint("worker", 3, step, 1, 1 << 20, 1, (pack(places),)))
    return drive


def said(*words: str) -> tuple[int, str]:
    """What a command prints, and how it ends."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(list(words))
    return code, out.getvalue()


def test_the_proof_is_the_same_wherever_the_log_is_read(etcd_server: Cluster, etcd_prefix: str) -> None:
    """From etcd, and over http from the master that leads."""
    url = etcd_server.url(etcd_prefix, ttl="5")

    async def story() -> list[tuple[int, str]]:
        async with open_log(url, CODEC) as log:
            lead = await log.lead("j", "m", 60.0)
            for one in consumed().batches:
                records = [record._replace(token=lead.token) for record in one.records]
                assert isinstance(await lead.append(CODEC.batch(lead.token, one.counter, records)), Appended)
            await lead.resign()
            found = [await asyncio.to_thread(said, "data", "verify", "j", "--log", url, "--json")]
            master = await Leading(log, "one").leads()
            try:
                where = ("--log", f"http://{master.at}/j")
                found.append(await asyncio.to_thread(said, "data", "verify", "j", *where, "--json"))
                found.append(await asyncio.to_thread(said, "data", "j", *where))
            finally:
                await master.end()
            return found

    (code, etcd), (again, http), (shown, words) = asyncio.run(asyncio.wait_for(story(), BOUND_S))
    assert (code, again, shown) == (0, 0, 0)
    assert json.loads(etcd) == json.loads(http)
    (proof,) = json.loads(etcd)["datasets"]
    assert (proof["position"], proof["states"], proof["findings"]) == (80, 2, [])
    assert [one["sample"] for one in proof["quarantined"]] == [17]
    assert "79 samples in the model" in words


def test_what_follows_a_log_ends_before_the_log_is_closed() -> None:
    """A question under way would open a connection again that nobody closes, and that is said beneath the last line."""
    ended: list[str] = []

    async def records() -> AsyncGenerator[Record, None]:
        try:
            for batch in consumed().batches:
                for record in batch.records:
                    yield record
            await asyncio.Event().wait()
        finally:
            ended.append("records")

    async def story() -> None:
        following = records()
        async with aclosing(_changes(following)) as changes:
            async for _, rows in changes:
                if rows:
                    break
        assert ended == ["records"]

    asyncio.run(asyncio.wait_for(story(), BOUND_S))
