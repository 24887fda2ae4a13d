"""The campaign `etcd_log`: the stories of `tests/chaos/etcd_stories.py`, each told to a new etcd, order and moments seeded.

Every story is told once before one is told again. ``voids`` counts the trials in which etcd's own members came to differ; such a
trial is done again, and two voids in succession are a failure.
"""

from __future__ import annotations

import random
import sys


def name_of(seed: int) -> str:
    """Which story a trial tells."""
    from tests.chaos.etcd_stories import STORIES

    turn, place = divmod(seed, len(STORIES))
    return random.Random(turn).sample(sorted(STORIES), len(STORIES))[place]


def trial(seed: int) -> dict[str, int]:
    """What it came to, and how often each story was told. Raises for every broken promise."""
    from tests.chaos.etcd_stories import insist_on

    name, voids = name_of(seed), list[str]()
    try:
        told = insist_on(name, seed, voids)
    except Exception as error:
        raise AssertionError(f"python -m tests.chaos.etcd_stories {name} {seed}: {error!r}") from error
    finally:
        for void in voids:
            print(f"\nvoid: {void}", file=sys.stderr)
    return {name: 1, "voids": len(voids), **told}
