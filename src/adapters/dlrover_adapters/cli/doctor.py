"""`dlrover doctor`: would a job run well on this machine? Each check says what it found, and what to do about it.

Nothing is changed and nothing is left behind. Checks run one after the other, each within a bound of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import socket
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dlrover_adapters.cli.places import FAILED, OK
from dlrover_adapters.cli.read import as_json
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_adapters.cli.doctor_check import Check, Result
    from dlrover_adapters.cli.doctor_network import Endpoint

EXAMPLES = """\
  dlrover doctor                                        is this machine fit?
  dlrover doctor --preload transformers,datasets        may these modules be imported once for all workers?
  dlrover doctor --gpu                                  and CUDA, NCCL, pinned memory (under a minute)
  dlrover doctor --endpoint node0:29400                 before a job of several hosts, on each of them
  dlrover doctor --log etcd://e1:2379,e2:2379,e3:2379   on hosts with masters whose log will be there
  dlrover doctor --json | jq '.checks[] | select(.verdict != "OK")'

  here 1 means that some check ended with FAIL; with nothing worse than WARN it is 0"""
PRELOAD_S, GPU_S = 180.0, 60.0
WORKERS_MAX = 8
WIDTH_MIN, WIDTH_MAX = 60, 140


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `doctor` takes."""
    parser.add_argument("--gpu", action="store_true", help="check GPUs too: warm fork and CUDA, NCCL, pinned memory")
    parser.add_argument(
        "--state-dir", metavar="DIR", type=Path, help="the state directory that jobs will use (default: theirs)"
    )
    parser.add_argument(
        "--preload",
        metavar="MODULES",
        default="",
        help="as for dlrover-run: modules to import once for all workers, comma separated; 'none'",
    )
    parser.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        type=_endpoint,
        help="the rendezvous point of a job of several hosts (port 29400 unless said)",
    )
    parser.add_argument(
        "--log",
        metavar="URL",
        help="the event log that jobs will use, if not in the state directory: etcd://HOST:2379/PREFIX",
    )
    parser.add_argument("--json", action="store_true", help="for programs: one object, with the numbers of each check")


def _endpoint(text: str) -> Endpoint:
    from dlrover_adapters.cli.doctor_network import endpoint

    try:
        return endpoint(text)
    except SpecError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


async def run(args: argparse.Namespace) -> int:
    """`dlrover doctor`. SIGTERM ends it as Ctrl-C does: after what was started has ended."""
    task, terminated = asyncio.ensure_future(_run(args)), False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await task
    except asyncio.CancelledError:
        if terminated:
            return 128 + signal.SIGTERM
        raise


async def _run(args: argparse.Namespace) -> int:
    import structlog

    from dlrover_adapters.cli.doctor_check import Verdict, examine

    # What the launcher would log is told by the checks, in words.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    results: list[Result] = []
    if not args.json:
        print(f"dlrover-core {metadata.version('dlrover-core')} looks at {socket.gethostname()}")
    for check in checks(args):
        with _progress(check.name):
            result = await examine(check)
        results.append(result)
        if not args.json:
            print(line(result), flush=True)
    if args.json:
        print(as_json(as_values(results)))
    else:
        print(summary(results))
    return FAILED if any(one.verdict is Verdict.FAIL for one in results) else OK


