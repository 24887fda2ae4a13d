"""A job whose log is truncated while it lives: its first incident is still explained, and whoever leads finds what it needs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import pytest

from dlrover_adapters.storage import FsspecStore
from dlrover_core.errors import LogCorrupt
from dlrover_core.history import explanation_of, render
from dlrover_core.job import incidents, job, nodes
from dlrover_core.job.state import CODEC, JobState, fold
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.kernel.log import Outcome, Segment, Snapshot
from dlrover_core.kernel.state import digest
from dlrover_core.logs.archive import Archive, Store
from dlrover_core.logs.memory import MemoryLeadership, MemoryLog
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.training import Training

SPEC = JobSpec("long", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))
SEGMENT_EVENTS = 20
JOINED = 23


class Fragile(FsspecStore):
    """A store in memory that fails while ``error`` is set."""

    error: OSError | None = None

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.seen: list[str] = []

    def read(self, name: str) -> bytes:
        """A whole file; ``seen`` tells which."""
        self.seen.append(name)
        return super().read(name)

    def _files(self) -> tuple[Any, str]:
        if self.error is not None:
            raise self.error
        return super()._files()

    def change(self, name: str, content: bytes) -> None:
        """Behind everybody's back."""
        files, root = self._files()
        files.pipe_file(f"{root}/{name}", content)

    def lose(self, name: str) -> None:
        """Delete it."""
        files, root = self._files()
        files.rm_file(f"{root}/{name}")


class Elder(MemoryLog):
    """A log that is truncated, to which an elder version writes until ``elder`` is False: its nodes join without a seat."""

    def __init__(self) -> None:
        self.cold = Fragile(f"memory://{uuid.uuid4().hex}/{SPEC.job}")
        super().__init__(CODEC, archive=self.cold, segment_events=SEGMENT_EVENTS)
        self.elder, self.stuck = True, False
        self.untold: list[Segment] = []
        self.whole: list[Record] = []
        self.noted: list[int] = []
        self.trims: list[int] = []

    def _land(self, lead: MemoryLeadership, batch: Batch) -> Outcome:
        if self.elder:
            batch = as_version_1(batch)
        if batch.first_seq == len(self.whole) + 1:
            self.whole.extend(CODEC.decode(batch.payload).records)
        return super()._land(lead, batch)

    async def archive(self, name: str, upto: int | None = None, noted: int | None = None) -> list[Segment]:
        """As the log does; with ``stuck`` its leader never hears of the files that were written."""
        found = await super().archive(name, upto, noted)
        if self.stuck and found:
            self.untold.extend(found)
            await asyncio.get_running_loop().create_future()
        return found

    async def trim(self, name: str, upto: int) -> int:
        """As the log does; what it said is kept, and whether the event of every file was committed before."""
        facts = [record.event for record in self.whole]
        self.noted.append(max(fact.last for fact in facts if isinstance(fact, job.Archived)) - upto)
        count = await super().trim(name, upto)
        self.trims += [count] if count else []
        return count

    @property
    def files(self) -> Archive:
        """The archive."""
        archive = self._archive_of(SPEC.job)
        assert archive is not None
        return archive

    @property
    def first(self) -> int:
        """The first event that the log itself still holds."""
        return self._jobs[SPEC.job].batches[0].first_seq


def as_version_1(batch: Batch) -> Batch:
    """The bytes of a batch as a version wrote them in which nodes had no seat."""
    raw = msgpack.unpackb(batch.payload)
    for row in raw[5]:
        if row[0] == JOINED:
            assert (row[1], row[4][4]) == (2, "")
            row[1], row[4] = 1, row[4][:4]
    return batch._replace(payload=msgpack.packb(raw))


def tell(story: Callable[[Cluster, Elder], Awaitable[None]], *, checked: bool = True) -> tuple[Elder, JobState]:
    """A job that ends well, whatever is done to its log's archive. ``checked``: all of its log can be read in the end."""

    async def whole() -> tuple[Elder, JobState]:
        log = Elder()
        async with Cluster(SPEC, training=Training(400), event_log=log, snapshot_events=SEGMENT_EVENTS) as cluster:
            await story(cluster, log)
            assert (await cluster.outcome()).state == "succeeded"
            check_steps(cluster)
            return log, await check(cluster) if checked else cluster.state

    return virtual_loop.run(whole())


async def step(cluster: Cluster, number: int) -> None:
    """Until so many more steps are made."""
    done = cluster.training.done
    await cluster.until(lambda: cluster.training.done >= done + number)


