"""A job file: `dlrover-run --job FILE.toml` reads it here, and tells everything that is wrong with it before anything is started.

Every error names the field by its path in the file (`groups.rollout.nodes`), its value, and what to write instead.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dlrover_adapters.cli import usage
from dlrover_adapters.cli.job_fields import GROUP_FIELDS, HINTS, JOB_FIELDS, RESOURCE_FIELDS, Field, named
from dlrover_adapters.cli.job_kinds import GROUP_NAME, Wrong, shown
from dlrover_core.errors import SpecError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROGRAMS = ("program", "module", "command")
NONE = "none"
RESERVED = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("DLROVER_TOKEN", "DLROVER_GROUP", "DLROVER_PLACE", "DLROVER_NODE", "DLROVER_AGENT_SOCKET"),
        *("DLROVER_PEERS", "DLROVER_LISTEN"),
    )
)
"""Variables that every worker gets from us."""

_BYTES_MAX = 1024 * 1024


class GroupFile(NamedTuple):
    """One group, as a job file has it.

    name:      the group's
    spec:      fields of its `GroupSpec`
    options:   options of `dlrover-run`, as if they had been typed for this group alone
    env:       environment variables of its workers, the job's own included
    framework: ``torch``, ``none``, or a module
    """

    name: str
    spec: Mapping[str, Any]
    options: Mapping[str, Any]
    env: Mapping[str, str] = {}
    framework: str = "torch"


class JobFile(NamedTuple):
    """A job file that could be read.

    path:      where it lies, as it was named
    options:   options of `dlrover-run` for the whole job
    durations: durations of the job's spec, in seconds
    groups:    in the file's order
    """

    path: str
    options: Mapping[str, Any]
    durations: Mapping[str, float]
    groups: tuple[GroupFile, ...]


def read(path: str) -> JobFile:
    """The job in a file. Raises `SpecError`."""
    if os.path.isdir(path):
        raise SpecError("job", f"{path!r} is a folder; name the file in it")
    try:
        with open(path, "rb") as file:
            data = file.read(_BYTES_MAX + 1)
        if len(data) > _BYTES_MAX:
            raise SpecError("job", f"{path!r} has more than {_BYTES_MAX} bytes: that is no job file")
        raw = tomllib.loads(data.decode())
    except OSError as error:
        raise SpecError("job", f"{path!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError("job", f"{path!r} is not text in UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SpecError("job", f"{path!r} is not TOML: {error}") from error
    return parsed(raw, path)


def parsed(raw: Mapping[str, Any], path: str) -> JobFile:
    """The job in the tables of a file that lies at ``path``. Raises `SpecError`."""
    folder = Path(path).absolute().parent
    found = _section("", {name: one for name, one in raw.items() if name != "groups"}, JOB_FIELDS, folder, ("groups",))
    groups = raw.get("groups")
    if groups is None:
        near = "; write the table as [groups.NAME]" if "group" in raw else ""
        raise SpecError("groups", f"missing: a job has at least one, as a table [groups.trainer]{near}")
    if not isinstance(groups, Mapping):
        raise SpecError("groups", f"{shown(groups)} is not a table; write [groups.trainer]")
    if not groups:
        raise SpecError("groups", "the table is empty; write [groups.trainer] and its program")
    _check_env("env", found.get("env", {}))
    made = tuple(_group(name, one, folder, found.get("env", {})) for name, one in groups.items())
    _check_together(made)
    options = {one.option: found[one.name] for one in JOB_FIELDS if one.option and one.name in found}
    if "detect" in options:
        options["detect"] = "on" if options["detect"] else "off"
    durations = {one.name: found[one.name] for one in JOB_FIELDS if one.name.endswith("_s") and one.name in found}
    return JobFile(path, options, durations, made)


def _section(
    path: str, raw: object, fields: tuple[Field, ...], folder: Path, beside: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The values of one table, by the fields' own names. ``beside``: names that the table has besides. Raises `SpecError`."""
    if not isinstance(raw, Mapping):
        raise SpecError(path, f"{shown(raw)} is not a table; write [{path}]")
    known, found = named(fields), dict[str, Any]()
    for name, value in raw.items():
        if name not in known:
            raise _unknown(path, name, (*known, *beside))
        field = known[name]
        if field.name in found:
            raise SpecError(
                _at(path, name), f"is another name of {field.name}, which is given too; leave one of them out"
            )
        try:
            read = field.kind.read(value)
        except Wrong as wrong:
            raise SpecError(_at(path, name) + wrong.below, str(wrong)) from wrong
        found[field.name] = _beside(folder, read) if field.path else read
    return found


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unknown(path: str, name: str, known: tuple[str, ...]) -> SpecError:
    """Names what somebody may have meant, and else all there are."""
    where = f"a field of {path}" if path else "a field of a job file"
    hint = HINTS.get(name, "")
    if hint and (hint.partition(".")[0] in known or hint.startswith(("program,", "resources"))):
        return SpecError(_at(path, name), f"is not {where} (did you mean {hint}?)")
    near = usage.meant(name, known)
    more = near or f"; there are: {', '.join(sorted(known))}"
    return SpecError(_at(path, name), f"is not {where}{more}")


def _beside(folder: Path, name: str) -> str:
    """A path as it is meant: relative ones begin where the job file lies."""
    return os.path.normpath(folder / name)


# ---- groups


