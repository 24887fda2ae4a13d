"""What a training state is made of: models, optimizers, things with a ``state_dict``, and nested dicts of the script's own.

A *source* says where its tensors are (`Found`, with the container that holds each, so that a replaced one is noticed cheaply),
which of them nothing but an optimizer writes, and what of it is no tensor; and it takes all of that back.

Names are those of torch.distributed.checkpoint: fully qualified, the same whether a model is wrapped or not.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.state_dict import _get_fqns, get_model_state_dict

from dlrover_core.errors import CoreError, SpecError

from .generators import draw_again, drawn
from .kinds import CLASSES, class_of, refuse_placeholder
from .nested import LARGE_BYTES, Path, in_order, is_large, leaves, local, marked, name_of, reached, unmarked

_OBJECTS = "__objects__"


class Mismatch(CoreError, ValueError):
    """What was saved and what is to be restored are not the same model, optimizer or state."""


class Found(NamedTuple):
    """One tensor: ``owner[key]`` is it; no owner: it is to be asked for anew with each save.

    ``beside``: nothing but an awaited optimizer writes it.
    """

    path: Path
    tensor: torch.Tensor
    owner: Any
    key: Any
    beside: bool = False


Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Of each saved tensor its dtype and full shape."""


class Source(Protocol):
    """One part of the state."""

    def tensors(self) -> Iterator[Found]:
        """All of them, as they are now."""

    def sizes(self) -> tuple[int, ...]:
        """Numbers that differ once tensors have come or gone; cheap."""

    def objects(self) -> Iterator[tuple[Path, Any]]:
        """What is no tensor, as it is now."""

    def make_room(self, shapes: Shapes) -> None:
        """Tensors that were saved and are not there yet are made, so that `tensors` finds them."""

    def load(self, objects: Mapping[str, Any]) -> None:
        """Take back what is no tensor, by name; the tensors are filled."""

    def asked(self) -> Iterator[tuple[str, ...]]:
        """Names of objects that it needs; of each tuple one is enough."""

    def roots(self) -> tuple[str, ...]:
        """With what the names of all that is its begin."""


def address(tensor: torch.Tensor) -> int:
    """Where in memory what is here of it begins; 0: it has no memory of its own."""
    try:
        return local(tensor).data_ptr()
    except RuntimeError:
        return 0