async def grow(cluster: Cluster, true: Callable[[], bool], rounds: int = 40) -> None:
    """Let people ask for pauses until the log has grown so far."""
    for _ in range(rounds):
        if true():
            return
        await cluster.leader.obey({"command": "suspend"})
        await cluster.until(lambda: cluster.leader.state.job.state == "suspended")
        await cluster.leader.obey({"command": "resume"})
        await step(cluster, 3)
    raise AssertionError("the log did not grow")


async def first_incident(cluster: Cluster, log: Elder) -> None:
    """A worker dies, and the job is up again."""
    await step(cluster, 5)
    cluster.kill_worker(3)
    await cluster.until(lambda: bool(seqs_of(log.whole, incidents.IncidentClosed)), every_s=0.1)


async def read(log: MemoryLog) -> list[Record]:
    """Archive and log as one stream."""
    return [record async for record in log.read(SPEC.job)]


def seqs_of(records: list[Record], *kinds: type) -> list[int]:
    """Where facts of these kinds are."""
    return [record.seq for record in records if isinstance(record.event, kinds)]


def test_the_first_incident_after_three_truncations_and_a_change_of_schema() -> None:
    """Three times truncated, once upgraded, once taken over past a foreign snapshot: the first incident tells what it told."""

    async def story(cluster: Cluster, log: Elder) -> None:
        await first_incident(cluster, log)
        await grow(cluster, lambda: len(log.trims) >= 1)
        log.elder = False
        await grow(cluster, lambda: len(log.trims) >= 2)
        lead = cluster.leader._lead
        assert lead is not None
        await lead.snapshot(Snapshot(await log.head(SPEC.job), "another schema", b"\xc1 nothing that can be read"))
        cluster.kill_master()
        log.cold.seen.clear()
        cluster.start_master()
        await cluster.until(lambda: cluster.master.leading)
        # The foreign snapshot is the newest: without it the fold begins with the first file.
        seen = list(log.cold.seen)
        assert seen == [segment.name for segment in log.files.verify() if segment.first < log.first]
        await grow(cluster, lambda: len(log.trims) >= 4)

    log, state = tell(story)
    assert len(log.trims) >= 3
    assert log.first > 3 * SEGMENT_EVENTS

    records = asyncio.run(read(log))
    assert records == log.whole
    assert digest(fold(records)) == digest(fold(log.whole)) == digest(state)
    assert len(log.files.verify()) >= 3
    assert len(seqs_of(records, job.Archived)) == len(log.files.spans())
    # When it was trimmed, every file was noted in a durable event.
    assert set(log.noted) == {0}

    versions = {row[1] for file in log.cold.names() for row in rows(log.cold, file) if row[0] == JOINED}
    assert versions == {1}
    assert max(seqs_of(records, incidents.IncidentClosed)[:1]) < log.first
    for seq in seqs_of(records, incidents.IncidentOpened, incidents.Diagnosed, incidents.ActionChosen)[:3]:
        told, expected = explanation_of(records, seq), explanation_of(log.whole, seq)
        assert told is not None
        assert told == expected
        text = render.explanation(told)
        assert "WorkerExited" in [type(fact.record.event).__name__ for fact in told.before]
        assert "rank 3" in text


def rows(store: Store, name: str) -> list[Any]:
    """The entries of an archive's file, as they lie there."""
    first = int(name.partition("-")[0])
    batches = Archive(store, SPEC.job, CODEC, SEGMENT_EVENTS).page(first - 1)
    return [row for batch in batches for row in msgpack.unpackb(batch.payload)[5]]


def test_a_successor_goes_on_archiving_where_its_predecessor_stopped() -> None:
    """A master that died between a file and the event of it: the next one finds the file, checks it, notes it, and trims."""

    async def story(cluster: Cluster, log: Elder) -> None:
        await first_incident(cluster, log)
        await grow(cluster, lambda: len(log.trims) >= 1)
        log.stuck = True
        await grow(cluster, lambda: bool(log.untold))
        log.stuck = False
        cluster.kill_master()
        cluster.start_master()
        await cluster.until(lambda: cluster.master.leading)
        assert cluster.master.state.job.archived == log.untold[0].first - 1
        await grow(cluster, lambda: cluster.leader.state.job.archived > log.untold[-1].last)

    log, _ = tell(story)
    events = [record.event for record in log.whole if isinstance(record.event, job.Archived)]
    spans = log.files.spans()
    assert [(fact.first, fact.last) for fact in events] == spans[: len(events)]
    chains = [segment.digest for segment in log.files.verify()]
    assert [fact.chain for fact in events] == chains[: len(events)]


