"""Import this before anything that imports structlog: that loads rich where it is installed, a tenth of a second in each of our

processes, for tracebacks that we never show. Whoever wants rich afterwards has it.
"""

from __future__ import annotations

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # as documented for `import`: there is no such module
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
