"""The Kubernetes backend: a node is a pod (docs/kubernetes.md). The extra ``k8s`` brings what it needs.

Names resolve lazily: the launcher looks at the arguments alone, and importing what speaks to a cluster takes time.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_backends.k8s.client import KubernetesBackend
    from dlrover_core.runtime.backends import BackendContext

_PLACES = {"KubernetesBackend": "client"}

__all__ = ["KubernetesBackend", "backend"]


def backend(context: BackendContext) -> KubernetesBackend:
    """The Kubernetes backend of a job. Raises `SpecError` for wrong arguments, or where the extra is not installed."""
    from dlrover_core.errors import SpecError

    for module in ("kubernetes_asyncio", "aiohttp", "yaml"):
        if importlib.util.find_spec(module) is None:
            raise SpecError("backend", f"k8s needs {module}: pip install 'dlrover-core[k8s]'")
    from dlrover_backends.k8s.client import KubernetesBackend

    return KubernetesBackend(context)


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dlrover_backends.k8s.{place}"), name)
