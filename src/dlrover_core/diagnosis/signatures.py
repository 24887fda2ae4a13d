"""What failures look like: the table of signatures, a data file, and a user's own beside it.

A signature names one kind of failure: its class, the scope it speaks about, the action that usually suffices, and the texts or
codes by which it is known. Finding them in text is `matching`'s.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from dlrover_core.diagnosis.evidence import CASC, CLASSES, SOURCES
from dlrover_core.diagnosis.patterns import Unfit, words
from dlrover_core.errors import SpecError

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same library under the name it had before
    import tomli as tomllib

# What usually suffices. `obs`: record only; `retry`: again in place; `proc`: restart the processes; `relaunch`: a new node;
# `isolate`: relaunch elsewhere and keep off the host until it has proved itself; `reset`: as `isolate`, its GPU needs a reset;
# `mem+`: relaunch with more memory; `shrink`: go on without; `fail`: end the job; `wait`: back off; `check`: check first.
ACTIONS = ("obs", "retry", "proc", "relaunch", "isolate", "reset", "mem+", "shrink", "fail", "wait", "check")
SCOPES = ("process", "gpu", "host", "link", "node", "job", "platform")
# What a code may be: a process's exit code or the signal that ended it, the kernel's GPU error, an exception's type, a
# platform's word, the system's error number, the status with which a server answered, that of a work completion of InfiniBand's,
# of a call of XLA's, or a published name of another library's status (`statuses.toml`).
CODES = ("exit", "signal", "xid", "exception", "reason", "errno", "http", "wc", "xla", "status")

OWN_BYTES_MAX = 64 * 1024
OWN_MAX = 256
PRIORITY, PRIORITY_CASC = 50, 40
# What one kind's members are called that have no row of their own, and the row that speaks for them.
FAMILIES = {"exception.": "exception", "exit.code": "exit.code", "exit.signal": "exit.signal"}


class Signature(NamedTuple):
    """One kind of failure.

    ``sources``: where it may be seen; ``codes``: exit codes, Xids or reasons that mean it; ``priority``: of several signatures
    in one text the highest counts; ``unless``: a line in which one of these matches is not it; ``subject``: a pattern whose
    group is what else the line names; ``general``: a symptom of many causes, which any more telling words explain.
    """

    id: str
    title: str
    verdict: str
    action: str
    scope: str
    confidence: float
    sources: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    origin: str = ""
    priority: int = PRIORITY
    unless: tuple[str, ...] = ()
    subject: str = ""
    general: bool = False

    @property
    def rank(self) -> tuple[int, float]:
        """Of several signatures that one text has, the highest counts."""
        return self.priority, self.confidence


class CodePattern(NamedTuple):
    """A pattern whose group is a code of ``kind``; ``otherwise``: the signature of one that nobody claims, or none.

    ``sources``: where the pattern is looked for; empty: wherever the signature may be seen.
    """

    kind: str
    pattern: str
    otherwise: str
    sources: tuple[str, ...] = ()


class Table:
    """Signatures by id and by code. A later one of the same id or code takes the earlier one's place."""

    def __init__(self, signatures: tuple[Signature, ...], code_patterns: tuple[CodePattern, ...] = ()) -> None:
        self.by_id: Mapping[str, Signature] = {one.id: one for one in signatures}
        self.by_code: Mapping[str, Signature] = {code: one for one in self.by_id.values() for code in one.codes}
        self.code_patterns = code_patterns

    def get(self, name: str) -> Signature | None:
        """The signature of that id: its own row, or as its family's, as every exception has one."""
        known = self.by_id.get(name)
        if known is not None:
            return known
        for start, family in FAMILIES.items():
            if name.startswith(start) and family in self.by_id and name[len(start) :].lstrip("-").isalnum():
                return self.by_id[family]._replace(id=name)
        return None

    def coded(self, kind: str, code: str | int) -> Signature | None:
        """The signature that claims this code."""
        return self.by_code.get(f"{kind}:{code}")


@functools.lru_cache(maxsize=8)
def table(extra: str = "") -> Table:
    """The table; ``extra``: a user's own signatures, as `JobSpec.signatures` holds them (JSON, a list of tables)."""
    files = [resources.files(__package__).joinpath(f"{name}.toml") for name in ("signatures", "families", "statuses")]
    told, families, statuses = (tomllib.loads(file.read_text(encoding="utf-8")) for file in files)
    names = {row["id"]: [f"status:{name}" for name in row["names"]] for row in statuses["status"]}
    ours = [*_exceptions(told["exceptions"]), *told["signature"], *families["signature"]]
    rows = [
        *({**row, "codes": [*row.get("codes", ()), *names.get(row["id"], ())]} for row in ours),
        *(json.loads(extra) if extra else ()),
    ]
    return Table(tuple(map(_signature, rows)), tuple(CodePattern(**row) for row in (*told["code"], *statuses["code"])))


