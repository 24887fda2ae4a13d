"""What a save consists of: which tensors, which of them may be copied beside training, and what is no tensor.

Beside the next forward and backward only that may be copied which nothing but the optimizer writes: parameters that an awaited
optimizer owns, and the tensors in its state. All else is *live*: buffers (BatchNorm's, spectral norm's), EMA copies, parameters
that no optimizer owns. Those are copied while training stands, unless the user says that nobody writes them (``frozen=``).

The walk through modules and state dicts is made once. After that a save looks whether each tensor is still the same object in the
same place of memory; where it is not, the walk is made again, and if it finds other names or shapes, that is another layout.
"""

from __future__ import annotations

import fnmatch
import functools
import io
import logging
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from dlrover_adapters.checkpoint.table import CUT, TRAINED, own_name
from dlrover_core.errors import SpecError
from dlrover_core.words import first_few

from . import foresight, kinds
from .chunks import Chunk, add, check_memory, chunk_of, place_of
from .optimizing import OptimizerSource
from .positions import DataSource
from .sources import (
    ClassSource,
    Found,
    GeneratorSource,
    Mismatch,
    ModelSource,
    Path,
    Shapes,
    Source,
    StatefulSource,
    StateSource,
    address,
    local,
    name_of,
)
from .vault import Vault

IDLE_BYTES, IDLE_SHARE = 64 * 1024 * 1024, 0.1
"""So much of parameters that nobody trains, or such a share of all, is worth a word: training stands while it is copied."""
_log = logging.getLogger("dlrover.torch")


class Target(NamedTuple):
    """Where a saved tensor's chunk is to be filled in: ``tensor`` is local, and begins at ``offsets`` of ``full_shape``."""

    name: str
    tensor: torch.Tensor
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]


class Signature(NamedTuple):
    """What a layout is made of; all that differs between two ranks or two saves in form."""

    chunks: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, str], ...]
    objects: tuple[str, ...]


def _owned(optimizers: Mapping[Path, Any]) -> frozenset[int]:
    """Ids of the parameters that optimizers write."""
    return frozenset(map(id, parameters(optimizers.values())))


def _fqns(models: Mapping[Path, ModelSource]) -> dict[int, str]:
    """Names of parameters. With several models their keys lead them, as two may have the same names."""
    fqns: dict[int, str] = {}
    for path, source in models.items():
        for fqn, (_owner, _key, tensor) in source._found().items():
            fqns.setdefault(id(tensor), ".".join((*path[1:], fqn)))
    return fqns


