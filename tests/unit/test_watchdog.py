"""When a process that does not answer hangs, and when it only seems to."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from dlrover_adapters.agent import looks
from dlrover_adapters.cli import asking
from dlrover_core.errors import SpecError
from dlrover_core.runtime.watchdog import BUSY_TIMES, DOUBT_SHARE, START_S, Seen, Verdict, Watch, Watchdog
from dlrover_core.spec import JobSpec
from dlrover_core.testing import virtual_loop

HUNG_S = 5.0
SLEEPS, STOPPED = Seen("S", 1.0), Seen("T", 1.0)


def watched(hung_s: float = HUNG_S) -> Watchdog:
    """One whose child has answered at 0."""
    dog = Watchdog(hung_s, 0.0)
    dog.answered(0.0)
    return dog


def looked(
    dog: Watchdog, until_s: float, see: Callable[[float], Seen], at_s: float = 0.0
) -> tuple[float, Verdict | None]:
    """Look as often as it wants, from one moment to another: the first verdict, and when it came."""
    while at_s < until_s:
        at_s += dog.wait_s
        verdict = dog.look(at_s, lambda: see(at_s))  # noqa: B023  # called at once
        if verdict is not None:
            return at_s, verdict
    return at_s, None


def test_a_stopped_child_hangs_after_exactly_its_bound() -> None:
    """Silence is counted from the last answer, so the bound does not grow by the time between two questions."""
    at_s, verdict = looked(watched(), 60.0, lambda _: STOPPED)
    assert at_s == pytest.approx(HUNG_S)
    assert verdict == Verdict(True, pytest.approx(HUNG_S), "it is stopped, as by SIGSTOP")


def test_a_doubt_comes_before_the_verdict_and_ends_with_an_answer() -> None:
    """A pause of 3 s of 5 is none; at 3.5 s there are 1.5 s left to make a successor ready."""
    dog, at_s = watched(), 0.0
    while not dog.in_doubt:
        at_s += dog.wait_s
        assert dog.look(at_s, lambda: STOPPED) is None
    assert at_s == pytest.approx(DOUBT_SHARE * HUNG_S)
    assert at_s > 3.0
    dog.answered(at_s)
    assert not dog.in_doubt


def test_a_child_that_sleeps_for_ever_hangs_too() -> None:
    """A deadlock is known by neither running nor being stopped."""
    at_s, verdict = looked(watched(), 60.0, lambda _: SLEEPS)
    assert at_s == pytest.approx(HUNG_S)
    assert verdict is not None
    assert "deadlock" in verdict.why


def test_pauses_shorter_than_the_bound_cost_nothing() -> None:
    """A hundred pauses of 3 s, each ended by an answer: no verdict."""
    dog, at_s = watched(), 0.0
    for _ in range(100):
        at_s, verdict = looked(dog, at_s + 3.0, lambda _: STOPPED, at_s)
        assert verdict is None
        dog.answered(at_s)


@pytest.mark.parametrize(
    ("see", "why"),
    [
        (lambda at: Seen("S", 0.5 * at), "it computes without a pause"),
        (lambda _: Seen("R", 1.0), "it waits for a processor"),
        (lambda _: Seen("D", 1.0), "it waits for a disk or a network file system"),
    ],
)
def test_a_busy_child_gets_longer_and_is_told_apart(see: Callable[[float], Seen], why: str) -> None:
    """One that computes, waits for a processor or for a disk has four times the bound, and the verdict says which."""
    at_s, verdict = looked(watched(), 60.0, see)
    assert at_s == pytest.approx(BUSY_TIMES * HUNG_S, abs=1.0)
    assert verdict is not None
    assert verdict.kill
    assert verdict.why.startswith(why)


def test_processor_time_of_before_the_silence_does_not_count() -> None:
    """A child that has computed for hours, and is stopped now, is stopped."""
    at_s, verdict = looked(watched(), 60.0, lambda _: Seen("S", 10_000.0))
    assert at_s == pytest.approx(HUNG_S)
    assert verdict is not None


def test_a_machine_that_stood_still_is_no_silence() -> None:
    """The parent itself was not run for an hour: the child still has nearly all of its time to answer."""
    dog = watched()
    assert dog.look(3600.0, lambda: STOPPED) is None
    dog.answered(3600.1)
    assert looked(dog, 3604.0, lambda _: STOPPED, 3600.1)[1] is None


def test_a_parent_that_is_always_late_still_comes_to_a_verdict() -> None:
    """On a machine so loaded that every look is seconds late a stopped child is found, only later."""
    dog, verdicts = watched(), []
    for at_s in range(3, 60, 3):
        verdicts += [at_s] if dog.look(float(at_s), lambda: STOPPED) is not None else []
    assert HUNG_S < verdicts[0] <= 4 * HUNG_S


def test_a_debuggers_victim_is_left_alone_and_told_once() -> None:
    """A traced child is never killed; when the debugger has gone it has its whole time again."""
    dog = watched()
    at_s, verdict = looked(dog, 60.0, lambda _: Seen("T", 1.0, 42))
    assert verdict == Verdict(False, pytest.approx(HUNG_S), "process 42 debugs it")
    at_s, verdict = looked(dog, at_s + 600.0, lambda _: Seen("T", 1.0, 42), at_s)
    assert verdict is None
    left_at_s = at_s
    at_s, verdict = looked(dog, at_s + 60.0, lambda _: STOPPED, at_s)
    assert verdict is not None
    assert verdict.kill
    assert at_s - left_at_s <= HUNG_S + 1.0


def test_a_child_may_take_longer_to_its_first_answer() -> None:
    """Imports of a cold start are no hang; a child that never comes that far is found all the same."""
    at_s, verdict = looked(Watchdog(HUNG_S, 0.0), 600.0, lambda _: SLEEPS)
    assert at_s == pytest.approx(START_S)
    assert verdict is not None


def test_a_dead_child_is_not_judged() -> None:
    """Its parent is about to be told of its end."""
    assert looked(watched(), 60.0, lambda _: Seen())[1] is None
    assert looked(watched(), 60.0, lambda _: Seen("Z"))[1] is None


def test_a_child_is_asked_one_question_at_a_time_until_it_hangs() -> None:
    """A child that is stopped finds one question, not thousands; after the verdict nothing is asked."""

    async def story() -> tuple[int, int, list[Verdict], float]:
        loop, asked, verdicts = asyncio.get_running_loop(), [], list[Verdict]()
        answers = True

        def ask() -> bool:
            asked.append(loop.time())
            if answers:
                loop.call_later(0.01, watch.answered)
            return True

        watch = Watch(HUNG_S, ask=ask, see=lambda: STOPPED, judged=verdicts.append)
        watch.open()
        await asyncio.sleep(100.0)
        before, answers = len(asked), False
        stopped_at = asked[-1]
        await asyncio.sleep(100.0)
        watch.close()
        return before, len(asked), verdicts, stopped_at

    before, after, verdicts, _ = virtual_loop.run(story())
    assert before == pytest.approx(160, abs=3)
    assert after == before + 1
    assert [one.kill for one in verdicts] == [True]


def test_a_bound_of_0_asks_nothing() -> None:
    """``hung_s`` 0: a master may be debugged for hours."""

    async def story() -> list[str]:
        asked: list[str] = []
        watch = Watch(
            0.0, ask=lambda: asked.append("?") is None, see=lambda: STOPPED, judged=lambda _: asked.append("!")
        )
        watch.open()
        await asyncio.sleep(1000.0)
        watch.answered()
        watch.close()
        return asked

    assert virtual_loop.run(story()) == []


@pytest.mark.parametrize("hung_s", [0.1, -1.0])
def test_a_bound_that_nobody_could_keep_is_refused(hung_s: float) -> None:
    """Less than half a second, or less than nothing, is no bound."""
    with pytest.raises(SpecError, match="hung_s"):
        JobSpec("j", hung_s=hung_s)
    assert JobSpec("j", hung_s=0.0).hung_s == 0


# ---- of real processes


def test_the_kernel_tells_a_stopped_process_from_one_that_computes() -> None:
    """State, processor time and debugger come from /proc, of the whole process."""
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as busy:
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            before = looks.seen(busy.pid)
            assert before.state == "R"
            assert before.tracer == 0
            busy.send_signal(signal.SIGSTOP)
            os.waitpid(busy.pid, os.WUNTRACED)
            assert looks.seen(busy.pid).state == "T"
        finally:
            busy.kill()
    assert looks.seen(busy.pid) == Seen()


async def _asked(
    see: Callable[[int], Seen], monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> tuple[list[str], int]:
    """What people are told within a second about a master that has answered once, and how often it was killed."""
    monkeypatch.setattr(looks, "seen", see)
    said, killed, doubts = list[str](), list[int](), list[bool]()
    told = asyncio.Event()

    def say(words: str) -> None:
        said.append(words)
        told.set()

    loop = asyncio.get_running_loop()
    one = asking.Asking(
        "j",
        0.5,
        say,
        lambda leading: "the one in reserve leads" if leading else "another one takes its place",
        lambda: doubts.append(bool(said)),
    )
    with socket.socket(fileno=os.dup(one.theirs.fileno())) as master:
        one.begin(123, lambda: killed.append(1))
        if answers:
            asking.answer(master.detach(), lambda: True)
        else:
            master.setblocking(False)
            await loop.sock_recv(master, 1)
            await loop.sock_sendall(master, asking.LEADS)
        try:
            await asyncio.wait_for(told.wait(), 1.0)
        except asyncio.TimeoutError:
            assert answers
        one.close()
        await asyncio.sleep(0.01)  # the master sees the end of its socket
    # A successor is made ready before people hear of it, and for no master that answers.
    assert doubts[:1] == ([] if answers else [False])
    return said, len(killed)


def test_a_launcher_says_which_master_hangs_and_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line: which master, which process, for how long, why, and what comes next."""
    said, killed = asyncio.run(_asked(lambda _: STOPPED, monkeypatch, answers=False))
    assert killed == 1
    told = (
        "job j: the master that leads (process 123) has not answered for 0.5 s: it is stopped, as by SIGSTOP; "
        "it is killed, and the one in reserve leads"
    )
    assert said == [told]


def test_a_master_that_answers_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the kernel says that it is stopped at this moment: it answers."""
    assert asyncio.run(_asked(lambda _: STOPPED, monkeypatch, answers=True)) == ([], 0)


def test_a_master_under_a_debugger_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """People are told once that failures wait."""
    said, killed = asyncio.run(_asked(lambda _: Seen("T", 0.0, 42), monkeypatch, answers=False))
    assert killed == 0
    assert len(said) == 1
    assert "process 42 debugs it; it is not killed" in said[0]
