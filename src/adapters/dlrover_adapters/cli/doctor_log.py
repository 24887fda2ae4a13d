"""The check of an event log elsewhere: can it be reached, is it well, how long does a look take? Nothing is written."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from dlrover_adapters.cli.doctor_check import Finding, fail, ok, size, warn
from dlrover_adapters.cli.places import shown
from dlrover_core.errors import CoreError, SpecError
from dlrover_core.logs import open_log

if TYPE_CHECKING:
    from dlrover_adapters.etcd.client import Etcd, Status
    from dlrover_adapters.etcd.log import EtcdLog
    from dlrover_core.kernel.log import EventLog

BOUND_S = 30.0
STUCK = "the log does not answer: look at its servers, and at the network between"
ALARMED = "it can be read, not written: docs/etcd.md, section 8, says how to make room; 'etcdctl alarm list' shows who complains"
ALARM_S = 2.0
LOOKS = 20
LOOK_SLOW_S = 0.05
NO_JOB = "dlrover-doctor"


async def log(url: str) -> Finding:
    """Open the log, read from it, and ask the members of an etcd how they are."""
    try:
        async with open_log(url) as opened:
            took = [await _look(opened) for _ in range(LOOKS)]
            jobs = len(await opened.jobs())
            if not url.startswith("etcd:"):
                return ok(f"{shown(url)} can be read, with {jobs} jobs", jobs=jobs)
            return await _etcd(opened, took, jobs)  # type: ignore[arg-type]  # as its scheme says
    except SpecError as error:
        return fail(f"{shown(url)}: {error}", "mend the URL, or what it names")
    except CoreError as error:
        return fail(str(error), "is it running, and do firewalls let this host through?")


async def _look(opened: EventLog) -> float:
    began = time.monotonic()
    await opened.head(NO_JOB)
    return time.monotonic() - began


async def _etcd(opened: EtcdLog, took: list[float], jobs: int) -> Finding:
    from dlrover_adapters.etcd.client import Status

    address, said = opened.etcd.address, await opened.etcd.statuses()
    members = {endpoint: told for endpoint, told in said.items() if isinstance(told, Status)}
    silent = {endpoint: str(told) for endpoint, told in said.items() if endpoint not in members}
    versions = sorted({one.version for one in members.values()})
    fullest = max((one.db_bytes for one in members.values()), default=0)
    middle, worst = statistics.median(took), max(took)
    how = ", ".join((*(["TLS"] if address.tls else ["no TLS"]), *([f"user {address.user}"] if address.user else [])))
    found = (
        f"{address.shown}: {len(members)} of {len(said)} members answer, etcd {', '.join(versions)}, {how}; "
        f"a look takes {middle * 1e3:.1f} ms (worst of {LOOKS}: {worst * 1e3:.1f} ms); {jobs} jobs, {size(fullest)}"
    )
    alarms = await _alarms(opened.etcd, members)
    values = {
        "alarms": alarms,
        "members": len(members),
        "silent": silent,
        "versions": versions,
        "db_bytes": fullest,
        "jobs": jobs,
    }
    values |= {"look_median_s": middle, "look_worst_s": worst, "tls": address.tls}
    if alarms:
        return fail(f"{found}; alarm: {', '.join(alarms)}", ALARMED, **values)
    advice = "; ".join(_advice(members, silent, middle, secret=bool(address.user) and not address.tls))
    return warn(found, advice, **values) if advice else ok(found, **values)


async def _alarms(etcd: Etcd, members: Iterable[str]) -> list[str]:
    """What the members complain of, such as ``NOSPACE``; nothing where they may not be asked."""
    rpc = etcd.rpc
    for endpoint in members:
        with contextlib.suppress(CoreError):
            told = await etcd.ask(endpoint, "Alarm", rpc.AlarmRequest(), timeout_s=ALARM_S)
            names = {rpc.NOSPACE: "NOSPACE", rpc.CORRUPT: "CORRUPT"}
            return sorted({names.get(one.alarm, str(one.alarm)) for one in told.alarms})
    return []


def _advice(members: Mapping[str, Status], silent: Mapping[str, str], look_s: float, *, secret: bool) -> list[str]:
    from dlrover_adapters.etcd.checks import CORRUPTING, DB_BYTES_FULL

    found = [f"{why}; one more, and there may be no majority" for why in silent.values()]
    if any(tuple(map(int, one.version.split("-")[0].split("."))) in CORRUPTING for one in members.values()):
        found.append("this version can lose data when it is killed under load: upgrade to 3.5.3 or newer")
    if any(one.db_bytes > (int(0.8 * one.quota_bytes) or DB_BYTES_FULL) for one in members.values()):
        found.append("it is nearly full: --auto-compaction-retention, defragment it, or raise its quota")
    if len(members) + len(silent) == 1:
        found.append("one member is named: where there are more, name all, and three survive the loss of one")
    if look_s > LOOK_SLOW_S:
        found.append("every decision waits for it: put its members nearer, on faster disks")
    if secret:
        found.append("the password travels unencrypted: ?cacert=FILE")
    return found
