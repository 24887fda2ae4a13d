"""The error tree. Every error of ours is a `CoreError`; its message says what happened, to whom, and what to do next.

Errors of libraries underneath are kept as ``__cause__``: the library may change, the tree stays.
"""

from __future__ import annotations


class CoreError(Exception):
    """Root of all errors raised by dlrover-core."""


class SpecError(CoreError, ValueError):
    """A job's configuration cannot be right. ``field`` names the setting."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class PlanError(CoreError, ValueError):
    """A simulation or a test of faults is described in a way that could never run."""


class IllegalTransition(CoreError):
    """A lifecycle forbids this trigger in this state."""

    def __init__(self, entity: str, state: str, trigger: str) -> None:
        super().__init__(f"{entity} cannot take '{trigger}' in state '{state}'")
        self.entity, self.state, self.trigger = entity, state, trigger


class Refused(CoreError):
    """A command was well formed but the state forbids it; nothing was changed. ``reason`` is for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class MalformedMessage(CoreError, ValueError):
    """Bytes or values from outside that are not a message of this protocol. Refused without a record."""


class LogError(CoreError):
    """Root of everything an event log may raise."""


class LogUnavailable(LogError):
    """The log cannot be reached or read now; training goes on, decisions wait."""


class LogFull(LogError):
    """The log has no room (disk full, quota): it can be read, not appended to. Free space and the master goes on."""


class LogCorrupt(LogError):
    """Stored bytes do not match their checksum. ``seq`` is the first sequence number that could not be read."""

    def __init__(self, job: str, seq: int, message: str) -> None:
        super().__init__(f"job {job!r}: event {seq}: {message}")
        self.job, self.seq = job, seq


class SchemaTooNew(LogError):
    """The log holds events that a newer version wrote. Upgrade; this version refuses to lead the job."""


class NotLeading(LogError):
    """Somebody else leads this job. ``holder`` and ``address`` say who and where, as far as known."""

    def __init__(
        self, job: str, holder: str = "", address: str = "", *, remedy: str = "stop it, or use another --job-id"
    ) -> None:
        where = f" at {address}" if address else ""
        who = holder or "another process"
        super().__init__(f"job {job!r} is led by {who}{where}; {remedy}")
        self.job, self.holder, self.address = job, holder, address


class StandsBy(NotLeading):
    """A master that does not lead was asked. Nothing was done, and nothing will be: ask ``address``, or again later."""


class HandedOver(CoreError):
    """This master was asked to go, and has left the job to the next one. ``reason`` is who asked, or why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"handed over: {reason}")
        self.reason = reason


class OtherRun(CoreError):
    """The job is at another run than the one that this master serves, which is no more. ``run`` is ours, ``now`` the job's."""

    def __init__(self, job: str, run: str, now: str) -> None:
        super().__init__(f"job {job!r} is at run {now or '(none)'}, and run {run}, which was led here, is no more")
        self.job, self.run, self.now = job, run, now


class ConnectionLost(CoreError):
    """The peer is gone, or said something no peer of ours says. Connect again.

    ``ended``: the peer's kernel ended the connection, without a goodbye, as it does when a process dies. False where a time-out
    of ours, or we ourselves, cut it: that is silence, and silence is not death.
    """

    def __init__(self, message: str, *, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


class TokenRefused(CoreError):
    """The job token is missing or wrong. Set DLROVER_TOKEN (or --token-file) to the job's own."""


class LaunchFailed(CoreError):
    """Workers could not be started on this node. The message names the part that failed."""


class LaunchRefused(CoreError):
    """A backend will not start this node. ``permanent`` means that asking again is pointless."""

    def __init__(self, reason: str, *, permanent: bool) -> None:
        super().__init__(reason)
        self.reason, self.permanent = reason, permanent
