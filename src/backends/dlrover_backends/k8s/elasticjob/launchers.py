"""Finds the launcher in a container's command, and what its flags say of the job.

A node's pod runs the container's own command: whatever stands around the launcher stays. The masters need what the launcher's
flags say of the whole job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dlrover_backends.k8s.elasticjob import shell
from dlrover_backends.k8s.elasticjob.shell import Word
from dlrover_core.errors import SpecError

OURS = "dlrover-run"
_MODULES = frozenset(
    (
        *("torch.distributed.run", "torch.distributed.launch", "dlrover_adapters.cli.run"),
        *("dlrover.trainer.torch.elastic_run", "dlrover.trainer.torch.main"),
    )
)
_SHELLS = frozenset(("sh", "bash", "dash", "zsh"))
_SCRIPT = re.compile(r".+\.(sh|bash)")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_BEFORE = frozenset(("exec", "env", "nohup", "time", "command"))

SWITCHES = frozenset(
    (
        *(
            "standalone",
            "module",
            "m",
            "no-python",
            "run-path",
            "virtual-local-rank",
            "detach",
            "watch-grads",
            "version",
        ),
        *("network-check", "comm-perf-test", "exclude-straggler", "auto-config", "auto-tunning", "save-at-breakpoint"),
        *("numa-affinity", "help", "h", "show-config", "job-schema"),
    )
)
"""Flags of launchers that take no value; a test compares them with the parser's."""
JOB_FLAGS = frozenset(
    (
        *("max-restarts", "on-join", "precheck", "check-slow", "hang-timeout", "hang-action", "slow-action", "set"),
        *("rdzv-conf", "shutdown-timeout", "log-level", "network-check", "comm-perf-test", "exclude-straggler"),
        *("auto-tunning", "save-at-breakpoint", "accelerator", "training-port", "membind-policy", "ucp-device-type"),
    )
)
"""Those that say something of the whole job: the masters are given them. Agents read the rest from their own line."""
ELSEWHERE: Mapping[str, str] = {
    "policy": "the file is in the nodes' image, and the masters have their own",
    "signatures": "the file is in the nodes' image, and the masters have their own",
    "log": "the operator says where the job's log is",
    "detach": "the job's masters are pods",
    "job-id": "the job has the ElasticJob's name",
}
"""Those that have no place in a pod, and why."""


class Lines(Protocol):
    """Reads command lines as the commands themselves do."""

    def line(self, words: Sequence[Word]) -> None:
        """A launcher's line in a pod, from after its name. Raises `SpecError` in the parser's words."""
        ...

    def job(self, words: Sequence[str], path: str, job_file: str) -> None:
        """What masters are told: their words, which name a job file at a path, and its text. Raises `SpecError`."""
        ...


class Unread:
    """Nothing is known of the commands' parsers: lines are what they look like."""

    def line(self, words: Sequence[Word]) -> None:
        """Nothing is wrong."""

    def job(self, words: Sequence[str], path: str, job_file: str) -> None:
        """Nothing is wrong."""


class Launcher(NamedTuple):
    """A launcher's line.

    flags:   each flag with its value, in order; None: it takes none
    program: what is run: a script, a module, a program
    args:    the program's arguments
    """

    flags: tuple[tuple[str, str | None], ...]
    program: str
    args: tuple[str, ...]

    def last(self, *names: str) -> str | None:
        """The value that counts of a flag, by any of its names; None: it is not there."""
        return next((value or "" for name, value in reversed(self.flags) if name in names), None)

    def job_words(self) -> list[str]:
        """Those flags that say something of the whole job, as words."""
        kept = [(name, value) for name, value in self.flags if name in JOB_FLAGS]
        return [f"--{name}" if value is None else f"--{name}={value}" for name, value in kept]


class Command(NamedTuple):
    """A container's command, read.

    launcher: its launcher; None: there is none to be seen
    words:    the command as a pod of ours runs it: another launcher's name is replaced by ours
    hidden:   a shell script is run, which may hold the launcher
    """

    launcher: Launcher | None
    words: tuple[str, ...]
    hidden: bool = False


