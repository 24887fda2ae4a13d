"""`dlrover`: look at jobs, from outside and at any time, and tell them what to do. For looking the log is all it needs.

Exit codes are part of the interface; `EXIT_CODES` is printed by every `--help`. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, MutableMapping, Sequence
from typing import Any, NamedTuple

from dlrover_adapters.telemetry import light  # noqa: F401  # first of all

# isort: split

from dlrover_adapters.cli import (
    ckpt,
    conformance,
    data,
    diagnose,
    doctor,
    host_memory,
    k8s_reach,
    kubernetes,
    operate,
    ray_leftovers,
    ray_reach,
    read,
    replay,
    serve,
    signatures,
    simulate,
    usage,
)
from dlrover_adapters.cli.detached import attach
from dlrover_adapters.cli.places import (
    FAILED,
    INTERRUPTED,
    LATE,
    NO_MASTER,
    NOT_FOUND,
    OK,
    PIPE_CLOSED,
    REFUSED,
    UNREADABLE,
    USAGE,
    NotFound,
    log_url,
    show_any_text,
    shown,
    through_masters,
)
from dlrover_adapters.cli.whose import version_lines
from dlrover_core.errors import ConnectionLost, CoreError, LogUnavailable, NotLeading, Refused, SpecError, TokenRefused

EXIT_CODES = f"""exit codes:
  {OK:<3}  done
  {FAILED:<3}  the job has failed; doctor: a check has; conformance: a promise is broken; replay: not as recorded;
       ckpt: bytes are damaged, or a step is not complete; data: samples are missing or in the model twice
  {USAGE:<3}  wrong usage
  {NOT_FOUND:<3}  no such job, event, signature or checkpoint; diagnose: no failure that is known
  {UNREADABLE:<3}  the log or the storage cannot be read: unreachable, damaged, or written by a newer version
  {REFUSED:<3}  refused: as the job stands, it cannot do what was asked
  {NO_MASTER:<3}  no master leads the job, or it cannot be asked: network, token
  {LATE:<3}  accepted, but not carried out within --timeout
  {usage.EX_LATER:<3}  no process or thread can be started: a limit is reached; master: the job was handed over,
       or the log's servers do not answer now: start it again
  {INTERRUPTED:<3}  interrupted by Ctrl-C
  {PIPE_CLOSED:<3}  the reader of our output went away"""


class Command(NamedTuple):
    """One subcommand: its one-line summary, examples for --help, its arguments, and what it does. Returns an exit code.

    One that is no coroutine has the main thread without a loop to itself.
    """

    name: str
    summary: str
    examples: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Coroutine[Any, Any, int] | int]


COMMANDS = (
    Command("status", "show a job's current state", read.STATUS_EXAMPLES, read.status_arguments, read.status),
    Command("events", "show a job's events, one line each", read.EVENTS_EXAMPLES, read.events_arguments, read.events),
    Command(
        "explain",
        "show why something was done: evidence, verdict, rule, cost",
        read.EXPLAIN_EXAMPLES,
        read.explain_arguments,
        read.explain,
    ),
    Command(
        "replay",
        "show what another policy would have decided on the same events",
        replay.EXAMPLES,
        replay.arguments,
        replay.run,
    ),
    Command(
        "report",
        "show incidents, goodput, and where the rest of the time went",
        read.REPORT_EXAMPLES,
        read.common_arguments,
        read.report,
    ),
    Command(
        "data",
        "show a job's progress in its data; prove that each sample counts once",
        data.EXAMPLES,
        data.arguments,
        data.run,
    ),
    Command(
        "hosts",
        "show the failures of each host; quarantine or release hosts",
        host_memory.EXAMPLES,
        host_memory.arguments,
        host_memory.run,
    ),
    Command(
        "scale",
        "change the number of nodes of a running job",
        operate.SCALE_EXAMPLES,
        operate.scale_arguments,
        operate.scale,
    ),
    Command(
        "drain",
        "move a node away from its host",
        operate.DRAIN_EXAMPLES,
        operate.drain_arguments,
        operate.drain,
    ),
    Command(
        "attach", "show the output of a detached job, until it ends", attach.EXAMPLES, attach.arguments, attach.run
    ),
    Command(
        "stop",
        "end a job; workers get stop_grace_s to save",
        operate.STOP_EXAMPLES,
        operate.stop_arguments,
        operate.stop,
    ),
    Command(
        "suspend",
        "pause a job, and give its nodes back",
        operate.SUSPEND_EXAMPLES,
        operate.suspend_arguments,
        operate.suspend,
    ),
    Command("resume", "continue a suspended job", operate.RESUME_EXAMPLES, operate.job_arguments, operate.resume),
    Command(
        "master", "run a master for a job whose hosts join by themselves", serve.EXAMPLES, serve.arguments, serve.run
    ),
    Command(
        "k8s",
        "print a job's Kubernetes objects as YAML; run the operator",
        kubernetes.EXAMPLES,
        kubernetes.arguments,
        kubernetes.run,
    ),
    Command(
        "ray",
        "list or remove what jobs have in a Ray cluster",
        ray_leftovers.EXAMPLES,
        ray_leftovers.arguments,
        ray_leftovers.run,
    ),
    Command(
        "diagnose",
        "find the cause of a failure in log files",
        diagnose.EXAMPLES,
        diagnose.arguments,
        diagnose.run,
    ),
    Command("ckpt", "list, verify, convert and remove checkpoints", ckpt.EXAMPLES, ckpt.arguments, ckpt.run),
    Command(
        "signatures",
        "list the known failures, or draft one of your own",
        signatures.EXAMPLES,
        signatures.arguments,
        signatures.run,
    ),
    Command(
        "doctor",
        "check whether this machine can run jobs, and say what to fix",
        doctor.EXAMPLES,
        doctor.arguments,
        doctor.run,
    ),
    Command(
        "simulate",
        "estimate a job's goodput from published failure data",
        simulate.EXAMPLES,
        simulate.arguments,
        simulate.run,
    ),
    Command(
        "conformance",
        "test your own backend or log against its contract",
        conformance.EXAMPLES,
        conformance.arguments,
        conformance.run,
    ),
)


def build_parser(commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    """The command line, as --help tells it."""
    form = argparse.RawDescriptionHelpFormatter
    parser = usage.Parser(
        prog="dlrover",
        description="Look at training jobs run by dlrover-core, and tell them what to do. "
        "Reading needs only the job's log; commands that change a job go to its leading master.",
        epilog="'dlrover COMMAND --help' shows examples.\n\n" + EXIT_CODES,
        formatter_class=form,
    )
    parser.add_argument("--version", action="store_true", help="print whose command this is, and its version")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in commands:
        sub = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog=f"examples:\n{command.examples}\n\n{EXIT_CODES}",
            formatter_class=form,
        )
        command.arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code; wrong usage leaves through argparse with 2."""
    show_any_text()
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.version:
        print("\n".join(version_lines("dlrover")))
        return OK
    if args.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    return guarded(args)


