"""The file in which a worker leaves the exception that ended it. Nothing of torch is needed for it."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from pathlib import Path

ERROR_CHARS_MAX, STACK_CHARS_MAX = 4096, 8192


def record(path: str, error: BaseException) -> None:
    """Write the error file at ``path``, in torch's form, unless there is one. Nothing happens where no path is given."""
    if not path:
        return
    whole = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    # Frames come before the error's text, which may be long.
    stack = (
        whole if len(whole) <= 2 * STACK_CHARS_MAX else f"{whole[:STACK_CHARS_MAX]}\n...\n{whole[-STACK_CHARS_MAX:]}"
    )
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    told = {"message": {"message": f"{type(error).__name__}: {_text_of(error)}"[:ERROR_CHARS_MAX], "extraInfo": extra}}
    # A full disk must not hide the error itself, which is printed next.
    with contextlib.suppress(OSError), Path(path).open("x", encoding="utf-8") as file:
        json.dump(told, file)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - its class is the program's own
        return "<its text cannot be had>"
