"""`dlrover conformance`: does a backend or an event log of somebody's own keep its contract? pytest is not needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli.places import FAILED, INTERRUPTED, OK
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_core.testing.conformance import Kit, Promise, Verdict

EXAMPLES = """\
  dlrover conformance mypackage.scheduler:MyBackend
  dlrover conformance tests/contract.py:my_stand -k fence -k incarnation
  dlrover conformance mypackage.log:MyLog --url 'mylog://localhost/{new}' --timeout 120
  dlrover conformance dlrover_core.logs.sqlite:SqliteLog --json | jq '.promises[] | select(.outcome == "failed")'

what OBJECT may be:
  a class with the methods of Backend that needs no argument, or of EventLog that needs none or a codec
  a function that returns, or an async context manager that yields, a new and empty one each time;
    for a backend better a dlrover_core.testing.Stand, which knows how to kill a node from outside
  a subclass of dlrover_core.testing.BackendConformance or LogConformance: the only form that can say everything

1 is the code when a promise is broken; a promise that could not be tried is told, and breaks nothing."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument(
        "object", metavar="OBJECT", help="module:name, or file.py:name; the current directory is looked in"
    )
    parser.add_argument(
        "--kind", choices=("backend", "log"), help="which contract (default: what its methods look like)"
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="open the log by its class's open_url(url, codec); {new} in it becomes a name of its own for each promise",
    )
    parser.add_argument(
        "-k", metavar="WORD", action="append", default=[], help="only promises with this in their name; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="list the promises, try none")
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=_seconds,
        help="bound on each promise (default: 60 s for backends, 30 s for logs)",
    )
    parser.add_argument("--json", action="store_true", help="for programs: one object, with a verdict on each promise")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def run(args: argparse.Namespace) -> int:
    """`dlrover conformance`. In the main thread and without a loop: every promise has a loop of its own. Raises `SpecError`."""
    import structlog

    from dlrover_core.runtime import objects
    from dlrover_core.testing import conformance

    sys.path.insert(0, os.getcwd())  # as `python -m` does
    # What our own would log is told by the verdicts.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

    thing = objects.find(args.object)
    kind, kit = _ours(thing, args) or conformance.kit_of(thing, args.object, args.kind, args.url)
    chosen = conformance.promises(kit, args.k)
    if not chosen:
        names = "\n  ".join(one.name for one in conformance.promises(kit))
        raise SpecError("-k", f"no promise of a {kind} has {' or '.join(args.k)} in its name; there are:\n  {names}")
    if args.list:
        _list(chosen, as_json=args.json)
        return OK
    conformance.opens(kit, args.object)
    return _tried(args, kind, kit, chosen)


def _ours(thing: Any, args: argparse.Namespace) -> tuple[str, Kit] | None:
    """The kit of a class of our own, which knows what only its author can."""
    if args.url is not None or not getattr(thing, "__module__", "").startswith("dlrover_"):
        return None
    from dlrover_adapters.cli.conformance_ours import kits

    return kits().get(thing) if isinstance(thing, type) else None


def _list(chosen: list[Promise], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([one._asdict() for one in chosen], indent=2, ensure_ascii=False))
        return
    width = max(len(one.name) for one in chosen)
    for one in chosen:
        print(f"{one.name:<{width}}  {one.text}")


def _tried(args: argparse.Namespace, kind: str, kit: Kit, chosen: list[Promise]) -> int:
    from dlrover_core.testing import conformance

    verdicts: list[Verdict] = []

    def tell(verdict: Verdict) -> None:
        verdicts.append(verdict)
        if not args.json:
            print(_line(verdict), flush=True)

    code = OK
    try:
        conformance.try_all(kit, chosen, story_s=args.timeout, tell=tell)
    except KeyboardInterrupt:
        code = INTERRUPTED
    broken = [one.promise.name for one in verdicts if one.outcome == conformance.FAILED]
    code = code or (FAILED if broken else OK)
    if args.json:
        print(json.dumps(_as_values(args.object, kind, chosen, verdicts), indent=2, ensure_ascii=False), flush=True)
    else:
        print(_summary(args.object, chosen, verdicts), flush=True)
    if any(one is not threading.main_thread() and not one.daemon for one in threading.enumerate()):
        # What was tried left a thread behind that nobody ends; the interpreter would wait for it.
        sys.stderr.flush()
        os._exit(code)
    return code


def _line(verdict: Verdict) -> str:
    word = verdict.outcome.upper() if verdict.outcome == "failed" else verdict.outcome
    line = f"{word:<8} {verdict.promise.name}"
    if verdict.outcome == "ok":
        return f"{line} ({verdict.took_s:.1f} s)"
    if verdict.outcome == "skipped":
        return f"{line}: {verdict.reason}"
    return (
        f"{line} ({verdict.took_s:.1f} s)\n         promised: {verdict.promise.text}\n         found: {verdict.reason}"
    )


def _summary(spec: str, chosen: list[Promise], verdicts: list[Verdict]) -> str:
    counts = _counts(chosen, verdicts)
    line = f"{spec}: {counts['ok']} of {len(chosen)} promises kept, {counts['failed']} broken, {counts['skipped']} not tried"
    if counts["left"]:
        line += f"; interrupted with {counts['left']} left"
    broken = [one.promise.name for one in verdicts if one.outcome == "failed"]
    return line + (f"\nagain: dlrover conformance {spec} -k {broken[0]}" if broken else "")


def _counts(chosen: list[Promise], verdicts: list[Verdict]) -> dict[str, int]:
    outcomes = [one.outcome for one in verdicts]
    counts = {outcome: outcomes.count(outcome) for outcome in ("ok", "failed", "skipped")}
    return {**counts, "left": len(chosen) - len(verdicts)}


def _as_values(spec: str, kind: str, chosen: list[Promise], verdicts: list[Verdict]) -> dict[str, Any]:
    told = [
        {
            "name": one.promise.name,
            "promise": one.promise.text,
            "outcome": one.outcome,
            "reason": one.reason,
            "took_s": round(one.took_s, 3),
        }
        for one in verdicts
    ]
    return {"object": spec, "kind": kind, **_counts(chosen, verdicts), "promises": told}