def test_an_archive_that_is_away_costs_nothing_but_room() -> None:
    """While the archive cannot be reached decisions go on and nothing is deleted; when it is back, all of it is made up for."""

    async def story(cluster: Cluster, log: Elder) -> None:
        await first_incident(cluster, log)
        log.cold.error = PermissionError("Access Denied")
        head = await log.head(SPEC.job)
        await grow(cluster, lambda: cluster.leader.state.seq > head + 4 * SEGMENT_EVENTS)
        assert (log.trims, log.first) == ([], 1)
        log.cold.error = None
        await grow(cluster, lambda: len(log.trims) >= 1)
        assert log.first > SEGMENT_EVENTS

    log, _ = tell(story)
    assert asyncio.run(read(log)) == log.whole


def test_a_leader_needs_no_archive() -> None:
    """With the archive lost altogether the next master takes over from the snapshot; readers are told what is missing."""

    async def story(cluster: Cluster, log: Elder) -> None:
        await first_incident(cluster, log)
        await grow(cluster, lambda: len(log.trims) >= 2)
        for name in log.cold.names():
            log.cold.lose(name)
        cluster.kill_master()
        cluster.start_master()
        await cluster.until(lambda: cluster.master.leading)
        with pytest.raises(LogCorrupt) as found:
            await read(log)
        assert found.value.seq == 1
        trims = list(log.trims)
        head = await log.head(SPEC.job)
        await grow(cluster, lambda: cluster.leader.state.seq > head + 3 * SEGMENT_EVENTS)
        # What cannot be archived in one chain is not deleted.
        assert log.trims == trims

    tell(story, checked=False)


DAMAGES = ["changed", "cut", "exchanged", "lost"]


def hurt(log: Elder, damage: str, index: int) -> Segment:
    """Do it to one of the files; tells which."""
    archive = log.files
    segment, other = archive.verify()[index], archive.verify()[index - 1]
    content = log.cold.read(segment.name)
    made = {
        "changed": content[:-20] + bytes([content[-20] ^ 1]) + content[-19:],
        "cut": content[: len(content) // 2],
        "exchanged": log.cold.read(other.name),
    }
    if damage == "lost":
        log.cold.lose(segment.name)
    else:
        log.cold.change(segment.name, made[damage])
    return segment


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_what_is_still_in_the_log(damage: str) -> None:
    """While the log still holds the events of a damaged file nothing is deleted, and nothing is lost; a lost file comes again."""

    async def story(cluster: Cluster, log: Elder) -> None:
        await first_incident(cluster, log)
        await grow(cluster, lambda: len(log.trims) >= 2)
        segment = hurt(log, damage, -1)
        assert log.first <= segment.first
        trims, head = len(log.trims), await log.head(SPEC.job)
        await grow(cluster, lambda: cluster.leader.state.seq > head + 3 * SEGMENT_EVENTS)
        assert (len(log.trims) > trims) == (damage == "lost")
        assert await read(log) == log.whole

    tell(story)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_what_was_deleted(damage: str) -> None:
    """Whoever reads a damaged file is told which event is gone; behind it all can be read, and the next master leads."""

    async def story(cluster: Cluster, log: Elder) -> None:
        await first_incident(cluster, log)
        await grow(cluster, lambda: len(log.trims) >= 3)
        segment = hurt(log, damage, 1)
        assert segment.last < log.first
        with pytest.raises(LogCorrupt) as found:
            await read(log)
        assert segment.first <= found.value.seq <= segment.last
        cluster.kill_master()
        cluster.start_master()
        await cluster.until(lambda: cluster.master.leading)
        assert [record async for record in log.read(SPEC.job, segment.last)] == log.whole[segment.last :]

    tell(story, checked=False)


def test_joins_of_the_elder_version_are_told_in_the_new_one() -> None:
    """What the first story relies on: the elder's bytes differ, and are read as today's event."""
    record = Record(1, 1, 1, 0, nodes.NodeJoined("worker-0-0", "h", "a", 2))
    batch = CODEC.batch(1, 1, [record])
    old = as_version_1(batch)
    assert old.payload != batch.payload
    assert CODEC.decode(old.payload).records == (record,)
