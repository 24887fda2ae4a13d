"""A bound on what a kubelet says will pass: a pod whose container does not start for that long has failed, on this host.

Kubelets and runtimes that are slow or away say so in words (`endings.PASSING`), and a node waits for them without a budget or a
time-out. One that says it for ever would hold its node for ever, while another host is free.
"""

from __future__ import annotations

from collections.abc import Callable

from dlrover_backends.k8s import endings
from dlrover_backends.k8s.api import Json
from dlrover_core.runtime.backend import Observation

STUCK_S = 600.0
"""A node waits so long for its kubelet, from when that was first seen."""
WORD = "KubeletStuck"
"""Our own word, which Kubernetes has none for."""
PODS_MAX = 4096


class Patience:
    """Since when pods wait for their kubelets, by uid. A master that takes over begins to count anew."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since: dict[str, float] = {}

    def left_s(self, pod: Json) -> float | None:
        """Seconds until a pod that waits for its kubelet has waited too long; None: it does not wait for that."""
        since = self._since.get(str(pod["metadata"].get("uid") or ""))
        return None if since is None else since + STUCK_S - self._now()

    def judged(self, pod: Json, seen: Observation) -> Observation:
        """The same, or that the node has failed."""
        uid = str(pod["metadata"].get("uid") or "")
        words = endings.passing(pod) if seen.phase == "pending" else ""
        if not words:
            self._since.pop(uid, None)
            return seen
        while uid not in self._since and len(self._since) >= PODS_MAX:
            del self._since[next(iter(self._since))]
        waited_s = self._now() - self._since.setdefault(uid, self._now())
        if waited_s < STUCK_S:
            return seen
        told = (
            f"{WORD}: for {waited_s / 60:.0f} min the kubelet of {seen.host or 'its host'} has not started it: {words}"
        )
        return seen._replace(
            phase="failed", exit_code=1, reason=told[: endings.TEXT_MAX], waits="", notice="", notice_us=0
        )
