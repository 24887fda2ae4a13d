"""YAML, which people write templates in and read objects in: read safely, and written in the order of the object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlrover_core.errors import SpecError


def read_file(path: str, field: str) -> Any:
    """The one document of a YAML or JSON file. Raises `SpecError`."""
    found = read_all(path, field)
    if len(found) > 1:
        raise SpecError(field, f"{path!r} has {len(found)} documents: leave one")
    return found[0] if found else None


def read_all(path: str, field: str) -> list[Any]:
    """All documents of a YAML or JSON file. Raises `SpecError`."""
    import yaml  # masters in pods have no template in a file, and must be quick to lead

    try:
        return list(yaml.safe_load_all(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(field, f"{path!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise SpecError(field, f"{path!r} is no YAML: {error}") from error


def written(objects: list[dict[str, Any]]) -> str:
    """Objects as a YAML stream, which ``kubectl apply -f -`` takes."""
    import yaml

    return "".join(
        f"---\n{yaml.safe_dump(one, sort_keys=False, default_flow_style=False, allow_unicode=True)}" for one in objects
    )
