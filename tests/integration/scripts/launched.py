"""What tests of the Linux launcher share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Make = Callable[..., Any]


def run(test: Coroutine[Any, Any, None]) -> None:
    """On a loop of its own, within a minute."""
    asyncio.run(asyncio.wait_for(test, 60))


def zygote_of(rig: Any) -> int:
    """Its pid."""
    return int(rig.launcher.pids["zygote"])
