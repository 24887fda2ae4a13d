"""A user's policy: read from its file, and its hook loaded. Both are looked into before anything is started."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import cast

from dlrover_core.diagnosis import policy
from dlrover_core.diagnosis.policy import Hook
from dlrover_core.errors import SpecError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read(path: str) -> str:
    """A policy's file as `JobSpec.policy` holds it. Raises `SpecError` for one that cannot be read, or says what cannot be."""
    try:
        told = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("policy", f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SpecError("policy", f"{path} is not TOML: {error}") from error
    text = policy.of_settings(told).to_json()
    hook(text)
    return text


def hook(text: str) -> Hook | None:
    """The hook that a job's policy names, made; None: it names none. Raises `SpecError` for one that cannot be."""
    name = policy.parsed(text).hook
    if not name:
        return None
    module, _, cls = name.partition(":")
    try:
        if os.getcwd() not in sys.path:
            # As for the script itself: what lies in the working directory can be named.
            sys.path.append(os.getcwd())
        made = getattr(importlib.import_module(module), cls)()
    except Exception as error:  # importing runs a user's code
        raise SpecError("policy.hook", f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(getattr(made, "choose", None)):
        raise SpecError("policy.hook", f"{name} has no method choose(judgement, choice, context)")
    return cast("Hook", made)
