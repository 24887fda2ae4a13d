"""The options of ``--backend ray``: which cluster, and what each node gets of it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dlrover_adapters.cli.torchrun_flags import Given, Options
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_core.runtime.backends import Choice

RAY = "ray"
FLAGS = ("ray_address", "resources", "label", "runtime_env")
_REMOTE = "://"
_NO_FILES = frozenset({"env_vars", "config"})
"""Parts of a runtime environment by which no script and no module comes to a host."""
_FOLDERS = frozenset({"working_dir", "py_modules", "image_uri", "container"})
"""Parts by which a script may come."""
_IMAGES = frozenset({"image_uri", "container"})
"""Parts with which a host has other files than this one."""


def arguments(group: argparse._ArgumentGroup) -> None:
    """Which cluster, and what each node gets."""
    group.add_argument(
        "--ray-address",
        action=Given,
        default=None,
        metavar="HOST:PORT",
        help="with --backend ray: the head of the cluster (default: RAY_ADDRESS, else the cluster that this host belongs to)",
    )
    group.add_argument(
        "--resources",
        action=Given,
        default=None,
        metavar="NAME=AMOUNT,...",
        help="with --backend ray: what each node gets, such as CPU=8,GPU=8,memory=64G,custom=1 (default: a CPU for each worker, "
        "and a GPU where the cluster has any)",
    )
    group.add_argument(
        "--label",
        action="append",
        default=None,
        metavar="KEY=SELECTOR",
        help="with --backend ray: only hosts with this label: zone=a, zone=in(a,b), zone=!a or zone=!in(a,b); may be repeated",
    )
    group.add_argument(
        "--runtime-env",
        action=Given,
        default=None,
        metavar="FILE",
        help="with --backend ray: Ray's runtime environment for each node, as YAML or JSON (working_dir, pip, env_vars)",
    )


def named(options: Options) -> str | None:
    """The backend with its arguments, the options among them; None: none of them is given. Raises `SpecError`."""
    given = [name for name in FLAGS if getattr(options, name, None) is not None]
    chosen, _, args = (str(options.backend) if options.backend is not None else "").partition(":")
    if not given:
        return None
    if chosen != RAY:
        raise SpecError(
            given[0].replace("_", "-"),
            f"{getattr(options, given[0])!r} is for --backend ray, and the backend is {options.backend or 'local'}",
        )
    from dlrover_backends.ray import settings

    told = settings.Settings(
        address=options.ray_address or "",
        resources=options.resources or "",
        label=";".join(options.label or ()),
        runtime_env=options.runtime_env or "",
    )
    for name in given:
        if not getattr(options, name):
            raise SpecError(
                name.replace("_", "-"), f"{getattr(options, name)!r} is empty: leave it out, or say what it is"
            )
    settings.check_address(told.address)
    settings.resources_of(told.resources)
    settings.labels_of(tuple(options.label or ()))
    return f"{RAY}:{args}{',' if args else ''}{settings.text(told)}"


def check(options: Options) -> None:
    """Refuse a script that no node will have: that is not in its working directory, or not here. Raises `SpecError`."""
    text, script = _runtime_env(options), options.script
    if not is_ray(options) or not hasattr(options, "module"):  # `dlrover master` has a job's file
        return
    if script is None or options.module or options.no_python:
        return
    from dlrover_backends.ray import runtime_env

    outer = runtime_env.submitted(os.environ)
    if not text:
        _check_submitted(outer, script)
        return
    env, file = runtime_env.read(text, os.getcwd(), outer), "the text" if text.startswith("{") else text
    folder = env.get("working_dir")
    if not env.keys() & _FOLDERS and not Path(script).exists():
        raise SpecError(
            "training_script",
            f"{script!r} is not here, and {file} brings no files: correct the name, or say working_dir in it",
        )
    if not isinstance(folder, str) or _REMOTE in folder or Path(folder).is_file():  # an archive
        return
    if Path(script).is_absolute() and not Path(script).exists() and not env.keys() & _IMAGES:
        raise SpecError(
            "training_script", f"{script!r} is not here: name it as it is called in {folder}, the working_dir of {file}"
        )
    if not Path(script).is_absolute() and not Path(folder, script).is_file():
        raise SpecError(
            "training_script",
            f"{script!r} is not in {folder}, the working_dir of {file}: name it as it is called in there",
        )


def _check_submitted(env: Mapping[str, object], script: str) -> None:
    """Under ``ray job submit`` Ray has unpacked here what nodes get, and Python's path names that folder. Raises `SpecError`."""
    if env.keys() & _FOLDERS != {"working_dir"} or Path(script).is_absolute():
        return
    if not any(Path(folder, script).exists() for folder in (os.getcwd(), *sys.path)):
        raise SpecError(
            "training_script",
            f"{script!r} is not in the folder that ray job submit has sent: name it as it is called in there, or submit with the "
            "--working-dir that has it",
        )


def has_files(options: argparse.Namespace) -> bool:
    """Do nodes get files of their own, so that a program which is not here may be there?"""
    if not is_ray(options):
        return False
    from dlrover_backends.ray import runtime_env

    if runtime_env.submitted(os.environ).get("working_dir"):
        return True
    text = _runtime_env(options)
    return bool(text) and not runtime_env.read(text, os.getcwd()).keys() <= _NO_FILES


def carried(choice: Choice) -> Choice:
    """The same choice, with what the file of its runtime environment says now, and the files that this one names.

    Masters read it from this process's memory: what becomes of those files later is no matter. Raises `SpecError`.
    """
    from dlrover_backends.ray import runtime_env, settings
    from dlrover_core.runtime.backends import BackendContext

    told = settings.read(BackendContext("job", "", (), "", args=choice.args))
    if not told.runtime_env:
        return choice
    held = runtime_env.held(runtime_env.read(told.runtime_env, os.getcwd()))
    return choice._replace(args=settings.text(told._replace(runtime_env=held)))


def _runtime_env(options: argparse.Namespace) -> str:
    """The runtime environment that the options name, or the backend's arguments; empty: none. Raises `SpecError`."""
    if not is_ray(options):
        return ""
    from urllib.parse import unquote

    parts = str(options.backend).partition(":")[2].split(",")
    named = [one.partition("=")[2] for one in parts if one.startswith("runtime_env=")]
    return str(getattr(options, "runtime_env", None) or unquote("".join(named)).strip())


def is_ray(options: argparse.Namespace) -> bool:
    """Is it Ray that starts the nodes?"""
    return options.backend is not None and str(options.backend).partition(":")[0] == RAY