class ModelSource:
    """A module. ``owned``: says ids of the parameters that an awaited optimizer writes, and nothing else."""

    def __init__(self, path: Path, model: torch.nn.Module, owned: Callable[[], frozenset[int]]) -> None:
        self._path, self._model, self._owned = path, model, owned
        self._others = False
        self._modules: list[torch.nn.Module] = []

    def reshard(self) -> None:
        """Take back what FSDP2 gathered for a forward without a backward, such as an evaluation's: only shards are the state.

        A root stays gathered then, by default, and its parameters are other tensors as long as it is.
        """
        sharding: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
        if sharding is None:
            return  # whoever shards has imported it
        for one in self._modules or self._model.modules():
            if isinstance(one, sharding):
                one.reshard()

    def _found(self) -> dict[str, tuple[Any, str, torch.Tensor]]:
        places: dict[str, tuple[Any, str, torch.Tensor]] = {}
        self._modules = []
        self.reshard()
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            self._modules.append(module)
            for owner in (module._parameters, module._buffers):
                for key, tensor in owner.items():
                    if tensor is None:
                        continue
                    self._refuse(module, prefix, key, tensor)
                    for fqn in _get_fqns(self._model, f"{prefix}.{key}" if prefix else key):
                        places[fqn] = (owner, key, tensor)
        return places

    def _refuse(self, module: torch.nn.Module, prefix: str, key: str, tensor: torch.Tensor) -> None:
        if isinstance(tensor, torch.nn.Parameter) and not torch.nn.parameter.is_lazy(tensor):
            refuse_placeholder(name_of((*self._path, *filter(None, (prefix, key)))), tensor, module)

    def tensors(self) -> Iterator[Found]:
        """Parameters and persistent buffers."""
        places, owned = self._found(), self._owned()
        for fqn, (_owner, _key, tensor) in places.items():
            if torch.nn.parameter.is_lazy(tensor):
                raise SpecError("model", f"{fqn} has no shape before the first batch; let one through the model first")
        state = get_model_state_dict(self._model)
        self._others = False
        for fqn, value in state.items():
            if not isinstance(value, torch.Tensor):
                self._others = True
                continue
            if fqn in places:
                owner, key, tensor = places[fqn]
                if tensor.shape == value.shape and address(tensor) == address(value):
                    yield Found((*self._path, fqn), tensor, owner, key, id(tensor) in owned)
                    continue
                if places[fqn][2].shape != value.shape:
                    raise SpecError(
                        "model",
                        f"its state dict has {fqn} with shape {list(value.shape)}, and the tensor has {list(tensor.shape)}; of "
                        "such wrappers (FSDP1) give state=... with what is to be saved, or use fully_shard",
                    )
            raise SpecError(
                "model",
                f"{fqn} in its state dict is made by a hook, and is none of its tensors; give it with state=...",
            )

    def sizes(self) -> tuple[int, ...]:
        """What its modules hold: modules by identity, the rest by number."""
        found: list[int] = []
        for one in self._modules:
            found += (len(one._parameters), len(one._buffers))
            found += map(id, one._modules.values())
        return tuple(found)

    def objects(self) -> Iterator[tuple[Path, Any]]:
        """Extra states of modules."""
        if self._others:
            for fqn, value in get_model_state_dict(self._model).items():
                if not isinstance(value, torch.Tensor):
                    yield (*self._path, fqn), value

    def make_room(self, shapes: Shapes) -> None:
        """A model has its tensors."""

    def load(self, objects: Mapping[str, Any]) -> None:
        """Extra states, to the modules that have them."""
        if not self._others:
            return
        for prefix, module in self._model.named_modules():
            fqn = f"{prefix}._extra_state" if prefix else "_extra_state"
            for clean in _clean(fqn):
                name = name_of((*self._path, clean))
                if name in objects and type(module).set_extra_state is not torch.nn.Module.set_extra_state:
                    module.set_extra_state(objects[name])

    def asked(self) -> Iterator[tuple[str, ...]]:
        """Extra states."""
        for path, _value in self.objects():
            yield (name_of(path),)

    def roots(self) -> tuple[str, ...]:
        """One."""
        return (name_of(self._path),)


def _clean(fqn: str) -> tuple[str, ...]:
    """Without the prefixes of DDP and torch.compile."""
    return (".".join(part for part in fqn.split(".") if part not in {"module", "_orig_mod"}), fqn)


