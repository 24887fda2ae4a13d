"""Ray's runtime environment of a job's nodes: read once, by the command that was typed, and then carried along.

Nodes are launched hours later, by masters on other hosts. So what the file says, and what the requirements files say that it
names, travels as JSON. It may have secrets in ``env_vars``: no other process sees it among the words of a command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrover_backends.ray import requirements
from dlrover_backends.ray.requirements import FIELD, SENT
from dlrover_core.errors import SpecError

SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
BYTES_MAX = 512 * 1024
"""Ray keeps it for each actor, a dead one too, in the memory of the cluster's state service."""
ENV_VARS_BYTES_MAX = 96 * 1024
"""Ray hands ``env_vars`` to a worker in one word of a command line, which Linux limits to 128 KiB."""
_FOLDERS = frozenset({"working_dir", "py_modules", "excludes"})


def read(text: str, cwd: str, outer: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The runtime environment that a JSON or YAML file, or a text of JSON itself, says; empty: ``outer`` alone.

    Folders and files in it are relative to ``cwd``. Of requirements files it has the lines, and of a file for conda what that
    says. ``outer``: what it is laid over (`submitted`), which Ray has read already. Raises `SpecError`.
    """
    found = _mapping(text, cwd) if text else {}
    folder = found.get("working_dir")
    if isinstance(folder, str):
        found["working_dir"] = _path(folder, cwd)
    modules = found.get("py_modules")
    if isinstance(modules, list):
        found["py_modules"] = [_path(one, cwd) if isinstance(one, str) else one for one in modules]
    for by in ("pip", "uv"):
        told = found.get(by)
        if isinstance(told, Mapping) and "packages" in told:
            found[by] = {**told, "packages": requirements.packages(told["packages"], Path(cwd), by)}
        elif told is not None:
            found[by] = requirements.packages(told, Path(cwd), by)
    if "conda" in found:
        found["conda"] = _conda(found["conda"], cwd)
    found = joined(outer or {}, found)
    _check(found, called(text))
    return found


def called(text: str) -> str:
    """What people call it: its file, or what it is where it was not read from one. It may have secrets."""
    return repr(text) if text and not text.startswith("{") else "the text"


def held(env: Mapping[str, Any]) -> str:
    """The path of a file that says this, in the memory of this process. It lives as long as this process.

    Processes of this user read it there, such as masters that this process starts, and nobody else. Nothing is left on disk.
    """
    fd = os.memfd_create("dlrover-runtime-env")
    with open(fd, "w", encoding="utf-8", closefd=False) as file:
        json.dump(env, file)
    return f"/proc/{os.getpid()}/fd/{fd}"


def submitted(environ: Mapping[str, str]) -> dict[str, Any]:
    """The runtime environment with which ``ray job submit`` has sent this command; empty: it was not.

    Nodes get it too, and nodes that are launched when this command is over do not inherit it.
    """
    try:
        told = json.loads(environ.get(SUBMITTED, ""))["runtime_env"]
    except (ValueError, LookupError, TypeError):
        return {}
    return {key: value for key, value in told.items() if not key.startswith("_")} if isinstance(told, Mapping) else {}


def joined(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """A runtime environment over another one, as Ray joins them: key by key, and ``env_vars`` by their names."""
    found = {**outer, **inner}
    if isinstance(outer.get("env_vars"), Mapping) and isinstance(inner.get("env_vars"), Mapping):
        found["env_vars"] = {**outer["env_vars"], **inner["env_vars"]}
    return found


def _path(written: str, cwd: str) -> str:
    """A folder or a file of this host; an address stays."""
    return written if "://" in written else str(Path(cwd, written).resolve())


def _mapping(text: str, cwd: str) -> dict[str, Any]:
    """What a file, or a text of JSON, says. Raises `SpecError`."""
    name = called(text)
    if text.startswith("{"):
        found = _parsed(text, name, is_json=True)
    else:
        found = _parsed(
            requirements.text_of(Path(cwd, text), f"runtime_env={name}"), name, is_json=text.endswith(".json")
        )
    if not isinstance(found, Mapping):
        raise SpecError(FIELD, f"runtime_env={name} holds no mapping; write working_dir: ., pip: [...], env_vars: ...")
    return dict(found)


def _conda(told: object, cwd: str) -> object:
    """What conda is told, with what a file of it says. A name, and a folder, are of environments that hosts have.

    Raises `SpecError`.
    """
    folder = Path(cwd)
    if isinstance(told, str):
        if Path(told).suffix not in {".yaml", ".yml"}:  # as Ray tells them apart
            return told
        file = Path(cwd, told).resolve()
        folder, name = file.parent, str(file)
        told = _parsed(requirements.text_of(file, f"{name}, which conda of the runtime environment names,"), repr(name))
        if not isinstance(told, Mapping):
            raise SpecError(FIELD, f"{name}, which conda of the runtime environment names, holds no mapping")
    if not isinstance(told, Mapping) or not isinstance(told.get("dependencies"), list):
        return told
    return {**told, "dependencies": [_with_packages(one, folder) for one in told["dependencies"]]}


def _with_packages(one: object, folder: Path) -> object:
    """A dependency of conda's; that on pip has a list of what pip installs."""
    if not isinstance(one, Mapping) or not isinstance(one.get("pip"), list):
        return one
    return {**one, "pip": requirements.packages(one["pip"], folder, "conda")}


def _check(env: Mapping[str, Any], name: str) -> None:
    """Refuse what cannot be carried. Raises `SpecError`."""
    own = {
        key: value for key, value in env.items() if key not in _FOLDERS
    }  # masters elsewhere have others, of other lengths
    try:
        size, variables = (len(json.dumps(one)) for one in (own, env.get("env_vars")))
    except (TypeError, ValueError) as error:
        raise SpecError(FIELD, f"runtime_env={name}: {error}; write that value in quotes") from error
    if variables > ENV_VARS_BYTES_MAX:
        raise SpecError(
            FIELD,
            f"runtime_env={name}: env_vars have {variables >> 10} KiB, and Ray takes {ENV_VARS_BYTES_MAX >> 10}: put long values "
            "into a file in working_dir",
        )
    if size > BYTES_MAX:
        raise SpecError(
            FIELD,
            f"runtime_env={name} has {size >> 10} KiB with the files that it names, and at most {BYTES_MAX >> 10} go with each "
            f"node: put a requirements file into working_dir, and write pip: ['-r {SENT}/requirements.txt']",
        )


def _parsed(raw: str, name: str, *, is_json: bool = False) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        if is_json:
            raise SpecError(FIELD, f"runtime_env={name} is not JSON: {error}") from error
    import yaml  # Ray brings it

    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError as error:
        # Its own words have the line, which may be a secret.
        raise SpecError(FIELD, f"runtime_env={name} is no YAML, or more than one document: {_where(error)}") from None


def _where(error: Exception) -> str:
    """What is wrong in a text, and where, without its words."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return str(problem) + (f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else "")
