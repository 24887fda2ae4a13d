"""Calls to etcd: members that stop; closing; users and passwords; certificates; addresses where no etcd is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from etcd_calls import RPC, connected, refusal, run
from tools.etcd_cluster import Cluster, certificates

from dlrover_adapters.etcd import checks
from dlrover_adapters.etcd.address import parse
from dlrover_adapters.etcd.client import ATTEMPT_S, Closed, Etcd
from dlrover_adapters.etcd.log import EtcdLog
from dlrover_adapters.etcd.protocol import load
from dlrover_core.errors import LogUnavailable, SpecError
from dlrover_core.testing.log_conformance import CODEC, JOB, Pen, seqs

# Tests that share a cluster run in one process: otherwise each process would start that cluster anew.
of_three = pytest.mark.xdist_group("etcd_client_three")
of_locked = pytest.mark.xdist_group("etcd_client_locked")
of_sealed = pytest.mark.xdist_group("etcd_client_sealed")


# ---- members that stop


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """A cluster of three for the tests that leave it healthy."""
    with Cluster(members=3) as etcd:
        yield etcd


@of_three
def test_a_stopped_member_costs_one_attempt(three: Cluster) -> None:
    """Of a member that is stopped, and still connected, the next one takes over, and calls after that never ask it."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        attempt_s = 3.0  # long, so that a pause of the machine is none
        patient = {"timeout_s": 30.0, "attempt_s": attempt_s}
        leader = await asyncio.to_thread(three.leader)
        stopped = (leader + 1) % 3
        async with connected(three.url("stopped")) as etcd:
            request = etcd.range("stopped/key")
            etcd._members._opened()
            etcd._members._at = stopped
            await etcd.call("Range", request)
            three.pause(stopped)
            try:
                began = loop.time()
                await asyncio.gather(*(etcd.call("Range", request, **patient) for _ in range(50)))
                assert attempt_s * 0.9 < loop.time() - began < attempt_s * 2
                began = loop.time()
                for _ in range(20):
                    await etcd.call("Range", request, **patient)
                assert loop.time() - began < attempt_s
                # Another failure does not lead back to it either.
                etcd._members.leave(etcd._members.now())
                assert etcd._members.now().endpoint != three.endpoints[stopped]
            finally:
                three.resume(stopped)
        await asyncio.to_thread(three.wait_healthy)

    run(story())


def test_a_killed_member_costs_nothing() -> None:
    """A member that is gone refuses at once: the next one answers within the same call."""

    async def story(server: Cluster) -> None:
        loop = asyncio.get_running_loop()
        killed = (await asyncio.to_thread(server.leader) + 1) % 3
        async with connected(server.url()) as etcd:
            etcd._members._opened()
            etcd._members._at = killed
            await etcd.call("Range", etcd.range("x"))
            server.kill(killed)
            began = loop.time()
            await etcd.call("Range", etcd.range("x"), timeout_s=40.0, attempt_s=20.0)
            assert loop.time() - began < 10.0

    with Cluster(members=3) as server:
        run(story(server))


@of_three
def test_a_leader_outlives_its_members_one_by_one(three: Cluster) -> None:
    """A leadership lives through the stop of each member in turn, and each batch lands once."""

    async def story() -> None:
        log = await EtcdLog.open_url(three.url("turns"), CODEC)
        try:
            pen = Pen(await log.lead(JOB, "a", 5.0))
            for member in range(3):
                three.pause(member)
                try:
                    batch = pen.draft()
                    while True:
                        with contextlib.suppress(LogUnavailable):
                            outcome = await pen.lead.append(batch)
                            break
                    assert type(outcome).__name__ in ("Appended", "AlreadyAppended")
                    pen.head = batch.last_seq
                finally:
                    three.resume(member)
                await asyncio.to_thread(three.wait_healthy)
            assert await seqs(log.read(JOB)) == [1, 2, 3]
            while pen.lead.trouble():  # noqa: ASYNC110  # until the next renewal, which is a matter of time
                await asyncio.sleep(0.01)
            assert pen.lead.valid()
        finally:
            await log.close()

    run(story())