def own(text: str, name: str) -> str:
    """A user's TOML as `JobSpec.signatures` takes it. ``name``: the file's, for what is wrong with it. Raises `SpecError`."""
    try:
        told = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError("signatures", f"{name}: not TOML: {error}") from error
    rows = told.get("signature")
    unknown = sorted(set(told) - {"signature"})
    if unknown or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        strange = f", and not {', '.join(map(repr, unknown))}" if unknown else ""
        raise SpecError("signatures", f"{name}: a file of signatures has tables [[signature]]{strange}")
    if len(rows) > OWN_MAX:
        raise SpecError("signatures", f"{name}: {len(rows)} signatures; at most {OWN_MAX}")
    seen: set[str] = set()
    for number, row in enumerate(rows, 1):
        which = row.get("id") if isinstance(row.get("id"), str) else f"signature {number}"
        for reason in _wrong(row, seen):
            raise SpecError("signatures", f"{name}: {which}: {reason}")
        seen.add(row["id"])
    made = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    if len(made.encode()) > OWN_BYTES_MAX:
        raise SpecError("signatures", f"{name}: {len(made.encode()):,} bytes of signatures; at most {OWN_BYTES_MAX:,}")
    return made


_TEXTS = ("id", "title", "class", "action", "scope", "origin", "subject")
_LISTS = ("sources", "patterns", "unless", "codes")


def _wrong(row: Mapping[str, Any], seen: set[str]) -> Iterator[str]:
    """What is wrong with a user's signature."""
    unknown = sorted(set(row) - {*_TEXTS, *_LISTS, "confidence", "general", "priority"})
    if unknown:
        yield f"there is no field {unknown[0]!r}; there are {', '.join((*_TEXTS, *_LISTS, 'confidence', 'priority', 'general'))}"
    missing = [field for field in ("id", "title", "class", "action", "sources") if not row.get(field)]
    if missing:
        yield f"{missing[0]!r} is missing"
    for field in _TEXTS:
        if not isinstance(row.get(field, ""), str):
            yield f"{field}: a text, not {row[field]!r}"
    for field in _LISTS:
        if not isinstance(row.get(field, []), list) or not all(isinstance(one, str) for one in row.get(field, [])):
            yield f"{field}: a list of texts, not {row[field]!r}"
    if not isinstance(row.get("general", False), bool):
        yield f"general: true or false, not {row['general']!r}"
    if row["id"] in seen:
        yield "there are two of this id"
    if len(row["id"]) > 64 or not all(part.replace("_", "a").isalnum() for part in row["id"].split(".")):
        yield "an id is of at most 64 letters, digits, '_' and '.'"
    yield from _unknown_words(row)
    if not row.get("patterns") and not row.get("codes"):
        yield "it needs patterns or codes to be known by"
    yield from _unfit(row)


def _unknown_words(row: Mapping[str, Any]) -> Iterator[str]:
    for field, known in (("class", CLASSES), ("action", ACTIONS), ("scope", SCOPES)):
        if row.get(field, known[0]) not in known:
            yield f"there is no {field} {row[field]!r}; there are {', '.join(known)}"
    for source in row["sources"]:
        if source not in SOURCES:
            yield f"there is no source {source!r}; there are {', '.join(SOURCES)}"
    for code in row.get("codes", ()):
        if code.partition(":")[0] not in CODES or not code.partition(":")[2]:
            yield f"code {code!r} is none of {', '.join(f'{kind}:...' for kind in CODES)}"
        elif code.startswith(("exit:", "xid:")) and not code.partition(":")[2].removeprefix("-").isdecimal():
            yield f"code {code!r}: a number, as the program or the kernel says it"
    confidence = row.get("confidence", 0.8)
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 < confidence <= 1:
        yield f"confidence: a number above 0, to 1, not {confidence!r}"
    priority = row.get("priority", PRIORITY)
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 100:
        yield f"priority: a whole number from 0 to 100, not {priority!r}"


def _unfit(row: Mapping[str, Any]) -> Iterator[str]:
    for field in ("patterns", "unless"):
        for pattern in row.get(field, ()):
            try:
                words(pattern)
            except Unfit as error:
                yield f"pattern {pattern!r}: {error}"
    if row.get("subject"):
        try:
            words(row["subject"])
        except Unfit as error:
            yield f"subject {row['subject']!r}: {error}"


def _exceptions(groups: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """A signature for each type of exception."""
    for group in groups:
        shared = {field: value for field, value in group.items() if field not in {"types", "title"}}
        for type_ in group["types"]:
            yield {
                "priority": 20,
                **shared,
                "id": f"exception.{type_}",
                "title": f"{type_}: {group['title']}",
                "sources": ["error", "log", "exit"],
                "codes": [f"exception:{type_}"],
            }


def _signature(row: Mapping[str, Any]) -> Signature:
    return Signature(
        id=row["id"],
        title=row["title"],
        verdict=row["class"],
        action=row["action"],
        scope=row.get("scope", "process"),
        confidence=float(row.get("confidence", 0.8)),
        sources=tuple(row.get("sources", ())),
        patterns=tuple(row.get("patterns", ())),
        codes=tuple(map(str, row.get("codes", ()))),
        origin=row.get("origin", ""),
        priority=row.get("priority", PRIORITY_CASC if row["class"] == CASC else PRIORITY),
        unless=tuple(row.get("unless", ())),
        subject=row.get("subject", ""),
        general=bool(row.get("general", False)),
    )
