"""The launcher over torch's elastic agent: the test plays the elastic agent, in virtual time and without a process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_adapters.cli import torchrun
from dlrover_adapters.torch import torchrun_workers
from dlrover_adapters.torch.torchrun_desk import ENDED, FINISHED, RUNNING, WAITING, Death, Desk, Seen
from dlrover_adapters.torch.torchrun_launcher import STORES_KEPT, TorchrunLauncher, Words
from dlrover_core.errors import LaunchFailed, SpecError
from dlrover_core.runtime.launcher import (
    Notice,
    StoreReady,
    WorkerExit,
    WorkersLaunch,
    WorkersStuck,
)
from dlrover_core.testing import virtual_loop


class Stage:
    """One launcher, its desk, and an elastic agent whose every move the test says."""

    def __init__(self) -> None:
        self.desk, self.left, self.notices = Desk(), list[str](), list[Notice]()
        self.stores: list[int] = []
        self.words: dict[str, Words] = {}
        self.dying: dict[int, Callable[[int | None], object]] = {}
        self.launcher = TorchrunLauncher(
            self.desk,
            open_store=self._open,
            bind="10.0.0.1",
            address="host-a",
            leave=self.left.append,
            words=self._read,
            watch=self._watch,
        )

    def _open(self, bind: str) -> tuple[Any, int]:
        assert bind == "10.0.0.1"
        self.stores.append(1000 + len(self.stores))
        return object(), self.stores[-1]

    async def _read(self, path: str) -> Words:
        return self.words.get(path, Words())

    def _watch(self, seen: Seen, died: Callable[[int | None], None]) -> Callable[[], None]:
        self.dying[seen.rank] = partial(asyncio.get_running_loop().call_soon, died)
        return lambda: None

    async def settle(self) -> list[Notice]:
        """Let everything that was said be heard; returns all notices since the last time."""
        await asyncio.sleep(0.01)
        fresh, self.notices = self.notices, []
        return [one for one in fresh if not isinstance(one, StoreReady)]

    async def hear(self) -> None:
        """Write down every notice."""
        async for notice in self.launcher.notices():
            self.notices.append(notice)

    async def begin(self, generation: int = 1, *, last: bool | None = False) -> WorkersLaunch:
        """The elastic agent comes, takes the generation and starts two workers."""
        launch = launch_of(generation)
        self.desk.come()
        await self.launcher.start(launch)
        assert self.desk.await_launch(0, 0.0) is launch
        assert self.desk.take(launch)
        self.desk.exist(tuple(Seen(100 + rank, -1, rank, last, f"error-{rank}") for rank in (0, 1)))
        await asyncio.sleep(0.01)
        return launch


def launch_of(generation: int) -> WorkersLaunch:
    """A generation of one node."""
    return WorkersLaunch("run", generation, 0, 1, 1, 0, 1, "host-a:1000", 0, 3)


def play(story: Callable[[Stage], Awaitable[None]]) -> None:
    """Run a story on an open launcher."""

    async def run() -> None:
        stage = Stage()
        await stage.launcher.open()
        hearing = asyncio.ensure_future(stage.hear())
        try:
            await story(stage)
        finally:
            await stage.launcher.close()
            await hearing

    virtual_loop.run(run())


def brief(notices: list[Notice]) -> list[tuple[Any, ...]]:
    """Exits as (rank, code, asked, last), the rest by name and generation."""
    return [
        (one.rank, one.exit_code, one.asked, one.last)
        if isinstance(one, WorkerExit)
        else (type(one).__name__, one.generation)  # type: ignore[union-attr]
        for one in notices
    ]


def test_a_start_is_taken_when_the_elastic_agent_comes_by() -> None:
    """And taken once; before it came nobody runs anything."""

    async def story(stage: Stage) -> None:
        launch = launch_of(1)
        await stage.launcher.start(launch)
        assert stage.desk.await_launch(0, 0.0) is launch
        assert stage.desk.phase == "away"
        stage.desk.come()
        assert (stage.desk.phase, stage.desk.lies(launch)) == (WAITING, True)
        assert stage.desk.take(launch)
        assert (stage.desk.phase, stage.desk.waiting) == (RUNNING, False)
        assert not stage.desk.take(launch)

    play(story)


def test_a_stop_takes_back_what_nobody_has_taken() -> None:
    """The elastic agent waits on, for the next generation."""

    async def story(stage: Stage) -> None:
        launch = launch_of(1)
        stage.desk.come()
        await stage.launcher.start(launch)
        assert await stage.launcher.stop(0.0, 30.0)
        assert not stage.desk.lies(launch)
        assert not stage.desk.take(launch)
        await stage.launcher.start(launch_of(2))
        assert stage.desk.await_launch(1, 0.0) == launch_of(2)
        assert brief(await stage.settle()) == [("WorkersGone", 1)]

    play(story)


def test_a_stop_calls_the_elastic_agent_back_and_waits_for_the_last_worker() -> None:
    """New nodes "waiting" make it stop its workers; their deaths are asked for, and cost nothing."""

    async def story(stage: Stage) -> None:
        await stage.begin()
        stopping = asyncio.ensure_future(stage.launcher.stop(0.0, 30.0))
        await asyncio.sleep(0.01)
        assert stage.desk.waiting
        stage.dying[0](-signal.SIGTERM)
        await asyncio.sleep(0.01)
        assert not stopping.done()
        stage.dying[1](1)
        assert await stopping
        assert brief(await stage.settle()) == [(0, -15, True, False), (1, 1, True, False), ("WorkersGone", 1)]
        await stage.launcher.start(launch_of(2))
        stage.desk.come()
        assert not stage.desk.waiting
        assert stage.desk.take(launch_of(2)) is False  # not the very launch
        assert await stage.settle() == []

    play(story)


def test_workers_that_were_never_seen_are_dead_when_the_elastic_agent_is_back() -> None:
    """Under ``--run-path`` nothing can be watched: its own coming by has to do."""

    async def story(stage: Stage) -> None:
        launch = launch_of(1)
        stage.desk.come()
        await stage.launcher.start(launch)
        stage.desk.take(launch)
        stage.desk.exist(())
        stopping = asyncio.ensure_future(stage.launcher.stop(0.0, 30.0))
        await asyncio.sleep(0.01)
        assert not stopping.done()
        stage.desk.come()
        assert await stopping
        assert brief(await stage.settle()) == [("WorkersGone", 1)]

    play(story)


def test_what_was_taken_and_not_begun_has_no_workers() -> None:
    """Who uses a handler by hand starts none that we could wait for; torch's elastic agent is called back before it looks."""

    async def story(stage: Stage) -> None:
        launch = launch_of(1)
        stage.desk.come()
        await stage.launcher.start(launch)
        stage.desk.take(launch)
        began = asyncio.get_running_loop().time()
        assert await stage.launcher.stop(0.0, 30.0)
        assert asyncio.get_running_loop().time() == began
        assert brief(await stage.settle()) == [("WorkersGone", 1)]
        assert stage.desk.waiting, "should it start some all the same"

    play(story)


