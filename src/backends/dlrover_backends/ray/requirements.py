"""Requirements files, as the lists of lines that Ray's runtime environment takes in their place.

Ray reads such a file where an actor is launched. That may be hours later, on a host without the file: so its lines travel.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from dlrover_core.errors import SpecError

FIELD = "backend"
FILE_BYTES_MAX = 1024 * 1024
SENT = "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}"
"""What Ray puts the folder of ``working_dir`` in place of, in a requirement."""
_COMMENT = re.compile(r"(^|\s+)#.*$")
_OPTION = re.compile(r"(?:-([rc])\s*|--(r)equirement(?:\s*=\s*|\s+)|--(c)onstraint(?:\s*=\s*|\s+))(.*)")


def packages(told: object, folder: Path, by: str) -> object:
    """The packages that ``pip`` or ``uv`` (``by``) is told to install: files' lines in place of the files' names.

    ``told``: the name of a requirements file, or a list, in which ``-r FILE`` may stand; anything else is Ray's to refuse.
    ``folder``: what names are relative to. Raises `SpecError`.
    """
    if isinstance(told, str):
        return list(dict.fromkeys(_of_file(Path(folder, told), set(), by)))
    if isinstance(told, list) and all(isinstance(one, str) for one in told):
        return list(_expanded(told, folder, set(), by))
    return told


def text_of(file: Path, what: str) -> str:
    """What a file says. Raises `SpecError`, which calls it ``what``."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(FILE_BYTES_MAX + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            FIELD,
            f"{what} cannot be read: {getattr(error, 'strerror', None) or error}; name it from the folder where you type the "
            "command, or from the root",
        ) from error
    if len(raw) > FILE_BYTES_MAX:
        raise SpecError(FIELD, f"{what} has more than {FILE_BYTES_MAX >> 10} KiB; put it into working_dir instead")
    return text


def logical(text: str) -> Iterator[str]:
    """The lines of a requirements file as pip reads them: continued ones joined, without comments and empty ones."""
    begun = ""
    for line in text.splitlines():
        if line.endswith("\\") and not _COMMENT.match(line):
            begun += line[:-1]
            continue
        # pip: a comment ends a continued line, too.
        whole = begun + (f" {line}" if _COMMENT.match(line) else line)
        begun = ""
        if kept := _COMMENT.sub("", whole).strip():
            yield kept
    if kept := begun.strip():
        yield kept


def _of_file(file: Path, seen: set[Path], by: str) -> Iterator[str]:
    """The lines of a file and of those that it names, each file once. Raises `SpecError`."""
    file = file.resolve()
    if file in seen:
        return
    seen.add(file)
    yield from _expanded(
        logical(text_of(file, f"{file}, which {by} of the runtime environment names,")), file.parent, seen, by
    )


def _expanded(lines: Iterable[str], folder: Path, seen: set[Path], by: str) -> Iterator[str]:
    for line in lines:
        option = _OPTION.match(line)
        if option is None:
            yield line
            continue
        kind, name = option[1] or option[2] or option[3], _name(option[4])
        on_host = "$" in name or Path(name).is_absolute() if kind == "c" else "$" in name
        if on_host or ("://" in name and (kind == "c" or by != "pip")):  # read on the host itself
            yield line
        elif kind == "c":
            raise SpecError(
                FIELD,
                f"{line!r} in {by} of the runtime environment: hosts do not have that file. Write its versions into the "
                f"requirements, or name a file that all hosts have, by its whole path; one in working_dir is "
                f"-c {SENT}/{Path(name).name}",
            )
        elif "://" in name:
            raise SpecError(
                FIELD,
                f"{line!r} in {by} of the runtime environment: Ray reads no address there; write its lines in its place",
            )
        else:
            yield from _of_file(Path(folder, name), seen, by)


def _name(written: str) -> str:
    """The name of a file behind an option, as pip and people write it."""
    try:
        words = shlex.split(written)
    except ValueError:
        words = []
    return words[0] if len(words) == 1 else written.strip()
