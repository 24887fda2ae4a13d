"""What only a live master knows of its job: whether it can decide now. The log tells history, and may itself be out of reach."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrover_core.errors import CoreError, SpecError

if TYPE_CHECKING:
    from dlrover_core.job.waiting import Wait

ANSWER_S = 2.0
MASTERS_MAX = 16
NODE_ROWS_MAX = 64


class Told(NamedTuple):
    """What the master at ``address`` says."""

    address: str
    status: Mapping[str, Any]

    @property
    def control_plane(self) -> dict[str, Any]:
        """For programs: whether decisions can be made, by whom, and if not since when and why not."""
        return {
            "address": self.address,
            "role": self.status.get("role", ""),
            "leader": self.status.get("leader", ""),
            "degraded": self.status.get("degraded", ""),
            "degraded_since_us": int(self.status.get("degraded_since", 0)),
        }


def arguments(parser: argparse.ArgumentParser) -> None:
    """How masters are found; nothing of it is needed to read the log."""
    parser.add_argument(
        "--master",
        metavar="HOST:PORT[,HOST:PORT]",
        help="ask these masters (default: the leader, by the log; for a job on this host those that it knows)",
    )


async def leader_says(args: argparse.Namespace, job: str, address: str) -> Told | None:
    """What the masters that ``--master`` names say of the job, else the leader at ``address``.

    None where none can be asked: that takes nothing from the job's history.
    """
    addresses = _named(args) or ([address] if address else [])
    with contextlib.suppress(CoreError, OSError):
        return await _first(args, job, addresses) if addresses else None
    return None


def _named(args: argparse.Namespace) -> list[str]:
    from dlrover_adapters.http import log_address

    named = [one.strip() for one in (args.master or "").split(",") if one.strip()]
    if named or not args.log or not log_address.is_url(args.log):
        return named
    address = log_address.parse(args.log)
    return [] if address.prefix else list(address.masters)


async def masters_say(args: argparse.Namespace) -> Told:
    """What the masters say that the arguments name, or that a job on this host knows. Raises `SpecError` and `CoreError`."""
    addresses = _named(args)
    if not addresses and args.job is not None:
        addresses = list(_kept(args, args.job).get("masters", ()))
    if not addresses:
        raise SpecError("master", "no master is known here; name one with --master HOST:PORT")
    return await _first(args, args.job or "", addresses)


async def _first(args: argparse.Namespace, job: str, addresses: Sequence[str]) -> Told:
    """The leader's answer, else a standby's, else the last error."""
    from dlrover_adapters.cli import operate
    from dlrover_adapters.http.client import fetch_status
    from dlrover_adapters.http.tls import dialled

    token = operate.token(argparse.Namespace(**{**vars(args), "job": job}))
    encryption = dialled(args.tls_ca or str(_kept(args, job).get("tls_ca", "")))
    found: Told | None = None
    error: CoreError = SpecError("master", "none is known")
    left, asked = list(addresses), set[str]()
    while left and len(asked) < MASTERS_MAX:
        address = left.pop(0)
        asked.add(address)
        try:
            status = await fetch_status(address, token, timeout_s=ANSWER_S, tls=encryption)
        except CoreError as lost:
            error = lost
            continue
        if job and status.get("job") not in ("", job):
            error = SpecError("master", f"the master at {address} leads job {status.get('job')!r}, not {job!r}")
            continue
        found = found or Told(address, status)
        if status.get("role", "leader") == "leader":
            return Told(address, status)
        leader = str(status.get("leader_address", ""))
        if leader and leader not in asked:
            left.insert(0, leader)
    if found is None:
        raise error
    return found


def _kept(args: argparse.Namespace, job: str) -> Mapping[str, Any]:
    """What the launcher of a job on this host has written down; nothing where there is none."""
    import json

    from dlrover_core.logs.place import default_state_dir

    with contextlib.suppress(CoreError, OSError, ValueError):
        path = Path(args.state_dir or default_state_dir()).absolute() / "jobs" / job / "settings.json"
        found = json.loads(path.read_text(encoding="utf-8")) if job else {}
        return found if isinstance(found, dict) else {}
    return {}


def steps_of(told: Told) -> dict[str, int] | None:
    """What the leader knows of the newest steps, by heartbeats; None where nobody made one, or an older master answers."""
    found = told.status.get("live")
    if not isinstance(found, dict):
        return None
    names = ("step", "age_us", "step_us", "total", "heard_us")
    steps = {name: found.get(name) for name in names}
    if not all(isinstance(one, int) for one in steps.values()) or found["step"] < 0:
        return None
    return {name: int(one or 0) for name, one in steps.items()}


def waits_of(told: Told) -> tuple[Wait, ...] | None:
    """What the job's groups wait for, as its leader says: the rules that decide it run there. None: a standby answered."""
    from dlrover_core.job.waiting import Wait

    if told.status.get("role", "leader") != "leader":
        return None
    return tuple(
        Wait(str(one["group"]), str(one["why"]), str(one["words"]), int(one["until"]), tuple(map(str, one["nodes"])))
        for one in told.status.get("waits", ())
    )


def lines(told: Told) -> Iterator[str]:
    """How the job stands by what its master says, where the log cannot be read."""
    from dlrover_adapters.cli.standing import degraded
    from dlrover_adapters.cli.standing import waiting as standbys
    from dlrover_core.history.phrases import one_line
    from dlrover_core.history.render import progress, table, waiting
    from dlrover_core.words import count

    status = told.status
    yield f"job {status.get('job', '')}  {status.get('state', '')}  run {status.get('run', '')}"
    where = f"generation {status.get('generation', 0)}, {count(int(status.get('world_size', 0)), 'rank')}"
    steps = steps_of(told)
    step = progress(steps) if steps is not None else f"step {max(int(status.get('step', 0)), 0)}"
    yield f"  {step}; {where}; as the master at {told.address} says"
    now = time.time_ns() // 1000
    yield from (f"  {line}" for line in waiting(waits_of(told) or (), now))
    nodes = list(dict(status.get("nodes", {})).items())
    rows = [(name, str(one.get("state", "")), one_line(str(one.get("host", "")), 64) or "-") for name, one in nodes]
    yield from table([("node", "state", "host"), *rows[:NODE_ROWS_MAX]] if rows else [])
    yield from filter(None, [*standbys(status), degraded(status, now)])
