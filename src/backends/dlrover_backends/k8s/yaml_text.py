"""YAML, which people write templates in and read objects in: read safely, and written in the order of the object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dlrover_core.errors import SpecError


def read_file(path: str, field: str) -> Any:
    """The one document of a YAML or JSON file. Raises `SpecError`."""
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(field, f"{path!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise SpecError(field, f"{path!r} is no YAML, or more than one document: {error}") from error


def written(objects: list[dict[str, Any]]) -> str:
    """Objects as a YAML stream, which ``kubectl apply -f -`` takes."""
    return "".join(
        f"---\n{yaml.safe_dump(one, sort_keys=False, default_flow_style=False, allow_unicode=True)}" for one in objects
    )
