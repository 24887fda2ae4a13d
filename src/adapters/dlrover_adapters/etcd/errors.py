"""What grpc and etcd say, in our words.

A grpc status alone does not tell what is wrong: etcd says quite different things with UNAVAILABLE, UNKNOWN and
RESOURCE_EXHAUSTED. So its words are looked at first; they are the same from 3.4 on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlrover_core.errors import LogError, LogFull, LogUnavailable, SpecError


class Closed(LogUnavailable):
    """The log was closed here: trying again is pointless."""


class TooLarge(LogError):
    """A reply is larger than may be received: ask for less."""


class LeaseGone(LogError):
    """There is no such lease (any more)."""


class Compacted(LogError):
    """The revision asked for was compacted away. ``at`` is the oldest that is left, 0 where that was not said."""

    def __init__(self, message: str, at: int = 0) -> None:
        super().__init__(message)
        self.at = at


class Denied(LogError):
    """etcd refuses us: user, password, certificate or permissions. The message says which, and what to do."""


class Unsupported(LogError):
    """What answers does not know this call: it is no etcd, or one that is too old."""


class TimedOut(LogUnavailable):
    """This member did not answer within ``given_s``; it may have done what it was told."""

    def __init__(self, message: str, given_s: float) -> None:
        super().__init__(message)
        self.given_s = given_s


class TokenOver(LogUnavailable):
    """The token of our authentication is not valid any more."""


class AuthOff(LogError):
    """This etcd has no authentication."""


def translated(endpoint: str, error: Any, timeout_s: float) -> LogError:
    """A grpc error as one of ours, by etcd's words, else by its code."""
    said = error.details() or ""
    return of_words(endpoint, said) or _of_code(endpoint, error.code(), said, timeout_s)


def of_words(endpoint: str, said: str) -> LogError | None:
    """The error that etcd means by these words; None: they are not special."""
    for words, made in _WORDS:
        if any(one in said for one in words):
            return made(endpoint, said)
    return None


def at_start(error: Denied | Unsupported) -> SpecError:
    """The same, for who has just given the URL."""
    return SpecError("log", str(error))


def _full(endpoint: str, said: str) -> LogError:
    return LogFull(
        f"etcd at {endpoint} is out of space ({said}): it can be read, not written; raise its quota or compact and "
        "defragment it, then disarm its alarm"
    )


def _request_too_large(endpoint: str, said: str) -> LogError:
    return LogError(
        f"etcd at {endpoint} takes no request of this size ({said}): start its members with a larger --max-request-bytes, "
        "at least the default of 1572864"
    )


def _corrupt(endpoint: str, said: str) -> LogError:
    return LogUnavailable(
        f"etcd at {endpoint} takes no writes: it has found that its members differ ({said}); find out which of them is right "
        "(etcdctl endpoint hashkv --cluster), rebuild the others, then disarm its alarm"
    )


def _denied(what: str) -> Callable[[str, str], LogError]:
    return lambda endpoint, said: Denied(f"etcd at {endpoint} refuses us: {what} ({said})")


def _plainly(kind: type[LogError]) -> Callable[[str, str], LogError]:
    return lambda endpoint, said: kind(f"{endpoint}: {said}")


_WORDS: tuple[tuple[tuple[str, ...], Callable[[str, str], LogError]], ...] = (
    (("database space exceeded",), _full),
    (("requested lease not found",), _plainly(LeaseGone)),
    (
        ("invalid auth token", "revision in auth store is old", "revision of auth store is old"),
        _plainly(TokenOver),
    ),
    (("authentication is not enabled",), _plainly(AuthOff)),
    (("corrupt cluster",), _corrupt),
    # A member that was added and not promoted yet, and one that is behind: others are asked.
    (("not supported for learner", "required revision is a future revision"), _plainly(LogUnavailable)),
    (("required revision has been compacted",), _plainly(Compacted)),
    # The first is etcd's own limit; the second that of its grpc server, which allows half a mebibyte more.
    (("request is too large", "grpc: received message larger than max"), _request_too_large),
    (("larger than max",), _plainly(TooLarge)),
    # etcd does not say which of the two, so that nobody can try out names.
    (("invalid user ID or password", "authentication failed"), _denied("user or password is wrong")),
    (
        ("user name is empty", "user name not found"),
        _denied("it wants a user and a password: etcd://USER@HOST and DLROVER_ETCD_PASSWORD"),
    ),
    (
        ("permission denied",),
        _denied("this user may not do that under the log's prefix; grant it a role that may"),
    ),
    (("unsupported transaction", "not supported", "unknown service", "unknown method"), _plainly(Unsupported)),
)


def _of_code(endpoint: str, code: Any, said: str, timeout_s: float) -> LogError:
    from grpc import StatusCode

    if code is StatusCode.DEADLINE_EXCEEDED:
        return TimedOut(f"{endpoint} did not answer within {timeout_s:.3g} s", timeout_s)
    if code is StatusCode.UNIMPLEMENTED:
        return Unsupported(f"{endpoint}: {said or code.name}")
    passing = (
        StatusCode.UNAVAILABLE,
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.CANCELLED,
        StatusCode.ABORTED,
        StatusCode.UNKNOWN,
        StatusCode.INTERNAL,
    )
    if code in passing:
        return LogUnavailable(f"{endpoint}: {said or code.name}")
    return LogError(f"etcd at {endpoint}: {code.name}: {said}")
