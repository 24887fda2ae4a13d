"""Lifecycles: states and transitions as data in `transitions`' own format, compiled to a read-only lookup.

Replay fires a lifecycle for every event, and a `transitions.Machine` costs 10 us a trigger; the compiled table costs a
dictionary lookup. A test builds the Machine from the same data and proves both equal over every (state, trigger). No
callbacks, ever: effects belong to decisions. Every (state, trigger) pair is a transition, or listed as ignored
(may happen, means nothing), or illegal (must not happen): there is no silent third case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dlrover_core.errors import IllegalTransition

if TYPE_CHECKING:
    from transitions import Machine

Transition = Mapping[str, object]
Guard = Callable[[Any], bool]
Key = tuple[str, str]
_FORBIDDEN = ("before", "after", "prepare", "queued")


class Way(NamedTuple):
    """One of several transitions of a (state, trigger): taken if each guard named says what is wanted of it."""

    checks: tuple[tuple[str, bool], ...]
    dest: str


class Lifecycle:
    """One kind of thing's states. ``transitions`` rows hold trigger, source (one, several or '*'), dest, and may be guarded.

    ``conditions`` and ``unless`` of a row name ``guards``: pure functions of the subject that `fire` is given. Rows of one
    (state, trigger) are tried in their order; where none may be taken, nothing changes, as in `transitions`.
    """

    def __init__(
        self,
        name: str,
        states: Iterable[str],
        initial: str,
        transitions: Iterable[Transition],
        ignored: Iterable[Key] = (),
        terminal: Iterable[str] = (),
        guards: Mapping[str, Guard] | None = None,
    ) -> None:
        self.name, self.initial = name, initial
        self.states = tuple(states)
        self.rows = tuple(MappingProxyType(dict(row)) for row in transitions)
        self.triggers = tuple(dict.fromkeys(str(row["trigger"]) for row in self.rows))
        self.ignored = frozenset(ignored)
        self.terminal = frozenset(terminal)
        self.guards = MappingProxyType(dict(guards or {}))
        ways = self._compile()
        # Nearly all are unguarded: those cost one lookup.
        self.table: Mapping[Key, str] = MappingProxyType(
            {key: one[0].dest for key, one in ways.items() if not one[0].checks}
        )
        self.guarded: Mapping[Key, tuple[Way, ...]] = MappingProxyType(
            {key: tuple(one) for key, one in ways.items() if one[0].checks}
        )

    def _compile(self) -> dict[Key, list[Way]]:
        ways: dict[Key, list[Way]] = {}
        for row in self.rows:
            if any(key in row for key in _FORBIDDEN):
                raise ValueError(f"{self.name}: callbacks belong to decisions, not to the lifecycle: {dict(row)}")
            for source in _names(row["source"], self.states):
                found = ways.setdefault((source, str(row["trigger"])), [])
                if found and not found[-1].checks:
                    raise ValueError(f"{self.name}: two transitions for {(source, str(row['trigger']))}")
                found.append(Way(self._checks(row), str(row["dest"])))
        self._check({key: [way.dest for way in found] for key, found in ways.items()})
        return ways

    def _checks(self, row: Transition) -> tuple[tuple[str, bool], ...]:
        wanted = [(name, True) for name in _names(row.get("conditions", ()), ())]
        unwanted = [(name, False) for name in _names(row.get("unless", ()), ())]
        unknown = sorted(name for name, _ in [*wanted, *unwanted] if name not in self.guards)
        if unknown:
            raise ValueError(f"{self.name}: no guards {unknown}")
        return (*wanted, *unwanted)

    def _check(self, table: Mapping[Key, list[str]]) -> None:
        dests = {dest for found in table.values() for dest in found}
        named = {self.initial, *self.terminal, *dests, *(key[0] for key in table), *(key[0] for key in self.ignored)}
        unknown = named - set(self.states)
        if unknown:
            raise ValueError(f"{self.name}: unknown states {sorted(unknown)}")
        both = self.ignored & set(table)
        if both:
            raise ValueError(f"{self.name}: both a transition and ignored: {sorted(both)}")
        alive = sorted(key for key in table if key[0] in self.terminal)
        if alive:
            raise ValueError(f"{self.name}: terminal states absorb, yet {alive}")

    def may(self, state: str, trigger: str, subject: Any = None) -> bool:
        """Would ``trigger`` lead anywhere from ``state``?"""
        return (state, trigger) in self.table or self._way(state, trigger, subject) is not None

    def fire(self, entity: str, state: str, trigger: str, subject: Any = None) -> str:
        """The next state; the same one where the pair is ignored or no guard lets it through. Raises `IllegalTransition`."""
        dest = self.table.get((state, trigger))
        if dest is not None:
            return dest
        if (state, trigger) in self.guarded:
            return self._way(state, trigger, subject) or state
        if (state, trigger) in self.ignored:
            return state
        raise IllegalTransition(entity, state, trigger)

    def _way(self, state: str, trigger: str, subject: Any) -> str | None:
        for checks, dest in self.guarded.get((state, trigger), ()):
            if all(self.guards[name](subject) is wanted for name, wanted in checks):
                return dest
        return None

    def machine(self, model: Any = None) -> Machine:
        """A live `transitions.Machine` over ``model`` (or one of its own), for embedders and validation.

        Guards are called with the first argument of a trigger: ``model.stop(subject)``.
        """
        from transitions import Machine

        return Machine(
            model=model if model is not None else Machine.self_literal,
            states=list(self.states),
            initial=self.initial,
            transitions=[self._row(row) for row in self.rows],
            auto_transitions=False,
        )

    def _row(self, row: Transition) -> dict[str, Any]:
        guarded = {
            key: [_bound(self.guards[name]) for name in _names(row[key], ())]
            for key in ("conditions", "unless")
            if key in row
        }
        return {**row, **guarded}

    def diagram(self) -> str:
        """A Mermaid state diagram, as the docs show it."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial}"]
        edges: dict[tuple[str, str], list[str]] = {}
        for (source, trigger), dest in self.table.items():
            edges.setdefault((source, dest), []).append(trigger)
        for (source, trigger), ways in self.guarded.items():
            for checks, dest in ways:
                said = " and ".join(name if wanted else f"not {name}" for name, wanted in checks)
                edges.setdefault((source, dest), []).append(f"{trigger} [{said}]" if said else trigger)
        lines += [f"    {source} --> {dest}: {', '.join(triggers)}" for (source, dest), triggers in edges.items()]
        lines += [f"    {state} --> [*]" for state in self.states if state in self.terminal]
        return "\n".join(lines) + "\n"


def _names(value: object, everything: tuple[str, ...]) -> tuple[str, ...]:
    """One name or several, as `transitions` lets them be written; '*' is ``everything``."""
    if value == "*":
        return everything
    return (value,) if isinstance(value, str) else tuple(str(one) for one in cast(Iterable[object], value))


def _bound(guard: Guard) -> Callable[..., bool]:
    return lambda subject=None, *_: guard(subject)
