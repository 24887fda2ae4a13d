"""The rendezvous handler as somebody uses it who is not torch's elastic agent, and as that one leaves it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

rendezvous = pytest.importorskip("dlrover_adapters.torch.rendezvous")

from torch.distributed.elastic.rendezvous import (  # noqa: E402
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from dlrover_adapters.torch import torchrun_line  # noqa: E402
from dlrover_adapters.torch.torchrun_desk import ENDED, Came, Desk, Failed, Leaving, Sign, Took  # noqa: E402
from dlrover_core.errors import ConnectionLost  # noqa: E402
from dlrover_core.runtime.launcher import WorkersLaunch  # noqa: E402
from dlrover_core.testing import virtual_loop  # noqa: E402

LAUNCH = WorkersLaunch("run", 1, 0, 1, 1, 0, 1, "host-a:1000", 0, 3)


class Stage:
    """A handler whose line is never drawn, and a master that the test plays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.signs: list[Sign] = []
        self.stopped: list[str] = []
        self.closed: list[float | None] = []
        self.waited: list[float] = []
        self.is_over, self.answers, self.line_ends = False, True, True
        monkeypatch.setattr(rendezvous, "Line", lambda desk, parts: self)
        monkeypatch.setattr(rendezvous.atexit, "register", lambda function: None)
        parts = SimpleNamespace(
            job="job", host="host", close=self.closed.append, over=self.over, stop=self.stop, words=None
        )
        self.handler = rendezvous.DlroverRendezvous("run", parts)
        self.desk: Desk = self.handler._desk
        self.desk.listen(self.signs.append)
        self.started = False

    def start(self) -> None:
        """The line's."""
        self.started = True

    def wait(self, seconds: float) -> bool:
        """The line's."""
        self.waited.append(seconds)
        return self.line_ends

    def over(self) -> bool:
        """The master's."""
        if not self.answers:
            raise ConnectionLost("nobody answers")
        return self.is_over

    def stop(self, reason: str) -> None:
        """The master's."""
        if not self.answers:
            raise ConnectionLost("nobody answers")
        self.stopped.append(reason)
        self.is_over = True

    def take(self, *, starts: bool) -> None:
        """As `next_rendezvous` does; ``starts``: and torch's elastic agent starts its workers."""
        self.desk.come()
        self.desk.post(LAUNCH)
        assert self.desk.take(LAUNCH)
        if starts:
            assert self.handler.use_agent_store
        self.signs.clear()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A new one."""
    return Stage(monkeypatch)


def test_closed_at_once(stage: Stage) -> None:
    """`set_closed` is seen by `is_closed` when it returns, before any rendezvous too; nobody gets another generation."""
    assert not stage.handler.is_closed()
    stage.handler.set_closed()
    assert stage.handler.is_closed()
    assert stage.stopped == ["closed by torchrun on host"]
    with pytest.raises(RendezvousClosedError, match="job 'job' is closed by torchrun on host"):
        stage.handler.next_rendezvous()
    assert not stage.started, "nobody is dialled for it"


def test_closed_by_another(stage: Stage) -> None:
    """Who has not come to a rendezvous yet asks the master."""
    stage.is_over = True
    assert stage.handler.is_closed()


@pytest.mark.parametrize("line_ends", [False, True], ids=["line waits", "line never began, or has given up"])
def test_no_master_answers(stage: Stage, line_ends: bool) -> None:
    """Then both raise what c10d raises without its store, and `shutdown` says False."""
    stage.answers, stage.line_ends = False, line_ends
    with pytest.raises(RendezvousConnectionError, match="nobody answers"):
        stage.handler.is_closed()
    with pytest.raises(RendezvousConnectionError, match="nobody answers"):
        stage.handler.set_closed()
    assert stage.handler.shutdown() is False


def test_shutdown_after_a_rendezvous_that_no_master_answered(stage: Stage) -> None:
    """No master has heard of it; the next one would not be told either."""
    stage.desk.close(RendezvousConnectionError("no master answered"))
    assert stage.handler.shutdown() is False
    assert stage.closed == [0.0]


@pytest.mark.parametrize("comes", [False, True])
def test_shutdown_by_hand_closes_the_job(stage: Stage, comes: bool) -> None:
    """As c10d's: before a rendezvous, and after one of whose workers nothing is known. Nothing is waited for that never comes."""
    if comes:
        stage.take(starts=False)
    assert stage.handler.shutdown() is True
    assert stage.stopped == ["closed by torchrun on host"]
    assert not [one for one in stage.signs if isinstance(one, Leaving)]
    assert stage.handler.shutdown() is True, "a second one has nothing to do"
    assert len(stage.stopped) == 1


def test_shutdown_after_a_failed_result(stage: Stage) -> None:
    """Who drives torch's elastic agent gets a result and no exception: its node has failed, it is not lost without a word."""
    stage.take(starts=True)
    assert stage.handler.shutdown() is True
    assert stage.signs == [Failed(1, ())]
    assert stage.waited == [rendezvous.OVER_S]
    assert stage.stopped == [], "how the job ends is the master's to say"


def test_shutdown_after_an_error_or_a_signal_leaves_the_others_alone(stage: Stage) -> None:
    """Who has no place, or was stopped, does not close the job for those who train."""
    stage.desk.close(RendezvousTimeoutError("no place"))
    assert stage.handler.shutdown() is True
    assert stage.stopped == []
    assert [type(one) for one in stage.signs] == [Leaving]