@of_three
def test_opening_does_not_wait_for_a_stopped_member(three: Cluster) -> None:
    """With one of three stopped a log is opened and led as if it were not there, or nearly."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        stopped = (await asyncio.to_thread(three.leader) + 1) % 3
        three.pause(stopped)
        try:
            began = loop.time()
            log = await EtcdLog.open_url(three.url("opening"), CODEC)
            await Pen(await log.lead(JOB, "a")).write()
            await log.close()
            # It took a second for each of a dozen calls if every one of them asked the stopped one first.
            assert loop.time() - began < 8 * ATTEMPT_S
        finally:
            three.resume(stopped)
        await asyncio.to_thread(three.wait_healthy)

    run(story())


# ---- closing


def test_closing_while_calls_run(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Calls and streams under way end with `Closed`, no task stays, no warning is given; closing twice is fine."""

    async def story() -> None:
        etcd = Etcd(parse(etcd_server.url(etcd_prefix)))
        watching = asyncio.Event()

        async def watch() -> None:
            async for _ in etcd.watch(etcd_prefix, 0):
                watching.set()

        stream = asyncio.ensure_future(watch())
        await watching.wait()
        calls = [asyncio.ensure_future(etcd.call("Range", etcd.range("x"))) for _ in range(50)]
        await asyncio.sleep(0)
        await etcd.close()
        await etcd.close()
        told = await asyncio.gather(stream, *calls, return_exceptions=True)
        assert isinstance(told[0], Closed)
        # What had its answer keeps it; a call is never cancelled by anybody but its caller.
        assert all(isinstance(one, (Closed, RPC.RangeResponse)) for one in told[1:])
        with pytest.raises(Closed):
            await etcd.call("Range", etcd.range("x"))
        with pytest.raises(Closed):
            await etcd.keep_alive(1, timeout_s=1)

    run(story())


def test_closing_while_a_watch_is_being_made() -> None:
    """A watch that never got as far as a connection ends as closed too, and not as a member that is slow."""

    async def story() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        async with server:
            etcd = Etcd(parse(f"etcd://127.0.0.1:{server.sockets[0].getsockname()[1]}/t"))
            beginning = asyncio.ensure_future(anext_of(etcd.watch("x/", 0, silence_s=0.5)))
            await asyncio.sleep(0)
            await etcd.close()
            with pytest.raises(Closed):
                await beginning

    async def anext_of(responses: AsyncGenerator[object, None]) -> None:
        async with aclosing(responses):
            async for _ in responses:
                return

    run(story())