def read(container: Mapping[str, Any], env: Mapping[str, str], field: str, lines: Lines | None = None) -> Command:
    """The command of a container. ``env``: variables whose values are known. Raises `SpecError`, named after ``field``."""
    lines = lines or Unread()
    words = [*_texts(container.get("command"), f"{field}.command"), *_texts(container.get("args"), f"{field}.args")]
    if len(words) == 1 and " " in words[0]:
        words = ["/bin/sh", "-c", words[0]]  # DLRover's own README writes a line where a list of words belongs
    place = _line_at(words)
    if place is not None:
        return _in_a_line(words, place, env, field, lines)
    found = [Word(_filled(one, env), 0, 0) for one in words]
    start = _launcher_at(found)
    if start is None:
        hidden = bool(words) and (_is_shell(words[0]) or bool(_SCRIPT.fullmatch(words[0])))
        return Command(None, tuple(words), hidden)
    return Command(_launcher(found[start.end :], field, lines), (*words[: start.begin], OURS, *words[start.end :]))


def _in_a_line(words: Sequence[str], place: int, env: Mapping[str, str], field: str, lines: Lines) -> Command:
    line = words[place]
    hidden = False
    for command in shell.commands(line, env):
        start = _launcher_at(command)
        if start is not None:
            begin, end = command[start.begin].start, command[start.end - 1].end
            own = line[:begin] + OURS + line[end:]
            found = _launcher(command[start.end :], field, lines)
            return Command(found, (*words[:place], own, *words[place + 1 :]))
        hidden = hidden or _runs_script(command)
    return Command(None, tuple(words), hidden)


def _texts(value: object, field: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise SpecError(field, f'{value!r} is no list of texts: write ["dlrover-run", "train.py"]')
    return list(value)


def _line_at(words: Sequence[str]) -> int | None:
    """Which word is a line for a shell; None: none is."""
    if not words or not _is_shell(words[0]):
        return None
    for place, one in enumerate(words[1:-1], 1):
        if one.startswith("-") and not one.startswith("--") and "c" in one:
            return place + 1
        if not one.startswith("-"):
            return None
    return None


def _is_shell(word: str) -> bool:
    return word.rpartition("/")[2] in _SHELLS


def _runs_script(command: Sequence[Word]) -> bool:
    named = [one.text for one in command if not _ASSIGNMENT.fullmatch(one.text)]
    named = named[1:] if named and named[0] in _BEFORE else named
    return bool(named) and bool(_SCRIPT.fullmatch(named[1] if _is_shell(named[0]) and len(named) > 1 else named[0]))


def _filled(text: str, env: Mapping[str, str]) -> str:
    """A word in which Kubernetes itself fills in ``$(NAME)``."""
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda found: env.get(found[1], found[0]), text)


class _Start(NamedTuple):
    """Which words of a command name its launcher."""

    begin: int
    end: int


def _launcher_at(command: Sequence[Word]) -> _Start | None:
    at = 0
    while at < len(command) and (_ASSIGNMENT.fullmatch(command[at].text) or command[at].text in _BEFORE):
        at += 1
    name = command[at].text.rpartition("/")[2] if at < len(command) else ""
    if name in {OURS, "torchrun"}:
        return _Start(at, at + 1)
    if re.fullmatch(r"python[0-9.]*", name):
        place = at + 1
        while place < len(command) and command[place].text in {"-u", "-O", "-B"}:
            place += 1
        module = [one.text for one in command[place : place + 2]]
        if len(module) == 2 and module[0] == "-m" and module[1] in _MODULES:
            return _Start(at, place + 2)
    return None


def _launcher(words: Sequence[Word], field: str, lines: Lines) -> Launcher:
    try:
        lines.line(words)
    except SpecError as error:
        raise SpecError(f"{field}.command", str(error)) from error
    flags: list[tuple[str, str | None]] = []
    at = 0
    while at < len(words) and words[at].text.startswith("-") and words[at].text != "--":
        name, equals, value = words[at].text.lstrip("-").partition("=")
        name, given = name.replace("_", "-"), words[at]
        at += 1
        if equals:
            flags.append((name, value))
        elif name in SWITCHES:
            flags.append((name, None))
        elif len(name) > 1 and name[0] in "rt" and name[1].isdigit() and words[at - 1].text[1] != "-":
            flags.append((name[0], name[1:]))  # -r3
        else:
            if at == len(words):
                raise SpecError(field, f"--{name}: the command ends where its value should be")
            given = words[at]
            flags.append((name, given.text))
            at += 1
        if given.open and name in JOB_FLAGS:
            raise SpecError(
                field,
                f"--{name} {given.text}: only the pod's shell knows this value, and the masters need it: write it out",
            )
    rest = [one.text for one in words[at:]]
    rest = rest[1:] if rest[:1] == ["--"] else rest
    if not rest:
        raise SpecError(field, f"{OURS} is given no script: name what it runs")
    return Launcher(tuple(flags), rest[0], tuple(rest[1:]))
