"""The etcd log: the conformance suite on a real etcd, and what leases, several clients and etcd's own troubles add."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from etcd_logs import opened, run
from structlog.testing import capture_logs
from tools.etcd_cluster import Cluster

from dlrover_adapters.etcd import election
from dlrover_adapters.etcd.client import Closed, Denied, Status
from dlrover_adapters.etcd.keys import Head
from dlrover_adapters.etcd.leadership import EtcdLeadership
from dlrover_adapters.etcd.lease import Timing
from dlrover_adapters.etcd.log import EtcdLog
from dlrover_adapters.etcd.looking import look
from dlrover_core.errors import LogError, LogFull, LogUnavailable, NotLeading, SpecError
from dlrover_core.kernel.log import AlreadyAppended, Appended, EventLog, Fenced, Outcome, Snapshot
from dlrover_core.logs import open_log
from dlrover_core.testing.log_conformance import CODEC, JOB, LogConformance, Pen, make_batch, seqs
from dlrover_core.testing.proxy import Proxy

TTL_S = 2.0  # etcd's shortest


class TestEtcdConformance(LogConformance):
    """The etcd log keeps the contract, also between two clients of one etcd."""

    @pytest.fixture(autouse=True)
    def _server(self, etcd_server: Cluster) -> None:
        self._etcd = etcd_server

    @contextlib.asynccontextmanager
    async def make_log(self) -> AsyncIterator[EventLog]:
        """A prefix of its own."""
        self._url = self._etcd.url(uuid.uuid4().hex)
        async with open_log(self._url, self.codec) as log:
            yield log

    def second(self, log: EventLog) -> AbstractAsyncContextManager[EventLog]:
        """Another connection to the same prefix."""
        return open_log(self._url, self.codec)

    async def depose(self, log: EventLog, job: str) -> None:
        """Revoke the leader's lease."""
        assert isinstance(log, EtcdLog)
        await revoke(self._etcd, log, job)

    async def halve_snapshot(self, log: EventLog, job: str, snapshot: Snapshot) -> None:
        """A part, and no manifest."""
        assert isinstance(log, EtcdLog)
        etcd, half = log.etcd, snapshot.state[: len(snapshot.state) // 2]
        await etcd.call("Txn", etcd.txn([], [etcd.put_op(log.keys(job).part(snapshot.seq, 0), half)]))


async def until(holds: Callable[[], object]) -> None:
    """Wait for what only a clock or a background task brings about; the story's bound is the bound."""
    while not holds():  # noqa: ASYNC110  # a clock has no event
        await asyncio.sleep(0.01)


async def revoke(server: Cluster, log: EtcdLog, job: str = JOB) -> None:
    """End a leader's lease behind its back."""
    await asyncio.to_thread(server.revoke, await asyncio.to_thread(server.lease_of, log.keys(job).leader))


@pytest.fixture
def own_etcd() -> Iterator[Cluster]:
    """An etcd that may be killed."""
    with Cluster() as etcd:
        yield etcd


def assert_outcome(found: Outcome | None, expected: Outcome) -> None:
    """The same values and the same kind: named tuples of different kinds are equal."""
    assert (type(found), found) == (type(expected), expected)


# ---- leases


def test_a_lease_is_kept(etcd_server: Cluster, etcd_prefix: str) -> None:
    """A leader leads on beyond its lease, without a word in between."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            lead = await log.lead(JOB, "a", TTL_S)
            first = lead._lease._until
            await until(lambda: lead._lease._until > first + TTL_S)
            assert lead.valid()
            assert not lead.trouble()

    run(story())


def test_the_urls_ttl_goes_first(etcd_server: Cluster, etcd_prefix: str) -> None:
    """``?ttl=`` is the operator's word: it decides, whatever the master asks for."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix, ttl="17")) as log:
            lead = await log.lead(JOB, "a", TTL_S)
            assert lead._lease.timing == Timing.of(17.0)

    run(story())


def test_timing_leaves_room_for_a_renewal_that_fails() -> None:
    """Of a period, two time-outs and a margin that do not fit into the lease, the start says so."""
    assert Timing.of(2.0).checked() == (2.0, 0.5, 0.5, 0.25)
    for bad in (Timing(2.0, 1.0, 0.5, 0.25), Timing(2.0, 0.5, 0.5, 0.6), Timing.of(0.0)):
        with pytest.raises(SpecError, match="cannot be kept"):
            bad.checked()


def test_a_lease_revoked_early_is_noticed_without_an_append(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Who loses its lease learns it from the next renewal; its appends are fenced, though nobody newer leads yet."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            pen = Pen(await log.lead(JOB, "a", TTL_S))
            await pen.write()
            await revoke(etcd_server, log)
            await pen.lead.lost
            assert not pen.lead.valid()
            assert_outcome(await pen.lead.append(pen.draft()), Fenced(pen.lead.token, pen.lead.token))
            assert await log.head(JOB) == 1

    run(story())


def test_a_lease_that_is_not_kept_any_more_is_a_lost_leadership(
    etcd_server: Cluster, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should renewing fail as nobody foresaw, leadership ends and says so; a zombie that waits for its lease helps nobody."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            lead = await log.lead(JOB, "a", TTL_S)
            monkeypatch.setattr(log.etcd, "keep_alive", None)
            with capture_logs() as said:
                await lead.lost
            assert not lead.valid()
            assert [one for one in said if "our bug" in one["event"]]

    run(story())


def test_a_deleted_key_is_a_lost_leadership(etcd_server: Cluster, etcd_prefix: str) -> None:
    """A leader whose key is deleted, while its lease lives on, learns it too."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            lead = await log.lead(JOB, "a", TTL_S)
            await asyncio.to_thread(etcd_server.delete, log.keys(JOB).leader)
            await lead.lost
            assert not lead.valid()

    run(story())


def test_etcd_down_is_not_a_lost_leadership(own_etcd: Cluster) -> None:
    """While etcd is down orders stop by the local clock and the reason is known; when it is back the same token leads on."""

    async def story() -> None:
        async with opened(own_etcd.url()) as log:
            pen = Pen(await log.lead(JOB, "a", TTL_S))
            await pen.write()
            own_etcd.kill(0)
            await until(lambda: not pen.lead.valid())
            assert "LogUnavailable" in pen.lead.trouble()
            batch = pen.draft()
            with pytest.raises(LogUnavailable, match="does not answer"):
                await pen.lead.append(batch)
            assert not asyncio.ensure_future(pen.lead.lost).done()
            await asyncio.to_thread(own_etcd.start, 0)
            await until(pen.lead.valid)
            assert_outcome(await pen.lead.append(batch), Appended(2))
            assert not pen.lead.trouble()
            assert (await log.leader(JOB)) == (pen.lead.token, "a", "")

    run(story())


def test_a_clock_that_ran_on_ends_validity_at_the_first_look(etcd_server: Cluster, etcd_prefix: str) -> None:
    """A process that slept past its lease gives no order, even before its own tasks have run again."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            lead = await log.lead(JOB, "a", TTL_S)
            assert lead.valid()
            time.sleep(TTL_S)  # noqa: ASYNC251  # the whole process, as SIGSTOP does it
            assert not lead.valid()

    run(story())


# ---- elections


def test_a_standby_takes_over_when_the_lease_is_over(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Of a leader that died without a word the standby hears when the lease ends, and not before."""

    async def story() -> None:
        url = etcd_server.url(etcd_prefix)
        async with opened(url) as log, opened(url) as other:
            dead = Pen(await log.lead(JOB, "a", TTL_S))
            await dead.write()
            assert dead.lead.keeping is not None
            dead.lead.keeping.cancel()
            waiting = asyncio.ensure_future(other.lead(JOB, "b", TTL_S))
            until_over = asyncio.ensure_future(until(lambda: not dead.lead.valid()))
            await asyncio.wait([waiting, until_over], return_when=asyncio.FIRST_COMPLETED)
            assert not waiting.done()  # locally it was over before anybody else could lead
            heir = Pen(await waiting, head=1)
            await heir.write()
            assert_outcome(await dead.lead.append(dead.draft()), Fenced(dead.lead.token, heir.lead.token))

    run(story())


def test_a_known_death_is_not_waited_for(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Who knows its predecessor dead takes over at once; of anybody else it does not believe it."""

    async def story() -> None:
        url = etcd_server.url(etcd_prefix)
        async with opened(url) as log, opened(url) as other:
            first = await log.lead(JOB, "a", 600.0)
            with pytest.raises(NotLeading, match="led by a"):
                await other.lead(JOB, "b", wait=False, dead=["somebody else"])
            assert first.valid()
            second = await asyncio.wait_for(other.lead(JOB, "b", dead=["nobody", "a"]), 5)
            assert second.token > first.token
            assert isinstance(await first.append(make_batch(first.token, 1, 1)), Fenced)

    run(story())


def test_who_came_after_the_dead_is_not_deposed(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Between looking and deposing somebody else may have begun to lead: that one stays."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            first = await log.lead(JOB, "dead", 600.0)
            await first.resign()
            pen = Pen(await log.lead(JOB, "b", 600.0))
            await election._depose(log.etcd, log.keys(JOB), first.token)
            await pen.write()
            assert pen.lead.valid()

    run(story())


def test_a_campaign_sent_twice_recognises_itself(etcd_server: Cluster, etcd_prefix: str) -> None:
    """A campaign whose answer was lost, sent again, has won the same election, not lost it to itself."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            etcd, keys = log.etcd, log.keys(JOB)
            lease = await etcd.call("LeaseGrant", etcd.rpc.LeaseGrantRequest(TTL=5))
            first = await election._claim(etcd, keys, "a", lease, 0.0)
            assert isinstance(first, election.Won)
            assert await election._claim(etcd, keys, "a", lease, 0.0) == first
            other = await etcd.call("LeaseGrant", etcd.rpc.LeaseGrantRequest(TTL=5))
            lost = await election._claim(etcd, keys, "b", other, 0.0)
            assert isinstance(lost, election._Held)
            assert lost.leader.holder == "a"

    run(story())


def test_a_token_that_does_not_rise_is_refused(etcd_server: Cluster, etcd_prefix: str) -> None:
    """An etcd whose revisions began anew under an old log is not led: its tokens would lie. Nothing is left behind."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            etcd, keys = log.etcd, log.keys(JOB)
            ahead = Head(7, 10**12, 1)
            await etcd.call("Txn", etcd.txn([], [etcd.put_op(keys.head, ahead.packed())]))
            with pytest.raises(LogError, match="older backup"):
                await log.lead(JOB, "a")
            assert await log.leader(JOB) is None

    run(story())


def test_a_standby_outlives_its_etcd(own_etcd: Cluster) -> None:
    """Who stands by does so through a restart of etcd, and leads when its turn comes."""

    async def story() -> None:
        async with opened(own_etcd.url()) as log, opened(own_etcd.url()) as other:
            first = await log.lead(JOB, "a", 5.0)
            waiting = asyncio.ensure_future(other.lead(JOB, "b"))
            await first.announce("x")
            own_etcd.kill(0)
            await until(lambda: not first.valid())
            assert not waiting.done()
            await asyncio.to_thread(own_etcd.start, 0)
            await until(first.valid)
            await first.resign()
            assert (await waiting).token > first.token

    run(story())


def test_many_campaigns_at_once_have_one_winner(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Of ten that campaign in the same instant one leads, and each of the others is told who."""

    async def story() -> None:
        url = etcd_server.url(etcd_prefix)
        async with contextlib.AsyncExitStack() as stack:
            logs = [await stack.enter_async_context(opened(url)) for _ in range(10)]
            asked = [log.lead(JOB, f"holder-{number}", wait=False) for number, log in enumerate(logs)]
            told = await asyncio.gather(*asked, return_exceptions=True)
            winners = [one for one in told if isinstance(one, EtcdLeadership)]
            losers = [one for one in told if isinstance(one, NotLeading)]
            assert (len(winners), len(losers)) == (1, 9)
            assert {one.holder for one in losers} == {winners[0].holder}

    run(story())


def test_resigning_hands_over_at_once(etcd_server: Cluster, etcd_prefix: str) -> None:
    """A resignation reaches the standby through its watch, not through the end of a lease."""

    async def story() -> None:
        url = etcd_server.url(etcd_prefix)
        async with opened(url) as log, opened(url) as other:
            first = await log.lead(JOB, "a", 600.0)
            waiting = asyncio.ensure_future(other.lead(JOB, "b"))
            await first.announce("x")
            await first.resign()
            await asyncio.wait_for(waiting, 3)

    run(story())


def test_resigning_is_bounded_when_etcd_is_down(own_etcd: Cluster) -> None:
    """Without an etcd to say it to, a resignation is over in a second or so."""

    async def story() -> None:
        async with opened(own_etcd.url()) as log:
            lead = await log.lead(JOB, "a", 600.0)
            own_etcd.kill(0)
            await asyncio.wait_for(lead.resign(), 3)
            await lead.lost
            assert not lead.valid()

    run(story())


# ---- appends


def test_a_lost_acknowledgement_is_found_out(etcd_server: Cluster, etcd_prefix: str) -> None:
    """A batch whose acknowledgement the network swallowed is there once, whether found out within the call or after it."""

    async def story() -> None:
        async with contextlib.AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(Proxy(etcd_server.endpoints[0]))
            log = await stack.enter_async_context(opened(etcd_server.url(etcd_prefix, endpoints=[proxy.address])))
            pen = Pen(await log.lead(JOB, "a", 600.0))
            for _ in range(5):
                batch = pen.draft(events=2)
                lost = proxy.cut_after_request(at_least_bytes=len(batch.payload))
                assert_outcome(await pen.lead.append(batch), AlreadyAppended(batch.last_seq))
                assert lost.done()
                pen.head = batch.last_seq
            await pen.write()
            assert await seqs(log.read(JOB)) == list(range(1, 12))

    run(story())


def test_what_landed_before_the_lease_ended_has_landed(etcd_server: Cluster, etcd_prefix: str) -> None:
    """A batch whose acknowledgement was lost, and whose leader was deposed since, is known to be there: identity before fence."""

    async def story() -> None:
        url = etcd_server.url(etcd_prefix)
        async with opened(url) as log, opened(url) as other:
            pen = Pen(await log.lead(JOB, "a", 600.0))
            batch = await pen.write(events=3)
            heir = Pen(await other.lead(JOB, "b", dead=["nobody", "a"]), head=3)
            assert_outcome(await pen.lead.append(batch), AlreadyAppended(3))
            assert not pen.lead.valid()
            await heir.write()
            assert_outcome(await pen.lead.append(batch), AlreadyAppended(3))
            assert isinstance(await pen.lead.append(pen.draft()), Fenced)

    run(story())


def test_a_newer_versions_batch_fences_like_any_other(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Who was deposed by a newer version, whose batches it cannot decode, is told that it was deposed."""

    async def story() -> None:
        url = etcd_server.url(etcd_prefix)
        async with opened(url) as log, opened(url) as other:
            pen = Pen(await log.lead(JOB, "a", 600.0))
            heir = await other.lead(JOB, "b", dead=["nobody", "a"])
            etcd, keys = log.etcd, log.keys(JOB)
            strange = [etcd.put_op(keys.batch(1), b"?"), etcd.put_op(keys.head, Head(1, heir.token, 1).packed())]
            await etcd.call("Txn", etcd.txn([], strange))
            assert_outcome(await pen.lead.append(pen.draft()), Fenced(pen.lead.token, heir.token))

    run(story())


def test_a_full_etcd_is_read_not_written(tmp_path: Path) -> None:
    """Out of space is `LogFull`, said by `trouble`; reading goes on, leadership too; with room the same batch lands."""

    async def story(server: Cluster) -> None:
        async with opened(server.url()) as log:
            pen = Pen(await log.lead(JOB, "a", TTL_S))
            await pen.write()
            refused = None
            while refused is None:
                batch = pen.draft(size=900_000)
                try:
                    assert_outcome(await pen.lead.append(batch), Appended(batch.last_seq))
                    pen.head = batch.last_seq
                except LogFull:
                    refused = batch
            assert "LogFull" in pen.lead.trouble()
            assert await seqs(log.read(JOB)) == list(range(1, pen.head + 1))
            first = pen.lead._lease._until
            await until(lambda: pen.lead._lease._until > first)
            assert pen.lead.valid()
            assert "LogFull" in pen.lead.trouble()
            await pen.lead.snapshot(Snapshot(1, "", b"no room, no harm"))
            landed = None
            for seq in range(2, pen.head):  # how much etcd gives back at once is its own affair
                await asyncio.to_thread(server.delete, log.keys(JOB).batch(seq))
                await asyncio.to_thread(server.make_room)
                with contextlib.suppress(LogFull):
                    landed = await pen.lead.append(refused)
                    break
            assert_outcome(landed, Appended(refused.last_seq))
            # While etcd defragmented it answered nothing: a renewal that failed meanwhile is trouble until the next one.
            await until(lambda: not pen.lead.trouble())

    with Cluster(quota_bytes=16 * 1024 * 1024) as server:
        run(story(server))


def test_an_etcd_that_found_itself_corrupt_is_waited_for(own_etcd: Cluster) -> None:
    """Its alarm refuses every write until somebody clears it: trouble, told in etcd's words, and no leader's or standby's end."""

    async def story() -> None:
        async with opened(own_etcd.url()) as log:
            pen = Pen(await log.lead(JOB, "a", 600.0))
            await pen.write()
            etcd = log.etcd
            member = next(one.member for one in (await etcd.statuses()).values() if isinstance(one, Status))
            raised = {"alarm": etcd.rpc.CORRUPT, "memberID": member}
            await etcd.call("Alarm", etcd.rpc.AlarmRequest(action=etcd.rpc.AlarmRequest.ACTIVATE, **raised))
            batch = pen.draft()
            with pytest.raises(LogUnavailable, match="corrupt cluster"):
                await pen.lead.append(batch)
            assert "corrupt cluster" in pen.lead.trouble()
            other = asyncio.ensure_future(log.lead("other", "b", TTL_S))
            await asyncio.wait({other}, timeout=0.5)
            assert not other.done()
            await etcd.call("Alarm", etcd.rpc.AlarmRequest(action=etcd.rpc.AlarmRequest.DEACTIVATE, **raised))
            assert_outcome(await pen.lead.append(batch), Appended(2))
            assert (await other).valid()

    run(story())


def test_a_batch_beyond_etcds_limit_names_the_setting(etcd_server: Cluster, etcd_prefix: str) -> None:
    """A batch larger than etcd takes is no passing trouble; the error names what to set."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            pen = Pen(await log.lead(JOB, "a"))
            await pen.write(size=1_100_000)
            for size in (1_700_000, 3_000_000):
                with pytest.raises(LogError, match="--max-request-bytes") as refused:
                    await pen.lead.append(pen.draft(size=size))
                assert not isinstance(refused.value, (LogUnavailable, LogFull))

    run(story())


def test_refusal_in_operation_is_waited_out(
    etcd_server: Cluster, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password changed under a leader is trouble, in etcd's words, and not its end."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            pen = Pen(await log.lead(JOB, "a", 600.0))

            async def refused(*_: object, **__: object) -> None:
                raise Denied("user or password is wrong")

            batch = pen.draft()
            with monkeypatch.context() as patch:
                patch.setattr(log.etcd, "call", refused)
                with pytest.raises(LogUnavailable, match="password is wrong"):
                    await pen.lead.append(batch)
                assert "password is wrong" in pen.lead.trouble()
                assert pen.lead.valid()
            assert_outcome(await pen.lead.append(batch), Appended(1))

    run(story())


def test_several_reads_are_of_one_revision(
    etcd_server: Cluster, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written between the first read and the second is in neither."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            etcd, (one, two) = log.etcd, (f"{etcd_prefix}/one", f"{etcd_prefix}/two")
            call = etcd.call

            async def and_then_somebody_writes(method: str, request: object) -> object:
                reply = await call(method, request)
                await call("Txn", etcd.txn([], [etcd.put_op(two, b"")]))
                return reply

            with monkeypatch.context() as patch:
                patch.setattr(etcd, "call", and_then_somebody_writes)
                _, found = await look(etcd, [etcd.range(one), etcd.range(two)])
            assert not found[1]
            assert (await look(etcd, [etcd.range(one), etcd.range(two)]))[1][1]

    run(story())


# ---- closing


def test_closing(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Closing resigns, ends who stands by and who follows, and leaves no task; everything then says that it is closed."""

    async def story() -> None:
        url = etcd_server.url(etcd_prefix)
        async with opened(url) as other:
            log = await EtcdLog.open_url(url, CODEC)
            pen = Pen(await log.lead(JOB, "a", 600.0))
            await pen.write()
            blocked = await other.lead("blocked", "other", 600.0)
            waiting = asyncio.ensure_future(log.lead("blocked", "a"))
            following = asyncio.ensure_future(seqs(log.follow(JOB, after=1)))
            reading = [asyncio.ensure_future(log.head(JOB)) for _ in range(20)]
            await blocked.announce("x")
            await log.close()
            await log.close()
            await pen.lead.lost
            for one in (waiting, following):
                with pytest.raises(LogUnavailable, match="closed"):
                    await one
            read = await asyncio.gather(*reading, return_exceptions=True)
            assert all(one == 1 or isinstance(one, Closed) for one in read)
            for question in (log.head(JOB), log.lead(JOB, "b"), pen.lead.append(pen.draft())):
                with pytest.raises(LogUnavailable, match="closed"):
                    await question
            await pen.lead.snapshot(Snapshot(1, "", b""))
            await pen.lead.resign()
            assert (await other.lead(JOB, "b", wait=False)).valid()
            await blocked.resign()
            await other.lead("blocked", "c", wait=False)

    run(story())
