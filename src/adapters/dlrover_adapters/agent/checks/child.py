"""A process of a check: it dies with its agent, leads a session of its own, and then is what it was given.

``python _module.py dlrover_adapters.agent.checks.child AGENT module NAME`` or ``... AGENT command ARGUMENT...``.
"""

from __future__ import annotations

import os
import runpy
import sys

from dlrover_adapters.agent.process import die_with_parent, set_name

NOT_STARTED = 127


def main() -> int:
    """Become it."""
    agent, kind, argv = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if not die_with_parent(agent):
        return 0
    os.setsid()
    if kind == "command":
        try:
            os.execvp(argv[0], argv)  # noqa: S606  # no shell is wanted
        except OSError as error:
            sys.stderr.write(f"cannot be started: {error.strerror or error}\n")
            return NOT_STARTED
    set_name("dlrover-check")
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
