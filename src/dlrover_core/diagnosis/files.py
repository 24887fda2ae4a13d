"""Whose a file is that cannot be read: a checkpoint's, the data's, or another process's message.

`EOFError: Ran out of input` says only that a pickle is not whole. What that means depends on who read it, and the call stack
tells: of its frames the innermost that speaks of data sets, of checkpoints or of a collective decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

CHECKPOINT, SAMPLE, SERVER, LOCK = "checkpoint.corrupt", "data.sample", "data.connection", "storage.lock"
# Words on a file that is not whole, whatever it holds.
_CUT = re.compile(
    r"\bRan out of input\b|\bpickle data was truncated\b|\binvalid load key\b|\bnot a zip file\b", re.IGNORECASE
)
_TORCH = re.compile(r"/torch/(?:serialization|utils/data/|distributed/)")
_OWNERS = (
    ("", re.compile(r"/torch/distributed/distributed_c10d\.py")),
    (
        CHECKPOINT,
        re.compile(
            r"check_?point|ckpt|resum|restor|state_?dict|safetensors|pretrained|/torch/serialization", re.IGNORECASE
        ),
    ),
    (
        SAMPLE,
        re.compile(
            r"data_?set|data_?load|data_?manag|feature|sample|collate|__getitem__|(?:\b|_)cached?(?:\b|_)|/torch/utils/data/",
            re.IGNORECASE,
        ),
    ),
)
# SQLite has no server: its database is a file, and what it waits for is that file's lock.
_SQLITE, _LOCKED = re.compile(r"/sqlite3/"), re.compile(r"\block(?:ed|ing)\b|\bbusy\b", re.IGNORECASE)


def owner(signature: str, words: str, frames: Sequence[tuple[str, str, str]]) -> str:
    """The signature of a file that cannot be read; empty: it stays what it was taken for.

    ``signature``: what the words alone were taken for. ``frames``: the calls, the outermost first, and the exception's package.
    """
    if signature == SERVER and _LOCKED.search(words) and any(_SQLITE.search(file) for file, _, _ in frames):
        return LOCK
    if signature != CHECKPOINT or not _CUT.search(words):
        return ""
    for file, _, function in reversed(frames):
        path = file.replace("\\", "/")
        said = path if _TORCH.search(path) else f"{'/'.join(path.split('/')[-2:])} {function}"
        found = next((name for name, pattern in _OWNERS if pattern.search(said)), None)
        if found is not None:
            return found if found != signature else ""
    return ""
