"""Commands of people for a running job, as plain values: one object with the ``command`` and its arguments by name.

Transports pass on whatever they receive, and nothing of it is trusted. An unknown command raises `MalformedMessage` and is
never recorded. A command that the job's state forbids is refused by the engine, and recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from dlrover_core.errors import MalformedMessage
from dlrover_core.job import hosts, job, operations
from dlrover_core.runtime.checked import checked
from dlrover_core.runtime.messages import Message
from dlrover_core.words import plain

TEXT_CHARS_MAX = 500
COMMANDS: Mapping[str, type] = {
    "scale": operations.ScaleGroup,
    "drain": operations.DrainNode,
    "stop": job.StopJob,
    "suspend": job.SuspendJob,
    "resume": job.ResumeJob,
    "quarantine": hosts.QuarantineHost,
    "release": hosts.ReleaseHost,
}
# Without a word on nodes, the command means what it meant before nodes could be released.
_DEFAULTS: Mapping[str, object] = {
    "group": "",
    "nodes_min": 0,
    "reason": "asked over HTTP",
    "keep_nodes": True,
    "lose": False,
}


def command_of(asked: object) -> Message:
    """The command in plain values. Raises `MalformedMessage`, which says what would be right."""
    if not isinstance(asked, Mapping):
        raise MalformedMessage(f'a command is an object like {{"command": "suspend"}}, not {type(asked).__name__}')
    verb = asked.get("command")
    cls = COMMANDS.get(verb) if isinstance(verb, str) else None
    if cls is None:
        raise MalformedMessage(f"there is no command {_shown(verb)}; there are: {', '.join(COMMANDS)}")
    names = cast(Any, cls)._fields
    unknown = sorted(str(name) for name in asked if name not in ("command", "job", *names))
    missing = [name for name in names if name not in asked and name not in _DEFAULTS]
    if unknown or missing:
        raise MalformedMessage(
            f"{verb} takes {', '.join(names)}"
            + (f"; {', '.join(missing)} is missing" if missing else "")
            + (f"; {_shown(', '.join(unknown))} is unknown" if unknown else "")
        )
    return checked(cls, tuple(_clean(asked.get(name, _DEFAULTS.get(name))) for name in names))


def job_of(asked: object) -> str:
    """The job that the sender means; empty: it does not say."""
    name = asked.get("job", "") if isinstance(asked, Mapping) else ""
    return name if isinstance(name, str) else _shown(name)


def _clean(value: object) -> object:
    """Text that can be recorded and shown."""
    return plain(value, TEXT_CHARS_MAX) if isinstance(value, str) else value


def _shown(value: object) -> str:
    # Never the text of a container: it may be nested as deep as a parser allows.
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__
