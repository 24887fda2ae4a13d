"""What does `import dlrover_core` cost above a bare interpreter, and what does it drag in?

Fresh processes in turn: ``-c pass``, ``import dlrover_core``, and, without a target, the import with the names that an
embedding program wants. The target is about the difference of the medians. Bytecode is compiled beforehand and the page
cache is warm. Fails, whatever the time, if the bare import loads any of structlog, asyncio, torch, aiohttp, transitions.
"""

from __future__ import annotations

import subprocess
import sys
import time

from _bench import BROKEN, Result, Row, median, options, say

MEASURES = ("src/dlrover_core",)

TARGET_MS = 20.0
BARRED = ("structlog", "asyncio", "torch", "aiohttp", "transitions")
BARE, OURS = "pass", "import dlrover_core"
EMBEDDER = "from dlrover_core import Backend, JobSpec, Master, open_log"


def once(code: str) -> float:
    """Milliseconds of one interpreter."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return 1000 * (time.perf_counter() - began)


def loaded() -> list[str]:
    """The barred packages that the import loads."""
    code = f"import sys, dlrover_core; print(*[name for name in {BARRED!r} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def main() -> int:
    """Start the interpreters in turn."""
    chosen = options(__doc__, trials=25)
    result = Result("import", "a bare interpreter")
    try:
        dragged = loaded()
        found: dict[str, list[float]] = {BARE: [], OURS: [], EMBEDDER: []}
        for code in found:
            once(code)  # compiles
        for _ in range(chosen.trials):
            for code, times in found.items():
                times.append(once(code))
    except subprocess.CalledProcessError as error:
        say(f"nothing measured: {error}")
        return BROKEN
    bare = median(found[BARE])
    result.rows = [
        Row("import dlrover_core, whole process", "ms", found[OURS], found[BARE]),
        Row("import dlrover_core, above bare", "ms", [one - bare for one in found[OURS]], target=TARGET_MS),
        Row("barred packages loaded", "packages", [float(len(dragged))], target=0.0),
        Row("with Master, Backend, JobSpec, open_log, above bare", "ms", [one - bare for one in found[EMBEDDER]]),
    ]
    if dragged:
        result.notes.append(f"import dlrover_core loads {', '.join(dragged)}")
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
