"""Lifecycles: states and transitions as data in `transitions`' own format, compiled to a read-only lookup.

Replay fires a lifecycle for every event, and a `transitions.Machine` costs 10 us a trigger; the compiled table costs a
dictionary lookup. A test builds the Machine from the same data and proves both equal over every (state, trigger). No
callbacks, ever: effects belong to the concerns' decisions. Every (state, trigger) pair is a transition, or listed as ignored
(may happen, means nothing), or illegal (must not happen): there is no silent third case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dlrover_core.errors import IllegalTransition

if TYPE_CHECKING:
    from transitions import Machine

Transition = Mapping[str, object]
_FORBIDDEN = ("before", "after", "prepare", "queued")


class Lifecycle:
    """One kind of thing's states. ``transitions`` rows hold trigger, source (one, several or '*') and dest."""

    def __init__(
        self,
        name: str,
        states: Iterable[str],
        initial: str,
        transitions: Iterable[Transition],
        ignored: Iterable[tuple[str, str]] = (),
        terminal: Iterable[str] = (),
    ) -> None:
        self.name, self.initial = name, initial
        self.states = tuple(states)
        self.rows = tuple(MappingProxyType(dict(row)) for row in transitions)
        self.triggers = tuple(dict.fromkeys(str(row["trigger"]) for row in self.rows))
        self.ignored = frozenset(ignored)
        self.terminal = frozenset(terminal)
        self.table: Mapping[tuple[str, str], str] = MappingProxyType(self._compile())

    def _compile(self) -> dict[tuple[str, str], str]:
        table: dict[tuple[str, str], str] = {}
        for row in self.rows:
            if any(key in row for key in _FORBIDDEN):
                raise ValueError(f"{self.name}: callbacks belong to decisions, not to the lifecycle: {dict(row)}")
            for source in self._sources(row["source"]):
                key = (source, str(row["trigger"]))
                if key in table:
                    raise ValueError(f"{self.name}: two transitions for {key}")
                table[key] = str(row["dest"])
        self._check(table)
        return table

    def _sources(self, source: object) -> tuple[str, ...]:
        if source == "*":
            return self.states
        return (source,) if isinstance(source, str) else tuple(str(one) for one in source)  # type: ignore[attr-defined]  # a list, by transitions' format

    def _check(self, table: Mapping[tuple[str, str], str]) -> None:
        named = {self.initial, *self.terminal, *table.values(), *(key[0] for key in table), *(key[0] for key in self.ignored)}
        unknown = named - set(self.states)
        if unknown:
            raise ValueError(f"{self.name}: unknown states {sorted(unknown)}")
        both = self.ignored & set(table)
        if both:
            raise ValueError(f"{self.name}: both a transition and ignored: {sorted(both)}")
        alive = sorted(key for key in table if key[0] in self.terminal)
        if alive:
            raise ValueError(f"{self.name}: terminal states absorb, yet {alive}")

    def may(self, state: str, trigger: str) -> bool:
        """Would ``trigger`` change ``state``?"""
        return (state, trigger) in self.table

    def fire(self, entity: str, state: str, trigger: str) -> str:
        """The next state; the same one where the pair is ignored. Raises `IllegalTransition`."""
        dest = self.table.get((state, trigger))
        if dest is not None:
            return dest
        if (state, trigger) in self.ignored:
            return state
        raise IllegalTransition(entity, state, trigger)

    def machine(self, model: Any = None) -> Machine:
        """A live `transitions.Machine` over ``model`` (or one of its own), for embedders, validation and diagrams."""
        from transitions import Machine

        return Machine(
            model=model if model is not None else Machine.self_literal,
            states=list(self.states),
            initial=self.initial,
            transitions=[dict(row) for row in self.rows],
            auto_transitions=False,
        )

    def diagram(self) -> str:
        """A Mermaid state diagram, as the docs show it."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial}"]
        edges: dict[tuple[str, str], list[str]] = {}
        for (source, trigger), dest in self.table.items():
            edges.setdefault((source, dest), []).append(trigger)
        lines += [f"    {source} --> {dest}: {', '.join(triggers)}" for (source, dest), triggers in edges.items()]
        lines += [f"    {state} --> [*]" for state in self.states if state in self.terminal]
        return "\n".join(lines) + "\n"
