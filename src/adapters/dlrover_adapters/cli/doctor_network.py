"""Checks of the network: can we listen, is the host's own name an address of this host, is the rendezvous point reachable?"""

from __future__ import annotations

import email.utils
import fcntl
import http.client
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dlrover_adapters.cli import values
from dlrover_adapters.cli.doctor_check import Finding, fail, ok, warn
from dlrover_adapters.http import token as tokens
from dlrover_core.errors import SpecError

PORT = 29400
"""The rendezvous port, as torchrun's."""

CONNECT_S = 5.0
SKEW_S = 2.0  # the header has whole seconds, and the answer takes its time
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "ifb", "tunl", "dummy")
BODY_BYTES_MAX = 65536


class Endpoint(NamedTuple):
    """``HOST:PORT`` of a rendezvous point."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def endpoint(text: str) -> Endpoint:
    """``HOST[:PORT]``; IPv6 addresses in brackets. Raises `SpecError`."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or ("[" not in text and text.count(":") > 1):
        host, port = text, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not 0 < (values.whole(port) or 0) < 65536:
        raise SpecError("endpoint", f"{text!r} is not HOST[:PORT] with a port of 1 to 65535")
    return Endpoint(host, int(port))


def is_ours(address: str) -> bool:
    """Is it an address of this machine? What can be bound to is."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind((address, 0))
    except OSError:
        return False
    return True


def resolve(host: str) -> list[str]:
    """The addresses of a name, in the resolver's order. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def is_loopback(address: str) -> bool:
    """Does it lead only to oneself?"""
    return address.startswith("127.") or address == "::1"


def interfaces() -> dict[str, str]:
    """The interfaces that have an IPv4 address, and it."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(one, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _real(found: Mapping[str, str]) -> list[str]:
    return [name for name in found if not name.startswith(_VIRTUAL)]


# ---- listening


def ports() -> Finding:
    """Can we listen on loopback and on the machine's own addresses, and reach ourselves there?"""
    reached: list[str] = []
    broken: list[str] = []
    for address in (LOOPBACK, *(one for one in interfaces().values() if not is_loopback(one))):
        fault = _reach_oneself(address)
        (broken if fault else reached).append(f"{address} ({fault})" if fault else address)
    if any(one.startswith(LOOPBACK) for one in broken):
        return fail(
            f"cannot listen and connect on {', '.join(broken)}",
            "is loopback up (ip link set lo up)? a sandbox without network?",
        )
    if broken:
        return warn(
            f"listening works on {', '.join(reached)}, not on {', '.join(broken)}",
            "one host needs loopback alone; for several hosts let the firewall pass TCP between the nodes",
            reached=reached,
            broken=broken,
        )
    low, high = _ephemeral()
    return ok(
        f"listening and connecting work on {', '.join(reached)}; free ports come from {low}-{high}", reached=reached
    )


def _ephemeral() -> tuple[str, str]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return "?", "?"
    return low, high


def _reach_oneself(address: str) -> str:
    try:
        with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname(), CONNECT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def hostname(several_hosts: bool, environ: Mapping[str, str] = os.environ) -> Finding:
    """Does the host's own name lead to this host? Gloo binds to what it resolves to, and tells its peers."""
    name, chosen = socket.gethostname(), environ.get("GLOO_SOCKET_IFNAME")
    real = _real(interfaces())
    use = f"export GLOO_SOCKET_IFNAME={real[0] if real else 'eth0'}"
    try:
        found = resolve(name)
    except OSError as error:
        said = f"{name!r} does not resolve ({error.strerror or error})"
        if chosen:
            return ok(f"{said}; GLOO_SOCKET_IFNAME={chosen} makes that harmless", name=name)
        return (fail if several_hosts else warn)(
            said,
            f"gloo then uses loopback, where other hosts cannot be reached: put '<its address> {name}' into /etc/hosts, "
            f"or {use}",
            name=name,
        )
    first = found[0]
    said = f"{name!r} resolves to {', '.join(found)}"
    values = {"name": name, "addresses": found}
    if chosen:
        return ok(f"{said}; gloo uses the interface {chosen}", **values)
    if not is_ours(first):
        return fail(
            f"{said}, and {first} is no address of this machine",
            f"gloo cannot bind to it, or binds to the wrong one: mend /etc/hosts or the name server, or {use}",
            **values,
        )
    if is_loopback(first):
        if several_hosts:
            return fail(
                f"{said}: gloo would tell other hosts to connect to {first}, which is themselves",
                f"{use} on every node (and the same for NCCL_SOCKET_IFNAME if NCCL picks a wrong one)",
                **values,
            )
        return ok(f"{said}; right for one host", f"before using several hosts: {use}", **values)
    return ok(f"{said}, this machine", **values)


def interface(environ: Mapping[str, str] = os.environ) -> Finding:
    """Do the interfaces named for gloo and NCCL exist, and is the choice clear where none is named?"""
    found = interfaces()
    listed = ", ".join(f"{name} {address}" for name, address in found.items()) or "none with an IPv4 address"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for name in environ.get(variable, "").split(","):
            # NCCL: '=eth0' is exact, '^eth0' excludes, otherwise a prefix. Gloo takes whole names.
            bare = name.strip().lstrip("=")
            known = any(one.startswith(bare) for one in found) if variable.startswith("NCCL") else bare in found
            if bare and not bare.startswith("^") and not known:
                return fail(
                    f"{variable}={environ[variable]}, but there is no interface {bare}: {listed}",
                    f"export {variable}={next(iter(_real(found)), 'lo')}, or unset it",
                    interfaces=found,
                )
    real = _real(found)
    named = [one for one in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if environ.get(one)]
    if len(real) > 1 and not named:
        return ok(
            listed,
            f"several to choose from: on several hosts say which one, export GLOO_SOCKET_IFNAME=... NCCL_SOCKET_IFNAME=... "
            f"({' or '.join(real)})",
            interfaces=found,
        )
    return ok(listed + "".join(f"; {one}={environ[one]}" for one in named), interfaces=found)


# ---- the rendezvous point


def rendezvous(where: Endpoint, environ: Mapping[str, str] = os.environ) -> Finding:
    """Is the rendezvous point free (if it is on this machine) or answered by a master, and do our clocks agree?"""
    try:
        found = resolve(where.host)
    except OSError as error:
        return fail(
            f"{where.host!r} does not resolve ({error.strerror or error})",
            "mend /etc/hosts or the name server, or give its address",
        )
    local = is_ours(found[0])
    if local and (fault := _bindable(found[0], where.port)) != "taken":
        if fault:
            return fail(f"cannot listen on {where}: {fault}", "ports below 1024 need privileges; choose another port")
        return ok(
            f"{where} is this machine and free: the launcher with this endpoint starts the master here", local=True
        )
    began = time.time()
    try:
        with socket.create_connection((found[0], where.port), CONNECT_S):
            pass
    except ConnectionRefusedError:
        return warn(
            f"{where} ({found[0]}) is reachable, and nobody listens there",
            "start dlrover-run there first, or at the same time; the others wait for it",
            local=local,
        )
    except OSError as error:
        return fail(
            f"{where} ({found[0]}) cannot be reached: {error.strerror or error}",
            f"let the firewall pass TCP port {where.port} (and the high ports, for the workers); is the address right?",
            local=local,
        )
    return _master(where, found[0], time.time() - began, environ)


def _bindable(address: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, port), family=family):
            return ""
    except OSError as error:
        return "taken" if error.errno == 98 else error.strerror or str(error)


