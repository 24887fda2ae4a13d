"""What a Python stack says: who waits for others, and where somebody is, in a line for people.

The stacks are those of `faulthandler`: a header per thread, then frames, the newest first. It lists threads from the newest to
the oldest, so the main thread comes last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\)")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')

FRAMES_MAX = 8

# A frame in one of these: it waits for other ranks, or for the store that all of them share.
_TOGETHER = ("torch/distributed/",)
_WRAPPERS = ("wrapper", "inner", "_wrap", "__call__", "decorate_context")
# Backward runs gradients' collectives in C++: a rank in it may well be waiting.
_BACKWARD = ("torch/autograd/graph.py", "torch/_tensor.py", "torch/autograd/__init__.py")
_DEVICE = ("torch/cuda/__init__.py", "torch/cuda/streams.py")
_SYNCHRONISING = re.compile(r"\.(item|cpu|synchronize|tolist)\(")
_NOT_THE_USERS = ("/site-packages/", "/dist-packages/", "<frozen", "dlrover_adapters/")
_LIBRARY = re.compile(r"/lib(64)?/python3[^/]*/")


class Frame(NamedTuple):
    """One call."""

    file: str
    line: int
    function: str


def threads(text: str) -> list[tuple[Frame, ...]]:
    """The stacks in a dump, in its order; what is cut short or no dump is left out."""
    found: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            found.append([])
            continue
        frame = _FRAME.fullmatch(line)
        if frame is not None and found:
            number = int(frame["line"]) if frame["line"].isdecimal() else 0
            found[-1].append(Frame(frame["file"], number, frame["function"]))
    return [tuple(frames) for frames in found if frames]


def main_thread(text: str) -> tuple[Frame, ...]:
    """The main thread's stack, newest call first; empty where there is none."""
    found = threads(text)
    return found[-1] if found else ()


def brief(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """What is worth sending of a stack: its newest calls, and the newest of the user's own, however deep below."""
    newest, own = tuple(stack[:FRAMES_MAX]), users(stack)
    return newest if own is None or own in newest else (*newest, own)


def users(stack: Sequence[Frame]) -> Frame | None:
    """The newest frame of the user's own code; where there is none, the newest of all."""
    own = (one for one in stack if not any(part in one.file for part in _NOT_THE_USERS))
    return next((one for one in own if not _LIBRARY.search(one.file)), stack[0] if stack else None)


def waits_in(stack: Sequence[Frame], source: str = "") -> str:
    """The call in which a rank waits for others; empty: it does not, as far as a stack can tell.

    ``source`` is the text of the newest line of the user's own: a call in C has no frame.
    """
    together = [one for one in stack if any(part in one.file for part in _TOGETHER)]
    if together and stack[0] in together:
        named = [one.function for one in together if not one.function.startswith(_WRAPPERS)]
        return named[0] if named else together[0].function
    if stack and any(stack[0].file.endswith(part) for part in _BACKWARD):
        return "backward"
    if stack and any(stack[0].file.endswith(part) for part in _DEVICE):
        return "synchronize"
    found = _SYNCHRONISING.search(source) if stack and users(stack) == stack[0] else None
    return found[1] if found else ""


def where(stack: Sequence[Frame], source: str = "") -> str:
    """Where somebody is, for people: ``step (train.py:42: time.sleep(60))``."""
    frame = users(stack)
    if frame is None:
        return ""
    line = f": {source.strip()}" if source.strip() else ""
    return f"{frame.function} ({frame.file.rsplit('/', 1)[-1]}:{frame.line}{line})"


def shape(stack: Sequence[Frame]) -> tuple[tuple[str, str], ...]:
    """What makes two stacks alike: files and functions of the newest calls, not their lines."""
    return tuple((one.file, one.function) for one in stack[:6])
