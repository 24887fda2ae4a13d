"""The masters' keeper: the actor that keeps ``dlrover-run`` leading a job in the cluster, when nobody else does.

It is detached and restarted for ever (``max_restarts=-1``): what Ray, its host or a person does to it ends no job. Of the masters
the exit status decides: 0 ends the job, 1, 78 and 93 fail it, anything else starts them again.

One beside a driver waits for the driver's death first.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from dlrover_backends.ray import mastery, runtime_env
from dlrover_backends.ray.keeper import KILL_WAIT_S, OWN, command, enter_again, raylet
from dlrover_backends.ray.mastery import ENDS, EVERYWHERE, Plan
from dlrover_backends.shared.process import LocalCommand, Started

AGAIN_S, AGAIN_MAX_S = 0.5, 5.0
CRASHES_MAX, LIVED_S = 20, 60.0
"""Ends in a row, of masters that lived shorter than that, until the job is given up."""
HANDED_OVER, GIVEN_UP, BROKEN = 75, 70, 1
LEAVE_S, IDLE_S = 2.0, 10.0
PORT_S, PORT_AGAIN_S = 10.0, 0.1
SETTLE_S = 20.0
"""So long keepers are moved to the hosts that they should be on (`masters.settle`)."""
OTHERS_S = SETTLE_S + 10.0
"""So long a keeper waits for the other ones' addresses: one that is moved has none before, and begins then."""
STORE_S, STORE_AGAIN_S = 10.0, 0.5
LINES, LINE_CHARS_MAX = 20, 500
BACKEND, BIND, MASTERS = "DLROVER_MASTER_BACKEND", "DLROVER_MASTER_BIND", "DLROVER_MASTER_AT"
JOB, LOG, STATE_DIR, RUN = "DLROVER_MASTER_JOB", "DLROVER_MASTER_LOG", "DLROVER_MASTER_STATE", "DLROVER_RUN"
"""What takes the place of options of the same meaning (`dlrover_adapters.cli.in_pod`)."""

log = structlog.get_logger("dlrover.backend")


Part = Callable[[Plan, int, Callable[[float], bool]], None]


class Released(Exception):
    """Nobody wants the run's masters any more: it has no claim of its job's name, or is about to lose it."""


