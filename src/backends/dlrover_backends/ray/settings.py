"""What ``--backend ray:KEY=VALUE,...`` says: which cluster, and what each node gets of it.

A value that has commas is written with percent signs (``resources=CPU%3D8%2CGPU%3D8``); `text` writes it so.
"""

from __future__ import annotations

import math
import os
import re
from typing import NamedTuple
from urllib.parse import quote, unquote

from dlrover_core.errors import SpecError
from dlrover_core.runtime.backends import BackendContext

FIELD = "backend"
EVENTS = "RAY_SCHEDULER_EVENTS"
"""With ``0`` Ray's library prints no words of its autoscaler, which are about all jobs of the cluster. Read at its import."""
VARIABLE, AUTO = "RAY_ADDRESS", "auto"
NODE_ID = "ray.io/node-id"
"""The label of a host's id, by which nodes are kept off hosts."""
PART_MIN = 0.0001
"""Ray counts resources in this unit."""
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):([0-9]{1,5})")
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]i?)?B?")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGT", 1)}
_KNOWN = {"cpu": "CPU", "gpu": "GPU", "memory": "memory"}


class Settings(NamedTuple):
    """Arguments of the backend.

    address:     ``HOST:PORT`` of the cluster's state service (GCS); empty: the cluster that this host is a node of
    resources:   what each node gets, as ``CPU=8,GPU=8,memory=64G,custom=1``; empty: the CPUs and GPUs that its workers need
    label:       label selectors of hosts, as ``KEY=SELECTOR``, several joined by ``;``; empty: any host
    runtime_env: a JSON or YAML file with Ray's runtime environment, or the JSON itself; empty: none
    """

    address: str = ""
    resources: str = ""
    label: str = ""
    runtime_env: str = ""

    def labels(self) -> dict[str, str]:
        """Label selectors by key. Raises `SpecError`."""
        return labels_of(tuple(filter(None, self.label.split(";"))))


def read(here: BackendContext) -> Settings:
    """The arguments of a context. Raises `SpecError` with the field, its value, and what to write."""
    texts = here.options(**{key: str(value) for key, value in Settings()._asdict().items()})
    told = Settings(**{key: unquote(value).strip() for key, value in texts.items()})
    check_address(told.address)
    resources_of(told.resources)
    told.labels()
    return told


def text(told: Settings) -> str:
    """The arguments as `read` takes them; empty ones are left out."""
    return ",".join(f"{key}={quote(value, safe=':/.[]')}" for key, value in told._asdict().items() if value)


def address_of(address: str) -> str:
    """The address that Ray will take: what is said, else `VARIABLE`; empty: the cluster that this host is a node of."""
    return next((one for one in (address, os.environ.get(VARIABLE, "")) if one not in {"", AUTO}), "")


def check_address(address: str) -> None:
    """Raises `SpecError` for an address that cannot be a cluster's. Where none is said, it is for that of `VARIABLE`."""
    wanted = address_of(address)
    if not wanted:
        return
    field, name = (FIELD, "address") if wanted == address else ("ray-address", VARIABLE)
    if wanted.startswith("ray://"):
        raise SpecError(
            field,
            f"{name}={wanted!r} is Ray Client's, which cannot start actors that outlive the command: run this on a machine of "
            f"the cluster with {name}=HOST:6379, or send it there with ray job submit",
        )
    if wanted.startswith(("http://", "https://")):
        remedy = "name the head as HOST:6379" if wanted == address else "unset it, or name the head as HOST:6379"
        raise SpecError(field, f"{name}={wanted!r} is the address of Ray's job server: {remedy}")
    found = _ADDRESS.fullmatch(wanted)
    if found is None or not 0 < int(found[2]) < 65536:
        raise SpecError(field, f"{name}={wanted!r} is not HOST:PORT of a Ray cluster, such as 10.0.0.1:6379")


def resources_of(text: str) -> dict[str, float]:
    """Resources by Ray's names: ``CPU``, ``GPU``, ``memory`` in bytes, and the cluster's own. Raises `SpecError`."""
    found: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = part.partition("=")
        name = _KNOWN.get(name.lower(), name)
        if not equals or not name:
            raise SpecError(FIELD, f"resources={text!r}: {part!r} is not NAME=AMOUNT; write CPU=8,GPU=8,memory=64G")
        if name in found:
            raise SpecError(FIELD, f"resources={text!r}: {name} stands twice")
        amount = _bytes(value) if name == "memory" else _amount(value)
        if amount is None:
            form = "memory=64G, or a number of bytes" if name == "memory" else f"{name}=2, a number from 0"
            raise SpecError(FIELD, f"resources={text!r}: {name}={value!r} is no amount; write {form}")
        if 0 < amount < PART_MIN:
            raise SpecError(
                FIELD,
                f"resources={text!r}: {name}={value!r}: Ray gives parts from {PART_MIN:g}; write {name}={PART_MIN:g}, more or 0",
            )
        if amount > 1 and amount != int(amount):
            raise SpecError(
                FIELD, f"resources={text!r}: {name}={value!r}: Ray gives parts only of one; write a whole number"
            )
        found[name] = amount
    if found and not any(found.values()):
        raise SpecError(
            FIELD, f"resources={text!r}: nothing but 0: Ray places nothing without a resource; write CPU={PART_MIN:g}"
        )
    return found


def labels_of(texts: tuple[str, ...]) -> dict[str, str]:
    """Label selectors by key, from ``KEY=SELECTOR`` each. Raises `SpecError`."""
    found: dict[str, str] = {}
    for one in texts:
        key, equals, selector = (part.strip() for part in one.partition("="))
        if not equals or not key or not selector:
            raise SpecError(
                FIELD, f"label={one!r} is not KEY=SELECTOR; write zone=a, zone=in(a,b), zone=!a or zone=!in(a,b)"
            )
        if key == NODE_ID:
            raise SpecError(
                FIELD,
                f"label={one!r}: the job itself keeps its nodes off hosts by {key}; give the hosts a label of your own",
            )
        if key in found:
            raise SpecError(FIELD, f"label={one!r}: {key} stands twice; one selector may name several values: in(a,b)")
        found[key] = selector
    return found


def _bytes(text: str) -> float | None:
    found = _BYTES.fullmatch(text)
    return None if found is None else float(int(float(found[1]) * _UNITS[found[2] or ""]))


def _amount(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if found >= 0 and math.isfinite(found) else None
