"""The loop of list and watch: every fault of an API server that was recorded, and what follows from it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from k8s_scripted import Script, failed, recorded_refusals

from dlrover_backends.k8s import backoff
from dlrover_backends.k8s.errors import (
    Busy,
    Conflict,
    Expired,
    Forbidden,
    Invalid,
    NotFound,
    Request,
    Unauthorized,
    Unreachable,
    of_answer,
)
from dlrover_backends.k8s.listwatch import Change, ListWatch, Snapshot

PODS = "/api/v1/namespaces/ml/pods"
CUT = Unreachable(Request("GET", PODS), 0, "ClientPayloadError: not all data came")
FROZEN = Unreachable(Request("GET", PODS), 0, "SocketTimeoutError: nothing for 90 s")
END = asyncio.CancelledError("the script is over")


def pod(name: str, version: int) -> dict[str, Any]:
    """A pod."""
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def page(version: int, *names: str, more: str = "") -> dict[str, Any]:
    """A page of a list."""
    return {"items": [pod(one, 1) for one in names], "metadata": {"resourceVersion": str(version), "continue": more}}


def event(type_: str, name: str, version: int) -> dict[str, Any]:
    """A change."""
    return {"type": type_, "object": pod(name, version)}


def bookmark(version: int) -> dict[str, Any]:
    """News of the version alone."""
    return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}


def error_event(code: int) -> dict[str, Any]:
    """An error in the stream of a watch."""
    return {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "too old", "reason": "Expired"}}


class Told:
    """One run of the loop over a script: what it told, which pauses it made."""

    def __init__(self, *answers: Any, step_s: float = 0.0) -> None:
        self.api = Script(*answers, END)
        self.seen, self.pauses = list[str](), list[float]()
        self.clock, self.step_s = 0.0, step_s

    def now(self) -> float:
        """A clock that each look moves on."""
        self.clock += self.step_s
        return self.clock

    async def pause(self, seconds: float) -> None:
        """A pause takes no time."""
        self.pauses.append(seconds)
        self.clock += seconds

    def run(self) -> Told:
        """Run the loop to the script's end."""

        async def told() -> None:
            loop = ListWatch(self.api, PODS, "a=b", now=self.now, chance=lambda: 0.5, pause=self.pause)
            async for one in loop.run():
                if isinstance(one, Snapshot):
                    self.seen.append("=" + ",".join(each["metadata"]["name"] for each in one.objects))
                else:
                    assert isinstance(one, Change)
                    self.seen.append(f"{one.type[0]}{one.object['metadata']['name']}")

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(told())
        return self

    def versions(self) -> list[str]:
        """From which versions it watched."""
        return [query["resourceVersion"] for what, query in self.api.asked if what.startswith("WATCH")]


def test_a_list_in_pages_then_changes() -> None:
    """All pages are one list; the watch goes on from its version, and changes follow in their order."""
    told = Told(page(7, "a", more="x"), page(7, "b"), [event("ADDED", "c", 8), event("DELETED", "a", 9)]).run()
    assert told.seen == ["=a,b", "Ac", "Da"]
    first, second, watch = (query for _, query in told.api.asked[:3])
    assert (first.get("continue"), second["continue"]) == (None, "x")
    assert watch["resourceVersion"] == "7"
    assert watch["allowWatchBookmarks"] == "true"
    assert 240 <= int(watch["timeoutSeconds"]) <= 300
    assert all(query["labelSelector"] == "a=b" for _, query in told.api.asked)


def test_no_list_is_of_an_old_cache() -> None:
    """No list names a version: with 0, or one of the past, a server may answer from a cache that lacks what was just made."""
    told = Told(page(7, "a"), [error_event(410)], page(9), failed(500), [CUT], [CUT], page(10)).run()
    lists = [query for what, query in told.api.asked if what.startswith("GET")]
    assert len(lists) >= 3
    assert not any({"resourceVersion", "resourceVersionMatch"} & set(query) for query in lists)


def test_a_clean_end_goes_on_from_the_last_version() -> None:
    """A watch that the server ends is opened again where it was, bookmarks included; nothing is listed and nobody is told."""
    told = Told(
        page(7, "a"), [event("MODIFIED", "a", 8), bookmark(20)], [event("MODIFIED", "a", 21)], [], step_s=5
    ).run()
    assert told.seen == ["=a", "Ma", "Ma"]
    assert told.versions()[:4] == ["7", "20", "21", "21"]
    assert told.pauses == []


def test_a_server_that_ends_watches_at_once_is_not_asked_without_end() -> None:
    """Watches that end within a second are followed by a pause each."""
    told = Told(page(7), [], [], []).run()
    assert len(told.pauses) == 3
    assert min(told.pauses) > 0


@pytest.mark.parametrize("gone", [[error_event(410)], failed(410)])
def test_an_expired_version_lists_anew(gone: Any) -> None:
    """410, as an ERROR event or as an answer: a new list at once, which shows what is gone since."""
    told = Told(page(7, "a", "b"), gone, page(50, "b"), []).run()
    assert told.seen == ["=a,b", "=b"]
    assert told.versions()[:2] == ["7", "50"]


def test_lists_that_expire_at_once_are_no_storm() -> None:
    """A server whose lists are too old for its watches is asked again, with pauses that grow."""
    told = Told(*[page(7), [error_event(410)]] * 4).run()
    assert told.pauses == pytest.approx([0.1, 0.2, 0.4])