class StatefulSource:
    """Anything with a ``state_dict``: one object, in which large tensors are marks of where they are.

    ``paths``: where it lies, and where else it may be looked for: in a world of another shape a rank that was not there before
    takes rank 0's.
    """

    def __init__(self, paths: tuple[Path, ...], stateful: Any, *, large: bool) -> None:
        self._paths, self._stateful, self.large = paths, stateful, large
        self._state: Any = None
        self._room: dict[str, Any] | None = None
        self.small: set[str] = set()
        """Names of tensors that are not apart from the rest, however large they are."""

    def tensors(self) -> Iterator[Found]:
        """The large ones, of a state that is asked for now; or those that there was room made for."""
        if self._room is not None:
            for name, room in self._room.items():
                yield Found(tuple(name.split(".")), room, None, None)
        elif self.large:
            self._state = {None: self._stateful.state_dict()}
            for path, value in self._apart(self._state):
                yield Found(path, value, None, None)

    def _apart(self, state: Any) -> Iterator[tuple[Path, Any]]:
        for path, value, _owner, _key in leaves(state, ()):
            at = (*self._paths[0], *path[1:])
            if is_large(value) and name_of(at) not in self.small:
                yield at, value

    def sizes(self) -> tuple[int, ...]:
        """Asked for anew with each save: nothing is known beforehand."""
        return ()

    def objects(self) -> Iterator[tuple[Path, Any]]:
        """All of it: the same state that `tensors` was of, if that was just asked for."""
        state = self._state[None] if self._state is not None else self._stateful.state_dict()
        self._state = None
        whole = state
        if self.large:
            apart = {id(value) for _path, value in self._apart({None: state})}
            whole = marked(state, self._paths[0], lambda value: id(value) in apart)
        # No path of a checkpoint may lead through another one's end.
        yield (self._paths[0] if whole is state else (*self._paths[0], _OBJECTS)), whole

    def make_room(self, shapes: Shapes) -> None:
        """Tensors of their own, which the state that is given back will have."""
        self._room = {}
        for path in self._paths:
            prefix = name_of(path) + "."
            found = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
            if found:
                self._room = {
                    name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in found.items()
                }
                return

    def load(self, objects: Mapping[str, Any]) -> None:
        """By its ``load_state_dict``. What was not saved stays as it is."""
        names = [name for path in self._paths for name in (name_of(path), name_of((*path, _OBJECTS)))]
        name = next((one for one in names if one in objects), None)
        if name is not None:
            self._stateful.load_state_dict(unmarked(objects[name], self._room or {}))
        self._room = None

    def own_name(self, objects: Collection[str]) -> str:
        """The name under which this rank's is missing where another rank's is there; empty: nothing is missing."""
        found = [path for path in self._paths if name_of(path) in objects or name_of((*path, _OBJECTS)) in objects]
        return name_of(self._paths[0]) if found and found[0] != self._paths[0] else ""

    def asked(self) -> Iterator[tuple[str, ...]]:
        """One object, in one of several places."""
        yield tuple(name for path in self._paths for name in (name_of(path), name_of((*path, _OBJECTS))))

    def roots(self) -> tuple[str, ...]:
        """Of all places."""
        return tuple(map(name_of, self._paths))


class StateSource:
    """A nested dict of the script's own: tensors are copied, and filled again, where they are; the rest is set."""

    def __init__(self, path: Path, state: MutableMapping[str, Any]) -> None:
        self._path, self._state = path, state
        self._late: dict[str, torch.Tensor] = {}
        """Room for tensors of lists in which something that is no tensor comes before them: it comes with `load`."""

    def tensors(self) -> Iterator[Found]:
        """Nobody knows who writes them."""
        for path, value, owner, key in leaves(self._state, self._path):
            if isinstance(value, torch.Tensor):
                yield Found(path, value, owner, key)
        for name, value in self._late.items():
            yield Found((*self._path, name), value, self._late, name)

    def sizes(self) -> tuple[int, ...]:
        """Which leaves are tensors; those in lists that were replaced have other owners."""
        return tuple(
            id(value) for _path, value, _owner, _key in leaves(self._state, ()) if isinstance(value, torch.Tensor)
        )

    def objects(self) -> Iterator[tuple[Path, Any]]:
        """All other leaves."""
        for path, value, _owner, _key in leaves(self._state, self._path):
            if not isinstance(value, torch.Tensor):
                yield path, value

    def make_room(self, shapes: Shapes) -> None:
        """What was saved and is not there is made, where dicts lead to it."""
        prefix = name_of(self._path) + "."
        self._late = {}
        here = {name_of(found.path) for found in self.tensors()}
        for name in sorted((one for one in shapes if one.startswith(prefix) and one not in here), key=in_order):
            dtype, shape = shapes[name]
            room = torch.empty(shape, dtype=getattr(torch, dtype))
            if not self._set(name.removeprefix(prefix), room):
                self._late[name.removeprefix(prefix)] = room

    def load(self, objects: Mapping[str, Any]) -> None:
        """Set what is no tensor, and tensors that had to wait for it. Raises `Mismatch`."""
        prefix = name_of(self._path) + "."
        here = {name_of(path): (owner, key) for path, _value, owner, key in leaves(self._state, self._path)}
        for name in objects.keys() & here.keys():
            owner, key = here[name]
            owner[key] = objects[name]
        new = {name.removeprefix(prefix): objects[name] for name in objects if name.startswith(prefix)}
        found = {**{name: new[name] for name in new if prefix + name not in here}, **self._late}
        self._late = {}
        for name in sorted(found, key=in_order):
            if not self._set(name, found[name]):
                raise Mismatch(
                    f"state: {prefix}{name} is a place in a list of which earlier places are missing in the checkpoint, or that "
                    "is no list any more; give a state of the same shape, or check who else writes to this storage"
                )

    def asked(self) -> Iterator[tuple[str, ...]]:
        """All leaves that are no tensors."""
        for path, _value in self.objects():
            yield (name_of(path),)

    def roots(self) -> tuple[str, ...]:
        """One."""
        return (name_of(self._path),)

    def _set(self, name: str, value: Any) -> bool:
        """False: it is a place in a list that nothing leads up to yet."""
        owner: Any = self._state
        keys = name.split(".")
        for key, following in itertools.pairwise(keys):
            if isinstance(owner, list):
                length, place = len(owner), reached(owner, key)
                if place is None:
                    return False
                if place == length:
                    owner[place] = [] if following.isdecimal() else {}
                owner = owner[place]
            else:
                owner = owner.setdefault(key, [] if following.isdecimal() else {})
            if not isinstance(owner, (MutableMapping, list)):
                raise Mismatch(
                    f"state: {name} was saved, and {key} is no dict any more; give a state of the same shape"
                )
        last: int | str | None = reached(owner, keys[-1]) if isinstance(owner, list) else keys[-1]
        if last is not None:
            owner[last] = value
        return last is not None


