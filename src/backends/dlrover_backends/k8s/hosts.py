"""What the cluster says of a host: not ready, tainted, cordoned, gone. Evidence beside a lost pod, where one may read it.

Nodes are no namespace's, so the right to see them is an administrator's to give; without it the pods' own words must do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import quote

import structlog

from dlrover_backends.k8s.api import Api, Json
from dlrover_backends.k8s.errors import ApiError, Forbidden, NotFound
from dlrover_backends.k8s.refusals import missing_right
from dlrover_core.runtime.within import within

ASK_S, FRESH_S, RACK_S = 2.0, 5.0, 600.0
"""`RACK_S`: for so long a host's rack is presumed to be as it was."""
TEXT_MAX = 200

log = structlog.get_logger("dlrover.backend")


class Hosts:
    """Looks hosts up, each for a moment only: news of pods wait for that. ``now``: a monotonic clock.

    Where a rack of hosts falls silent the API is slow, too. After one look-up that was not answered in ``ask_s`` seconds, no host
    is looked up for `FRESH_S`: else the last of many lost pods would be told minutes later.
    """

    def __init__(self, now: Callable[[], float], ask_s: float = ASK_S) -> None:
        self._now, self._ask_s, self._hidden = now, ask_s, False
        self._slow_until = float("-inf")
        self._known: dict[str, tuple[float, str, bool]] = {}
        self._racks: dict[str, tuple[float, str]] = {}

    async def rack(self, api: Api, host: str, label: str) -> str:
        """The rack of a host, as this label of its Node says; empty: it has none, or it cannot be seen."""
        at = self._now()
        seen_at, rack = self._racks.get(host, (float("-inf"), ""))
        if self._hidden or at - seen_at < RACK_S or at < self._slow_until:
            return rack
        try:
            found = await within(self._ask_s, api.ask("GET", f"/api/v1/nodes/{quote(host)}"))
        except Forbidden as error:
            self._hidden = True
            log.warning("no racks are known", error=missing_right(error))
            return rack
        except asyncio.TimeoutError:
            self._slow_until = self._now() + FRESH_S
            return rack
        except ApiError:
            return rack  # asked again with the next news of a pod there
        rack = str((found["metadata"].get("labels") or {}).get(label) or "")
        self._racks[host] = (at, rack)
        return rack

    async def wrong(self, api: Api, host: str, *, away: bool = False) -> str:
        """What is wrong with a host, in words; empty: nothing is, or it cannot be seen.

        away: only if it is not ready, or gone
        """
        at = self._now()
        self._known = {name: one for name, one in self._known.items() if at - one[0] < FRESH_S}
        if self._hidden or host in self._known or at < self._slow_until:
            _, words, is_away = self._known.get(host, (0.0, "", False))
            return words if is_away or not away else ""
        words, is_away = "", False
        try:
            found = await within(self._ask_s, api.ask("GET", f"/api/v1/nodes/{quote(host)}"))
            words, is_away = of_host(found), bool(_unready(found))
        except NotFound:
            words, is_away = f"host {host} is no longer in the cluster", True
        except Forbidden:
            self._hidden = True
        except asyncio.TimeoutError:
            self._slow_until = self._now() + FRESH_S
        except ApiError:
            pass  # the next one may be answered
        self._known[host] = (at, words, is_away)
        return words if is_away or not away else ""


def of_host(host: Json) -> str:
    """What is wrong with a Node object, in words; empty: nothing is."""
    found = [_not_ready(one) for one in _unready(host)]
    spec = host.get("spec") or {}
    taints = [
        f"{one.get('key')}:{one.get('effect')}"
        for one in spec.get("taints") or ()
        if str(one.get("key", "")).startswith("node.kubernetes.io/") or one.get("effect") == "NoExecute"
    ]
    if taints:
        found.append(f"tainted {', '.join(dict.fromkeys(taints))}")
    elif spec.get("unschedulable"):
        found.append("cordoned")
    return f"host {host['metadata']['name']} is {', '.join(found)}"[:TEXT_MAX] if found else ""


def _unready(host: Json) -> list[Json]:
    """The condition by which a host is not ready, if it is not."""
    conditions = (host.get("status") or {}).get("conditions") or ()
    return [one for one in conditions if one.get("type") == "Ready" and one.get("status") != "True"]


def _not_ready(condition: Json) -> str:
    words = ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
    return f"not ready ({words or condition.get('status')})"
