"""One watch: which events it sends, in which order, from which version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dlrover_backends.fake_k8s import answers, tables
from dlrover_backends.fake_k8s.kinds import Kind
from dlrover_backends.fake_k8s.store import Change, Shelf, Store, Stored, encoded

Object = dict[str, Any]
Test = Callable[[Object], bool]


class Watch:
    """The events of one watch, as lines.

    Args:
        kind: what is watched.
        store: where.
        wanted: which objects.
        version: changes after this version are sent.
        form: `partial` for metadata alone, else empty.
    """

    def __init__(self, kind: Kind, store: Store, wanted: Test, version: int, form: str = "") -> None:
        self._kind = kind
        self._shelf: Shelf = store.shelf(kind.key)
        self._store = store
        self._wanted = wanted
        self._form = form
        self.version = version
        self._news = asyncio.Event()
        self._shelf.waiting.add(self._news.set)
        self.closing: str | None = None  # 'end' or 'cut', said from outside
        self.frozen = False

    def close(self) -> None:
        """Listen no more."""
        self._shelf.waiting.discard(self._news.set)

    def interrupt(self, how: str) -> None:
        """End this watch from outside: `end` cleanly, `cut` without the last chunk, `expired` with an ERROR event."""
        self.closing = how
        self._news.set()

    async def news(self, timeout_s: float) -> None:
        """Wait for changes, at most so long."""
        tick = asyncio.get_running_loop().call_later(timeout_s, self._news.set)
        try:
            await self._news.wait()
        finally:
            tick.cancel()
        self._news.clear()

    def initial(self) -> list[bytes]:
        """What exists, as ADDED events."""
        found = [stored for _, stored in sorted(self._shelf.objects.items()) if self._wanted(stored.obj)]
        return [self.line("ADDED", stored) for stored in found]

    def expired(self) -> bool:
        """Whether the history no longer reaches back to where this watch is."""
        return self.version < self._shelf.since

    def pending(self) -> list[bytes]:
        """Events of changes not sent yet."""
        lines = []
        for change in self._shelf.after(self.version):
            self.version = change.version
            line = self._event(change)
            if line is not None:
                lines.append(line)
        return lines

    def _event(self, change: Change) -> bytes | None:
        before = change.was is not None and self._wanted(change.was.obj)
        after = not change.deleted and self._wanted(change.now.obj)
        if change.deleted:
            return self.line("DELETED", change.now) if before else None
        if before and after:
            return self.line("MODIFIED", change.now)
        if after:
            return self.line("ADDED", change.now)
        if before:
            assert change.was is not None
            metadata = {**change.was.obj["metadata"], "resourceVersion": str(change.version)}
            return self.line("DELETED", Stored({**change.was.obj, "metadata": metadata}, change.version))
        return None

    def line(self, event: str, stored: Stored) -> bytes:
        """One event as a line of the stream."""
        raw = encoded(tables.partial(stored.obj)) if self._form else stored.raw
        return b'{"type":"%s","object":%s}\n' % (event.encode(), raw)

    def bookmark(self, *, initial: bool = False) -> bytes:
        """A BOOKMARK event; the version is the store's, as nothing of this kind happened since the last event."""
        kind = self._kind
        metadata: Object = {"resourceVersion": str(max(self.version, self._store.version))}
        if initial:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        obj: Object = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
        if kind.key == ("", "pods") and not self._form:
            obj.update(spec={"containers": None}, status={})
        self.version = int(metadata["resourceVersion"])
        return b'{"type":"BOOKMARK","object":%s}\n' % encoded(obj)

    def error(self) -> bytes:
        """The ERROR event of a version that is too old."""
        words = f"too old resource version: {self.version} ({self._shelf.since})"
        return b'{"type":"ERROR","object":%s}\n' % encoded(answers.status(410, words))
