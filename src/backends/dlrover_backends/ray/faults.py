"""What it means that Ray cannot be joined, or does not take an order: in words that say what to do."""

from __future__ import annotations

import re
import socket
from typing import NamedTuple

from dlrover_backends.ray import settings
from dlrover_core.errors import SpecError

TEXT_MAX = 500
PROBE_S = 3.0
_ADDRESS = re.compile(r"\[?([^\[\]/]+?)\]?:(\d+)")
_CLUSTER = re.compile(r"The cluster was started with:\s*Ray: (\S+)\s*Python: (\S+)")
_PROCESS = re.compile(r"(?:This process|The process)[^:]*:\s*Ray: (\S+)\s*Python: (\S+)")
# As Ray says it of the address itself.
_NO_ADDRESS = ("Invalid Ray address", "Invalid address", "Unable to parse port", "ray client connection")
_AWAY = re.compile(
    r"\bunavailable\b|deadline.?exceeded|timed.?out|failed to connect|connection (refused|reset|lost)", re.IGNORECASE
)
"""As gRPC says that nobody answered. A Ray error carries such words of another one in its own."""


class Fault(NamedTuple):
    """Why not. ``permanent``: waiting does not mend it."""

    text: str
    permanent: bool


def probe(address: str) -> None:
    """Does anybody listen at the address? Ray itself takes most of a minute to say no. Blocks, `PROBE_S`.

    Raises `SpecError`, also for what is no address of a cluster.
    """
    settings.check_address(address)
    wanted = settings.address_of(address)
    if why := silence(wanted):
        raise SpecError(
            "ray-address",
            f"no Ray cluster answers at {wanted} ({why}): name its head as HOST:6379, or start one with ray start --head",
        )


def silence(address: str, bound_s: float = PROBE_S) -> str:
    """Why nobody listens at HOST:PORT; empty: somebody does, or it is no such address. Blocks, ``bound_s``."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return ""
    try:
        socket.create_connection((found[1], int(found[2])), bound_s).close()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or "no answer"
    return ""


def of_connect(error: BaseException, address: str) -> Fault:
    """Why the cluster cannot be joined. ``address``: as the user wrote it; empty: the one of this host."""
    text = " ".join(str(error).split())
    address = settings.address_of(address)
    where = f"the Ray cluster at {address}" if address else "the Ray cluster of this host"
    if "Version mismatch" in text:
        theirs, ours = _CLUSTER.search(str(error)), _PROCESS.search(str(error))
        if theirs is not None and ours is not None:
            what = f"Ray {theirs[1]} with Python {theirs[2]}, and this is Ray {ours[1]} with Python {ours[2]}"
        else:
            what = text[:TEXT_MAX]
        return Fault(
            f"{where} runs {what}: install the cluster's versions here, or run this on its head", permanent=True
        )
    if "Could not find any running Ray instance" in text:
        return Fault(
            "no Ray cluster runs on this host: start one with ray start --head, join one with ray start --address=HOST:6379, "
            "or say --ray-address HOST:6379",
            permanent=True,
        )
    if "RAY_AUTH" in text or "nauthenticated" in text or "token authentication" in text.lower():
        return Fault(
            f"{where} does not take this token ({text.partition('. ')[0][:TEXT_MAX]}): set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN as the cluster has them, or RAY_AUTH_TOKEN_PATH",
            permanent=True,
        )
    if "Can't find a `node_ip_address.json`" in text or "matching Raylet" in text or "node_ip_address" in text:
        return Fault(
            f"this host is no node of {where}: join it with ray start --address={address or 'HOST:6379'}, or send the command "
            "there with ray job submit",
            permanent=True,
        )
    if re.search(r"Ray \S+ has no \S+$", text):
        return Fault(f"{text}, which this backend needs: install Ray 2.58 to 2.60", permanent=True)
    if any(one in text for one in _NO_ADDRESS):
        return Fault(f"{where} cannot be joined: name its head as HOST:6379 ({text[:TEXT_MAX]})", permanent=True)
    return Fault(f"{where} cannot be joined: {type(error).__name__}: {text[:TEXT_MAX]}", permanent=False)


def of_order(error: BaseException) -> Fault | None:
    """Why a node cannot be launched, where no waiting mends it; None: it may be tried again."""
    text = " ".join(str(error).split())[:TEXT_MAX]
    if isinstance(error, (ValueError, TypeError)):
        return Fault(f"Ray does not take the node: {text}", permanent=True)
    if ("runtime_env" in text or "working_dir" in text) and not _is_away(error):
        return Fault(f"Ray does not take the runtime environment: {text}", permanent=True)
    return None


def _is_away(error: BaseException | None) -> bool:
    """Is it, or what it comes from, that the cluster's state service did not answer?"""
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError)) or type(error).__name__ == "RpcError":
            return True
        if _AWAY.search(str(error)):
            return True
        error = error.__cause__
    return False