def test_an_expired_page_begins_the_list_anew() -> None:
    """A list whose `continue` has expired is begun again, and half of it is never told."""
    told = Told(page(7, "a", more="x"), failed(410), page(9, "b"), []).run()
    assert told.seen == ["=b"]


@pytest.mark.parametrize("fault", [CUT, FROZEN])
def test_a_cut_or_frozen_watch_goes_on(fault: Unreachable) -> None:
    """A stream that is cut, or silent for too long, is opened again from the last version, after a pause."""
    told = Told(page(7, "a"), [event("MODIFIED", "a", 8), fault], [event("MODIFIED", "a", 9)]).run()
    assert told.seen == ["=a", "Ma", "Ma"]
    assert told.versions()[:2] == ["7", "8"]
    assert told.pauses[0] == pytest.approx(0.1)


def test_watches_that_never_bring_anything_list_anew() -> None:
    """After three watches in a row that fail without an event the state is listed: the version may be the fault."""
    told = Told(page(7, "a"), [CUT], [error_event(500)], failed(504), page(9), []).run()
    assert told.seen == ["=a", "="]
    assert len(told.pauses) >= 3


def test_retry_after_is_honoured() -> None:
    """429 with Retry-After, in a list and in a watch, waits as long as the server asks, and little longer."""
    told = Told(failed(429, after="3"), page(7), failed(429, after="2"), []).run()
    assert 3.0 <= told.pauses[0] <= 3.2
    assert 2.0 <= told.pauses[1] <= 2.2
    assert told.seen == ["="]


def test_an_outage_of_any_length_backs_off() -> None:
    """Pauses grow to 20 s at most, whatever the server does, and the first list afterwards is told."""
    told = Told(*[failed(503) if one % 2 else CUT for one in range(12)], page(7, "a"), []).run()
    assert told.pauses[:3] == pytest.approx([0.1, 0.2, 0.4])
    assert max(told.pauses) == pytest.approx(10.0)  # chance is a half
    assert told.seen == ["=a"]


def test_it_is_listed_now_and_again() -> None:
    """After ten to fifteen minutes the state is listed anew, whatever watches said."""
    told = Told(page(7, "a"), [event("MODIFIED", "a", 8)], page(9, "a"), [], step_s=200).run()
    assert told.seen == ["=a", "Ma", "=a"]


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_what_waiting_does_not_mend_is_raised(status: int) -> None:
    """A missing right, credentials that are refused, a collection that is not there: the caller is told."""

    async def told() -> None:
        async for _ in ListWatch(Script(failed(status, "no")), PODS).run():
            pass

    with pytest.raises((Invalid, Unauthorized, Forbidden, NotFound), match="no"):
        asyncio.run(told())


def test_back_off_is_reset_by_a_calm_minute() -> None:
    """The pause is the first one again after a minute that went well, and not before."""
    one = backoff.BackOff(lambda: 1.0)
    assert [one.failed(0.0) for _ in range(9)] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 20, 20])
    one.went_well(10.0)
    one.went_well(65.0)
    assert one.failed(69.0) == pytest.approx(20)
    one.went_well(70.0)
    one.went_well(129.0)
    assert one.failed(130.0) == pytest.approx(0.2)
    assert one.failed(131.0, retry_after_s=3600) < 61


def test_recorded_refusals_are_their_classes() -> None:
    """Each refusal that a real API server gave is the error that its callers act on."""
    classes = {
        400: Invalid,
        401: Unauthorized,
        403: Forbidden,
        404: NotFound,
        405: Invalid,
        409: Conflict,
        410: Expired,
        415: Invalid,
        422: Invalid,
        429: Busy,
        500: Busy,
        504: Busy,
    }
    lines = recorded_refusals()
    assert len(lines) > 25
    for line in lines:
        error = of_answer(Request(line["method"], line["path"]), line["status"], line["body"], line["headers"])
        if line["status"] != 406:
            assert type(error) is classes[line["status"]], line
        assert str(line["status"]) in str(error)
    throttled = [line for line in lines if line["status"] == 429]
    assert throttled
    for line in throttled:
        assert of_answer(Request("POST", PODS), 429, line["body"], line["headers"]).retry_after_s == 1.0
    two = next(line for line in lines if line["note"].startswith("two faults"))
    found = of_answer(Request("POST", PODS), 422, two["body"], {}).causes
    assert [field for field, _ in found] == ["metadata.labels", "spec.restartPolicy"]


@pytest.mark.parametrize(
    ("method", "path", "verb"),
    [
        ("GET", PODS, "list"),
        ("GET", f"{PODS}?watch=1", "watch"),
        ("GET", f"{PODS}/a", "get"),
        ("POST", PODS, "create"),
        ("DELETE", f"{PODS}/a", "delete"),
        ("PATCH", f"{PODS}/a", "patch"),
        ("GET", "/apis/batch/v1/namespaces/ml/jobs", "list"),
        ("GET", "/apis/batch/v1/namespaces/ml/jobs/a", "get"),
    ],
)
def test_verbs(method: str, path: str, verb: str) -> None:
    """A request is named by the verb that a Role grants."""
    assert Request(method, path).verb == verb
