"""The job token: who may speak to this job's master.

It comes from the environment or from a file, never from an argument: command lines can be read by everybody on the host.
It is compared in constant time and is never logged.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dlrover_core.errors import SpecError

VARIABLE = "DLROVER_TOKEN"
HEADER = "Authorization"
# For proxies that keep `HEADER` to themselves, as the API server of Kubernetes does.
PLAIN_HEADER = "X-DLRover-Token"
_SCHEME = "Bearer "
TOKEN_CHARS_MIN = 8
TOKEN_CHARS_MAX = 1024
_TOKEN_BYTES = 32

HOW_TO_SHARE = (
    "several hosts need one job token, the same on each: run once "
    f"(umask 077; python3 -c 'import secrets; print(secrets.token_urlsafe({_TOKEN_BYTES}))' > job.token), copy the file to "
    f'every host, and say --token-file job.token there, or export {VARIABLE}="$(cat job.token)"'
)


def make_token() -> str:
    """A new token, for a job on one host."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def load_token(environ: Mapping[str, str], token_file: str | Path | None = None) -> str:
    """The job token: from ``token_file`` if one is named, else from ``DLROVER_TOKEN``; empty if neither is there.

    Raises `SpecError` for a file that cannot be read and for what cannot be a token.
    """
    if token_file is None:
        found = environ.get(VARIABLE, "").strip()
        return _checked(found, VARIABLE) if found else ""
    try:
        # A token is short: a wrong path (a device, a checkpoint) must not be read whole.
        with Path(token_file).open("rb") as file:
            raw = file.read(TOKEN_CHARS_MAX + 2)
    except OSError as error:
        raise SpecError("--token-file", f"{token_file} cannot be read: {error.strerror}") from error
    return _checked(raw.decode("latin-1").strip(), f"--token-file {token_file}")


def require_token(environ: Mapping[str, str], token_file: str | Path | None = None) -> str:
    """`load_token`, for a job on several hosts. Raises `SpecError` that says what to run when there is none."""
    token = load_token(environ, token_file)
    if not token:
        raise SpecError(VARIABLE, HOW_TO_SHARE)
    return token


def loopback_token(directory: Path) -> str:
    """The token of a job whose launchers all run on this host: one lies in the job's private directory.

    The first launcher makes the file, whole; the others, which meet the first at a loopback address, read it.
    """
    path = directory / "loopback.token"
    with contextlib.suppress(FileExistsError):
        part = path.with_suffix(f".{os.getpid()}")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(make_token())
            os.link(part, path)
        finally:
            part.unlink()
    return load_token({}, path)


@contextlib.contextmanager
def kept(token: str, folder: Path, link: Path) -> Iterator[None]:
    """Keep the token of a one-host job where `dlrover` finds it: in a file of this user's alone that goes with ``folder``.

    ``link`` leads there, and is all that a launcher that was killed leaves behind.
    """
    keep(token, folder, link)
    try:
        yield
    finally:
        for path in (link, folder / "token"):
            with contextlib.suppress(OSError):  # gone with its folder, or on a disk that is read-only by now
                path.unlink()


def keep(token: str, folder: Path, link: Path) -> None:
    """Write the token into ``folder`` and ``link`` to it; as often as need be. Raises `OSError`."""
    path = folder / "token"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(token + "\n")
    link.unlink(missing_ok=True)
    link.symlink_to(path)


def authorization(token: str) -> dict[str, str]:
    """The header that shows the token. Without a token there is none, and the master will say so."""
    return {HEADER: _SCHEME + token} if token else {}


def past_proxies(token: str) -> dict[str, str]:
    """The same in a header that proxies let through; `HEADER` is theirs."""
    return {PLAIN_HEADER: token} if token else {}


def shown(header: str | None) -> str:
    """The token that a request shows, or the empty string."""
    return header[len(_SCHEME) :].strip() if header is not None and header.startswith(_SCHEME) else ""


def shown_plainly(headers: Sequence[str]) -> str:
    """The token in `PLAIN_HEADER`; of several none, for whoever stands between us might have looked at another one."""
    return headers[0].strip() if len(headers) == 1 else ""


def same(one: str, other: str) -> bool:
    """Are the tokens equal? It takes as long for a wrong one as for the right one. No token equals nothing."""
    equal = hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode("utf-8", "surrogatepass"))
    return equal and bool(one)


def _checked(token: str, source: str) -> str:
    if not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX:
        raise SpecError(source, f"a token has {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} characters, this one {len(token)}")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise SpecError(source, "a token is one word of printable ASCII characters")
    return token