def checks(args: argparse.Namespace) -> list[Check]:
    """All that these arguments ask for, in the order they are made: what is cheap and what others rest on comes first."""
    from dlrover_adapters.cli import doctor_evidence as evidence
    from dlrover_adapters.cli import doctor_machine as machine
    from dlrover_adapters.cli import doctor_network as network
    from dlrover_adapters.cli import doctor_state as state
    from dlrover_adapters.cli import doctor_workers as workers
    from dlrover_adapters.cli.doctor_check import Check
    from dlrover_adapters.cli.doctor_checkpoints import checkpoint_memory

    began, count = machine.clocks(), expected_workers()
    preload = modules(args.preload)
    several = (
        args.endpoint is not None and not network.is_loopback(args.endpoint.host) and args.endpoint.host != "localhost"
    )
    slow_disk = "the disk, or the server of that file system, does not answer: name another directory with --state-dir"
    slow_names = "a name server that does not answer: put the host's own name into /etc/hosts"
    asked = [
        Check("python", machine.python),
        Check("processes", workers.fork, 30.0),
        Check("processors", partial(machine.processors, count)),
        Check("memory", machine.memory),
        Check("open files", partial(machine.open_files, count)),
        Check("tasks", partial(machine.tasks, count)),
        Check("locked memory", machine.locked_memory),
        Check("inotify", machine.watches),
        Check("core files", machine.cores),
        Check("evidence", evidence.evidence),
        Check("shared memory", partial(machine.shared_memory, count)),
        Check("checkpoints", checkpoint_memory),
        Check("sockets", state.sockets, stuck="set TMPDIR to a folder on a local disk"),
        Check("state directory", lambda: state.state_directory(state.where(args.state_dir)), 20.0, slow_disk),
        Check("ports", network.ports, 20.0),
        Check("hostname", partial(network.hostname, several), 20.0, slow_names),
        Check("interface", network.interface),
    ]
    if args.log is not None:
        from dlrover_adapters.cli import doctor_log

        asked.append(Check("log", partial(doctor_log.log, args.log), doctor_log.BOUND_S, doctor_log.STUCK))
    if args.endpoint is not None:
        asked.append(Check("endpoint", partial(network.rendezvous, args.endpoint), 30.0, slow_names))
    asked.append(Check("preload", partial(workers.preload, preload), PRELOAD_S, _SLOW_IMPORT))
    if args.gpu:
        asked.append(Check("gpu", partial(workers.gpu, preload), GPU_S, _SLOW_GPU))
    asked.append(Check("clock", partial(machine.clock, began)))  # last: it sees how far both clocks went meanwhile
    return asked


_SLOW_IMPORT = "a module of --preload waits for something (network, a lock, a GPU) while it is imported; leave it out"
_SLOW_GPU = "nvidia-smi and dmesg (Xid) say more; a first use of a GPU without nvidia-persistenced is slow"


def modules(text: str) -> tuple[str, ...] | None:
    """``--preload`` as the launcher takes it."""
    return None if text == "none" else tuple(one.strip() for one in text.split(",") if one.strip())


def expected_workers(root: Path = Path("/")) -> int:
    """How many workers this machine will run, for rules of thumb: one per GPU, else one per processor, up to `WORKERS_MAX`."""
    gpus = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    return gpus or min(WORKERS_MAX, len(os.sched_getaffinity(0)))


# ---- telling


def line(result: Result, width: int | None = None) -> str:
    """One check for people: verdict, name, what was found, and below it what to do."""
    head = f"{result.verdict.value:<5} {result.name:<16} "
    columns = width or max(WIDTH_MIN, min(WIDTH_MAX, shutil.get_terminal_size((WIDTH_MAX, 24)).columns))
    text = textwrap.fill(result.finding.found, columns, initial_indent=head, subsequent_indent=" " * len(head))
    if not result.finding.advice:
        return text
    arrow = " " * (len(head) - 3) + "-> "
    return (
        text
        + "\n"
        + textwrap.fill(
            result.finding.advice,
            columns,
            initial_indent=arrow,
            subsequent_indent=" " * len(head),
            break_long_words=False,
        )
    )


def summary(results: list[Result]) -> str:
    """The last line."""
    counted = {verdict: sum(one.verdict.value == verdict for one in results) for verdict in ("OK", "WARN", "FAIL")}
    took = sum(one.took_s for one in results)
    verdict = "not fit: see FAIL" if counted["FAIL"] else "fit; see WARN" if counted["WARN"] else "fit"
    return f"{counted['OK']} OK, {counted['WARN']} WARN, {counted['FAIL']} FAIL in {took:.1f} s: {verdict}"


def as_values(results: list[Result]) -> dict[str, object]:
    """All of it for programs."""
    order = ("FAIL", "WARN", "OK")
    return {
        "host": socket.gethostname(),
        "version": metadata.version("dlrover-core"),
        "verdict": min((one.verdict.value for one in results), key=order.index, default="OK"),
        "checks": [
            {
                "name": one.name,
                "verdict": one.verdict.value,
                "found": one.finding.found,
                "advice": one.finding.advice,
                "took_s": round(one.took_s, 3),
                "values": dict(one.finding.values),
            }
            for one in results
        ],
    }


@contextmanager
def _progress(name: str) -> Iterator[None]:
    """Name on a terminal what is being waited for."""
    if not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(f"\rchecking {name} ...")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