class GeneratorSource:
    """The random generators of this rank."""

    def __init__(self, rank: int) -> None:
        self._path: Path = ("rank", str(rank), "rng")

    def tensors(self) -> Iterator[Found]:
        """None that are large."""
        return iter(())

    def sizes(self) -> tuple[int, ...]:
        """None."""
        return ()

    def objects(self) -> Iterator[tuple[Path, Any]]:
        """Their states."""
        yield self._path, drawn()

    def make_room(self, shapes: Shapes) -> None:
        """None is needed."""

    def own_name(self, objects: Collection[str]) -> str:
        """The name under which this rank's states are missing; empty: they are there."""
        return "" if name_of(self._path) in objects else name_of(self._path)

    def load(self, objects: Mapping[str, Any]) -> None:
        """In a world of another shape a rank that was not there before keeps its own."""
        if name_of(self._path) in objects:
            draw_again(objects[name_of(self._path)])

    def asked(self) -> Iterator[tuple[str, ...]]:
        """Ranks that are new have none."""
        return iter(())

    def roots(self) -> tuple[str, ...]:
        """One."""
        return (name_of(self._path),)


class ClassSource:
    """The names of the classes of models and optimizers, by their paths."""

    def __init__(self, given: Mapping[Path, Any]) -> None:
        self.classes = {name_of(path): class_of(one) for path, one in given.items()}

    def tensors(self) -> Iterator[Found]:
        """None."""
        return iter(())

    def sizes(self) -> tuple[int, ...]:
        """None."""
        return ()

    def objects(self) -> Iterator[tuple[Path, Any]]:
        """One."""
        if self.classes:
            yield (CLASSES,), self.classes

    def make_room(self, shapes: Shapes) -> None:
        """None is needed."""

    def load(self, objects: Mapping[str, Any]) -> None:
        """They are what they are; who restores compares them before."""

    def asked(self) -> Iterator[tuple[str, ...]]:
        """Older checkpoints have none."""
        return iter(())

    def roots(self) -> tuple[str, ...]:
        """One."""
        return (CLASSES,)


__all__ = [
    "LARGE_BYTES",
    "ClassSource",
    "Found",
    "GeneratorSource",
    "Mismatch",
    "ModelSource",
    "Path",
    "Shapes",
    "Source",
    "StateSource",
    "StatefulSource",
    "address",
    "local",
    "name_of",
]
