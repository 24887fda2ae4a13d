"""A file that ``torch.load(weights_only=True)`` opens, written as it goes: no more than one tensor is in memory at a time.

``torch.save`` wants the whole state in memory. Here a `Leaf` stands for each tensor, and its elements are asked for when their
turn comes. The format is torch's own: a zip with ``data.pkl`` and one record for each storage; the writer of the zip is torch's.
"""

from __future__ import annotations

import collections
import contextlib
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, cast

import numpy as np
import torch

Fill = Callable[["Leaf"], torch.Tensor]
Landed = Callable[["Leaf", int], None]


class Leaf:
    """A tensor that is not here: ``name`` is for whoever fills it."""

    __slots__ = ("dtype", "key", "name", "shape")

    def __init__(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.name, self.dtype, self.shape, self.key = name, dtype, shape, ""


class _Storage:
    __slots__ = ("dtype", "key", "size")

    def __init__(self, key: str, dtype: torch.dtype | None, size: int) -> None:
        self.key, self.dtype, self.size = key, dtype, size


class _Pickler(pickle.Pickler):
    """Leaves, as torch pickles tensors (``torch.Tensor._reduce_ex_internal``), and what tensors there are among objects."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=2)
        self.leaves: list[Leaf] = []
        self.others: dict[str, Any] = {}
        self._number = 0

    def _key(self) -> str:
        self._number += 1
        return str(self._number - 1)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Leaf):
            return NotImplemented
        obj.key = self._key()
        self.leaves.append(obj)
        count = prod(obj.shape)
        steps, step = [], 1
        for length in reversed(obj.shape):
            steps.append(step)
            step *= max(length, 1)
        hooks: collections.OrderedDict[str, Any] = collections.OrderedDict()
        common = (0, obj.shape, tuple(reversed(steps)), False, hooks)
        if obj.dtype in torch.storage._new_dtypes():
            storage = _Storage(obj.key, None, count * obj.dtype.itemsize)
            return torch._utils._rebuild_tensor_v3, (storage, *common, obj.dtype)
        return torch._utils._rebuild_tensor_v2, (_Storage(obj.key, obj.dtype, count), *common)

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            kind: Any = torch.UntypedStorage
            if obj.dtype is not None:
                kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[obj.dtype])
            return "storage", kind, obj.key, "cpu", obj.size
        if isinstance(obj, torch.storage.TypedStorage):
            key = self._key()
            self.others[key] = obj._untyped_storage
            typed: Any = obj
            return "storage", getattr(torch, typed._pickle_storage_type()), key, "cpu", typed._size()
        return None


def save(out: Any, tree: Any, fill: Fill, landed: Landed | None = None) -> None:
    """Write ``tree`` to ``out``, which has ``write`` and ``tell``; ``fill`` gives a leaf's tensor, contiguous, for one moment.

    ``landed`` is told at which byte of ``out`` each leaf's elements begin.
    """
    body = io.BytesIO()
    pickler = _Pickler(body)
    pickler.dump(tree)
    watched = Watched(out)
    writer: Any = torch._C.PyTorchFileWriter(cast(Any, watched))
    raw = body.getvalue()
    writer.write_record("data.pkl", raw, len(raw))
    writer.write_record("byteorder", "little", len("little"))
    try:
        for leaf in pickler.leaves:
            tensor = fill(leaf)
            watched.watch(tensor)
            writer.write_record(f"data/{leaf.key}", tensor.untyped_storage(), tensor.nbytes)
            watched.check()
            if landed is not None:
                landed(leaf, watched.found_at(0))
        for key, storage in pickler.others.items():
            writer.write_record(f"data/{key}", storage, storage.nbytes())
    except BaseException as error:
        watched.error = error
        raise
    finally:
        # In any case: else its destructor would, whenever that is.
        writer.write_end_of_file()
    watched.check()


class Watched:
    """Passes on what torch writes, and sees at which byte the elements of a tensor begin.

    torch's writer ends the *process* when its stream raises at the wrong moment (``PyTorchStreamWriter``'s destructor). So what
    is raised is kept, the rest goes nowhere, and `check` raises it once torch is through.
    """

    def __init__(self, out: Any) -> None:
        self._out = out
        self._address = self._size = 0
        self.found = -1
        self.error: BaseException | None = None
        """What went wrong: nothing is passed on any more."""

    def check(self) -> None:
        """Raise what went wrong."""
        if self.error is not None:
            raise self.error

    def found_at(self, begin: int) -> int:
        """Where those of the tensor that was watched for began; of one without elements ``begin``."""
        if not self._size:
            return begin
        if self.found < 0:
            raise RuntimeError(f"torch {torch.__version__} writes tensors in another way than is known here")
        return self.found

    def watch(self, tensor: torch.Tensor) -> None:
        """The next tensor."""
        self._address, self._size, self.found = tensor.data_ptr(), tensor.nbytes, -1

    def write(self, content: Any) -> int:
        """By torch's writer: a view of memory that is good for the time of this call."""
        if self._size and self.found < 0:
            there = np.frombuffer(content, np.uint8).__array_interface__["data"][0]
            if there == self._address:
                self.found = self._out.tell()
        if self.error is None:
            try:
                self._out.write(content)
            except BaseException as error:  # noqa: BLE001  # raised by `check`, a moment later
                self.error = error
        return len(content)

    def flush(self) -> None:
        """Not of interest."""


class _Crc:
    """Counts the writers that have checksums switched off, and keeps the option's value from before."""

    def __init__(self) -> None:
        self.lock, self.users, self.before = threading.Lock(), 0, True


_CRC = _Crc()


@contextlib.contextmanager
def no_crc() -> Iterator[None]:
    """``torch.save`` without the zip's own checksums, which no reader of torch's looks at: they cost 0.4 s per GiB."""
    if not hasattr(torch.serialization, "set_crc32_options"):  # before torch 2.6
        yield
        return
    # The option is the process's, and several threads write: the first sets it, and the last puts it back.
    with _CRC.lock:
        if not _CRC.users:
            _CRC.before = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(False)
        _CRC.users += 1
    try:
        yield
    finally:
        with _CRC.lock:
            _CRC.users -= 1
            if not _CRC.users:
                torch.serialization.set_crc32_options(_CRC.before)
