"""etcd's messages and service stubs: those of the `etcd3` package, on today's protobuf.

``etcd3`` 0.12.0 was generated for protobuf 3 and cannot be imported beside anything newer. What is in it all the same are the
descriptors of etcd's protocol, as serialized bytes. They are read from its source without running it, and built in a
descriptor pool of our own: a second etcd client in the process, even ``etcd3`` itself where it still works, never notices.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.metadata
import os
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dlrover_core.errors import SpecError

_PACKAGE = "etcd3.etcdrpc"
_FILES = ("kv_pb2.py", "auth_pb2.py", "rpc_pb2.py")
_STUBS = "rpc_pb2_grpc.py"
_REMEDY = "install what the etcd log needs: pip install 'dlrover-core[etcd]'"


class Protocol(NamedTuple):
    """The protocol: ``rpc`` and ``kv`` have the messages by name, ``stubs`` the classes ``KVStub``, ``WatchStub`` ..."""

    rpc: Any
    kv: Any
    stubs: Any


# Else grpc warns at every fork of the process it is in; we never call it in a child.
_QUIET = {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Settings for grpc, which reads them when imported and with its first channel. No longer: our children's are not ours."""
    ours = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@lru_cache(maxsize=1)
def load() -> Protocol:
    """Build it, once per process. Raises `SpecError` where a package is missing or not the one we know."""
    try:
        from google.protobuf.descriptor_pool import DescriptorPool
        from google.protobuf.message_factory import GetMessageClass
    except ImportError as error:
        raise SpecError("log", f"an etcd log needs protobuf: {error}; {_REMEDY}") from error
    folder = _folder()
    pool = DescriptorPool()
    modules = {path.stem: _messages(pool, GetMessageClass, path) for path in (folder / name for name in _FILES)}
    with quiet():
        stubs = _stubs(folder / _STUBS, modules)
    return Protocol(modules["rpc_pb2"], modules["kv_pb2"], stubs)


def _folder() -> Path:
    """Where the generated files of the installed ``etcd3`` lie; nothing of it is imported."""
    try:
        files = importlib.metadata.files("etcd3") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise SpecError("log", f"an etcd log needs the messages of etcd3; {_REMEDY}") from error
    for file in files:
        place = Path(str(file.locate()))
        if place.name == _STUBS and all((place.parent / name).is_file() for name in (_STUBS, *_FILES)):
            return place.parent
    raise SpecError("log", f"the installed etcd3 lacks the files of {_PACKAGE}; {_REMEDY}")


def _messages(pool: Any, class_of: Callable[[Any], Any], path: Path) -> types.ModuleType:
    """One of the files, its classes built from the descriptors in it. Those it depends on are in the pool already.

    Not by protobuf's own builder: that one also registers what it builds with the pool that all of the process shares.
    """
    descriptor = pool.AddSerializedFile(_serialized(path))
    module = types.ModuleType(f"dlrover_adapters.etcd.protocol.{path.stem}")
    for name, message in descriptor.message_types_by_name.items():
        setattr(module, name, class_of(message))
    for enum in descriptor.enum_types_by_name.values():
        for value in enum.values:
            setattr(module, value.name, value.number)
    return module


def _serialized(path: Path) -> bytes:
    """The bytes handed to ``FileDescriptor(serialized_pb=_b('...'))``: among the module's constants, the one that says its name.

    The module is compiled and not parsed into a tree: `ast.parse` of CPython 3.11 fails where another thread parses too.
    """
    name = path.stem.replace("_pb2", ".proto")
    begin = f"\n{chr(len(name))}{name}"  # field 1 of a FileDescriptorProto
    for text in compile(path.read_text(encoding="utf-8"), str(path), "exec").co_consts:
        if isinstance(text, str) and text.startswith(begin):
            return text.encode("latin-1")
        if isinstance(text, bytes) and text.startswith(begin.encode()):
            return text
    raise SpecError("log", f"{path.name} of the installed etcd3 holds no descriptor; {_REMEDY}")


def _stubs(path: Path, modules: dict[str, types.ModuleType]) -> types.ModuleType:
    """The stubs' module, run as it is but for its imports: for ``etcd3`` it gets our messages, which nobody else sees."""
    messages = types.ModuleType(_PACKAGE)
    for name, module in modules.items():
        setattr(messages, name, module)

    def imported(name: str, *scope: Any, **more: Any) -> types.ModuleType:
        return messages if name == _PACKAGE else builtins.__import__(name, *scope, **more)

    made = types.ModuleType(f"dlrover_adapters.etcd.protocol.{path.stem}")
    setattr(made, "__builtins__", {**vars(builtins), "__import__": imported})
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), made.__dict__)  # noqa: S102  # an installed module
    except ImportError as error:
        raise SpecError("log", f"an etcd log needs grpc: {error}; {_REMEDY}") from error
    return made
