"""What a list-watch loop has shown, by uid: the newest object of each, and who is told when one changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import aclosing

from dlrover_backends.k8s.api import Json
from dlrover_backends.k8s.listwatch import ListWatch, Snapshot


class Cache:
    """Objects of one collection.

    loop:  what shows them
    kind:  ``apiVersion`` and ``kind`` of each: items of a list do not have them
    heard: called with each object that came, changed or went
    """

    def __init__(self, loop: ListWatch, kind: Json, heard: Callable[[Json], None]) -> None:
        self._loop, self._kind, self._heard = loop, kind, heard
        self.objects: dict[str, Json] = {}
        self.synced = False

    async def run(self) -> None:
        """Until cancelled. Raises `ApiError` for what waiting does not mend."""
        async with aclosing(self._loop.run()) as seen:
            async for one in seen:
                if isinstance(one, Snapshot):
                    self._listed(one.objects)
                    continue
                uid = str(one.object["metadata"]["uid"])
                if one.type == "DELETED":
                    self.objects.pop(uid, None)
                else:
                    self.objects[uid] = one.object
                self._heard(one.object)

    def _listed(self, objects: Iterable[Json]) -> None:
        before, self.objects = self.objects, {str(one["metadata"]["uid"]): {**self._kind, **one} for one in objects}
        self.synced = True
        gone = [one for uid, one in before.items() if uid not in self.objects]
        for one in [*self.objects.values(), *gone]:
            self._heard(one)
