"""The URL of an etcd log: ``etcd://[USER@]HOST[:PORT][,HOST[:PORT] ...][/PREFIX][?OPTION=VALUE&...]``.

Options: ``cacert``, ``cert``, ``key`` (PEM files; any of them means TLS), ``password_file``, ``archive`` (a directory or an
fsspec URL; without one nothing is ever truncated), ``ttl`` (seconds of the leader's lease). A password in the URL is taken and
never shown; rather than there, where every ``ps`` shows it, put it into ``DLROVER_ETCD_PASSWORD`` or a file.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from dlrover_core.errors import SpecError
from dlrover_core.logs import urls

PORT = 2379
PORT_DIGITS_MAX = 5
PREFIX = "dlrover"
PASSWORD = "DLROVER_ETCD_PASSWORD"  # noqa: S105  # the variable's name
OPTIONS = ("cacert", "cert", "key", "password_file", "archive", "ttl")
FORM = "etcd://HOST:2379,HOST:2379/PREFIX"
# `urlsplit` knows one host, and newer ones refuse several in brackets.
_URL = re.compile(
    r"etcd://((?P<who>[^/?#]*)@)?(?P<hosts>[^/?#@]*)(?P<path>/[^?#]*)?(\?(?P<query>[^#]*))?(?P<fragment>#.*)?",
    re.IGNORECASE | re.DOTALL,
)
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Address:
    """Where an etcd is, and as whom it is spoken to. ``endpoints`` are ``host:port``, an IPv6 host in brackets."""

    endpoints: tuple[str, ...]
    prefix: str = PREFIX
    user: str = ""
    password: str = field(default="", repr=False)
    cacert: str = ""
    cert: str = ""
    key: str = ""
    archive: str = field(default="", repr=False)  # an fsspec URL may hold a password too
    ttl_s: float | None = None

    @property
    def tls(self) -> bool:
        """Is it spoken to encrypted?"""
        return bool(self.cacert or self.cert or self.key)

    @property
    def shown(self) -> str:
        """For people: without the password."""
        user = f"{self.user}@" if self.user else ""
        return f"etcd://{user}{','.join(self.endpoints)}/{self.prefix}"


def parse(url: str) -> Address:
    """Read a URL. Raises `SpecError` that says which part is wrong."""
    parts = _URL.fullmatch(url)
    if parts is None or not parts["hosts"]:
        raise SpecError("log", f"{_shown(url)!r} names no etcd; say {FORM}")
    endpoints = tuple(dict.fromkeys(_endpoint(url, one) for one in parts["hosts"].split(",")))
    if parts["fragment"]:
        raise SpecError("log", f"{_shown(url)!r}: a '#' has no meaning here; write %23 for one in a name")
    options = urls.options(parts["query"] or "", OPTIONS)
    user, password = _credentials(parts["who"] or "", options.get("password_file", ""))
    if bool(options.get("cert")) != bool(options.get("key")):
        raise SpecError("log", "a client certificate needs both, ?cert=FILE&key=FILE")
    for name in ("cacert", "cert", "key"):
        if name in options:
            _read(name, options[name])
    return Address(
        endpoints=endpoints,
        prefix=_prefix(urls.unquoted("prefix", parts["path"] or "")),
        user=user,
        password=password,
        cacert=options.get("cacert", ""),
        cert=options.get("cert", ""),
        key=options.get("key", ""),
        archive=options.get("archive", ""),
        ttl_s=_seconds(options["ttl"]) if "ttl" in options else None,
    )


def _credentials(who: str, password_file: str) -> tuple[str, str]:
    """User and password, the latter from the URL, a file or the environment."""
    name, colon, secret = who.partition(":")
    user, password = urls.unquoted("user", name), urls.unquoted("password", secret)
    if colon and password_file:
        raise SpecError("log", "a password and a password_file are given: leave one of them out")
    if (colon or password_file) and not user:
        raise SpecError("log", f"a password is given and no user; say etcd://USER@{FORM.partition('//')[2]}")
    if password_file:
        password = _read("password_file", password_file).rstrip("\r\n")
    elif user and not colon:
        password = os.environ.get(PASSWORD, "")
    if user and not password:
        raise SpecError("log", f"user {user!r} needs a password: set {PASSWORD}, or ?password_file=FILE")
    return user, password


def _endpoint(url: str, text: str) -> str:
    found = _HOST.match(text)
    rest = text[found.end() :] if found else text
    port = rest.removeprefix(":") if rest else str(PORT)
    if (
        found is None
        or (rest and not rest.startswith(":"))
        or not (port.isascii() and port.isdecimal() and len(port) <= PORT_DIGITS_MAX and 0 < int(port) < 2**16)
    ):
        # Somebody may have written a password with a '/' in it: what looks like a port is a part of it then.
        named = text.partition(":")[0] if "@" in url else text
        hint = "; in a password write %2F for '/', %3F for '?', %23 for '#'" if named != text else ""
        raise SpecError("log", f"{named!r} in {_shown(url)!r} is not HOST:PORT, or [IPV6]:PORT; say {FORM}{hint}")
    return f"{found.group()}:{int(port)}"


def _prefix(path: str) -> str:
    prefix = path.strip("/") or PREFIX
    if any(ord(char) < 32 for char in prefix):
        raise SpecError("log", f"prefix {prefix!r} holds control characters")
    if "&" in prefix:
        raise SpecError(
            "log", f"prefix {prefix.partition('&')[0]!r} is followed by '&': the first option begins with '?'"
        )
    return prefix


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 2 <= seconds <= 600:
        raise SpecError("log", f"?ttl={text} is not a number of seconds from 2 to 600")
    return seconds


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SpecError("log", f"?{name}={path} cannot be read: {reason}") from error


def _shown(url: str) -> str:
    """A URL without its password, even if it is written wrongly; and without options, which may hold one too."""
    shown = re.sub(r"(?s)(//[^:@]*):.*@", r"\1:***@", url)
    return shown.partition("?")[0]