def test_giving_up_without_a_word_is_a_failure() -> None:
    """Torch's elastic agent returned a failed result: what was held counts, or else nobody knows how its workers ended."""

    async def held(stage: Stage) -> None:
        await stage.begin(last=None)
        stage.dying[1](7)
        stage.desk.fail(())
        assert brief(await stage.settle()) == [(1, 7, False, True), ("WorkersGone", 1)]

    async def told(stage: Stage) -> None:
        await stage.begin(last=True)
        stage.dying[1](7)
        assert brief(await stage.settle()) == [(1, 7, False, True)]
        stage.dying[0](-signal.SIGTERM)
        stage.desk.fail(())
        assert brief(await stage.settle()) == [(0, -15, True, False), ("WorkersGone", 1)]

    async def unknown(stage: Stage) -> None:
        await stage.begin()
        stage.desk.fail(())
        assert brief(await stage.settle()) == [(0, 1, False, True), ("WorkersGone", 1)]

    for story in (held, told, unknown):
        play(story)


def test_workers_that_do_not_die_make_a_stop_fail() -> None:
    """After torch's own 30 s and the kill wait."""

    async def story(stage: Stage) -> None:
        await stage.begin()
        began = asyncio.get_running_loop().time()
        assert not await stage.launcher.stop(0.0, 10.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(40.0)
        assert await stage.settle() == [WorkersStuck(1, (100, 101))]

    play(story)


def test_a_death_is_told_at_once_with_its_words() -> None:
    """The rest of the node is killed by torch: that is no evidence."""

    async def story(stage: Stage) -> None:
        await stage.begin()
        stage.words["error-1"] = Words("tail", "ValueError: no", 7)
        stage.dying[1](1)
        told = await stage.settle()
        assert brief(told) == [(1, 1, False, False)]
        assert isinstance(told[0], WorkerExit)
        assert (told[0].tail, told[0].error, told[0].error_at_us) == ("tail", "ValueError: no", 7)
        stage.dying[0](-signal.SIGTERM)
        assert brief(await stage.settle()) == [(0, -15, True, False), ("WorkersGone", 1)]
        stage.desk.come()
        assert await stage.settle() == []
        assert not stage.desk.waiting

    play(story)


def test_the_exit_that_torch_will_not_answer_is_the_last() -> None:
    """What it says itself afterwards is no news."""

    async def story(stage: Stage) -> None:
        await stage.begin(last=True)
        stage.dying[1](-signal.SIGKILL)
        assert brief(await stage.settle()) == [(1, -9, False, True)]
        stage.dying[0](-signal.SIGTERM)
        stage.desk.fail((Death(1, -9),))
        assert brief(await stage.settle()) == [(0, -15, True, False), ("WorkersGone", 1)]
        assert stage.desk.phase == ENDED
        with pytest.raises(LaunchFailed, match="start torchrun there again"):
            await stage.launcher.start(launch_of(2))

    play(story)


def test_an_exit_is_held_where_nobody_knows_whether_torch_will_answer_it() -> None:
    """It died before it could be asked how many restarts are left: to guess would charge one that torch does not have."""

    async def answered(stage: Stage) -> None:
        await stage.begin(last=None)
        stage.dying[1](7)
        assert brief(await stage.settle()) == []
        stage.desk.come()
        assert brief(await stage.settle()) == [(1, 7, False, False), ("WorkersGone", 1)]

    async def given_up(stage: Stage) -> None:
        await stage.begin(last=None)
        stage.dying[1](7)
        assert brief(await stage.settle()) == []
        stage.desk.fail((Death(1, 7),))
        assert brief(await stage.settle()) == [(1, 7, False, True), ("WorkersGone", 1)]

    play(answered)
    play(given_up)


def test_who_has_no_environment_does_not_say_whether_it_was_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zombie, on older kernels: its rank can be told, its restarts cannot."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        monkeypatch.setattr(torchrun_workers, "_children", lambda: [torchrun_workers._Child(child.pid, 1, {})])
        (found,) = torchrun_workers.find("run", 5)
        os.close(found.pidfd)
        child.kill()
    assert (found.rank, found.last) == (5, None)


@pytest.mark.parametrize(("local_rank", "missing"), [(0, 3), (1, 1)])
def test_who_has_no_environment_is_who_is_missing_of_its_node(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, missing: int
) -> None:
    """The sibling says where the node's ranks begin: the rank beside it, and not the one before it, is the dead one's."""
    told = {"TORCHELASTIC_RUN_ID": "run", "RANK": "2", "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "2"}
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as one,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other,
    ):
        children = [torchrun_workers._Child(one.pid, 1, told), torchrun_workers._Child(other.pid, 2, {})]
        monkeypatch.setattr(torchrun_workers, "_children", lambda: children)
        found = torchrun_workers.find("run", 5)
        for seen in found:
            os.close(seen.pidfd)
        one.kill()
        other.kill()
    assert [(seen.pid, seen.rank) for seen in found] == [(one.pid, 2), (other.pid, missing)]


def test_torchs_last_words_count_where_nothing_was_seen() -> None:
    """With ranks, exit codes and error files, the earliest first."""

    async def story(stage: Stage) -> None:
        launch = launch_of(1)
        stage.desk.come()
        await stage.launcher.start(launch)
        stage.desk.take(launch)
        stage.desk.fail((Death(1, 1, "boom", 5), Death(0, -6)))
        assert brief(await stage.settle()) == [(1, 1, False, True), (0, -6, False, True), ("WorkersGone", 1)]

    play(story)


def test_a_restart_by_torch_that_nobody_can_explain_is_told() -> None:
    """It comes by unasked: its workers failed, and the others must start again too."""

    async def story(stage: Stage) -> None:
        await stage.begin()
        stage.dying[0](None)
        stage.dying[1](None)
        assert await stage.settle() == []
        stage.desk.come()
        told = await stage.settle()
        assert brief(told) == [(0, 1, False, False), ("WorkersGone", 1)]
        assert isinstance(told[0], WorkerExit)
        assert "does not tell" in told[0].tail

    play(story)


def test_a_termination_is_held_until_torch_shows_what_it_was() -> None:
    """Somebody may have stopped one worker, or torchrun, which passes the signal on."""

    async def killed(stage: Stage) -> None:
        await stage.begin()
        stage.dying[0](-signal.SIGTERM)
        stage.dying[1](-signal.SIGTERM)
        assert await stage.settle() == []
        stage.desk.come()
        assert brief(await stage.settle()) == [(0, -15, False, False), (1, -15, False, False), ("WorkersGone", 1)]

    async def stopped(stage: Stage) -> None:
        await stage.begin()
        stage.desk.leave("torchrun got SIGTERM", dead=False)
        stage.dying[0](-signal.SIGTERM)
        stage.dying[1](3)
        assert brief(await stage.settle()) == [(0, -15, True, False), (1, 3, True, False), ("WorkersGone", 1)]
        assert stage.left == ["torchrun got SIGTERM"]

    play(killed)
    play(stopped)


def test_the_last_barrier_says_that_all_ended_well() -> None:
    """Exit codes 0 alone say nothing; and once there, the elastic agent never starts anything again."""

    async def story(stage: Stage) -> None:
        launch = await stage.begin()
        stage.dying[0](0)
        stage.dying[1](0)
        assert await stage.settle() == []
        stage.desk.finish()
        assert brief(await stage.settle()) == [(0, 0, False, False), ("WorkersGone", 1)]
        assert stage.desk.phase == FINISHED
        assert stage.desk.lies(launch)
        stage.desk.close(RuntimeError("the job is over"))
        assert stage.desk.lies(launch), "the others may still be on their way to the barrier"
        assert await stage.launcher.stop(30.0, 30.0)
        with pytest.raises(LaunchFailed, match="finished"):
            await stage.launcher.start(launch_of(2))
        assert not stage.desk.lies(launch), "nobody else will come"

    play(story)


def test_a_closed_desk_answers_with_the_reason() -> None:
    """The first one."""
    desk = Desk()
    desk.close(ValueError("first"))
    desk.close(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        desk.await_launch(0, 0.0)


def test_one_store_is_always_ahead() -> None:
    """A named one is replaced at once, a strange one is not ours; those of past generations are closed."""

    async def story(stage: Stage) -> None:
        await asyncio.sleep(0.01)
        assert stage.notices == [StoreReady("host-a:1000")]
        stage.launcher.spend_store("elsewhere:1000")
        stage.launcher.spend_store("host-a:1000")
        stage.launcher.spend_store("host-a:1000")
        await asyncio.sleep(0.01)
        assert stage.notices == [StoreReady("host-a:1000"), StoreReady("host-a:1001")]
        for port in range(1001, 1006):
            stage.launcher.spend_store(f"host-a:{port}")
        assert len(stage.launcher._stores) == STORES_KEPT + 1

    play(story)


def test_several_hosts_need_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """One host makes its own, for whoever of this user comes to the same job; several must be given one."""
    monkeypatch.delenv("DLROVER_TOKEN", raising=False)
    place = torchrun.Place("job", tmp_path, "")
    params = SimpleNamespace(max_nodes=2, get=lambda *_: None)
    with pytest.raises(SpecError, match="several hosts need one job token"):
        torchrun._token(params, place, "10.0.0.1")
    made = torchrun._token(params, place, "127.0.0.1")
    assert torchrun._token(params, place, "localhost") == made
    assert torchrun._token(SimpleNamespace(max_nodes=1, get=lambda *_: None), place, "10.0.0.1") == made
    assert (tmp_path / "loopback.token").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("DLROVER_TOKEN", "a-given-token")
    assert torchrun._token(params, place, "10.0.0.1") == "a-given-token"


@pytest.mark.parametrize(
    ("run_id", "name"),
    [("none", "torchrun-29400"), ("My Job/7", "my-job-7"), ("---", "torchrun-29400"), ("a" * 80, "a" * 63)],
)
def test_the_jobs_name(run_id: str, name: str) -> None:
    """``--rdzv-id``, made fit; torchrun's default is everybody's and gets the port."""
    assert torchrun._name(run_id, 29400) == name


@pytest.mark.parametrize(
    ("endpoint", "nodes", "found"),
    [
        ("", 1, ("127.0.0.1", 0)),
        (None, 1, ("127.0.0.1", 0)),
        ("localhost:0", 1, ("localhost", 0)),
        ("[::1]:0", 1, ("::1", 0)),
        ("host0:7", 1, ("host0", 7)),
        ("host0", 2, ("host0", 29400)),
    ],
)
def test_one_node_needs_no_endpoint(endpoint: str | None, nodes: int, found: tuple[str, int]) -> None:
    """Its masters take a free port, as torchrun's c10d does for ``localhost:0``; several nodes must find the same one."""
    assert torchrun._endpoint(SimpleNamespace(endpoint=endpoint, max_nodes=nodes)) == found


@pytest.mark.parametrize(
    ("endpoint", "words"), [("", "needs --rdzv-endpoint HOST:PORT"), ("localhost:0", "1 to 65535")]
)
def test_several_nodes_need_an_endpoint(endpoint: str, words: str) -> None:
    """A free port would be another one for each of them."""
    with pytest.raises((ValueError, SpecError), match=words):
        torchrun._endpoint(SimpleNamespace(endpoint=endpoint, max_nodes=2))


def test_a_job_without_name_and_port_has_a_new_name() -> None:
    """Two of them at the same time on one host are two jobs."""
    names = {torchrun._name("none", 0) for _ in range(8)}
    assert len(names) == 8
    assert all(name.startswith("torchrun-") for name in names)


def test_the_spec_leaves_counting_to_torch() -> None:
    """And takes torchrun's time-outs and ours from ``--rdzv-conf``; what nobody knows is refused."""
    conf = {
        "timeout": 900,
        "etcd_prefix": "/x",
        "use_libuv": "0",
        "join_timeout": "20",
        "last_call_timeout": "3",
        "linger_s": "0.5",
    }
    params = SimpleNamespace(
        run_id="j", min_nodes=1, max_nodes=4, config=conf, get=lambda key, default=None: conf.get(key, default)
    )
    spec = torchrun._spec(params, "j")
    assert (spec.joining, spec.launch_s, spec.last_call_s, spec.linger_s) == (True, 20.0, 3.0, 0.5)
    assert (spec.groups[0].nodes_min, spec.groups[0].nodes_max, spec.groups[0].nproc) == (1, 4, 1)
    assert spec.max_restarts == spec.groups[0].relaunch_max == torchrun.WITHOUT_END
    conf["jion_timeout"] = "20"
    with pytest.raises(ValueError, match="no jion_timeout; it has"):
        torchrun._spec(params, "j")


def test_torch_loads_us_for_nothing() -> None:
    """The entry point is loaded with every torchrun on the host, whatever its backend."""
    code = "import sys, dlrover_adapters.cli.torchrun as t; t.creator(); print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"torch", "aiohttp", "structlog", "asyncio", "dlrover_core"} & set(told.split())
