"""Kinds of values in a job file. Each kind reads a value, describes itself in JSON schema, and names itself for people.

A kind knows nothing of where its value stands. Whoever reads a file adds the path (`groups.rollout.nodes`) to what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dlrover_adapters.cli import usage
from dlrover_core.spec import NODES_MAX

SECONDS_MAX = 10**9
COUNT_MAX = 10**9
GROUP_NAME = "[a-z][a-z0-9]*"
_VARIABLE = "[A-Za-z_][A-Za-z0-9_]*"
_MODULE = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
_CPU = r"[0-9]+m|[0-9]+(\.[0-9]+)?"
_MEMORY = r"[0-9]+(\.[0-9]+)?([KMGT]i?)?"
_NODES = "[0-9]{1,6}(:[0-9]{1,6})?"
_STREAMS = "[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*"
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class Wrong(Exception):
    """A value is not of its kind. The text says what would be; ``below`` is where in the value it is wrong."""

    def __init__(self, text: str, below: str = "") -> None:
        super().__init__(text)
        self.below = below


class Kind(Protocol):
    """One kind of values."""

    def read(self, value: object) -> Any:
        """The value as the rest of the program takes it. Raises `Wrong`."""

    def schema(self) -> dict[str, Any]:
        """What JSON schema says of a value of this kind."""

    def words(self) -> str:
        """The kind in a few words, for a table."""


def shown(value: object) -> str:
    """A value as it may stand in an error."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_whole(value: object) -> bool:
    """Is it an integer? TOML's booleans are none, though Python's are."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Text:
    """A text that is not empty. ``of``: what it names, for people."""

    of: str = "text"
    pattern: str = ""
    example: str = ""

    def read(self, value: object) -> str:
        """The text."""
        if isinstance(value, str) and value and "\0" not in value and re.fullmatch(self.pattern or "(?s:.+)", value):
            return value
        raise Wrong(
            f"{shown(value)} is not {_a(self.of)}" + (f"; say for example {self.example}" if self.example else "")
        )

    def schema(self) -> dict[str, Any]:
        """A string."""
        found: dict[str, Any] = {"type": "string", "minLength": 1}
        return {**found, "pattern": f"^({self.pattern})$"} if self.pattern else found

    def words(self) -> str:
        """What it names."""
        return self.of


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    among: tuple[str, ...]

    def read(self, value: object) -> str:
        """The word."""
        if isinstance(value, str) and value in self.among:
            return value
        near = usage.meant(value, self.among) if isinstance(value, str) else ""
        raise Wrong(f"{shown(value)} is none of {', '.join(map(repr, self.among))}{near}")

    def schema(self) -> dict[str, Any]:
        """An enumeration."""
        return {"enum": list(self.among)}

    def words(self) -> str:
        """The words."""
        return " or ".join(f'"{one}"' for one in self.among)


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def read(self, value: object) -> bool:
        """As it is."""
        if isinstance(value, bool):
            return value
        raise Wrong(f"{shown(value)} is neither true nor false; write it without quotes")

    def schema(self) -> dict[str, Any]:
        """A boolean."""
        return {"type": "boolean"}

    def words(self) -> str:
        """Both."""
        return "true or false"


@dataclass(frozen=True)
class Count:
    """A whole number from ``least`` on."""

    least: int = 0
    most: int = COUNT_MAX

    def read(self, value: object) -> int:
        """As it is."""
        if isinstance(value, int) and is_whole(value) and self.least <= value <= self.most:
            return value
        bounds = f"from {self.least}" + (f" to {self.most}" if self.most != COUNT_MAX else " on")
        quotes = "; write it without quotes" if isinstance(value, str) and value.isdecimal() else ""
        raise Wrong(f"{shown(value)} is not a whole number {bounds}{quotes}")

    def schema(self) -> dict[str, Any]:
        """An integer."""
        return {"type": "integer", "minimum": self.least, "maximum": self.most}

    def words(self) -> str:
        """Its bounds."""
        return (
            f"whole number, {self.least} to {self.most}"
            if self.most != COUNT_MAX
            else f"whole number from {self.least}"
        )


@dataclass(frozen=True)
class Seconds:
    """A number of seconds, with or without a fraction."""

    positive: bool = False

    def read(self, value: object) -> float:
        """As a float."""
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(value, (int, float)) and numeric and 0 <= value < SECONDS_MAX and (value or not self.positive):
            return float(value)
        least = "more than 0" if self.positive else "0 or more"
        raise Wrong(f"{shown(value)} is not a number of seconds, {least}; write for example 30")

    def schema(self) -> dict[str, Any]:
        """A number."""
        least = {"exclusiveMinimum": 0} if self.positive else {"minimum": 0}
        return {"type": "number", **least, "exclusiveMaximum": SECONDS_MAX}

    def words(self) -> str:
        """The unit."""
        return "seconds"


@dataclass(frozen=True)
class Texts:
    """A list of texts."""

    of: Text = Text()
    least: int = 0

    def read(self, value: object) -> tuple[str, ...]:
        """As a tuple."""
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise Wrong(f'{shown(value)} is not a list; write ["...", "..."]')
        if len(value) < self.least:
            raise Wrong("the list is empty; name at least one")
        return tuple(_read_below(self.of, one, f"[{place}]") for place, one in enumerate(value))

    def schema(self) -> dict[str, Any]:
        """An array."""
        least = {"minItems": self.least} if self.least else {}
        return {"type": "array", "items": self.of.schema(), **least}

    def words(self) -> str:
        """What it lists."""
        return f"list of {self.of.words()}s"


@dataclass(frozen=True)
class Arguments:
    """A list of texts of which any may be empty: the words of a command line."""

    def read(self, value: object) -> tuple[str, ...]:
        """As a tuple."""
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise Wrong(f'{shown(value)} is not a list; write ["--lr", "0.1"]')
        for place, one in enumerate(value):
            if not isinstance(one, str) or "\0" in one:
                raise Wrong(f"{shown(one)} is not a text; put it into quotes", f"[{place}]")
        return tuple(value)

    def schema(self) -> dict[str, Any]:
        """An array of strings."""
        return {"type": "array", "items": {"type": "string"}}

    def words(self) -> str:
        """What it lists."""
        return "list of texts"


@dataclass(frozen=True)
class Command:
    """A program with its first arguments: one text, which is not split, or a list."""

    def read(self, value: object) -> tuple[str, ...]:
        """Always a tuple."""
        if isinstance(value, str):
            return (Text("program").read(value),)
        found = Arguments().read(value)
        if not found or not found[0]:
            raise Wrong('name a program; write ["./serve", "--port", "8000"]')
        return found

    def schema(self) -> dict[str, Any]:
        """A string or an array."""
        words = {"type": "array", "items": {"type": "string"}, "prefixItems": [{"minLength": 1}], "minItems": 1}
        return {"oneOf": [{"type": "string", "minLength": 1}, words]}

    def words(self) -> str:
        """Both forms."""
        return "program, or list of a program and its arguments"


@dataclass(frozen=True)
class Variables:
    """Environment variables: a table of texts."""

    def read(self, value: object) -> dict[str, str]:
        """Numbers and booleans must be quoted: which text would they be?"""
        if not isinstance(value, Mapping):
            raise Wrong(f'{shown(value)} is not a table; write {{ NAME = "value" }}')
        for name, one in value.items():
            if not re.fullmatch(_VARIABLE, name):
                raise Wrong(f"{name!r} is not the name of an environment variable", f".{name}")
            if not isinstance(one, str) or "\0" in one:
                raise Wrong(f"{shown(one)} is not a text; put it into quotes", f".{name}")
        return dict(value)

    def schema(self) -> dict[str, Any]:
        """An object of strings."""
        names = {"pattern": f"^({_VARIABLE})$"}
        return {"type": "object", "propertyNames": names, "additionalProperties": {"type": "string"}}

    def words(self) -> str:
        """What it holds."""
        return "table of texts"


@dataclass(frozen=True)
class Nodes:
    """A number of nodes, or the fewest and the most as ``"MIN:MAX"``."""

    def read(self, value: object) -> tuple[int, int]:
        """Fewest and most."""
        low, high = self._parts(value)
        if 1 <= low <= high <= NODES_MAX:
            return low, high
        raise Wrong(f"{shown(value)}: need 1 <= MIN <= MAX <= {NODES_MAX}")

    @staticmethod
    def _parts(value: object) -> tuple[int, int]:
        if isinstance(value, int) and is_whole(value):
            return value, value
        if isinstance(value, str) and re.fullmatch(_NODES, value):
            low, colon, high = value.partition(":")
            return int(low), int(high if colon else low)
        raise Wrong(f'{shown(value)} is neither a whole number nor "MIN:MAX"; write for example 4, or "2:4"')

    def schema(self) -> dict[str, Any]:
        """An integer, or a string of a form. That MIN is at most MAX is more than a schema says."""
        number = {"type": "integer", "minimum": 1, "maximum": NODES_MAX}
        return {"oneOf": [number, {"type": "string", "pattern": f"^({_NODES})$"}]}

    def words(self) -> str:
        """Both forms."""
        return 'whole number, or "MIN:MAX"'


@dataclass(frozen=True)
class Processes:
    """Workers per node: a number, or by the devices of the host."""

    def read(self, value: object) -> str:
        """As `--nproc-per-node` has it."""
        if value in ("auto", "cpu", "gpu", "xpu") and isinstance(value, str):
            return value
        if isinstance(value, int) and is_whole(value) and value >= 1:
            return str(value)
        raise Wrong(f'{shown(value)} is neither a whole number from 1 on nor one of "auto", "cpu", "gpu", "xpu"')

    def schema(self) -> dict[str, Any]:
        """An integer, or one of four words."""
        return {"oneOf": [{"type": "integer", "minimum": 1}, {"enum": ["auto", "cpu", "gpu", "xpu"]}]}

    def words(self) -> str:
        """Both forms."""
        return 'whole number from 1, "auto", "cpu", "gpu" or "xpu"'


@dataclass(frozen=True)
class Cpus:
    """CPUs as Kubernetes writes them: ``4``, ``0.5`` or ``"500m"``."""

    def read(self, value: object) -> int:
        """In thousandths."""
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= COUNT_MAX:
            return round(value * 1000)
        if isinstance(value, str) and re.fullmatch(_CPU, value) and len(value) <= 12:
            return int(value[:-1]) if value.endswith("m") else round(float(value) * 1000)
        raise Wrong(f'{shown(value)} is not a number of CPUs; write for example 4, 0.5 or "500m"')

    def schema(self) -> dict[str, Any]:
        """A number, or a string of a form."""
        number = {"type": "number", "minimum": 0, "maximum": COUNT_MAX}
        return {"oneOf": [number, {"type": "string", "pattern": f"^({_CPU})$", "maxLength": 12}]}

    def words(self) -> str:
        """The forms."""
        return 'number, or "500m"'


@dataclass(frozen=True)
class Memory:
    """Memory as Kubernetes writes it: ``"8Gi"``, ``"512Mi"``, ``"2G"``; a bare number would be bytes, and is refused."""

    def read(self, value: object) -> int:
        """In MiB, rounded up."""
        if isinstance(value, str) and (found := re.fullmatch(_MEMORY, value)) and len(value) <= 16:
            unit = found[2] or ""
            return -(-round(float(value.removesuffix(unit)) * _UNITS[unit]) // 2**20)
        raise Wrong(f'{shown(value)} is not an amount of memory; write for example "8Gi" or "512Mi"')

    def schema(self) -> dict[str, Any]:
        """A string of a form."""
        return {"type": "string", "pattern": f"^({_MEMORY})$", "maxLength": 16}

    def words(self) -> str:
        """The form."""
        return '"8Gi", "512Mi"'


@dataclass(frozen=True)
class Preload:
    """Modules to import ahead: a list, or ``"auto"``, or ``"none"``; ``auto`` may stand in the list."""

    def read(self, value: object) -> str:
        """As `--preload` has it."""
        if value in ("auto", "none") and isinstance(value, str):
            return value
        if isinstance(value, str):
            raise Wrong(f'{shown(value)} is neither "auto" nor "none"; write modules as a list, [{value!r}]')
        return ",".join(Texts(Text("module", _MODULE, '"transformers"')).read(value))

    def schema(self) -> dict[str, Any]:
        """One of two words, or an array."""
        modules = {"type": "array", "items": {"type": "string", "pattern": f"^({_MODULE})$", "minLength": 1}}
        return {"oneOf": [{"enum": ["auto", "none"]}, modules]}

    def words(self) -> str:
        """The forms."""
        return 'list of modules, "auto" or "none"'


@dataclass(frozen=True)
class Streams:
    """Output streams as `--redirects` and `--tee` name them: a number, or by local rank."""

    def read(self, value: object) -> str:
        """As the flags have it."""
        if isinstance(value, int) and is_whole(value) and 0 <= value <= 3:
            return str(value)
        if isinstance(value, str) and re.fullmatch(_STREAMS, value):
            return value
        raise Wrong(f'{shown(value)} is none of 0 (none), 1 (stdout), 2 (stderr), 3 (both); by local rank "0:3,1:1"')

    def schema(self) -> dict[str, Any]:
        """An integer, or a string of a form."""
        text = {"type": "string", "pattern": f"^({_STREAMS})$"}
        return {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 3}, text]}

    def words(self) -> str:
        """The forms."""
        return '0 none, 1 stdout, 2 stderr, 3 both, or "0:3,1:1" by local rank'


MODULE = Text("module", _MODULE, '"my.package.train"')
GROUP = Text("group", GROUP_NAME, '"trainer"')


def _read_below(kind: Text, value: object, below: str) -> str:
    try:
        return kind.read(value)
    except Wrong as wrong:
        raise Wrong(str(wrong), below) from wrong


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