def test_shutdown_before_a_rendezvous_waits_for_nobody(stage: Stage) -> None:
    """An error of torch's elastic agent before it came: masters that nobody has seen end at once, and not after 30 s."""
    try:
        raise ValueError("its own")  # noqa: TRY301  # as it is under way when torch calls
    except ValueError:
        stage.handler.shutdown()
    assert stage.closed == [0.0]


def test_rank_0_may_serve_its_own_store(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's switch for it counts here as for c10d."""
    assert stage.handler.use_agent_store is True
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert stage.handler.use_agent_store is False


def test_shutdown_after_a_signal_that_somebody_caught(stage: Stage) -> None:
    """The others were told when it came."""
    stage.take(starts=True)
    stage.desk.leave("torchrun got SIGTERM", dead=False)
    assert stage.desk.phase == ENDED
    stage.handler.shutdown()
    assert stage.stopped == []


# ---- a node that has no place


class Waiting:
    """A line that minds one agent in virtual time."""

    def __init__(self, *, reserve: bool = False, node: str = "") -> None:
        self.said: list[str] = []
        self.left: list[str] = []
        self.desk = Desk()
        self.masters_ended = False
        parts: Any = SimpleNamespace(
            job="job", masters=("host:1",), join_s=20.0, reserve=reserve, say=self.said.append, trouble=str, host="h",
            ended=lambda: self.masters_ended,
        )  # fmt: skip
        self.agent: Any = SimpleNamespace(node=node, leaving="", unmastered_s=0.0, leave=self.leave)
        self.line = torchrun_line.Line(self.desk, parts)
        self.noting: Any = SimpleNamespace(trouble="")

    def leave(self, reason: str) -> None:
        """The agent's."""
        self.agent.leaving = reason
        self.left.append(reason)

    def mind(self, seconds: float) -> None:
        """For so long."""

        async def run() -> None:
            self.desk.come()
            minding = asyncio.ensure_future(self.line._mind(self.agent, self.noting))
            await asyncio.sleep(seconds)
            minding.cancel()
            await asyncio.gather(minding, return_exceptions=True)

        virtual_loop.run(run())


def test_a_node_beyond_max_is_told_and_times_out() -> None:
    """As c10d's, after ``join_timeout``; it goes without a word about failure."""
    waiting = Waiting()
    waiting.mind(15.0)
    assert waiting.said == [
        "all nodes of job 'job' are there (--nnodes MAX); this one waits until one of them goes, for join_timeout=20 s at most"
    ]
    assert waiting.desk.closed is None
    waiting.mind(25.0)
    assert isinstance(waiting.desk.closed, RendezvousTimeoutError)
    assert "had no place for this node within 20 s" in str(waiting.desk.closed)
    assert waiting.left == ["no place"]
    assert len(waiting.said) == 1


def test_a_master_that_has_never_been_heard_has_not_refused_a_place() -> None:
    """How long none was heard counts from the start: a slow start of masters is no full job."""
    waiting = Waiting()
    waiting.agent = _Unheard(waiting)
    waiting.mind(15.0)
    assert waiting.said == []
    assert waiting.desk.closed is None


class _Unheard:
    """An agent without a master."""

    node = leaving = ""

    def __init__(self, waiting: Waiting) -> None:
        self.leave = waiting.leave

    @property
    def unmastered_s(self) -> float:
        """Since the start."""
        return asyncio.get_running_loop().time()


def test_a_reserve_waits_without_end() -> None:
    """It is told as well."""
    waiting = Waiting(reserve=True)
    waiting.mind(1000.0)
    assert waiting.desk.closed is None
    assert waiting.said == ["all nodes of job 'job' are there (--nnodes MAX); this one waits until one of them goes"]


def test_a_node_that_has_its_place_waits_for_the_others() -> None:
    """How long, its master knows."""
    waiting = Waiting(node="worker-0-0")
    waiting.mind(1000.0)
    assert waiting.desk.closed is None
    assert waiting.said == []


def test_masters_of_this_host_that_have_ended_with_the_job() -> None:
    """Whoever comes then is told that the job is over; there is nobody left who could say it, and nobody is dialled for it."""
    waiting = Waiting()
    waiting.agent, waiting.masters_ended = _Unheard(waiting), True
    waiting.mind(2.0)
    assert isinstance(waiting.desk.closed, RendezvousClosedError)
    assert waiting.left[0] == "the job is over"


def test_a_master_that_was_found_just_now_is_waited_for() -> None:
    """How long none was heard is looked at now and again: what is known at the end may be of before it was found."""
    line = Waiting().line
    ending = threading.Event()
    line._thread = threading.Thread(target=ending.wait, args=(0.2,))
    line._thread.start()
    line._unmastered_s = 5.0
    assert line.wait(20.0)


def test_signs_of_the_handler_are_those_of_the_desk(stage: Stage) -> None:
    """A generation that is taken and not begun has no workers."""
    stage.desk.come()
    stage.desk.post(LAUNCH)
    stage.desk.take(LAUNCH)
    assert [type(one) for one in stage.signs] == [Came, Took]
    assert not stage.desk.begun
    assert stage.handler.use_agent_store
    assert stage.desk.begun
