"""Finds a class or function that a person named: ``module:name``, or ``path/to/file.py:name``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from dlrover_core.errors import SpecError


def find(spec: str, field: str = "") -> Any:
    """The object that ``module:name`` or ``path/to/file.py:name`` names.

    Raises `SpecError` that names ``field``, or ``spec`` itself where there is none.
    """
    place, _, name = spec.partition(":")
    field, said = field or spec, f"{spec!r}: " if field else ""
    if not place or not name:
        raise SpecError(
            field, f"{said}write module:name, for instance mypackage.scheduler:MyBackend, or file.py:MyBackend"
        )
    try:
        thing = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ModuleNotFoundError as error:
        known = error.name is not None and (place == error.name or place.startswith(f"{error.name}."))
        why = f"there is no module {error.name!r}" if known else f"importing {place} failed: {error}"
        raise SpecError(field, f"{said}{why}; looked in the current directory and in {sys.prefix}") from error
    except Exception as error:
        raise SpecError(field, f"{said}importing {place} failed: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(thing, part):
            raise SpecError(field, f"{said}{place} has no {name!r}{_like(thing, part)}")
        thing = getattr(thing, part)
    return thing


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise ModuleNotFoundError(f"there is no file {path}")
    # A file called json.py must not become everybody's json.
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of {path}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _like(thing: Any, name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, [one for one in dir(thing) if not one.startswith("_")], 3)
    return f"; there is {', '.join(near)}" if near else ""
