"""Why a promise was not kept, in a line or two, where no test runner rewrites assertions: the statement, and its values."""

from __future__ import annotations

import ast
import asyncio
import functools
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

VALUE_CHARS_MAX = 200
_OURS = str(Path(__file__).parent)
_PYTHON = str(Path(asyncio.__file__).parents[1])


def reason_of(error: BaseException, kit: type) -> str:
    """What went wrong: the words of the error, the statement of the kit where, and the place in the code under test."""
    own = _files(kit)
    frames = list(_frames(error))
    said = " ".join(str(error).split())
    if isinstance(error, AssertionError):
        if said:
            return said
        step = next((one for one in reversed(frames) if one[0].f_code.co_filename in own), None)
        return _told(*step) if step is not None else "AssertionError"
    words = (
        [] if isinstance(error, asyncio.TimeoutError) and not said else [f"{type(error).__name__}: {said}".rstrip(": ")]
    )
    told = (one for one in reversed(frames) if one[0].f_code.co_filename in own)
    step = next((one for one in told if one[0].f_code.co_name.startswith(("story", "test_"))), None)
    if step is not None:
        words.append(_told(*step))
    elsewhere = next((one for one in reversed(frames) if is_foreign(one[0], kit)), None)
    if elsewhere is not None:
        words.append(f"at {place(*elsewhere)}")
    return "; ".join(words)


def place(frame: FrameType, line: int) -> str:
    """A place in somebody's code."""
    return f"{Path(frame.f_code.co_filename).name}:{line}, in {frame.f_code.co_name}"


def _files(kit: type) -> set[str | None]:
    """The files that a kit is written in; what was made on the spot is no step of a story."""
    modules = {one.__module__ for one in kit.__mro__} - {"builtins", "dlrover_core.testing.conformance"}
    return {sys.modules[one].__file__ for one in modules if one in sys.modules}


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Where it passed, the outermost first; where the bound of a story cut it off, what it was about to do."""
    seen = error
    if isinstance(error, asyncio.TimeoutError) and isinstance(error.__cause__, asyncio.CancelledError):
        seen = error.__cause__
        if sys.version_info < (3, 11) and isinstance(seen.__context__, asyncio.CancelledError):
            seen = seen.__context__  # the task's own; the waiter got another one
    trace: TracebackType | None = seen.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def is_foreign(frame: FrameType, kit: type) -> bool:
    """Code under test: neither a kit, nor ours, nor Python's."""
    file = frame.f_code.co_filename
    return not (file in _files(kit) or file.startswith((_OURS, _PYTHON, "<")))


def _told(frame: FrameType, line: int) -> str:
    statement = _statement(frame.f_code.co_filename, line)
    if statement is None:
        return f"at {Path(frame.f_code.co_filename).name}:{line}"
    text = " ".join(ast.unparse(statement).split())
    if isinstance(statement, ast.AsyncWith | ast.With | ast.AsyncFor | ast.For | ast.If | ast.Try):
        return f"`{text.partition(':')[0]}`"
    values = ", ".join(f"{name} = {value}" for name, value in _values(statement, frame.f_locals).items())
    return f"`{text}`" + (f" where {values}" if values else "")


@functools.cache
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


def _statement(file: str, line: int) -> ast.stmt | None:
    """The innermost statement that a line belongs to."""
    tree = _tree(file)
    if tree is None:
        return None
    found = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.stmt) and one.lineno <= line <= (one.end_lineno or one.lineno)
    ]
    return min(found, key=lambda one: (one.end_lineno or one.lineno) - one.lineno, default=None)


def _values(node: ast.AST, local: dict[str, Any]) -> dict[str, str]:
    """The local values that a statement speaks of. Nothing is called to find out."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        try:
            told = repr(_value(node, local))
        except Exception:  # noqa: BLE001  # no plain value: perhaps a part of it is one
            told = "<"
        if " object at 0x" not in told and not told.startswith("<"):
            return {ast.unparse(node): told if len(told) <= VALUE_CHARS_MAX else told[:VALUE_CHARS_MAX] + " ..."}
    found: dict[str, str] = {}
    inside = (
        [node.func.value, *node.args] if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    )
    for child in ast.iter_child_nodes(node) if inside is None else inside:
        found |= _values(child, local)
    return found


def _value(node: ast.expr, local: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return local[node.id]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, local), node.attr)
    if isinstance(node, ast.Subscript):
        return _value(node.value, local)[_value(node.slice, local)]
    raise LookupError(type(node).__name__)
