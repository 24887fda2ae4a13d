"""TLS between agents, operators and masters: contexts made from files, and what went wrong in words.

A master shows a certificate; whoever dials checks it against a CA, and that it names the host that was dialled. Who may speak is
still the token's matter: certificates of agents are not asked for.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from dlrover_core.errors import ConnectionLost, SpecError
from dlrover_core.runtime.within import within

if TYPE_CHECKING:
    import aiohttp

PROBE_S = 2.0
_ROUNDS = 8
# OpenSSL's X509_V_ERR_...: what is wrong with a certificate.
_NOT_YET, _EXPIRED = 9, 10
_STRANGE_CA = (18, 19, 20, 21)
_OTHER_NAME = (62, 64)
# What a peer without TLS looks like, by versions of OpenSSL.
_PLAIN = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL")
_PLAIN_CLIENT = ("HTTP_REQUEST", *_PLAIN)


class Untrusted(ConnectionLost):
    """Nothing was said: one end encrypts and the other does not, or what the master shows is not to be trusted."""


class BadFile(SpecError):
    """A certificate, key or CA that cannot be used."""


def shown(certificate: str, key: str = "") -> ssl.SSLContext:
    """What masters show: a certificate, and its key from a file of its own or the same one. Raises `BadFile`."""
    _readable("tls-cert", certificate)
    if key:
        _readable("tls-key", key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def ask() -> bytes:
        raise BadFile("tls-key", f"{key or certificate} has a passphrase, and masters start unattended; take it off")

    try:
        context.load_cert_chain(certificate, key or None, ask)
    except ssl.SSLError as error:
        raise _unusable(error, certificate, key) from error
    return context


def _unusable(error: ssl.SSLError, certificate: str, key: str) -> BadFile:
    if error.reason == "KEY_VALUES_MISMATCH":
        return BadFile("tls-key", f"{key or certificate} is not the key of the certificate {certificate}")
    if not _has(certificate, b"CERTIFICATE-----"):
        return BadFile("tls-cert", f"{certificate} has no certificate in PEM form")
    if not _has(key or certificate, b"PRIVATE KEY-----"):
        return BadFile("tls-key", f"{key or certificate} has no private key in PEM form; name the file that has")
    return BadFile("tls-cert", f"{certificate} or its key cannot be used: {error.reason or error}")


def _has(path: str, words: bytes) -> bool:
    return words in Path(path).read_bytes()


def trusting(ca: str) -> ssl.SSLContext:
    """What who dials checks masters by: certificates of this file alone, and the name that was dialled. Raises `BadFile`."""
    _readable("tls-ca", ca)
    try:
        context = ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise BadFile("tls-ca", f"{ca} has no certificate in PEM form ({error.reason or error})") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def dialled(ca: str) -> ssl.SSLContext | None:
    """`trusting`, where a CA was named; else nothing is encrypted."""
    return trusting(ca) if ca else None


def pinned(certificate: str) -> ssl.SSLContext | None:
    """For a launcher that dials its own masters, at whatever address: this certificate and no other; None without one."""
    if not certificate:
        return None
    context = trusting(certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def check(certificate: str, key: str, ca: str, host: str = "") -> None:
    """Would who dials ``host`` and trusts ``ca`` take this certificate? An empty host: any name. Raises `BadFile`."""
    to_master, to_agent = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusts = trusting(ca)
    trusts.check_hostname = bool(host)
    master = shown(certificate, key).wrap_bio(to_master, to_agent, server_side=True)
    agent = trusts.wrap_bio(to_agent, to_master, server_hostname=host or None)
    for _ in range(_ROUNDS):
        for one in (agent, master):
            try:
                one.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                raise BadFile("tls-cert", f"{certificate} would not be taken: {why(error)}") from error


def why(error: ssl.SSLError) -> str:
    """What a failed handshake means, and what to do, for who dials."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        if error.reason in _PLAIN:
            return "it speaks no TLS; leave --tls-ca out here, or start the masters with --tls-cert and --tls-key"
        return f"TLS failed: {error.reason or error}"
    code, said = error.verify_code, error.verify_message.rstrip(".")
    if code == _EXPIRED:
        return "its certificate, or its CA's, has expired; make a new one, and check this host's clock"
    if code == _NOT_YET:
        return "its certificate is not valid yet; check this host's clock"
    if code in _STRANGE_CA:
        return f"its certificate is not of the CA in --tls-ca ({said}); name the CA that signed the masters' --tls-cert"
    if code in _OTHER_NAME:
        return f"{said}; say HOST as the certificate does, or make one whose subjectAltName names what is dialled"
    return f"its certificate is not to be trusted: {said}"


def refused(error: BaseException) -> str:
    """The same for the master: why a peer did not get in."""
    if not isinstance(error, ssl.SSLError):
        return "it hung up; where it does not trust our certificate, its own words say why"
    reason = error.reason or str(error)
    if reason in _PLAIN_CLIENT:
        return "it does not encrypt; it needs --tls-ca"
    if "ALERT" in reason and ("CERT" in reason or "CA" in reason.split("_")):
        return f"it does not trust our certificate ({reason}); its own words say why"
    return reason


def untrusted(address: str, error: aiohttp.ClientConnectorError) -> Untrusted | None:
    """What a failed dial was, if it was TLS."""
    cause = error.__cause__ if isinstance(error.__cause__, ssl.SSLError) else error.os_error
    return Untrusted(f"the master at {address}: {why(cause)}") if isinstance(cause, ssl.SSLError) else None


async def encrypts(address: str) -> bool:
    """Does somebody there speak TLS? Asked when a dial without it was hung up on; nothing is trusted, and nothing told."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = address.rpartition(":")
    try:
        _, writer = await within(PROBE_S, asyncio.open_connection(host.strip("[]"), int(port), ssl=context))
    except (OSError, ValueError, asyncio.TimeoutError):
        return False
    writer.transport.abort()
    return True


def encrypted(address: str) -> Untrusted:
    """What to tell who dialled such an address without TLS."""
    return Untrusted(f"the master at {address} speaks only TLS; name the CA of its certificate with --tls-ca")


def _readable(field: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise BadFile(field, f"{path} cannot be read: {error.strerror}") from error
