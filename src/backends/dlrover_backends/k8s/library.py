"""The parts of kubernetes-asyncio that are used here, without its models: those cost a third of a second in each process.

Whoever imports a part of a package imports the package first, and this one's imports 800 modules of generated models and calls.
So two empty packages stand in its place while the parts are imported. Afterwards none of it is among the process's modules:
whoever else wants the library has the whole of it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kubernetes_asyncio.client.configuration import Configuration
    from kubernetes_asyncio.client.rest import RESTClientObject

NAME = "kubernetes_asyncio"
CLIENT = f"{NAME}.client"


class Parts(NamedTuple):
    """What is used of the library.

    config:        reads kubeconfig files and service accounts
    configuration: the class of what they are read into
    rest:          the class that sends requests
    """

    config: Any
    configuration: type[Configuration]
    rest: type[RESTClientObject]


def parts() -> Parts:
    """The parts, alone where that can be. Raises `ImportError` where the library is not installed."""
    if NAME in sys.modules:
        return _imported()
    try:
        return _alone()
    except (ImportError, AttributeError):  # a version with other parts
        return _imported()


def _imported() -> Parts:
    config, configuration, rest = (
        importlib.import_module(one) for one in (f"{NAME}.config", f"{CLIENT}.configuration", f"{CLIENT}.rest")
    )
    return Parts(config, configuration.Configuration, rest.RESTClientObject)


def _alone() -> Parts:
    try:
        top = _empty(importlib.util.find_spec(NAME))
        client: Any = _empty(importlib.machinery.PathFinder.find_spec(CLIENT, top.__path__))
        client.ApiClient = object  # named by functions that make one, which are not called here
        client.Configuration = importlib.import_module(f"{CLIENT}.configuration").Configuration
        return _imported()
    finally:
        # Other threads import, too: their modules come and go meanwhile.
        for name in [one for one in list(sys.modules) if one.partition(".")[0] == NAME]:
            sys.modules.pop(name, None)


def _empty(spec: importlib.machinery.ModuleSpec | None) -> ModuleType:
    """A package in which nothing was run yet."""
    if spec is None:
        raise ImportError(f"no module named {NAME!r}", name=NAME)
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    return made
