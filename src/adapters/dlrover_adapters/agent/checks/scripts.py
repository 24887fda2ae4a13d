"""A site's own checks: executables that know what this place should look like.

Exit code 0 is well; anything else is a failed check, and its last line says what. (Clusters that check nodes by script often end
them with 201, 202 or 14; all of them mean the same here.) Each has its time, and is killed with all it has started.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from .processes import Command, Ended, run

LINE_MAX = 200


async def problems(scripts: Sequence[str], env: Mapping[str, str], limit_s: float) -> list[str]:
    """What each of them finds, in order; one after the other, within the limit together."""
    found = []
    for script in scripts:
        argv = shlex.split(script)
        name = os.path.basename(argv[0])
        try:
            ended = (await run([Command(tuple(argv), env)], limit_s))[0]
        except OSError as error:  # no process at all can be started
            found.append(f"check {name}: {error}")
            continue
        if ended.exit_code != 0:
            found.append(f"check {name}: {_how(ended, limit_s)}")
    return found


def _how(ended: Ended, limit_s: float) -> str:
    said = f": {ended.last_line[:LINE_MAX]}" if ended.last_line else ""
    if ended.exit_code is None:
        return f"did not end within {limit_s:g} s{said}"
    return f"{f'exit code {ended.exit_code}' if ended.exit_code > 0 else f'killed by signal {-ended.exit_code}'}{said}"
