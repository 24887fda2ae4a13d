"""The URL of a log that is read through masters: ``http[s]://HOST[:PORT][,HOST[:PORT] ...][/PROXY/PATH]/JOB[?OPTION=VALUE&...]``.

Options: ``cacert`` (the CA of the masters' certificate; with ``https`` and without one those that this system trusts),
``token_file`` (else the token is in ``DLROVER_TOKEN``). A path before the job's name is a proxy's: it gets the token in a
header of its own, for ``Authorization`` is the proxy's, and there ``DLROVER_PROXY_AUTHORIZATION`` stands, if it is set.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qs, quote

from dlrover_adapters.http import token as tokens
from dlrover_core.errors import SpecError
from dlrover_core.logs import urls

PORT, PROXY_PORTS = 29400, {"http": 80, "https": 443}
PROXY_AUTHORIZATION = "DLROVER_PROXY_AUTHORIZATION"
SCHEMES = ("http://", "https://")
OPTIONS = ("cacert", "token_file")
FORM = f"http://HOST:{PORT}/JOB"
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<hosts>[^/?#]*)(?P<path>/[^?#]*)?(\?(?P<query>[^#]*))?(?P<fragment>#.*)?",
    re.IGNORECASE | re.DOTALL,
)
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Address:
    """Where masters are, and what to show them. ``masters`` are ``host:port``; an empty ``job``: the one that they lead."""

    scheme: str
    masters: tuple[str, ...]
    job: str
    prefix: str = ""
    cacert: str = ""
    token: str = field(default="", repr=False)
    proxy_authorization: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """What opens the door."""
        if not self.prefix:
            return tokens.authorization(self.token)
        theirs = {tokens.HEADER: self.proxy_authorization} if self.proxy_authorization else {}
        return {**theirs, **tokens.past_proxies(self.token)}

    @property
    def shown(self) -> str:
        """For people, in one piece."""
        return f"{self.scheme}://{','.join(self.masters)}{self.prefix}/{self.job}"


def is_url(text: str) -> bool:
    """Does it name a log read through masters, in place of a job's name?"""
    return text.lower().startswith(SCHEMES)


def parse(url: str) -> Address:
    """Read a URL, and the token that it or the environment names. Raises `SpecError` that says which part is wrong."""
    parts = _URL.fullmatch(url)
    if parts is None or not parts["hosts"]:
        raise SpecError("log", f"{_shown(url)!r} names no master; say {FORM}")
    if "@" in parts["hosts"]:
        raise SpecError("log", f"a token does not belong into a URL, which 'ps' shows; set {tokens.VARIABLE}")
    if parts["fragment"]:
        raise SpecError("log", f"{url!r}: a '#' has no meaning here; write %23 for one in a name")
    scheme = parts["scheme"].lower()
    prefix, _, job = (parts["path"] or "").rstrip("/").rpartition("/")
    port = PROXY_PORTS[scheme] if prefix else PORT
    options = urls.options(parts["query"] or "", OPTIONS)
    if options.get("cacert") and scheme == "http":
        raise SpecError("log", "?cacert is for https://")
    return Address(
        scheme,
        tuple(dict.fromkeys(_endpoint(one, port) for one in parts["hosts"].split(","))),
        urls.unquoted("job's name", job),
        prefix,
        options.get("cacert", ""),
        tokens.load_token(os.environ, options.get("token_file")),
        os.environ.get(PROXY_AUTHORIZATION, "").strip() if prefix else "",
    )


def job_of(url: str) -> str:
    """The job that a URL names; empty where it names none. Raises `SpecError`."""
    return parse(url.partition("?")[0]).job


def options_of(url: str) -> dict[str, str]:
    """The options of a URL. Raises `SpecError`."""
    return urls.options(url.partition("?")[2], OPTIONS)


def with_options(url: str, **options: str) -> str:
    """The URL with these options, where they are not empty and it does not have them already."""
    base, _, query = url.partition("?")
    have = parse_qs(query, keep_blank_values=True)
    more = [f"{name}={quote(value)}" for name, value in options.items() if value and name not in have]
    said = "&".join(filter(None, [query, *more]))
    return f"{base}?{said}" if said else base


def _endpoint(text: str, port: int) -> str:
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found["port"] or port) < 2**16:
        raise SpecError("log", f"{text!r} is not HOST:PORT, or [IPV6]:PORT; say {FORM}")
    return f"{found['host']}:{int(found['port'] or port)}"


def _shown(url: str) -> str:
    return re.sub(r"//[^/]*@", "//***@", url.partition("?")[0])
