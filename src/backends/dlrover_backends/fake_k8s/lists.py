"""Lists: which version they show, in pages that continue, in the form that was asked for."""

from __future__ import annotations

import base64
import json
from typing import Any

from dlrover_backends.fake_k8s import answers, selectors, tables
from dlrover_backends.fake_k8s.answers import Refused
from dlrover_backends.fake_k8s.api import Api
from dlrover_backends.fake_k8s.kinds import Kind
from dlrover_backends.fake_k8s.store import Key, Stored
from dlrover_backends.fake_k8s.store import encoded as dumped
from dlrover_backends.fake_k8s.watching import Test

Object = dict[str, Any]
Query = dict[str, str]

_TOO_OLD = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter, or use the continue token in this response to retrieve the remainder of the results. "
    "Continuing with the provided token results in an inconsistent list - objects that were created, modified, or "
    "deleted between the time the first chunk was returned and now may show up in the list."
)


class Later(Exception):
    """A list asks for a version from the future."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


def wanted(kind: Kind, where: str, query: Query) -> Test:
    """Which objects a list or watch is about.

    Raises:
        Refused: a selector that cannot be parsed.
    """
    tests: list[Test] = []
    if where:
        tests.append(lambda obj: obj["metadata"].get("namespace") == where)
    if query.get("labelSelector"):
        fits = selectors.labels(query["labelSelector"])
        tests.append(lambda obj: fits(obj["metadata"].get("labels") or {}))
    if query.get("fieldSelector"):
        tests.append(selectors.fields(kind, query["fieldSelector"]))
    return lambda obj: all(test(obj) for test in tests)


def number(query: Query) -> int | None:
    """The resourceVersion of a query.

    Raises:
        Refused: it is no number.
    """
    text = query.get("resourceVersion") or ""
    if not text:
        return None
    if not text.isdigit():
        words = f'invalid resource version: resourceVersion: Invalid value: "{text}": strconv.ParseUint: '
        raise answers.bad_request(f'{words}parsing "{text}": invalid syntax')
    return int(text)


def options_refused(field: str, words: str) -> Refused:
    """What the server says of list options that exclude each other."""
    cause = answers.not_allowed(field, words)
    details: Object = {"group": "meta.k8s.io", "kind": "ListOptions", "causes": [cause]}
    message = f'ListOptions.meta.k8s.io "" is invalid: {field}: {cause["message"]}'
    return Refused(422, answers.status(422, message, details=details))


class Lists:
    """Lists of one server."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def encoded(self, kind: Kind, where: str, query: Query, form: str, *, behind: int = 0) -> bytes:
        """A list as it is sent.

        Args:
            kind: what is listed.
            where: namespace; empty for all.
            query: selectors, limit, continue, resourceVersion, resourceVersionMatch.
            form: `partial`, `table` or empty for whole objects.
            behind: show the state of so many writes ago: a server with an old cache.

        Raises:
            Refused: 400, 410 or 422.
            Later: the version asked for is not there yet.
        """
        version, objects, start = self._source(kind, query, behind)
        test = wanted(kind, where, query)
        found = [(key, one) for key, one in sorted(objects.items()) if key >= start and test(one.obj)]
        limit = int(query.get("limit") or 0)
        if query.get("resourceVersion") == "0" and query.get("resourceVersionMatch", "") != "Exact":
            limit = 0
        metadata: Object = {"resourceVersion": str(version)}
        if kind.custom:
            metadata = {"continue": "", **metadata}
        if limit and len(found) > limit:
            left = len(found) - limit
            found = found[:limit]
            metadata["continue"] = _token(version, found[-1][0], where)
            if not query.get("labelSelector") and not query.get("fieldSelector"):
                metadata["remainingItemCount"] = left
        return self._written(kind, [one for _, one in found], metadata, form)

    def _source(self, kind: Kind, query: Query, behind: int) -> tuple[int, dict[Key, Stored], Key]:
        store = self._api.store
        match = query.get("resourceVersionMatch", "")
        asked = number(query)
        if query.get("continue"):
            version, start = _parsed(query["continue"])
            if version < 0:
                return store.version, store.shelf(kind.key).objects, start
            try:
                return version, store.at(kind.key, version), start
            except LookupError:
                raise answers.expired(_TOO_OLD, _token(-1, start, "", after=False)) from None
        if match and asked is None:
            raise options_refused(
                "resourceVersionMatch", "resourceVersionMatch is forbidden unless resourceVersion is provided"
            )
        if match == "Exact":
            if asked == 0:
                words = 'resourceVersionMatch "exact" is forbidden for resourceVersion "0"'
                raise options_refused("resourceVersionMatch", words)
            assert asked is not None
            if asked > store.version:
                raise Later(asked)
            try:
                return asked, store.at(kind.key, asked), ("", "")
            except LookupError:
                raise answers.expired("The resourceVersion for the provided list is too old.") from None
        if asked is not None and asked > store.version:
            raise Later(asked)
        if behind:
            history = store.shelf(kind.key).history
            if history:
                version = history[max(0, len(history) - behind)].version - 1
                return version, store.at(kind.key, version), ("", "")
        return store.version, store.shelf(kind.key).objects, ("", "")

    def _written(self, kind: Kind, found: list[Stored], metadata: Object, form: str) -> bytes:
        if form == "table":
            return dumped(tables.table(kind, [one.obj for one in found], metadata, self._api.clock()))
        if form == "partial":
            head: Object = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
            return dumped({**head, "items": [tables.partial(one.obj) for one in found] or None})
        head = {"kind": kind.kind + "List", "apiVersion": kind.api_version, "metadata": metadata}
        if kind.custom:
            items = b",".join(one.raw for one in found)
        else:
            items = b",".join(_bare(one) for one in found)
        return dumped(head)[:-1] + b',"items":[' + items + b"]}"


def _bare(stored: Stored) -> bytes:
    """An object of a built-in kind in a list: without its kind and version."""
    return dumped({key: value for key, value in stored.obj.items() if key not in {"kind", "apiVersion"}})


def _token(version: int, last: Key, where: str, *, after: bool = True) -> str:
    namespace, name = last
    path = name if where or not namespace else f"{namespace}/{name}"
    start = f"{'/' if version >= 0 else ''}{path}\0" if after else path
    text = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": start, "ns": namespace}, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _parsed(token: str) -> tuple[int, Key]:
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        first = raw[:1].decode("latin-1")
        if first != "{":
            shown = f"\\u{ord(first):04x}" if not " " <= first <= "~" else first
            words = f"continue key is not valid: invalid character '{shown}' looking for beginning of value"
            raise answers.bad_request(f"invalid continue token: {words}")
        inside = json.loads(raw)
        start = str(inside["start"]).lstrip("/")
        name = start.rpartition("/")[2]
        return int(inside["rv"]), (inside.get("ns", ""), name)
    except (ValueError, KeyError) as wrong:
        raise answers.bad_request(f"invalid continue token: {wrong}") from wrong
