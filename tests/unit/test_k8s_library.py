"""What is used of kubernetes-asyncio is imported alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALONE = """
import sys
from dlrover_backends.k8s import transport
assert transport.kube.load_kube_config and transport.kube.load_incluster_config
print(*(one for one in sys.modules if one.startswith("kubernetes_asyncio")))
from kubernetes_asyncio import client, config
assert client.CoreV1Api and client.ApiClient is not object
assert config.kube_config.ApiClient is client.ApiClient
"""
FIRST = """
import kubernetes_asyncio.client
from dlrover_backends.k8s import transport
assert transport.parts.configuration is kubernetes_asyncio.client.Configuration
print()
"""
BUSY = """
import sys, types

class Other(str):
    "A module that another thread imports and forgets while those of ours are looked through."
    def partition(self, _):
        for name in ("one_more", "two_more"):
            sys.modules.setdefault(name, types.ModuleType(name))
        sys.modules.pop("kubernetes_asyncio.client.rest", None)
        return super().partition(".")

sys.modules[Other("other")] = types.ModuleType("other")
from dlrover_backends.k8s import library
assert library.parts().config.load_kube_config
print(*(one for one in sys.modules if str.startswith(one, "kubernetes_asyncio")))
"""
BROKEN = """
import sys
from dlrover_backends.k8s import library

def broken():
    raise RuntimeError("broken")

library._imported = broken
try:
    library.parts()
except RuntimeError as error:
    assert str(error) == "broken"
print(*(one for one in sys.modules if one.startswith("kubernetes_asyncio")))
"""


@pytest.mark.parametrize("code", [ALONE, FIRST, BUSY, BROKEN], ids=["alone", "whole", "busy", "broken"])
def test_the_library_is_whole_for_everybody_else(code: str) -> None:
    """Whoever imports it after us has all of it; where somebody has imported it before, that is what is used.

    No empty package stays, whatever else is imported meanwhile, or fails.
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.split()) == (0, []), ended.stderr
