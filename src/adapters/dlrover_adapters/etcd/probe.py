"""Why nobody answers: what grpc does not tell, asked of the endpoint once more by hand.

grpc says "failed to connect" for a wrong CA, a wrong name, a missing client certificate and a server without TLS alike. Python's
own TLS says which it is. Only looked at after a failure, and once per start.
"""

from __future__ import annotations

import socket
import ssl
from typing import NamedTuple

from dlrover_adapters.etcd.address import Address
from dlrover_core.errors import SpecError

PROBE_S = 2.0
# What every HTTP/2 client begins with, and empty settings.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_UNTRUSTED = {18, 19, 20, 21}  # X509_V_ERR_: self-signed, or no way to an issuer we know
_OVER = {9, 10}  # not yet, or not any more, valid
# How OpenSSL calls an answer that is none of TLS, and an end without an answer.
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"}
_NO_ANSWER = {"", "UNEXPECTED_EOF_WHILE_READING"}
_NAMES = {62, 64}  # host name, IP address


class Finding(NamedTuple):
    """Why an endpoint is not reached. ``ours``: what was configured here cannot be right, and waiting does not help."""

    reason: str
    ours: bool = False


_PLAIN = Finding("it does not speak TLS: leave out ?cacert=, ?cert= and ?key=, or have etcd serve TLS", ours=True)


def certificates(address: Address) -> ssl.SSLContext | None:
    """The TLS settings of an address; None: it is plain. Raises `SpecError` for files that are no certificates."""
    if not address.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=address.cacert or None)
    except (ssl.SSLError, OSError) as error:
        raise SpecError("log", f"?cacert={address.cacert} holds no certificate in PEM form ({_said(error)})") from error
    context.set_alpn_protocols(["h2"])
    if address.cert:
        try:
            context.load_cert_chain(address.cert, address.key, password=lambda: b"")
        except (ssl.SSLError, OSError) as error:
            if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
                why = "the key belongs to another certificate"
            else:
                why = f"not a certificate and its unencrypted key, both in PEM form: {_said(error)}"
            raise SpecError("log", f"?cert={address.cert}&key={address.key}: {why}") from error
    return context


def find(address: Address, endpoint: str) -> Finding | None:
    """What keeps us from an endpoint; None: nothing that can be seen from outside. Blocks for a few times `PROBE_S`."""
    try:
        connection = _connected(endpoint)
    except socket.gaierror as error:
        return Finding(f"there is no host {_host(endpoint)!r} ({error.strerror})")
    except TimeoutError:
        return Finding("no connection within 2 s: nobody there, or a firewall between")
    except OSError as error:
        return Finding(f"no connection: {error.strerror or error}")
    with connection:
        context = certificates(address)
        if context is None:
            return _plain(connection, endpoint)
        return _encrypted(connection, context, endpoint, bool(address.cert))


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")


def _connected(endpoint: str) -> socket.socket:
    return socket.create_connection((_host(endpoint), int(endpoint.rpartition(":")[2])), PROBE_S)


def _encrypted(connection: socket.socket, context: ssl.SSLContext, endpoint: str, shown: bool) -> Finding | None:
    host = _host(endpoint)
    try:
        with context.wrap_socket(connection, server_hostname=host) as channel:
            # With TLS 1.3 a server that misses our certificate, or dislikes it, says so only now.
            channel.sendall(_PREFACE)
            return None if channel.recv(1) else Finding("it ended the connection without a word")
    except ssl.SSLCertVerificationError as error:
        return _unverified(error, host)
    except ssl.SSLError as error:
        if (error.reason or "") in _NO_ANSWER:
            return _hung_up(endpoint, "end of the stream")
        return _alerted(error, shown)
    except TimeoutError:
        return Finding("it accepts connections and says nothing: stopped, or overloaded")
    except OSError as error:
        return _hung_up(endpoint, error.strerror or str(error))


def _hung_up(endpoint: str, how: str) -> Finding:
    """It ended the connection in our handshake, by an end or a reset as the kernel sees it: a plain server, or a dying one."""
    try:
        with _connected(endpoint) as connection:
            if _speaks_plainly(connection):
                return _PLAIN
    except OSError:
        pass
    return Finding(f"it ended the connection during the TLS handshake: {how}")


def _speaks_plainly(connection: socket.socket) -> bool:
    """HTTP/2 without TLS: its settings come, which begin with their length."""
    connection.sendall(_PREFACE)
    return connection.recv(1) == b"\0"


def _unverified(error: ssl.SSLCertVerificationError, host: str) -> Finding:
    said = error.verify_message
    if error.verify_code in _NAMES:
        return Finding(f"its certificate is not for {host!r} ({said}): use a name that is in it", ours=True)
    if error.verify_code in _UNTRUSTED:
        return Finding(f"its certificate is not of the CA we were given ({said}): correct ?cacert=", ours=True)
    if error.verify_code in _OVER:
        return Finding(f"its certificate's time is over, or one of our two clocks is wrong ({said})", ours=True)
    return Finding(f"its certificate is not good: {said}", ours=True)


def _alerted(error: ssl.SSLError, shown: bool) -> Finding:
    """What an alert means; ``shown``: we have a certificate of our own to show."""
    said = error.reason or str(error)
    if said in _NO_TLS:
        return _PLAIN
    # Servers say with any of these that a certificate is missing, or that they do not trust it.
    if any(one in said for one in ("CERTIFICATE", "UNKNOWN_CA", "HANDSHAKE_FAILURE")):
        if not shown:
            return Finding("it wants a client certificate: give ?cert= and ?key=", ours=True)
        return Finding(f"it does not accept our client certificate ({said}): give one of the CA it trusts", ours=True)
    return Finding(f"the TLS handshake failed: {said}")


def _plain(connection: socket.socket, endpoint: str) -> Finding | None:
    try:
        connection.sendall(_PREFACE)
        answer = connection.recv(1)
    except TimeoutError:
        return Finding("it accepts connections and says nothing: stopped, or overloaded")
    except OSError:
        answer = b""
    if answer == b"\0":
        return None
    if _wants_tls(endpoint):
        return Finding("it wants TLS: give ?cacert=FILE, the CA of its certificate", ours=True)
    return Finding("it does not speak HTTP/2: that is no etcd, or not its client port", ours=bool(answer))


def _wants_tls(endpoint: str) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connected(endpoint) as connection, context.wrap_socket(connection):
            return True
    except ssl.SSLError as error:
        return (error.reason or "") not in _NO_TLS | _NO_ANSWER
    except OSError:
        return False


def _said(error: OSError) -> str:
    return error.reason if isinstance(error, ssl.SSLError) and error.reason else (error.strerror or str(error))
