"""The smoke size of the campaign `k8s_seeds`: the Kubernetes backend under drawn faults of its API server, masters and pods."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
from tests.chaos.k8s_seeds import trial

from dlrover_backends.k8s.client import KubernetesBackend

SMOKE = range(6)
HUNT = range(100, 140)


def _deaf_to_deletions() -> AbstractContextManager[Any]:
    """DELETED events tell nothing."""
    change = KubernetesBackend._change

    def deaf(self: KubernetesBackend, type_: str, *rest: Any) -> Any:
        return None if type_ == "DELETED" else change(self, type_, *rest)

    return mock.patch.object(KubernetesBackend, "_change", deaf)


@pytest.mark.parametrize("seed", SMOKE)
@pytest.mark.slow_loop(reason="the server, the backend and the script of pods share one loop")
def test_every_seed_ends_right(seed: int) -> None:
    """One living pod per place at any time, one relaunch per death, and nothing left at the end."""
    trial(seed)


@pytest.mark.parametrize("bug", [_deaf_to_deletions])
@pytest.mark.slow_loop(reason="the server, the backend and the script of pods share one loop")
def test_planted_bugs_are_found(bug: Any) -> None:
    """A backend with a bug that real clusters bring out breaks a promise within a few seeds."""
    with bug(), mock.patch("tests.chaos.k8s_seeds.SETTLE_S", 1.0):
        for seed in HUNT:
            try:
                trial(seed)
            except AssertionError:
                return
    pytest.fail("no seed found it")