def guarded(args: argparse.Namespace) -> int:
    """Run the command that was parsed; its exit code. Errors are told."""
    _speak(args.command)
    try:
        if k8s_reach.is_there(args):
            return k8s_reach.run(args)
        if ray_reach.is_there(args):
            return ray_reach.run(args)
        through_masters(args)
        done = args.run(args)
        code: int = done if isinstance(done, int) else asyncio.run(done)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered must not fail again when the interpreter flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except NotFound as error:
        return _say(args, error, NOT_FOUND)
    except SpecError as error:
        return _say(args, error, USAGE)
    except Refused as error:
        return _say(args, error, REFUSED)
    except (ConnectionLost, TokenRefused, NotLeading) as error:
        return _say(args, error, NO_MASTER)
    except (BlockingIOError, RuntimeError) as error:
        limit = usage.limit(error)
        if not limit:
            raise
        return _say(args, limit, usage.EX_LATER)
    except CoreError as error:
        if args.command == "master" and isinstance(error, LogUnavailable):
            return _say(args, error, usage.EX_LATER)
        return _say(
            args, f"{error} ({shown(place := log_url(args.log, args.state_dir))}; {_elsewhere(place)})", UNREADABLE
        )
    return code


def _elsewhere(place: str) -> str:
    """What to type where the log at this URL cannot be read."""
    if place.startswith(("http:", "https:")):
        return "if the job is over, its masters are gone: read its log on the host that has it, or with --log"
    return "--log or --state-dir names another"


def _speak(command: str) -> None:
    """Let what logs have to say come out on stderr, in this command's name, and never between its results."""
    import structlog

    def line(_logger: object, _method: str, words: MutableMapping[str, Any]) -> str:
        why = words.get("error") or words.get("reason")
        return f"dlrover {command}: {words['event']}{f': {why}' if why else ''}"

    structlog.configure(
        processors=[line],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _say(args: argparse.Namespace, error: object, code: int) -> int:
    print(f"dlrover {args.command}: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
