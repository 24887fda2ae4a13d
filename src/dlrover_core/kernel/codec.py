"""How batches lie in the log: msgpack arrays, versioned, checked on the way in.

A batch is ``[1, token, counter, at, first_seq, [entry, ...]]`` and an entry ``[kind, version, dt, back, fields]`` or the
same with ``[sender, boot, number]`` behind it: ``dt`` is the entry's microseconds after ``at`` and ``back`` the distance to
its cause (0: none). Small numbers, because msgpack stores them in one byte. Stored bytes are never rewritten: an older
version of a kind passes its upcasters on the way in; an unknown kind or a newer version raises `SchemaTooNew`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgpack

from dlrover_core.errors import LogError, SchemaTooNew
from dlrover_core.kernel.events import Batch, Event, Kind, Origin, Record, Registry

FORMAT = 1


class Codec:
    """Encodes and decodes batches of the kinds in a registry. Stateless beyond its tables."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._packed = {cls: (kind.kind, kind.version) for cls, kind in registry.by_class.items()}
        self._current = {
            (kind.kind, kind.version): (kind.cls, len(kind.cls._fields))  # type: ignore[attr-defined]  # a NamedTuple
            for kind in registry.by_class.values()
        }

    def entry(self, record: Record, batch_at: int) -> bytes:
        """One record, packed. ``batch_at`` is the time of the batch that will hold it."""
        kind, version = self._packed[type(record.event)]
        back = record.seq - record.cause if record.cause else 0
        row: tuple[object, ...] = (kind, version, record.at - batch_at, back, record.event)
        if record.origin is not None:
            row += (record.origin,)
        return cast(bytes, msgpack.packb(row))

    def seal(self, token: int, counter: int, at: int, records: Sequence[Record], entries: Sequence[bytes]) -> Batch:
        """A batch of already packed entries."""
        head = msgpack.packb((FORMAT, token, counter, at, records[0].seq))
        # An array of 6: the header's array of 5 opened again and the entries' array as its last item.
        body = msgpack.Packer().pack_array_header(len(entries))
        payload = b"\x96" + head[1:] + body + b"".join(entries)
        return Batch(token, counter, at, tuple(records), payload)

    def batch(self, token: int, counter: int, records: Sequence[Record]) -> Batch:
        """A batch from records: what tests and tools use; the engine seals the entries it has packed one by one."""
        at = records[0].at
        return self.seal(token, counter, at, records, [self.entry(record, at) for record in records])

    def decode(self, payload: bytes) -> Batch:
        """A batch from its bytes. Raises `LogError` for bytes that are none, `SchemaTooNew` for those of a newer version."""
        try:
            raw = msgpack.unpackb(payload, use_list=False, strict_map_key=False)
            form, token, counter, at, first, rows = raw
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise LogError(f"{len(payload)} bytes are not a batch: {error}") from error
        if form != FORMAT:
            raise SchemaTooNew(f"batch format {form} is newer than {FORMAT}; upgrade dlrover-core to read this log")
        try:
            return Batch(token, counter, at, self._records(token, at, first, rows), payload)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise LogError(f"batch {counter} of token {token} holds no records: {error}") from error

    def _records(self, token: int, at: int, first: int, rows: Sequence[Any]) -> tuple[Record, ...]:
        current, make, made = self._current, tuple.__new__, []
        seq = first
        for row in rows:
            shape = current.get(row[:2])
            fields = row[4]
            event: Event
            if shape is not None:
                cls, width = shape
                if len(fields) != width:
                    raise ValueError(f"{cls.__name__} has {width} fields, not {len(fields)}")
                event = make(cls, fields)
            else:
                event = self._upcast(row[0], row[1], fields)
            back = row[3]
            origin = make(Origin, row[5]) if len(row) > 5 else None
            made.append(make(Record, (seq, at + row[2], token, seq - back if back else 0, event, origin)))
            seq += 1
        return tuple(made)

    def _upcast(self, number: int, version: int, fields: tuple[object, ...]) -> Event:
        kind: Kind | None = self.registry.by_kind.get(number)
        if kind is None or version > kind.version:
            name = kind.name if kind else "unknown"
            raise SchemaTooNew(
                f"event kind {number} ({name}) version {version} was written by a newer dlrover-core; upgrade this one"
            )
        for step in range(version, kind.version):
            fields = kind.upcasters[step](fields)
        return cast(Event, kind.cls(*fields))