class Capture:
    """The state of one rank. ``rank``: its global number, for what every rank has of its own.

    Each of ``model``, ``optimizer``, ``scheduler`` and ``extra`` is one or several, in a sequence or a dict; ``state`` is a
    nested dict. ``frozen`` and ``live``: names (``*`` as in shells) or tensors. ``data``: one or several datasets, of which the
    position is saved. Raises `SpecError` for what cannot be saved.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        extra: Any = None,
        state: MutableMapping[str, Any] | None = None,
        frozen: Iterable[Any] = (),
        live: Iterable[Any] = (),
        data: Any = None,
        rank: int = 0,
    ) -> None:
        self.models = named("model", model)
        self.optimizers = named("optimizer", optimizer)
        extras, schedulers = named("extra", extra), named("scheduler", scheduler)
        check(self.models, self.optimizers, {**schedulers, **extras}, state)
        self.optimizers = {path: kinds.unwrapped(name_of(path), one) for path, one in self.optimizers.items()}
        self._rank = rank
        self._hinted = False
        self._saved: frozenset[str] = frozenset()
        self._frozen, self._live = _Chosen("frozen", frozen), _Chosen("live", live)
        # None of them knows us: models are to go with their last user, not when garbage is collected. Until then a DDP model
        # would hold its group, and with torch 2.13 a gloo group that goes with such a model may hang.
        owned = functools.partial(_owned, self.optimizers)
        models = {path: ModelSource(path, one, owned) for path, one in self.models.items()}
        fqns = functools.partial(_fqns, models)
        self._sources: list[Source] = [*models.values()]
        self._sources += [
            OptimizerSource(path, one, fqns, beside=isinstance(one, torch.optim.Optimizer))
            for path, one in self.optimizers.items()
        ]
        self._sources += [StatefulSource((path,), one, large=False) for path, one in schedulers.items()]
        for path, one in extras.items():
            mine = (path,) if rank == 0 else (("rank", str(rank), *path), path)
            self._sources.append(StatefulSource(mine, one, large=True))
        if state is not None:
            self._sources.append(StateSource(("state",), state))
        self.data = DataSource(named("data", data), rank)
        self._sources += [self.data, GeneratorSource(rank), ClassSource({**self.models, **self.optimizers})]
        self._chunks: list[Chunk] | None = None
        self._watched: list[tuple[Any, Any, Any, torch.Tensor, int]] = []
        self._sizes: list[tuple[int, ...]] = []
        self._anew: set[str] = set()
        self._serialised = _Serialised()

    def release(self) -> None:
        """Hold no model, optimizer or tensor any more; nothing can be captured after it."""
        self.models, self.optimizers, self._sources, self._chunks = {}, {}, [], None
        self._watched, self._sizes, self._saved, self._anew = [], [], frozenset(), set()
        self._frozen, self._live = _Chosen("frozen", ()), _Chosen("live", ())
        self._serialised = _Serialised()
        self.data = DataSource({}, self._rank)

    # ---- tensors

    def chunks(self) -> list[Chunk]:
        """All tensors, as they are now; the walk is made only if some of them are not what they were."""
        for source in self._sources:
            if isinstance(source, ModelSource):
                source.reshard()
        if self.tensors_changed():
            self._walk()
        assert self._chunks is not None
        return self._chunks

    def tensors_changed(self) -> bool:
        """Must the walk be made again?"""
        return self._chunks is None or not self._unchanged()

    def _unchanged(self) -> bool:
        try:
            for owner, key, tensor, here, address in self._watched:
                if owner[key] is not tensor or here.data_ptr() != address:
                    return False
        except (KeyError, IndexError):
            return False
        if self._sizes != [source.sizes() for source in self._sources]:
            return False
        return not self._asked_anew()

    def _asked_anew(self) -> bool:
        """States with large tensors say anew where those are. Is that of another form than before?"""
        assert self._chunks is not None
        fresh: dict[str, torch.Tensor] = {}
        for source in self._sources:
            if isinstance(source, StatefulSource) and source.large:
                fresh.update({name_of(found.path): local(found.tensor) for found in source.tensors()})
        known = {one.name: one for one in self._chunks if one.name in self._anew}
        if fresh.keys() != known.keys():
            return True
        if any(
            fresh[name].shape != one.tensor.shape or fresh[name].dtype != one.tensor.dtype
            for name, one in known.items()
        ):
            return True
        if fresh:
            self._chunks = [
                one._replace(tensor=fresh[one.name].detach()) if one.name in fresh else one for one in self._chunks
            ]
        return False

    def _walk(self) -> None:
        chunks: list[Chunk] = []
        self._watched, self._anew = [], set()
        seen: dict[Any, int] = {}
        idle = 0
        for source in self._sources:
            for found in source.tensors():
                name = name_of(found.path)
                check_memory(name, found.tensor)
                chunk = chunk_of(name, found, live=self._is_live(name, found))
                if found.owner is None:
                    self._anew.add(name)
                else:
                    here = local(found.tensor)
                    self._watched.append((found.owner, found.key, found.tensor, here, here.data_ptr()))
                if chunk is not None:
                    add(chunks, seen, chunk)
                    if chunk.live and isinstance(source, ModelSource) and _is_idle(found.tensor):
                        idle += chunk.size
        self._hint(idle, sum(one.size for one in chunks))
        names = [one.name for one in chunks]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SpecError(
                "state", f"two tensors are called {twice}; give models or optimizers as a dict with other keys"
            )
        self._frozen.all_found()
        self._live.all_found()
        saved = {one.tensor.data_ptr() for one in chunks}
        for source in self._sources:
            if isinstance(source, OptimizerSource):
                source.refuse_hidden(saved)
        self._chunks = chunks
        self._sizes = [source.sizes() for source in self._sources]

    def _hint(self, idle: int, all_bytes: int) -> None:
        """Once, where much is copied while training stands though probably nobody writes it: the base model of a LoRA."""
        if not self._hinted and self._rank == 0 and (idle > IDLE_BYTES or idle > IDLE_SHARE * all_bytes):
            self._hinted = True
            _log.warning(
                "%.1f MiB of parameters have requires_grad False and belong to no optimizer given: they are copied within every "
                "save, while training stands; if your code does not write them either, say so with "
                "frozen=[p for p in model.parameters() if not p.requires_grad]",
                idle / 2**20,
            )

    def _is_live(self, name: str, found: Found) -> bool:
        frozen, live = self._frozen.has(name, found.tensor), self._live.has(name, found.tensor)
        return live or not (frozen or found.beside)

    def foreseen(self) -> list[Chunk] | None:
        """The tensors that there will be after the first step, on the meta device where they are not yet; None: nobody knows."""
        found = list(self.chunks())
        for source in self._sources:
            if not isinstance(source, OptimizerSource) or source.optimizer.state:
                continue
            states = foresight.foreseen(source.optimizer)
            if states is None:
                return None
            for path, tensor, parameter in source.stated(states):
                full, offsets = tuple(tensor.shape), (0,) * tensor.dim()
                if tensor.shape == local(parameter).shape and local(parameter) is not parameter:
                    if not tensor.numel() and parameter.numel():
                        continue
                    full, offsets = tuple(parameter.shape), place_of(name_of(path), parameter)[1]
                name = name_of(path)
                live = self._is_live(name, Found(path, tensor, None, None, beside=source.beside))
                found.append(Chunk(name, path, tensor, str(tensor.dtype)[6:], full, offsets, live))
        return found

    def signature(self, chunks: Sequence[Chunk], objects: Iterable[str]) -> Signature:
        """The form of a state, without its values."""
        return Signature(
            tuple(
                sorted(
                    (one.name, one.dtype, one.full_shape, one.offsets, tuple(one.tensor.shape), one.live, one.same_as)
                    for one in chunks
                )
            ),
            tuple(sorted(objects)),
        )

    def keep_among_objects(self, names: Collection[str]) -> None:
        """Tensors of ``extra`` that are serialised with the rest of it, however large they are."""
        for source in self._sources:
            if names and isinstance(source, StatefulSource):
                source.small.update(names)
                self._chunks = None

    # ---- what is no tensor

    def objects(self) -> tuple[dict[str, bytes], dict[str, Path]]:
        """By name: serialised by torch.save, and the paths. Ask for `chunks` first."""
        streams: dict[str, bytes] = {}
        paths: dict[str, Path] = {}
        for source in self._sources:
            for path, value in source.objects():
                name = name_of(path)
                streams[name] = self._serialised.stream(name, value, changes=isinstance(source, GeneratorSource))
                paths[name] = path
        return streams, paths

    def registered(self, vault: Vault) -> Vault:
        """The vault, once the agent knows the datasets as they are now. Raises as `DataSource.register`."""
        self.data.register(vault)
        return vault

    def cut(self) -> dict[str, bytes]:
        """What is said of the data, packed, by the names that it has in a blob; empty: there are no datasets."""
        said = {CUT: self.data.cut(), TRAINED: self.data.leased.counted()}
        return {name: packed for name, packed in said.items() if packed}

    def own(self, name: str) -> bool:
        """Does only this rank have this object? The others are the same on all ranks."""
        return own_name(name, self._rank)

    def forms(self) -> Iterator[tuple[str, str]]:
        """Of objects that rank 0 saves for all ranks what has to be the same on all, in words.

        An optimizer's parameters, by name; numbers and text in ``state``; and the position in the data.
        """
        yield from self.data.forms()
        for source in self._sources:
            if isinstance(source, OptimizerSource):
                yield f"{source.roots()[0]}.param_groups", repr(source.names())
            elif isinstance(source, StateSource):
                yield from ((name_of(path), repr(value)) for path, value in source.objects() if _is_plain(value))

    # ---- back again

    def targets(self, shapes: Shapes) -> list[Target]:
        """Where saved tensors are to be filled in, those of this rank; ``shapes``: of all that were saved. Raises `Mismatch`."""
        for source in self._sources:
            source.make_room(shapes)
        self._chunks, self._saved = None, frozenset(shapes)
        found = self.chunks()
        for one in found:
            if one.name not in shapes:
                raise Mismatch(f"{one.name} was not saved; restore with the same model and optimizer, or start anew")
            if shapes[one.name] != (one.dtype, one.full_shape):
                dtype, shape = shapes[one.name]
                raise Mismatch(
                    f"{one.name} was saved as {dtype}{list(shape)}, and is {one.dtype}{list(one.full_shape)} now; "
                    "restore with the same model and optimizer"
                )
        names, roots = {one.name for one in found}, tuple(f"{name_of(path)}." for path in self.models)
        lost = sorted(name for name in shapes if name.startswith(roots) and name not in names)
        if lost and self.models and not any(one.offsets for one in found if one.tensor.numel() == 0):
            known = {name_of((*path, fqn)) for path, model in self.models.items() for fqn in model.state_dict()}
            lost = [name for name in lost if name not in known and self._nowhere(name)]
            if lost:
                raise Mismatch(f"{lost[0]} was saved, and this model has no such tensor; restore with the same model")
        return [Target(one.name, one.tensor, one.full_shape, one.offsets) for one in found]

    def _nowhere(self, name: str) -> bool:
        """A shard of nothing is no chunk, but its tensor is there."""
        return not any(
            name_of(found.path) == name
            for source in self._sources
            if isinstance(source, ModelSource)
            for found in source.tensors()
        )

    def forget(self) -> None:
        """Nothing is loaded after all into the room that `targets` made."""
        for source in self._sources:
            if isinstance(source, (StatefulSource, OptimizerSource)):
                source.load({})
        self._chunks = None

    def examine(self, objects: Mapping[str, Any]) -> tuple[str, ...]:
        """Is what was saved what is asked for? After `targets`, with the objects, before any tensor is filled.

        What differs and does no harm, in words. Raises `Mismatch` for another optimizer, `SpecError` for other data.
        """
        notes: list[str] = list(self.data.accept(objects.get(CUT)))
        if kinds.CLASSES in objects:
            notes += self._other_classes(objects[kinds.CLASSES], objects)
        for source in self._sources:
            for names in source.asked():
                if not any(name in objects for name in names):
                    notes.append(f"{names[0]} is not in this checkpoint: it stays as it is now")
        roots = {root for source in self._sources for root in source.roots()}
        rest = sorted(
            name
            for name in {*self._saved, *filter(self.wants, objects)} - {kinds.CLASSES}
            if not any(name == root or name.startswith(f"{root}.") for root in roots)
        )
        if rest:
            notes.append(f"the checkpoint has {first_few(rest, 3)}, which nothing here asks for")
        return tuple(notes)

    def _other_classes(self, saved: Mapping[str, str], objects: Mapping[str, Any]) -> Iterator[str]:
        for path, model in self.models.items():
            was, now = saved.get(name_of(path), ""), kinds.class_of(model)
            if was and was != now:
                yield f"{name_of(path)} was a {was} and is a {now} now; its tensors have the same names and shapes"
        for source in self._sources:
            if not isinstance(source, OptimizerSource):
                continue
            (root,) = source.roots()
            was, now = saved.get(root, ""), type(source.optimizer).__name__
            if not was or was == now:
                continue
            if not self._fits(source, objects.get(f"{root}.param_groups", ())):
                raise Mismatch(
                    f"{root} was saved from {was}, and is {now} now, which keeps another state; restore with {was}, or without "
                    "an optimizer to begin with a new one"
                )
            yield f"{root} was saved from {was}, and is {now} now; what it keeps has the same names, so it is taken over"

    @staticmethod
    def _fits(source: OptimizerSource, groups: Iterable[Any]) -> bool:
        """Would this optimizer keep what the saved one did? Where that cannot be foreseen: has it the same options?"""
        states = foresight.foreseen(source.optimizer)
        if states is not None and source.saved:
            mine = {source.name(one): set(state) for one, state in states.items()}
            return all(keys == mine.get(name) for name, keys in source.saved.items())
        return [set(group) for group in groups] == [set(group) for group in source.optimizer.param_groups]

    def lacks(self, objects: Collection[str]) -> str:
        """What only this rank has and is not among these objects, though others of its kind are; empty: nothing."""
        for source in self._sources:
            name = source.own_name(objects) if isinstance(source, (GeneratorSource, StatefulSource)) else ""
            if name:
                return name
        return ""

    def wants(self, name: str) -> bool:
        """Is an object of this name of use to this rank?"""
        return not name.startswith("rank.") or name.startswith(f"rank.{self._rank}.")

    def load(self, objects: Mapping[str, Any]) -> None:
        """Give back what is no tensor; all tensors are filled. Raises `Mismatch`."""
        for source in self._sources:
            source.load(objects)
        self._chunks = None


def _is_idle(tensor: torch.Tensor) -> bool:
    """A parameter that is not trained."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def _is_plain(value: Any) -> bool:
    """A number or text, or a list or dict of such: equal ones look the same in every process."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(_is_plain(one) for pair in value.items() for one in pair)
    if isinstance(value, (list, tuple)):
        return type(value) in {list, tuple} and all(map(_is_plain, value))
    return value is None or type(value) in {bool, int, float, str, bytes}


class _Chosen:
    """Tensors that the user names, or gives."""

    def __init__(self, option: str, given: Iterable[Any]) -> None:
        if isinstance(given, (str, torch.Tensor)) or not isinstance(given, Iterable):
            given = [given]
        given = list(given)
        self._option = option
        self._names = [one for one in given if isinstance(one, str)]
        self._tensors = [one for one in given if isinstance(one, torch.Tensor)]
        wrong = [one for one in given if not isinstance(one, (str, torch.Tensor))]
        if wrong:
            raise SpecError(option, f"names or tensors, got {type(wrong[0]).__name__}")
        self._used: set[int | str] = set()

    def has(self, name: str, tensor: torch.Tensor) -> bool:
        """By identity, by the whole name, or by the name without what it is of."""
        at = address(tensor)
        for one in self._tensors:
            if one is tensor or (address(one) == at and one.shape == tensor.shape):
                self._used.add(id(one))
                return True
        short = name.partition(".")[2]
        for pattern in self._names:
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(short, pattern):
                self._used.add(pattern)
                return True
        return False

    def all_found(self) -> None:
        """A name that is no tensor's is a mistake; one in an optimizer's state may come later."""
        for one in self._names:
            if one not in self._used and not one.startswith("optimizer."):
                raise SpecError(
                    self._option, f"{one!r} is the name of none of the tensors; they are like model.layer.weight"
                )


class _Serialised:
    """Streams of torch.save by name. Most objects are the same in each save."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, bytes]] = {}

    def stream(self, name: str, value: Any, *, changes: bool) -> bytes:
        """Raises `SpecError` for what cannot be serialised."""
        try:
            if changes:
                return _saved(value)
            pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
            known = self._known.get(name)
            if known is None or known[0] != pickled:
                known = self._known[name] = (pickled, _saved(value))
            return known[1]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise SpecError(name, f"cannot be serialised: {error}; leave it out of what is saved") from error


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def named(option: str, given: Any) -> dict[Path, Any]:
    """One or several, by path: the option alone, or with the key or the number."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and not hasattr(given, "state_dict"):
        wrong = [key for key in given if not isinstance(key, str) or "." in key]
        if wrong:
            raise SpecError(option, f"keys are names without dots, got {wrong[0]!r}")
        return {(option, key): one for key, one in given.items()}
    if isinstance(given, (list, tuple)):
        return {(option, str(number)): one for number, one in enumerate(given)}
    return {(option,): given}


def check(
    models: Mapping[Path, Any], optimizers: Mapping[Path, Any], others: Mapping[Path, Any], state: object
) -> None:
    """Is everything of a kind that can be saved? Raises `SpecError`."""
    for path, one in models.items():
        if not isinstance(one, torch.nn.Module):
            raise SpecError(
                name_of(path), f"a torch.nn.Module, got {type(one).__name__}; other things are for extra= or state="
            )
    for path, one in optimizers.items():
        if not (hasattr(one, "param_groups") and isinstance(getattr(one, "state", None), Mapping)):
            raise SpecError(
                name_of(path), f"an optimizer has param_groups and state, {type(one).__name__} has not; use extra="
            )
    for path, one in others.items():
        if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
            raise SpecError(
                name_of(path),
                f"needs state_dict() and load_state_dict(), {type(one).__name__} has not; use state={{...}}",
            )
    if state is not None and not isinstance(state, MutableMapping):
        raise SpecError("state", f"a dict, nested as you like, got {type(state).__name__}")
    if not (models or optimizers or others or state is not None):
        raise SpecError("model", "there is nothing to save; give model=, optimizer=, extra= or state=")


def parameters(optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """All parameters of these optimizers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
