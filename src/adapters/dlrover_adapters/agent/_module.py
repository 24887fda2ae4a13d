"""Run a module of ours as `python -m` does, but not from the working directory: ``python _module.py MODULE ARG...``.

That directory is the user's, and with ``-m`` it comes first: a ``secrets.py`` in it would become ours. (``-P`` does the same,
from Python 3.11 on.) Run as a file, never imported.

Agents and masters import some hundred thousand objects that all stay: Python's own thresholds would look for garbage among them
140 times, a sixth of what their start costs. A zygote sees to that itself: what it is forked to be is the user's.
"""

import gc
import os
import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        # Not this file's folder either, whose modules have names like `logs`; workers put their script's here.
        sys.path[0] = os.devnull
    del sys.argv[0]
    if sys.argv[0].startswith("dlrover_adapters.cli."):
        gc.set_threshold(20_000, 20, 100)  # as `collector.THRESHOLDS`

    import runpy

    # What `python -m` itself calls: `runpy.run_module` would end with another `__main__` than it began with, and then what
    # the interpreter does last for a script's globals (flushing its open files) is not done.
    runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
