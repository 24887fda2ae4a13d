"""A site's own checks: executables that know what this place should look like.

Exit code 0 is well; anything else is a failed check, and its last line says what. (Clusters that check nodes by script often end
them with 201, 202 or 14; all of them mean the same here.) One is killed, with all it has started, when their time is over.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence

from .processes import Command, Ended, run

LINE_MAX = 200


async def problems(scripts: Sequence[str], env: Mapping[str, str], limit_s: float) -> list[str]:
    """What each of them finds, in order; one after the other, within the limit together."""
    found, deadline = [], time.monotonic() + limit_s
    for script in scripts:
        argv = shlex.split(script)
        name = os.path.basename(argv[0])
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            found.append(f"check {name}: not run: those before it took all of {limit_s:g} s")
            continue
        try:
            ended = (await run([Command(tuple(argv), env)], left_s))[0]
        except OSError as error:  # no process at all can be started
            found.append(f"check {name}: {error}")
            continue
        if ended.exit_code != 0:
            found.append(f"check {name}: {_how(ended, left_s)}")
    return found


def _how(ended: Ended, limit_s: float) -> str:
    said = f": {ended.last_line[:LINE_MAX]}" if ended.last_line else ""
    if ended.exit_code is None:
        return f"did not end within {round(limit_s, 1):g} s{said}"
    return f"{f'exit code {ended.exit_code}' if ended.exit_code > 0 else f'killed by signal {-ended.exit_code}'}{said}"