class _Answer(NamedTuple):
    status: int
    date: float | None
    body: str


def _ask(address: str, port: int, path: str, headers: Mapping[str, str]) -> _Answer | None:
    """One request; None where whoever listens speaks no HTTP."""
    connection = http.client.HTTPConnection(address, port, timeout=CONNECT_S)
    try:
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        body = response.read(BODY_BYTES_MAX).decode(errors="replace")
        date = response.getheader("Date")
        return _Answer(response.status, email.utils.parsedate_to_datetime(date).timestamp() if date else None, body)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _master(where: Endpoint, address: str, connect_s: float, environ: Mapping[str, str]) -> Finding:
    asked = time.time()
    health = _ask(address, where.port, "/v1/healthz", {})
    answered = time.time()
    if health is None or health.status != 200 or health.body.strip() != "ok":
        return fail(
            f"something listens on {where} that is no dlrover master",
            f"who is it: ss -ltnp 'sport = :{where.port}' there; choose another port if it is another program's. "
            "A master that was given certificates looks like this, too: TLS is not looked behind here",
        )
    said = f"a dlrover master answers at {where} (connected in {connect_s * 1e3:.1f} ms)"
    values: dict[str, object] = {"connect_s": connect_s}
    if health.date is not None:
        # The header is cut to whole seconds: the true time lay in the second that follows it.
        skew = health.date + 0.5 - (asked + answered) / 2
        values["skew_s"] = skew
        if abs(skew) > SKEW_S:
            return warn(
                f"{said}; its clock is {skew:+.0f} s off ours",
                "let NTP keep both (chronyc tracking): times of causes on different hosts are compared",
                **values,
            )
        said += ", clocks agree to a second"
    try:
        token = tokens.load_token(environ)
    except SpecError as error:
        return fail(f"{said}; {error}", f"set {tokens.VARIABLE} to the token the job was started with", **values)
    if not token:
        return ok(said, f"set {tokens.VARIABLE} to find out whether the job would take us", **values)
    status = _ask(address, where.port, "/v1/status", tokens.authorization(token))
    if status is None or status.status != 200:
        code = "no answer" if status is None else f"HTTP {status.status}"
        return fail(
            f"{said}, but does not take our token ({code})",
            f"set {tokens.VARIABLE} to the token the job was started with",
            **values,
        )
    return ok(f"{said}; it takes our token, {_job(status.body)}", **values)


def _job(body: str) -> str:
    try:
        told = json.loads(body)
        return f"job {told['job']} is {told['state']}"
    except (ValueError, KeyError, TypeError):
        return "and tells no job"
