"""Run a module of ours as `python -m` does, but without the working directory on its path: ``python _module.py MODULE ARG...``.

It is the user's directory, and a ``secrets.py`` in it would become ours. (``-P`` does the same, from Python 3.11 on.)
"""

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's folder
    del sys.argv[0]

    import runpy

    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
