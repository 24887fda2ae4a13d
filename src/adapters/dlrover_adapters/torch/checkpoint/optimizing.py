"""An optimizer as a source: its state by the names of its parameters, and its groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from dlrover_core.errors import SpecError

from .kinds import overrides_state_dict, refuse_placeholder
from .memory import roomy
from .nested import Path, leaves, local, marked, name_of, unmarked
from .sources import Found, Mismatch, Shapes, address

_FOREIGN = "="
"""Among the names of parameters: what of an optimizer's state belongs to none."""


class OptimizerSource:
    """An optimizer. ``fqns``: says of ids of parameters their names; a parameter of no model is known by its number.

    The values of parameters that no model has (master weights in fp32, flat partitions) are part of it: stale ones would
    overwrite a restored model in the next step. Of the state, tensors that are a parameter's own (``state[p]["exp_avg"]``) are
    found again by their names alone. All else is in one object: numbers, and containers, in which tensors are marks of where
    they are.
    """

    def __init__(self, path: Path, optimizer: Any, fqns: Callable[[], Mapping[int, str]], *, beside: bool) -> None:
        self._path, self.optimizer, self.beside, self._fqns = path, optimizer, beside, fqns
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._of_no_model: set[str] = set()
        self._uneven: list[tuple[Any, Path]] = []
        self._foreign: list[Any] = []
        self._room: dict[str, torch.Tensor] = {}
        self._all_room: dict[str, torch.Tensor] = {}
        self.saved: dict[str, set[str]] = {}
        """By parameter the tensors that were saved, as `make_room` heard."""
        self._stepped = self._told_all = False
        self._hooks: list[Any] = []
        self._learn()
        if overrides_state_dict(optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            self._hooks = [
                optimizer.register_step_pre_hook(self._steps),
                optimizer.register_step_post_hook(self._steps),
            ]

    def _steps(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """A step, if there is a gradient: from now on it must have a state, if it ever has one."""
        if not self._stepped:
            self._stepped = any(getattr(one, "grad", None) is not None for one in self._parameters())

    def _parameters(self) -> list[Any]:
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    def _refuse_elsewhere(self) -> None:
        """A ``state_dict`` of its own: has it more than groups and state, or a state where we see none?"""
        kind, state = type(self.optimizer).__name__, self.optimizer.state
        try:
            told = self.optimizer.state_dict()
            more = sorted(map(str, told.keys() - {"state", "param_groups"}))
            hidden = bool(told.get("state")) and not state
        except Exception as error:
            raise SpecError(name_of(self._path), f"{kind}: its state_dict fails: {error}; give it as extra=") from error
        if more or hidden:
            what = f"also has {', '.join(more)}" if more else "has a state, and .state is empty"
            raise SpecError(
                name_of(self._path),
                f"{kind} keeps its state elsewhere, where it would be lost: its state_dict {what}; give the optimizer that has "
                "it, or give this one as extra=",
            )
        self._told_all = bool(state)

    def refuse_hidden(self, known: Collection[int]) -> None:
        """Raise `SpecError` for weights in its attributes that nobody saves; ``known``: addresses of what is saved."""
        largest = max((local(one).numel() for one in self._parameters()), default=0)
        for key, value in getattr(self.optimizer, "__dict__", {}).items():
            if key in {"state", "param_groups", "defaults"}:
                continue
            tensors = [one for one in _tensors(value) if one.is_floating_point() and address(one) not in known]
            if largest and sum(local(one).numel() for one in tensors) >= largest:
                kind = type(self.optimizer).__name__
                raise SpecError(
                    f"{name_of(self._path)}.{key}",
                    f"{kind} keeps tensors there as large as its parameters (master weights?), which are in no group and in no "
                    f"state: they would be lost. Save them too, with state={{{key!r}: optimizer.{key}}}, or give this optimizer "
                    "as extra=",
                )

    def stated(
        self, states: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
    ) -> Iterator[tuple[Path, torch.Tensor, torch.Tensor]]:
        """Path, tensor and parameter of states that are not there yet."""
        for parameter, state in states.items():
            for key, tensor in state.items():
                yield (*self._path, "state", self.name(parameter), key), tensor, parameter

    def name(self, parameter: Any) -> str:
        """Of a parameter; of those added later, too."""
        known = self._names.get(id(parameter))
        if known is None or known[0]() is not parameter:
            self._learn(parameter)
            known = self._names[id(parameter)]
        return known[1]

    def names(self) -> list[list[str]]:
        """The names of the parameters of each group."""
        return [[self.name(one) for one in group["params"]] for group in self.optimizer.param_groups]

    def _learn(self, *more: Any) -> None:
        """The names of those that are new."""
        fqns = self._fqns()
        used = {name for _, name in self._names.values()}
        for one in (*self._parameters(), *more):
            known = self._names.get(id(one))
            if known is not None and known[0]() is one:
                continue
            name, number = fqns.get(id(one), ""), len(self._names)
            of_model = bool(name)
            while not name:
                name, number = f"param_{number}" if f"param_{number}" not in used else "", number + 1
            used.add(name)
            if not of_model:
                self._of_no_model.add(name)
            self._names[id(one)] = (weakref.ref(one), name)

    def tensors(self) -> Iterator[Found]:
        """Parameters of no model, all tensors of the state, in lists and dicts too; and those that there was room made for."""
        self._uneven, self._foreign = [], []
        if (self._stepped or self.optimizer.state) and not self._told_all and overrides_state_dict(self.optimizer):
            self._refuse_elsewhere()
        for group in self.optimizer.param_groups:
            for number, one in enumerate(group["params"]):
                name = self.name(one)
                at = (*self._path, "params", name)
                refuse_placeholder(name_of(at), one, state=self.optimizer.state.get(one))
                if name in self._of_no_model:
                    yield Found(at, one, group["params"], number, self.beside)
        if self._stepped:
            for hook in self._hooks:
                hook.remove()
        for name, tensor in self._room.items():
            yield Found(tuple(name.split(".")), tensor, None, None, self.beside)
        for parameter, state in self.optimizer.state.items():
            if not isinstance(parameter, torch.Tensor):
                self._foreign.append(parameter)
                continue
            path = (*self._path, "state", self.name(parameter))
            if not isinstance(state, MutableMapping):
                raise SpecError(name_of(path), f"the state of a parameter is a dict, got {type(state).__name__}")
            if not all(map(_is_even, state, state.values())):
                self._uneven.append((parameter, path))
            for at, value, owner, key in leaves(state, path):
                if isinstance(value, torch.Tensor):
                    yield Found(at, value, owner, key, self.beside)

    def sizes(self) -> tuple[int, ...]:
        """Of the groups, of the state, and of each parameter's; where tensors lie deeper, which those are."""
        state = self.optimizer.state
        groups = (len(group["params"]) for group in self.optimizer.param_groups)
        deeper = (
            id(value)
            for parameter, _path in self._uneven
            for _at, value, _owner, _key in leaves(state.get(parameter, {}), ())
            if isinstance(value, torch.Tensor)
        )
        mine = state.values()
        return (id(state), len(state), self._stepped, *groups, *map(len, mine), *map(id, mine), *deeper)

    def objects(self) -> Iterator[tuple[Path, Any]]:
        """The groups, with names in place of parameters; and in one what of the state is no tensor of a parameter's own."""
        groups = [
            {**group, "params": [self.name(one) for one in group["params"]]} for group in self.optimizer.param_groups
        ]
        yield (*self._path, "param_groups"), groups
        state = self.optimizer.state
        plain: dict[str, Any] = {
            path[-1]: {
                key: marked(value, (*path, str(key)), _is_tensor)
                for key, value in state.get(parameter, {}).items()
                if not _is_even(key, value)
            }
            for parameter, path in self._uneven
        }
        if self._foreign:
            plain[_FOREIGN] = [(key, state[key]) for key in self._foreign if key in state]
        if plain:
            yield (*self._path, "values"), plain

    def make_room(self, shapes: Shapes) -> None:
        """The state that its parameters had: zeros of the same shape, or small ones as they were saved."""
        prefix = name_of((*self._path, "state")) + "."
        mine = {self.name(one): (group, one) for group in self.optimizer.param_groups for one in group["params"]}
        wanted: dict[str, dict[str, str]] = {}
        for name in shapes:
            if name.startswith(prefix):
                fqn = _longest(name.removeprefix(prefix), mine)
                if fqn is None:
                    raise Mismatch(
                        f"the saved optimizer has {name}, this one has no such parameter; restore with the same model and "
                        "optimizer"
                    )
                wanted.setdefault(fqn, {})[name.removeprefix(f"{prefix}{fqn}.")] = name
        self._room, self._all_room = {}, {}
        self.saved = {fqn: {key.partition(".")[0] for key in keys} for fqn, keys in wanted.items()}
        for fqn, (group, parameter) in mine.items():
            keys = wanted.get(fqn, {})
            if not keys and parameter not in self.optimizer.state:
                continue
            state = self.optimizer.state[parameter]
            for key, value in list(state.items()):
                if _has_tensors(value) and not (key in keys and _is_even(key, value)):
                    del state[key]
            for key, name in keys.items():
                dtype, full = shapes[name]
                now = state.get(key)
                if not isinstance(now, torch.Tensor) or tuple(now.shape) != full or str(now.dtype)[6:] != dtype:
                    now = _room(parameter, group, getattr(torch, dtype), full)
                self._all_room[name] = now
                if "." in key:
                    self._room[name] = now  # in which container it belongs, `load` is told
                else:
                    state[key] = now

    def load(self, objects: Mapping[str, Any]) -> None:
        """Groups and the rest. Raises `Mismatch` for other groups."""
        room, self._room, self._all_room = self._all_room, {}, {}
        saved = objects.get(name_of((*self._path, "param_groups")))
        groups = self.optimizer.param_groups
        if saved is None:
            return
        if self.names() != [group["params"] for group in saved]:
            raise Mismatch(
                f"{name_of(self._path)}: its groups have other parameters than those saved ({len(groups)} groups now, "
                f"{len(saved)} saved); make them in the same order"
            )
        for group, one in zip(groups, saved, strict=True):
            for key, value in one.items():
                now = group.get(key)
                if key == "params":
                    continue
                if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.shape == value.shape:
                    now.copy_(value)  # graphs and schedulers hold on to it
                else:
                    group[key] = value
        self._load_values(objects.get(name_of((*self._path, "values")), {}), room)

    def _load_values(self, plain: Mapping[str, Any], room: Mapping[str, Any]) -> None:
        by_name = {self.name(one): one for one in self._parameters()}
        for name, values in plain.items():
            if name == _FOREIGN:
                self.optimizer.state.update(values)
            elif name in by_name:
                state = self.optimizer.state[by_name[name]]
                for key, value in values.items():
                    if not isinstance(key, str):
                        state.pop(str(key), None)  # the room made by its name
                    state[key] = unmarked(value, room)

    def asked(self) -> Iterator[tuple[str, ...]]:
        """The groups."""
        yield (name_of((*self._path, "param_groups")),)

    def roots(self) -> tuple[str, ...]:
        """One."""
        return (name_of(self._path),)


def optimizer_states(optimizers: Iterable[Any]) -> list[tuple[Any, dict[Any, Any]]]:
    """What optimizers have before room is made in them."""
    return [
        (one, {key: dict(value) if isinstance(value, dict) else value for key, value in one.state.items()})
        for one in optimizers
    ]


def put_back(before: Iterable[tuple[Any, dict[Any, Any]]]) -> None:
    """Room that was made and not filled is no state."""
    for optimizer, state in before:
        optimizer.state.clear()
        optimizer.state.update(state)


def _tensors(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors in a container, and in containers inside it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one, depth - 1)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_even(key: Any, value: Any) -> bool:
    """A tensor that its name leads to."""
    return isinstance(value, torch.Tensor) and isinstance(key, str) and "." not in key


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (Mapping, list)):
        return any(isinstance(one, torch.Tensor) for _path, one, _owner, _key in leaves(value, ()))
    return isinstance(value, torch.Tensor)


def _longest(name: str, known: Mapping[str, Any]) -> str | None:
    """The longest known name, of a parameter, that a name begins with; there is more after it."""
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return None


def _room(
    parameter: torch.Tensor, group: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """For a state of a parameter: like it, or small."""
    if tuple(parameter.shape) == shape:
        if type(parameter.data) is torch.Tensor and parameter.device.type == "cpu" and parameter.is_contiguous():
            return roomy(shape, dtype)
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    on_device = bool(shape) or group.get("capturable") or group.get("fused")
    return torch.empty(shape, dtype=dtype, device=local(parameter).device if on_device else "cpu")
