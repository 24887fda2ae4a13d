"""Whom an agent dials, in which order and after which pauses."""

from __future__ import annotations

import pytest

from dlrover_core.runtime.masters import ANSWER_S, LEARNT_MAX, RETRY_FIRST_S, RETRY_MAX_S, Masters
from dlrover_core.runtime.messages import Goodbye


class Agent:
    """As much of an agent as dials: what it dialled and how long it paused in between, on a clock of its own."""

    def __init__(self, *listed: str) -> None:
        self.masters = Masters(listed)
        self.now = 0.0
        self.pauses: list[float] = []

    def tries(self, *, takes_s: float = 0.0, steady: bool = False, away: Goodbye | None = None) -> str:
        """One try that ends in this way; returns who was dialled."""
        dialled = self.masters.address
        self.masters.dials(self.now)
        self.now += takes_s
        pause = self.masters.lost(self.now, steady=steady, away=away, jitter_of="me")
        self.pauses.append(pause)
        self.now += pause
        return dialled

    @property
    def next(self) -> str:
        """Who is dialled next."""
        return self.masters.address


def to(address: str = "") -> Goodbye:
    """A goodbye that sends the agent on."""
    return Goodbye("somebody leads", leave=False, address=address)


def test_round_and_round() -> None:
    """Masters that are not there are dialled in turn; after each round there is a pause, and pauses grow to two seconds."""
    agent = Agent("a", "b", "c")
    assert [agent.tries() for _ in range(24)] == ["a", "b", "c"] * 8
    assert not any(agent.pauses[0::3] + agent.pauses[1::3])
    for round_, pause in enumerate(agent.pauses[2::3]):
        whole = min(RETRY_MAX_S, RETRY_FIRST_S * 2**round_)
        assert whole / 2 <= pause <= whole


def test_who_had_us_is_dialled_again_at_once() -> None:
    """After a conversation that was well the same master comes first, and pauses begin anew."""
    agent = Agent("a", "b")
    for _ in range(9):
        agent.tries()
    assert agent.pauses[-1] == 0
    assert agent.pauses[-2] > RETRY_FIRST_S
    assert agent.tries(takes_s=60, steady=True) == "b"
    assert (agent.next, agent.pauses[-1]) == ("b", 0.0)
    agent.tries()
    agent.tries()
    assert 0 < agent.pauses[-1] <= RETRY_FIRST_S


def test_goodbye_after_a_conversation() -> None:
    """A master that goes and says so is not asked again: the one that it names is dialled at once, else the next."""
    agent = Agent("a", "b", "c")
    agent.tries(takes_s=60, steady=True, away=to())
    assert (agent.next, agent.pauses[-1]) == ("b", 0.0)
    agent.tries(takes_s=60, steady=True, away=to("x"))
    assert (agent.next, agent.pauses[-1]) == ("x", 0.0)


def test_sent_on() -> None:
    """Whom a standby names is dialled next and at once; if it is not there, the one after the standby is."""
    agent = Agent("a", "b", "c")
    agent.tries(away=to("x"))
    assert (agent.next, agent.pauses[-1]) == ("x", 0.0)
    assert [agent.tries() for _ in range(4)] == ["x", "b", "c", "a"]
    assert [bool(pause) for pause in agent.pauses] == [False, False, False, True, False]


def test_the_dead_leader_is_not_tried_twice() -> None:
    """Standbys that still believe in a leader that is gone: each is asked in turn, and the dead one not in between again."""
    agent = Agent("dead", "b", "c")
    agent.tries(takes_s=60, steady=True)
    dialled = [agent.tries(away=to("dead") if agent.next != "dead" else None) for _ in range(8)]
    assert dialled == ["dead", "b", "dead", "c", "dead", "b", "dead", "c"]


def test_ping_pong_does_not_spin() -> None:
    """Two masters that each name the other cost growing pauses, as if nobody were there."""
    agent = Agent("a", "b")
    for _ in range(40):
        agent.tries(away=to("b" if agent.next == "a" else "a"))
    waits = [pause for pause in agent.pauses if pause]
    assert len(waits) >= 19
    assert min(waits[8:]) >= RETRY_MAX_S / 2
    assert agent.now >= 15


def test_being_kept_is_pause_enough() -> None:
    """A try that took long, as with a standby that keeps agents, is followed by the next at once."""
    agent = Agent("a", "b", "c")
    for _ in range(10):
        agent.tries(takes_s=RETRY_MAX_S, away=to())
        agent.tries()
        agent.tries()
    assert sum(agent.pauses) == 0


def test_one_that_never_answers() -> None:
    """Where others can be asked nobody is waited for as long as for the only one; all of them, for longer each round."""
    assert Agent("a").masters.answer_s(15.0) == 15.0
    agent = Agent("a", "b")
    waits = []
    for _ in range(7):
        waits.append(agent.masters.answer_s(15.0))
        agent.tries(takes_s=waits[-1])
    assert waits == [ANSWER_S, ANSWER_S, ANSWER_S * 2, ANSWER_S * 2, 15.0, 15.0, 15.0]
    assert agent.masters.answer_s(1.0) == 1.0


def test_learnt_addresses_are_bounded() -> None:
    """Of the masters that it was sent to an agent keeps the newest few, and none that was not there; the listed stay."""
    agent = Agent("a", "b")
    for number in range(50):
        agent.tries(away=to(f"x{number}"))
        agent.tries(takes_s=60, steady=True)
        agent.tries(away=to())
    assert agent.masters.known[:2] == ["a", "b"]
    assert len(agent.masters.known) <= 2 + LEARNT_MAX
    for _ in range(30):
        agent.tries()
    assert agent.masters.known == ["a", "b"]
    agent.tries(away=to("y" * 1000))
    assert agent.masters.known == ["a", "b"]


@pytest.mark.parametrize("listed", [("a",), ("a", "b"), ("a", "b", "c")])
def test_everybody_is_reached(listed: tuple[str, ...]) -> None:
    """Whatever an agent was told, it comes round to every listed master."""
    agent = Agent(*listed)
    agent.tries(away=to("x"))
    agent.tries(takes_s=60, steady=True)
    assert {agent.tries() for _ in range(6)} >= set(listed)
