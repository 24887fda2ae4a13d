"""What only looks like an etcd is refused, by name: old ones, proxies, stores without transactions, members in the past.

What no etcd here can be is a small server of our own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from etcd_calls import RPC, connected, refusal, run

from dlrover_adapters.etcd import checks
from dlrover_adapters.etcd.client import Denied
from dlrover_adapters.etcd.log import EtcdLog
from dlrover_core.errors import LogUnavailable, SpecError
from dlrover_core.testing.log_conformance import CODEC, JOB


class Pretender:
    """A grpc server that answers some of etcd's methods, each as it is told."""

    def __init__(self, **answers: Callable[[Any], Any]) -> None:
        self.header = RPC.ResponseHeader(cluster_id=7, member_id=1, revision=5, raft_term=2)
        self.answers: dict[str, Callable[[Any], Any]] = {
            "Status": lambda _: RPC.StatusResponse(header=self.header, version="3.5.13"),
            "Range": lambda _: RPC.RangeResponse(header=self.header),
            "LeaseGrant": lambda asked: RPC.LeaseGrantResponse(header=self.header, ID=1, TTL=asked.TTL),
            "LeaseRevoke": lambda _: RPC.LeaseRevokeResponse(header=self.header),
            **answers,
        }
        self.tells_progress = True

    async def __aenter__(self) -> str:
        """Serve; the address."""
        import grpc

        services: dict[str, dict[str, Any]] = {}
        for method, answer in self.answers.items():
            service = {"Status": "Maintenance", "LeaseGrant": "Lease", "LeaseRevoke": "Lease"}.get(method, "KV")
            asked = getattr(RPC, {"Txn": "TxnRequest"}.get(method, f"{method}Request"))
            services.setdefault(service, {})[method] = grpc.unary_unary_rpc_method_handler(
                self._answer(answer), asked.FromString, lambda reply: reply.SerializeToString()
            )
        services["Watch"] = {
            "Watch": grpc.stream_stream_rpc_method_handler(
                self._watch, RPC.WatchRequest.FromString, lambda reply: reply.SerializeToString()
            )
        }
        self._server = grpc.aio.server()
        for service, handlers in services.items():
            handler = grpc.method_handlers_generic_handler(f"etcdserverpb.{service}", handlers)
            self._server.add_generic_rpc_handlers((handler,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        await self._server.stop(None)

    def _answer(self, answer: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        async def handle(request: Any, context: Any) -> Any:
            import grpc

            reply = answer(request)
            if isinstance(reply, str):
                await context.abort(grpc.StatusCode.UNKNOWN, reply)
            return reply

        return handle

    async def _watch(self, requests: Any, _context: Any) -> AsyncIterator[Any]:
        first = True
        async for _ in requests:
            if first or self.tells_progress:
                yield RPC.WatchResponse(header=self.header, created=first)
            first = False


def told_by(pretender: Pretender, *, lead: bool = False) -> str:
    """Why a pretender is refused."""
    words = []

    async def story() -> None:
        async with pretender as host:
            if not lead:
                words.append(await refusal(f"etcd://{host}/t"))
                return
            log = await EtcdLog.open_url(f"etcd://{host}/t", CODEC)
            try:
                with pytest.raises(SpecError) as refused:
                    await log.lead(JOB, "a")
                words.append(str(refused.value))
            finally:
                await log.close()

    run(story())
    return words[0]


def test_old_etcds_are_refused() -> None:
    """Before 3.4 a watch does not tell its progress."""
    pretender = Pretender()
    pretender.answers["Status"] = lambda _: RPC.StatusResponse(header=pretender.header, version="3.3.27")
    assert "3.3.27: 3.4 is the oldest" in told_by(pretender)


def test_stores_without_a_version_are_refused() -> None:
    """An imitation that does not even say what it imitates."""
    pretender = Pretender()
    pretender.answers["Status"] = lambda _: RPC.StatusResponse(header=pretender.header)
    assert "only imitates etcd" in told_by(pretender)


def test_proxies_without_progress_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As etcd's own grpc-proxy: it swallows the question for progress."""
    monkeypatch.setattr(checks, "PROGRESS_S", 0.1)
    pretender = Pretender()
    pretender.tells_progress = False
    assert "grpc-proxy" in told_by(pretender)


def test_stores_that_refuse_our_transaction_are_refused() -> None:
    """As kine: it knows the transactions Kubernetes sends, and says of others that it does not."""
    pretender = Pretender(Txn=lambda _: "unsupported transaction: compare:<...>")
    assert "unsupported transaction" in told_by(pretender, lead=True)


def test_stores_that_ignore_conditions_are_refused() -> None:
    """A store whose transactions always land would fence nobody."""
    pretender = Pretender()

    def land(_: Any) -> Any:
        return RPC.TxnResponse(header=pretender.header, succeeded=True)

    pretender.answers["Txn"] = land
    assert "lands though its condition fails" in told_by(pretender, lead=True)


def test_stores_with_an_empty_else_branch_are_refused() -> None:
    """A store whose else-branch does not answer all its ranges cannot tell why a batch did not land."""
    pretender = Pretender()
    landed = []

    def land_once(_: Any) -> Any:
        landed.append(1)
        return RPC.TxnResponse(header=pretender.header, succeeded=len(landed) == 1)

    pretender.answers["Txn"] = land_once
    assert "does not tell what lies there" in told_by(pretender, lead=True)


def test_a_member_that_lives_in_the_past_is_not_believed() -> None:
    """An answer under an older raft term than was seen is not taken, and its member left alone; alone, it says so."""

    async def story() -> None:
        past, now = Pretender(), Pretender()
        now.header.raft_term = 9
        async with past as old, now as new, connected(f"etcd://{old},{new}/t") as etcd:
            etcd._members._opened()
            etcd._members._at = 1
            await etcd.call("Range", etcd.range("x"))
            etcd._members._at = 0
            assert (await etcd.call("Range", etcd.range("x"))).header.raft_term == 9
            assert etcd._members.now().endpoint == new
            with pytest.raises(LogUnavailable, match="raft term 2, 9 was seen"):
                await etcd.ask(old, "Range", etcd.range("x"))

    run(story())


def test_members_of_two_clusters_are_not_mixed() -> None:
    """Endpoints of different clusters are noticed by their answers, before a log is written in two places."""

    async def story() -> None:
        one, two = Pretender(), Pretender()
        two.header.cluster_id = 8
        async with one as first, two as second, connected(f"etcd://{first},{second}/t") as etcd:
            await etcd.ask(first, "Range", etcd.range("x"))
            with pytest.raises(LogUnavailable, match="another cluster"):
                await etcd.ask(second, "Range", etcd.range("x"))

    run(story())


def test_refusals_of_one_member_are_not_asked_of_the_next() -> None:
    """A wrong password is wrong everywhere: the first answer is the answer."""

    async def story() -> None:
        asked = []

        def refuse(_: Any) -> str:
            asked.append(1)
            return "etcdserver: permission denied"

        one, two = Pretender(Range=refuse), Pretender(Range=refuse)
        async with one as first, two as second, connected(f"etcd://{first},{second}/t") as etcd:
            with pytest.raises(Denied):
                await etcd.call("Range", etcd.range("x"))
            assert len(asked) == 1

    run(story())


def test_a_member_that_only_learns_is_not_asked_again() -> None:
    """A member that was added and not promoted yet serves nobody: the next one is asked, and the log can be opened."""

    async def story() -> None:
        def refuse(_: Any) -> str:
            return "etcdserver: rpc not supported for learner"

        learner, voter = Pretender(Range=refuse), Pretender()
        async with learner as first, voter as second, connected(f"etcd://{first},{second}/t") as etcd:
            etcd._members._opened()
            etcd._members._at = 0
            await etcd.call("Range", etcd.range("x"))
            assert etcd._members.now().endpoint == second

    run(story())