def _group(name: str, raw: object, folder: Path, shared: Mapping[str, str]) -> GroupFile:
    path = f"groups.{name}"
    if not re.fullmatch(GROUP_NAME, name):
        raise SpecError(path, f"{name!r} cannot name a group; write lower-case letters and digits, a letter first")
    if not isinstance(raw, Mapping):
        raise SpecError(path, f"{shown(raw)} is not a table; write [{path}]")
    rest = {key: one for key, one in raw.items() if key != "resources"}
    found = _section(path, rest, GROUP_FIELDS, folder, ("resources",))
    resources = _section(f"{path}.resources", raw.get("resources", {}), RESOURCE_FIELDS, folder)
    framework = found.get("framework", "torch")
    _check_env(f"{path}.env", found.get("env", {}))
    _check_framework(path, found, framework)
    least, most = _size(path, found)
    spec = {one.spec: found[one.name] for one in GROUP_FIELDS if one.spec and one.name in found}
    spec |= {one.spec: resources[one.name] for one in RESOURCE_FIELDS if one.name in resources}
    spec |= {"nodes_min": least, "nodes_max": most}
    if framework == NONE:
        spec.setdefault("store", False)
    # What the job's spec has of its own is no option of one group.
    options = {one.option: found[one.name] for one in GROUP_FIELDS if one.option and not one.spec and one.name in found}
    options |= _program(path, found, folder)
    options["nproc_per_node"] = found.get("processes", "1")
    options.setdefault("role", name)
    return GroupFile(name, spec, options, {**shared, **found.get("env", {})}, framework)


def _program(path: str, found: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The program of a group as options. Raises `SpecError`."""
    given = [one for one in PROGRAMS if one in found]
    if not given:
        raise SpecError(path, 'names no program; write program = "train.py", or module = ..., or command = ...')
    if len(given) > 1:
        raise SpecError(
            f"{path}.{given[1]}", f"{given[0]} is given too: a group runs one program; leave one of them out"
        )
    kind, args = given[0], list(found.get("args", ()))
    script = found[kind]
    if kind == "command":
        script, *first = found[kind]
        args = [*first, *args]
        script = _beside(folder, script) if "/" in script else script
    if kind == "program" and not os.path.isfile(script) and not os.path.isdir(script):
        raise SpecError(
            f"{path}.program",
            f"{script!r} is not a file; paths begin where the job file lies. For a module write module, for another program "
            "command",
        )
    preload = found.get("preload", "")
    if kind == "command" and preload not in ("", "none", "auto"):
        raise SpecError(f"{path}.preload", f"{preload!r}, but nothing is imported for a command; leave one of them out")
    return {
        "script": script,
        "arguments": args,
        "module": kind == "module",
        "no_python": kind == "command",
        "run_path": False,
    }


def _size(path: str, found: Mapping[str, Any]) -> tuple[int, int]:
    """The fewest and the most nodes. Raises `SpecError`."""
    ranged = [one for one in ("minReplicas", "maxReplicas") if one in found]
    given = [one for one in ("nodes", "replicas") if one in found] + ranged[:1]
    if len(given) > 1:
        raise SpecError(
            f"{path}.{given[1]}", f"{given[0]} is given too: both say how many nodes; leave one of them out"
        )
    if len(ranged) == 1:
        other = "maxReplicas" if ranged == ["minReplicas"] else "minReplicas"
        raise SpecError(f"{path}.{ranged[0]}", f"needs {other} beside it; for a fixed number write replicas")
    if ranged:
        least, most = found["minReplicas"], found["maxReplicas"]
        if least > most:
            raise SpecError(f"{path}.minReplicas", f"{least} is more than maxReplicas, {most}; write the smaller first")
        return least, most
    if "replicas" in found:
        return found["replicas"], found["replicas"]
    least, most = found.get("nodes", (1, 1))
    return least, most


def _check_env(path: str, env: Mapping[str, str]) -> None:
    for name in env:
        if name in RESERVED:
            raise SpecError(f"{path}.{name}", "is set for every worker by dlrover-run; leave it out")


def _check_framework(path: str, found: Mapping[str, Any], framework: str) -> None:
    if framework != NONE:
        return
    if found.get("store"):
        raise SpecError(
            f"{path}.store", 'true, but the store is torch\'s, and framework is "none"; leave one of them out'
        )
    if "numa_binding" in found:
        raise SpecError(
            f"{path}.numa_binding",
            f'{found["numa_binding"]!r}, but torch is asked for it, and framework is "none"; leave one of them out',
        )


def _check_together(groups: tuple[GroupFile, ...]) -> None:
    """What groups say of each other. Raises `SpecError`."""
    names = [one.name for one in groups]
    for group in groups:
        path, uses = f"groups.{group.name}", group.spec.get("uses", ())
        for used in uses:
            if used not in names:
                near = usage.meant(used, names) or f"; there are: {', '.join(sorted(names))}"
                raise SpecError(f"{path}.uses", f"{used!r} is not a group of this job{near}")
            if used == group.name and group.spec.get("coupling") != "each":
                raise SpecError(
                    f"{path}.uses", f'{used!r} is this group itself; leave it out, or write coupling = "each"'
                )
        if len(set(uses)) != len(uses):
            raise SpecError(f"{path}.uses", f"{', '.join(uses)}: one of them stands there twice; leave one out")
        if group.spec.get("set") and group.spec.get("coupling") == "each":
            raise SpecError(
                f"{path}.set",
                f'{group.spec["set"]!r}, but with coupling = "each" every node is a set; leave one of them out',
            )
    if not any(group.spec.get("ends", True) and group.spec.get("critical", True) for group in groups):
        raise SpecError(
            "groups",
            "all say ends = false or critical = false: nobody could tell when the job is over; leave them out of one",
        )
