"""The log in etcd as masters in pods are told it: a URL with the password in it, and the files that it names.

All of it lies in the job's Secret. The files are read where the command is typed, and mounted in the masters' pods.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlencode

from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_adapters.etcd.address import Address
    from dlrover_backends.k8s.elasticjob.operator import Forget

FILES = {"cacert": "etcd-ca.pem", "cert": "etcd-client.pem", "key": "etcd-client-key.pem"}
"""Options of the URL that name files, and the keys of the Secret that these are in."""
_USER = re.compile(r"(etcd://[^/@:?#]+)(:[^/@]*)?(?=@)", re.IGNORECASE)
_TLS = re.compile(r"etcds:", re.IGNORECASE)


class Told(NamedTuple):
    """What goes into the Secret.

    url:   of the log, as pods have it; what is no etcd is left as it was typed
    files: contents by key
    """

    url: str
    files: dict[str, str]


def _check_plain(log: str) -> None:
    if _TLS.match(log):
        raise SpecError(
            "log",
            "etcds: is not known: say etcd://HOST:2379?cacert=FILE, and with client certificates &cert=FILE&key=FILE",
        )


def read(log: str, folder: str, *, password: str | None = None, key: str | None = None) -> Told:
    """What masters in pods are told of this log. Raises `SpecError` where etcd cannot be asked with what it names.

    folder:   where the pods have the files
    password: stands for etcd's; None: the true one
    key:      stands for the client's key; None: the true one
    """
    _check_plain(log)
    if not log.lower().startswith("etcd:"):
        return Told(log, {})
    from dlrover_adapters.etcd import address

    found = address.parse(
        _USER.sub(rf"\1:{password}", log) if password is not None and "password_file=" not in log else log
    )
    files = {name: str(getattr(found, name)) for name in FILES if getattr(found, name)}
    told = {FILES[name]: Path(path).read_text(encoding="utf-8") for name, path in files.items()}
    if key is not None and "key" in files:
        told[FILES["key"]] = key
    return Told(_url(found, {name: f"{folder}/{FILES[name]}" for name in files}, password), told)


def forgetting(log: str) -> Forget | None:
    """Removes what this etcd has of a job that is deleted, as the operator wants it; None: there is no etcd, or an archive.

    A job's archive cannot be removed from here, and without its log the next job of the name could not use it.
    """
    if not log:
        return None
    from dlrover_adapters.etcd import address
    from dlrover_backends.k8s import masters

    if address.parse(log).archive:
        return None

    async def forget(namespace: str, job: str, run: str, begun: Callable[[], None]) -> None:
        from dlrover_adapters.etcd.erasing import erase

        found = address.parse(log)  # each time: a password in a file changes
        files = {name: str(getattr(found, name)) for name in FILES if getattr(found, name)}
        # Spelled as masters are told it: a prefix that is quoted differently is another one.
        await erase(masters.by_namespace(_url(found, files, None), namespace), job, run, begun)

    return forget


def _url(found: Address, files: dict[str, str], password: str | None) -> str:
    who = f"{quote(found.user, safe='')}:{quote(found.password if password is None else password, safe='')}@"
    options = dict(files)
    if found.archive:
        options["archive"] = found.archive
    if found.ttl_s is not None:
        options["ttl"] = f"{found.ttl_s:g}"
    query = f"?{urlencode(options, safe='/', quote_via=quote)}" if options else ""
    return f"etcd://{who if found.user else ''}{','.join(found.endpoints)}/{quote(found.prefix)}{query}"