def test_a_channel_closed_under_a_call_is_a_cut(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Certificates change, or the log is closed, while a call authenticates: it is tried elsewhere, and no bug of ours."""

    async def story() -> None:
        async with connected(etcd_server.url(etcd_prefix)) as etcd:
            await etcd.call("Range", etcd.range("x"))
            member = etcd._members.now()
            await member.channel.close()
            with pytest.raises(LogUnavailable, match="was cut"):
                await etcd._attempt(member, "Range", etcd.range("x"), 1.0, quorum=True)
            with pytest.raises(LogUnavailable, match="was cut"):
                await etcd._keep_alive(member, 1, 1.0)

    run(story())


def test_grpcs_settings_are_not_left_to_children(
    etcd_server: Cluster, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a launcher tells its own grpc, the workers that it starts do not inherit."""
    for name in ("GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    load.__wrapped__()

    async def story() -> None:
        async with connected(etcd_server.url(etcd_prefix)) as etcd:
            await etcd.call("Range", etcd.range("x"))
            assert dict(os.environ) == before

    run(story())


def test_a_cancelled_call_is_cancelled(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Cancelling a caller is not taken for trouble of a member."""

    async def story() -> None:
        async with connected(etcd_server.url(etcd_prefix)) as etcd:
            call = asyncio.ensure_future(etcd.call("Range", etcd.range("x")))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await etcd.call("Range", etcd.range("x"))).count == 0

    run(story())


# ---- users and passwords


@pytest.fixture(scope="module")
def locked() -> Iterator[Cluster]:
    """An etcd that wants passwords; `reader` may read what `writer` may write, both only under ``mine``."""
    with Cluster(user="root", password="secret") as etcd:
        etcd.add_user("writer", "pen", "mine/")
        etcd.add_user("reader", "glasses", "elsewhere/")
        end = base64_of("mine0")
        permission = {"permType": "READ", "key": base64_of("mine/"), "range_end": end}
        etcd._any("auth/role/grant", {"name": "reader", "perm": permission})
        yield etcd


def base64_of(text: str) -> str:
    """As etcd's gateway wants its bytes."""
    import base64

    return base64.b64encode(text.encode()).decode()


@of_locked
def test_wrong_credentials_say_which(locked: Cluster) -> None:
    """No user, a wrong password and a missing permission are three different errors, each with its remedy."""

    async def story() -> None:
        host = locked.endpoints[0]
        assert "user or password is wrong" in await refusal(f"etcd://root:wrong@{host}/t")
        assert "user or password is wrong" in await refusal(f"etcd://nobody:secret@{host}/t")
        assert "DLROVER_ETCD_PASSWORD" in await refusal(f"etcd://{host}/t")
        assert "grant it a role" in await refusal(f"etcd://writer:pen@{host}/other")

    run(story())


@of_locked
def test_a_user_who_may_only_read_reads(locked: Cluster) -> None:
    """Who may read and not write opens and follows the log; only leading says that it may not."""

    async def story() -> None:
        host = locked.endpoints[0]
        writer = await EtcdLog.open_url(f"etcd://writer:pen@{host}/mine", CODEC)
        reader = await EtcdLog.open_url(f"etcd://reader:glasses@{host}/mine", CODEC)
        try:
            pen = Pen(await writer.lead(JOB, "a"))
            await pen.write()
            following = asyncio.ensure_future(seqs(reader.follow(JOB), upto=2))
            await pen.write()
            assert await following == [1, 2]
            with pytest.raises(SpecError, match="grant it a role"):
                await reader.lead("theirs", "b")
        finally:
            await reader.close()
            await writer.close()

    run(story())


@of_locked
def test_a_token_that_is_over_is_renewed(locked: Cluster) -> None:
    """Tokens die with the member that gave them: calls and watches go on with a new one."""

    async def story() -> None:
        async with connected(locked.url("mine")) as etcd:
            for question in (
                lambda: etcd.call("Range", etcd.range("mine/x")),
                lambda: etcd.progress("mine/x", 5.0),
            ):
                old, etcd._token = etcd._token, "made-up.1"
                etcd._metadata = (("token", "made-up.1"),)
                # A call goes on by itself; a stream finds out the first time, and has a new one the second.
                assert await question() or await question()
                assert etcd._token not in (None, "made-up.1", old)

    run(story())


@of_locked
def test_many_calls_authenticate_once(locked: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred first calls at once ask for one token: etcd compares passwords slowly."""

    async def story() -> None:
        async with connected(locked.url("mine")) as etcd:
            asked = []
            authenticate = Etcd._authenticate

            async def counted(self: Etcd, member: Any) -> None:
                asked.append(member.endpoint)
                await authenticate(self, member)

            monkeypatch.setattr(Etcd, "_authenticate", counted)
            await asyncio.gather(*(etcd.call("Range", etcd.range("mine/x")) for _ in range(100)))
            assert len(asked) == 1

    run(story())


def test_a_password_that_nobody_asks_for(etcd_server: Cluster, etcd_prefix: str) -> None:
    """A user given to an etcd without authentication does no harm."""

    async def story() -> None:
        host = etcd_server.endpoints[0]
        log = await EtcdLog.open_url(f"etcd://root:secret@{host}/{etcd_prefix}", CODEC)
        try:
            await Pen(await log.lead(JOB, "a")).write()
        finally:
            await log.close()

    run(story())


# ---- certificates


@pytest.fixture(scope="module")
def sealed() -> Iterator[Cluster]:
    """An etcd that serves TLS and wants a certificate of every client."""
    with Cluster(mutual=True) as etcd:
        yield etcd


@pytest.fixture
def foreign(tmp_path: Path) -> Any:
    """A CA of somebody else, and a certificate of it."""
    return certificates(tmp_path)


@of_sealed
def test_certificates_of_both_sides(sealed: Cluster) -> None:
    """With the right three files a log is led, written and read."""

    async def story() -> None:
        log = await EtcdLog.open_url(sealed.url("t"), CODEC)
        try:
            await Pen(await log.lead(JOB, "a")).write()
            assert await seqs(log.read(JOB)) == [1]
        finally:
            await log.close()

    run(story())


@of_sealed
def test_wrong_certificates_say_which(sealed: Cluster, foreign: Any, etcd_server: Cluster, tmp_path: Path) -> None:
    """CA, name, client certificate, key, no TLS on either side: each has an error of its own."""

    async def story() -> None:
        assert sealed.certificates is not None
        host, (ca, cert, key) = sealed.endpoints[0], sealed.certificates
        mine = f"cert={cert}&key={key}"
        assert "not of the CA we were given" in await refusal(f"etcd://{host}/t?cacert={foreign.cacert}&{mine}")
        named = host.replace("127.0.0.1", "127.1")
        assert "is not for '127.1'" in await refusal(f"etcd://{named}/t?cacert={ca}&{mine}")
        assert "wants a client certificate" in await refusal(f"etcd://{host}/t?cacert={ca}")
        theirs = f"cert={foreign.cert}&key={foreign.key}"
        assert "does not accept our client certificate" in await refusal(f"etcd://{host}/t?cacert={ca}&{theirs}")
        mixed = f"cert={cert}&key={foreign.key}"
        assert "belongs to another certificate" in await refusal(f"etcd://{host}/t?cacert={ca}&{mixed}")
        assert "holds no certificate" in await refusal(f"etcd://{host}/t?cacert={key}&{mine}")
        assert "does not speak TLS" in await refusal(f"etcd://{etcd_server.endpoints[0]}/t?cacert={ca}&{mine}")
        assert "wants TLS" in await refusal(f"etcd://{host}/t")

    run(story())


@of_sealed
def test_renewed_certificates_are_taken_up(sealed: Cluster, foreign: Any, tmp_path: Path) -> None:
    """Files that were replaced are read again when a call fails: short-lived certificates need no restart."""

    async def story() -> None:
        assert sealed.certificates is not None
        ca, cert, key = (tmp_path / name for name in ("mine-ca.pem", "mine.pem", "mine.key"))
        for mine, theirs in zip((ca, cert, key), foreign, strict=True):
            shutil.copy(theirs, mine)
        async with connected(f"etcd://{sealed.endpoints[0]}/t?cacert={ca}&cert={cert}&key={key}") as etcd:
            with pytest.raises(LogUnavailable):
                await etcd.call("Range", etcd.range("x"), timeout_s=0.5)
            for mine, right in zip((ca, cert, key), sealed.certificates, strict=True):
                shutil.copy(right, mine)
                os.utime(mine, (1, 1))
            assert (await etcd.call("Range", etcd.range("x"))).count == 0

    run(story())


# ---- nobody there


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody answers, the error comes within its bound and says of every endpoint why."""
    monkeypatch.setattr(checks, "OPEN_S", 0.5)

    async def story() -> None:
        with pytest.raises(LogUnavailable) as refused:
            await EtcdLog.open_url("etcd://127.0.0.1:1,no-such-host.invalid:2379/t", CODEC)
        assert "127.0.0.1:1: no connection: Connection refused" in str(refused.value)
        assert "there is no host 'no-such-host.invalid'" in str(refused.value)

    run(story())


def test_a_stopped_etcd_is_told(etcd_server: Cluster, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an etcd that accepts connections and says nothing, just that is said."""
    monkeypatch.setattr(checks, "OPEN_S", 0.5)

    async def story() -> None:
        with pytest.raises(LogUnavailable, match="accepts connections and says nothing"):
            await EtcdLog.open_url(etcd_server.url(etcd_prefix), CODEC)

    etcd_server.pause(0)
    try:
        run(story())
    finally:
        etcd_server.resume(0)
    etcd_server.wait_healthy()


def test_something_else_there() -> None:
    """What answers and does not speak HTTP/2 is no etcd."""

    async def story() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert "that is no etcd" in await refusal(f"etcd://127.0.0.1:{port}/t")

    run(story())
