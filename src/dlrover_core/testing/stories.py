"""How conformance kits tell their stories: each promise is an async function of the kit and of what it tries."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

Tried = TypeVar("Tried")


def story(told: Callable[[Any, Tried], Awaitable[None]]) -> Callable[[Any], None]:
    """Make a plain test of a story: ``run`` of its kit tells it to a new log or backend, in a new event loop."""

    @functools.wraps(told)
    def test(kit: Any) -> None:
        kit.run(functools.partial(told, kit))

    del test.__wrapped__  # pytest would look for fixtures that are called as the story's arguments
    return test
