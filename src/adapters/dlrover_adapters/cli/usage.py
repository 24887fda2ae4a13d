"""Wrong command lines: one line on stderr that says what is wrong and what to type, and exit status 2."""

from __future__ import annotations

import argparse
import difflib
import errno
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from dlrover_core.errors import SpecError

EX_USAGE = 2
EX_LATER = 75
"""sysexits.h's EX_TEMPFAIL: the same may well succeed later."""
LINE_CHARS_MAX = 2000
_NEAR, _BEGIN = 0.8, 5
"""How like a misspelt name must be to its own; the letters that are enough to go by a name's beginning."""
_UNKNOWN = "unrecognized arguments: "
_CHOICE = re.compile(r"invalid choice: '([^']+)' \(choose from (.+)\)")


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors are one line: the usage stays with ``--help``."""

    raises = False
    """Is an error raised, as `SpecError`, because the words are another process's?"""

    def error(self, message: str) -> NoReturn:
        """Say it and leave with 2."""
        words = f"{message}{self._meant(message)}; {self.prog} --help lists the options"
        if self.raises:
            raise SpecError(self.prog, words)
        sys.exit(say(self.prog, words))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuse an empty value of an option, which mostly is a variable that a script did not set.

        Torchrun's own options, and others that say ``may_be_empty``, take one.
        """
        if action.option_strings and "" in arg_strings and not getattr(action, "may_be_empty", False):
            raise argparse.ArgumentError(action, "its value is empty; give one, or leave the option out")
        return super()._get_values(action, arg_strings)

    def _meant(self, message: str) -> str:
        """The option, command or value that somebody may have misspelt, as words to add."""
        if choice := _CHOICE.search(message):
            return meant(choice[1], re.findall(r"[\w.-]+", choice[2]))
        unknown = message.removeprefix(_UNKNOWN).split(" ", 1)[0]
        if unknown == message or not unknown.startswith("--"):
            return ""
        return meant(unknown.partition("=")[0], self._option_string_actions)


def say(prog: str, error: object) -> int:
    """Print one line in the name of ``prog``; the exit status."""
    words = " ".join(str(error).split())
    if len(words) > LINE_CHARS_MAX:  # what is wrong stands at the beginning, and what to type at the end
        words = f"{words[: LINE_CHARS_MAX // 2]} ... {words[-LINE_CHARS_MAX // 2 :]}"
    print(f"{prog}: error: {words}", file=sys.stderr)
    return EX_USAGE


def limit(error: BaseException) -> str:
    """What to say where the system starts no more processes or threads; empty: ``error`` is another one."""
    thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    process = isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN and _starting(error)
    if not thread and not process:
        return ""
    return (
        f"no {'thread' if thread else 'process'} can be started: a limit of processes is reached; "
        "see ulimit -u, and pids.max of the control group"
    )


def _starting(error: BaseException) -> bool:
    """Was it raised where a process is started? Pipes and sockets that take nothing now say the same."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or trace.tb_frame.f_code.co_name in {"_execute_child", "_fork", "_launch"}


def meant(name: str, known: Iterable[str]) -> str:
    """The known name that is closest to an unknown one, as words to add; empty: none is close.

    A longer name that begins alike is closer than one that shares letters: ``--nprocs`` means ``--nproc-per-node``.
    """
    names = sorted(known)
    found = difflib.get_close_matches(name, names, n=1, cutoff=_NEAR)
    found = found or [one for one in names if len(name) > _BEGIN and one.startswith(name[:-1])]
    found = found or difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {found[0]}?)" if found else ""