class MastersKeeper:
    """Keeps the masters of one job.

    ``plan`` is `mastery.Plan.to_map`; ``number``: which of the job's keepers this is; ``host``: Ray's id of the host that it
    should be on, empty: any; ``part``: `masters.part` where there are others.
    """

    def __init__(self, plan: dict[str, Any], number: int, host: str = "", part: Part | None = None) -> None:
        import ray

        self._plan, self._number, self._host, self._part = mastery.of_map(plan), number, host, part
        self._started: Started | None = None
        self._backend = ""
        self._last: deque[str] = deque(maxlen=LINES)
        self._released, self._idle = os.eventfd(0, os.EFD_CLOEXEC), threading.Event()
        for name in (*OWN, *(one for one in os.environ if one.startswith("DLROVER_"))):
            os.environ.pop(name, None)
        signal.signal(signal.SIGTERM, self._hand_over)
        # A process that was started again is told so by the cluster's service, maybe now: such a call fails unless it is retried,
        # and the actor would live on, idle.
        ray.get_runtime_context().current_actor.run.options(max_task_retries=-1).remote()

    def run(self) -> None:
        """Keep masters until the job is over; then this actor is over too, and is not restarted."""
        import ray

        try:
            _await_end(self._plan.driver, self._released)
            self._await_move()
            if self._part is not None:
                others = (self._plan, self._number, self._is_released_within)
                threading.Thread(target=self._part, args=others, daemon=True).start()
            self._tell_end(self._keep())
        except Released:  # the driver's good end was its death, too
            if self._is_released_within(0.0):
                self._idle.set()
                return
            log.info("the job is over, and its masters are not wanted")
        except BaseException:  # Ray would keep an idle actor; a process that ends is started again
            log.exception("masters are not kept by this process any more")
            sys.stderr.flush()
            os._exit(BROKEN)
        ray.actor.exit_actor()

    def ready(self) -> int:
        """This process."""
        return os.getpid()

    def leave(self) -> None:
        """End the masters, and `run`, so that the actor may be killed: Ray alarms its driver of a task that a kill ends.

        Where nobody kills it, it keeps masters again.
        """
        os.eventfd_write(self._released, 1)
        if self._idle.wait(LEAVE_S):
            again = threading.Timer(IDLE_S, os._exit, (BROKEN,))  # Ray starts it again
            again.daemon = True
            again.start()

    def _await_move(self) -> None:
        """On another host than the wanted one, wait `SETTLE_S` for `masters.settle` to replace this keeper; then stay.

        Masters that were started here meanwhile would have others told an address that is nobody's soon. Raises `Released`.
        """
        if self._host and _is_elsewhere(self._host) and self._is_released_within(SETTLE_S):
            raise Released

    def _is_released_within(self, bound_s: float) -> bool:
        return bool(select.select([self._released], [], [], bound_s)[0])

    # ---- the masters

    def _keep(self) -> int:
        """Start masters until one of their ends is final; its exit status."""
        crashes = 0
        while True:
            began = time.monotonic()
            status = self._once()
            if status in ENDS:
                return status
            crashes = 0 if status == HANDED_OVER or time.monotonic() - began > LIVED_S else crashes + 1
            if crashes >= CRASHES_MAX:
                self._last.append(f"masters have ended {crashes} times in a row, with status {status} at last")
                return GIVEN_UP
            if self._is_released_within(min(AGAIN_MAX_S, AGAIN_S * 2 ** max(0, crashes - 1))):
                raise Released

    def _once(self) -> int:
        """One life of the masters; their exit status, negative for a signal. None of them outlives it."""
        try:
            return self._watch(self._start())
        except Released:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, it may be over at the next try
            started, self._started = self._started, None
            log.warning("masters cannot be kept", error=f"{type(error).__name__}: {error}")
            self._last.append(f"masters cannot be started, or not be kept: {type(error).__name__}: {error}")
            if started is not None:
                started.end()
            return GIVEN_UP

    def _watch(self, started: Started) -> int:
        """Wait for their end; the exit status. Raises `OSError`, and `Released` once they have ended for that."""
        poll, host, over, released = select.poll(), raylet(), list[int](), False
        poll.register(started.pidfd, select.POLLIN)
        poll.register(self._released, select.POLLIN)
        if host >= 0:
            poll.register(host, select.POLLIN)
        while started.pidfd not in over:  # in pieces: Python runs handlers of signals between them
            over = [fd for fd, _ in poll.poll(1000)]
            if host in over:
                started.signal(signal.SIGKILL)
                poll.unregister(host)
            if self._released in over:
                released = True
                started.signal(signal.SIGKILL)
                poll.unregister(self._released)
        code, _ = started.bury(KILL_WAIT_S)
        self._started = None
        started.close()
        if host >= 0:
            os.close(host)
        if released:
            raise Released
        return GIVEN_UP if code is None else code

    def _start(self) -> Started:
        """Raises `OSError`, `RuntimeError`."""
        reading, writing = os.pipe()
        try:
            self._started = Started(
                LocalCommand(command(self._plan.argv), self._environment(), self._cwd(), output=writing)
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        threading.Thread(target=self._pass_on, args=(reading,), daemon=True).start()
        return self._started

    def _pass_on(self, reading: int) -> None:
        """What masters print goes where this process prints, and its last lines are kept."""
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._last.append(line.rstrip()[:LINE_CHARS_MAX])
                sys.stderr.write(line)

    def _hand_over(self, *_: object) -> None:
        """Ray, or a person, ends this process: masters hand over, and the next keeper goes on."""
        started = self._started
        if started is None:
            os._exit(128 + signal.SIGTERM)
        started.signal(signal.SIGTERM)
        select.select([started.pidfd], [], [], KILL_WAIT_S)
        started.end()
        os._exit(128 + signal.SIGTERM)

    # ---- what they are told

    def _environment(self) -> dict[str, str]:
        plan, port = self._plan, self._port()
        self._backend = self._backend or backend_of(plan)
        own = f"{_address() if plan.bind == EVERYWHERE else plan.bind}:{port}"
        self._store(mastery.at(self._plan.run, self._number), own.encode())
        found = {
            BACKEND: self._backend,
            BIND: f"{plan.bind}:{port}",
            MASTERS: ",".join(self._all(own)),
            JOB: plan.job,
            STATE_DIR: self._state_dir(),
            RUN: plan.run,
            "DLROVER_TOKEN": plan.token,
            "PYTHONUNBUFFERED": "1",
        }
        return {**plan.env, **found, **({LOG: plan.log} if plan.log else {})}

    def _cwd(self) -> str | None:
        """Masters on another host than the one where the command was typed need nothing of that folder."""
        if Path(self._plan.cwd or "?").is_dir():
            return self._plan.cwd
        enter_again()
        return None

    def _port(self) -> int:
        """The port of the masters before: nodes know it, and the dead hold it for a moment. Another one if it stays taken."""
        known = int(
            _read(self._plan.job, mastery.at(self._plan.run, self._number)).rpartition(":")[2] or self._plan.port
        )
        deadline = time.monotonic() + PORT_S
        while known and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                return _free(self._plan.bind, known)
            time.sleep(PORT_AGAIN_S)
        return _free(self._plan.bind, 0)

    def _all(self, own: str) -> list[str]:
        """The addresses of all keepers' masters. The others' are waited for: nodes that start now know no further ones."""
        others = [one for one in range(self._plan.keepers) if one != self._number]
        deadline = time.monotonic() + OTHERS_S
        while True:
            found = [_read(self._plan.job, mastery.at(self._plan.run, one)) for one in others]
            if all(found) or time.monotonic() > deadline:
                return [own, *filter(None, found)]
            time.sleep(STORE_AGAIN_S)

    def _state_dir(self) -> str:
        """Masters that share a log have a state directory each: two of them may be on one host."""
        if self._plan.state_dir and not self._plan.log:
            return self._plan.state_dir
        from dlrover_core.logs.place import default_state_dir, private_dir

        state = default_state_dir()
        return str(private_dir(state / f"ray-{self._number}") if self._plan.log else state)

    # ---- the store

    def _store(self, part: str, value: bytes, bound_s: float = STORE_S) -> None:
        """Write it down; while the cluster's state service refuses it, again and again for ``bound_s``.

        While that service is away, Ray's own call waits for it, 60 s at most; then Ray ends this process.

        Raises `Released` where the name is not the run's any more: this process may outlive its actor for seconds. Then it is not
        written: whoever releases the run looks once more after the claim is gone, and this here looks at the claim after writing.
        """
        from dlrover_backends.ray import private

        key, deadline = mastery.key(self._plan.job, part), time.monotonic() + bound_s
        was_told = False
        while True:
            try:
                private.put(key, value)
                released = not _is_claimed(self._plan.job, self._plan.run)
                if released:
                    private.remove(key)
            except Exception as error:  # noqa: BLE001  # Ray raises anything
                if not was_told:
                    log.warning("the cluster's state cannot be written to", error=str(error))
                was_told = True
            else:
                if released:
                    raise Released
                return
            if time.monotonic() > deadline:
                return
            if self._is_released_within(STORE_AGAIN_S):
                raise Released

    def _tell_end(self, status: int) -> None:
        """Write down how the job ended: without it, whoever asks hears for ever that no master answers. Raises `Released`."""
        words = "\n".join(self._last)
        self._store(mastery.end(self._plan.run), json.dumps({"status": status, "words": words}).encode(), math.inf)


def _read(job: str, part: str) -> str:
    from dlrover_backends.ray import private

    try:
        return (private.get(mastery.key(job, part)) or b"").decode()
    except Exception as error:  # noqa: BLE001  # Ray raises anything
        log.warning("the cluster's state cannot be read", error=str(error))
        return ""


def _is_claimed(job: str, run: str) -> bool:
    """Is the job's name claimed by that run? Raises whatever Ray does."""
    from dlrover_backends.ray import private

    prefix = mastery.key(job)
    claims = private.keys(prefix + mastery.CLAIM)
    record = mastery.record_of(job, {one.removeprefix(prefix): private.get(one) or b"" for one in claims})
    return record is not None and record.run == run


def _is_elsewhere(host: str) -> bool:
    """Is this the actor's first process, on another host than the one with this id, which lives?

    Where Ray has started the actor again, it is where Ray can have it; nobody moves it then.
    """
    import ray

    here = ray.get_runtime_context()
    if here.get_node_id() == host:
        return False
    try:
        lives = any(one["NodeID"] == host and one["Alive"] for one in ray.nodes())
        return lives and not here.was_current_actor_reconstructed
    except Exception as error:  # noqa: BLE001  # Ray raises anything
        log.warning("the cluster's hosts cannot be read", error=str(error))
        return True


def _address() -> str:
    import ray

    host: str = ray.util.get_node_ip_address()
    return f"[{host}]" if ":" in host else host


def _free(host: str, port: int) -> int:
    """That port, or a free one for 0. Raises `OSError` where somebody listens there."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host.strip("[]"), port))
        return int(probe.getsockname()[1])


def _await_end(driver: str, released: int) -> None:
    """Wait for a launcher of this host to be dead, ``PID:START`` as `started_at` says it. Empty: nobody is waited for.

    Raises `Released` as soon as the descriptor ``released`` can be read.
    """
    if not driver:
        return
    pid, _, began = driver.partition(":")
    while started_at(int(pid)) == began:
        try:
            fd = os.pidfd_open(int(pid))
        except ProcessLookupError:
            return
        try:
            if released in select.select([fd, released], [], [], 1.0)[0]:
                raise Released
        finally:
            os.close(fd)


def started_at(pid: int) -> str:
    """When a process was started, in the kernel's own measure; empty: it is dead. With the pid it names one process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in {b"Z", b"X"} else fields[19].decode()


def backend_of(plan: Plan) -> str:
    """The backend with its arguments. The runtime environment lies in this process's memory, where masters read it.

    A variable has 128 KiB at most, and whatever masters start would have it too.
    """
    if not plan.runtime_env:
        return plan.backend
    name, _, args = plan.backend.partition(":")
    return f"{name}:{','.join(filter(None, (args, f'runtime_env={runtime_env.held(plan.runtime_env)}')))}"


def environment_of(plan: Plan) -> Mapping[str, Any]:
    """What a keeper's own runtime environment is: it holds the folders of the nodes' one in the cluster, and installs nothing."""
    return {key: plan.runtime_env[key] for key in ("working_dir", "py_modules") if plan.runtime_env.get(key)}
