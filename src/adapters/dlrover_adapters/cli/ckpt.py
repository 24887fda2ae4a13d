"""`dlrover ckpt`: the checkpoints under a URL: list, verify, convert, remove. Needs no job, no log and no master."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from dlrover_adapters.cli.places import FAILED, OK, QUIET_S, REFUSED, UNREADABLE, NotFound
from dlrover_core.errors import CoreError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlrover_adapters.checkpoint.listing import Step
    from dlrover_adapters.checkpoint.places import Place

EXAMPLES = """\
  dlrover ckpt ls file:///ckpts/run1                which steps there are, complete or not, how large, how old
  dlrover ckpt verify s3://bucket/run1              every byte of the newest complete step; exit 1 if one is wrong
  dlrover ckpt verify /ckpts/run1 --all --json      of all steps, for programs
  dlrover ckpt export /ckpts/run1 model.safetensors --only model
  dlrover ckpt export /ckpts/run1 state.pt --step 1200
  dlrover ckpt export /ckpts/run1 /tmp/plain --format dcp
  dlrover ckpt rm /ckpts/run1 --keep 3              all but the newest three, and what is older and incomplete
  dlrover ckpt rm /ckpts/run1 --step 100 --step 200"""

_VERBS = {
    "ls": "the steps under a URL",
    "verify": "compare every byte with what was written",
    "export": "to safetensors, to a file that torch.load opens, to a plain checkpoint of torch's",
    "rm": "remove steps",
}
_URL = "where the checkpoints lie: a path, file:///path, s3://bucket/path, or whatever fsspec reaches"
_SAID_EACH_S = 1.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `ckpt` takes."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    subs = {
        name: verbs.add_parser(name, help=told, description=f"{told[0].upper()}{told[1:]}.")
        for name, told in _VERBS.items()
    }
    for name, sub in subs.items():
        mine = [line for line in EXAMPLES.splitlines() if f"ckpt {name} " in line]
        sub.epilog = "examples:\n" + "\n".join(mine)
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        sub.add_argument("url", metavar="URL", help=_URL)
    subs["verify"].add_argument(
        "--step", type=int, action="append", help="this step; may be repeated (default: the newest)"
    )
    subs["verify"].add_argument("--all", action="store_true", help="all steps, incomplete ones too")
    export = subs["export"]
    export.add_argument("target", metavar="TARGET", help="the file to write, or the folder for dcp: a path or a URL")
    export.add_argument(
        "--format", choices=("safetensors", "torch", "dcp"), help="default: safetensors, or what TARGET ends in"
    )
    export.add_argument(
        "--only", metavar="KEY", default="", help="what lies below this key alone, as: model, optimizer.state"
    )
    export.add_argument("--step", type=int, help="this step (default: the newest complete one)")
    remove = subs["rm"]
    remove.add_argument("--step", type=int, action="append", help="this step; may be repeated")
    remove.add_argument("--keep", type=int, metavar="N", help="all but the newest N complete ones")
    remove.add_argument("--force", action="store_true", help="the newest complete step, too")
    for sub in subs.values():
        sub.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """`dlrover ckpt`."""
    verb: Callable[[argparse.Namespace, Place, int | None], int] = {
        "ls": _ls, "verify": _verify, "export": _export, "rm": _rm,
    }[args.verb]  # fmt: skip
    try:
        from dlrover_adapters.checkpoint.manifests import (
            CheckpointDamaged,
            CheckpointIncomplete,
            CheckpointTooNew,
            step_of,
        )
        from dlrover_adapters.checkpoint.places import Place
    except ImportError as error:
        raise SpecError("ckpt", f"{error}; install it: pip install 'dlrover-core[torch]'") from error
    url, _, last = args.url.rstrip("/").rpartition("/")
    step = step_of(last)
    try:
        return verb(args, Place(args.url if step is None else url or "/"), step)
    except CheckpointTooNew as error:
        return _say(error, UNREADABLE)
    except (CheckpointDamaged, CheckpointIncomplete) as error:
        return _say(error, FAILED)
    except (SpecError, NotFound):
        raise
    except OSError as error:
        return _say(error, UNREADABLE)
    except CoreError as error:
        return _say(error, REFUSED)


def _say(error: Exception, code: int) -> int:
    print(f"dlrover ckpt: {error}", file=sys.stderr)
    return code


def _found(place: Place, named: Sequence[int] | None) -> list[Step]:
    """All steps, or those that were named. Raises `NotFound`."""
    from dlrover_adapters.checkpoint.listing import steps

    found = steps(place)
    there = [one.step for one in found]
    missing = [step for step in named or () if step not in there]
    if missing or not found:
        told = f"no step {missing[0]}" if missing else "no checkpoint"
        rest = f"; there is {', '.join(map(str, there[-8:]))}" if there else "; URL is what FlashCheckpoint was given"
        raise NotFound(f"{place.shown()}: there is {told}{rest}")
    return [one for one in found if one.step in named] if named else found


def _newest(place: Place, step: int | None) -> int:
    """The step that was named, or the newest complete one. Raises `NotFound`."""
    from dlrover_adapters.checkpoint.listing import newest

    if step is not None:
        return _found(place, [step])[0].step
    found = newest(_found(place, None))
    if found is None:
        raise NotFound(f"{place.shown()}: no step is complete; 'dlrover ckpt ls' shows what there is")
    return found.step


def _ls(args: argparse.Namespace, place: Place, step: int | None) -> int:
    found = _found(place, None if step is None else [step])
    if args.json:
        print(json.dumps([one._asdict() for one in found], indent=2))
        return OK
    now = time.time()
    rows = [("step", "state", "size", "age", "format", "parts", "generation", "")]
    for one in found:
        age = "?" if not one.changed else _ago(now - one.changed)
        generation = str(one.generation) if one.generation >= 0 else "-"
        rows.append(
            (str(one.step), one.state, _bytes(one.size), age, one.kind or "-", str(one.parts), generation, one.why)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip())
    return OK


def _verify(args: argparse.Namespace, place: Place, step: int | None) -> int:
    from dlrover_adapters.checkpoint.verify import verify

    named = args.step or ([step] if step is not None else None)
    chosen = [one.step for one in _found(place, named)] if args.all or named else [_newest(place, None)]
    verdicts = []
    for number in chosen:
        with _Said(f"step {number}") as said:
            verdict = verify(place, number, said.more)
        verdicts.append(verdict)
        if not args.json:
            # A step that was never completed is no damage; it is not fine either.
            word = "fine" if verdict.fine else "DAMAGED" if verdict.damages else "incomplete"
            print(f"step {number}: {word}, {_bytes(verdict.size)} compared")
            for line in (*verdict.damages, *([verdict.missing] if verdict.missing else [])):
                print(f"  {line}")
    if args.json:
        print(json.dumps([{**one._asdict(), "fine": one.fine} for one in verdicts], indent=2))
    return OK if all(one.fine for one in verdicts) else FAILED


def _export(args: argparse.Namespace, place: Place, step: int | None) -> int:
    from dlrover_adapters.checkpoint.export import export
    from dlrover_adapters.checkpoint.reader import StepReader

    number = _newest(place, args.step if args.step is not None else step)
    ending = args.target.rpartition(".")[2]
    kind = args.format or {"pt": "torch", "pth": "torch", "bin": "torch"}.get(ending, "safetensors")
    with _Said(f"step {number}") as said:
        done = export(StepReader(place, number), args.target, kind, only=args.only, progress=said.more)
    if args.json:
        print(json.dumps({"step": number, "format": kind, "target": args.target, **done._asdict()}, indent=2))
        return OK
    print(
        f"step {number}: {done.tensors} tensors, {done.objects} objects, {_bytes(done.size)} in {args.target} ({kind})"
    )
    if done.left_out:
        names = ", ".join(done.left_out[:5]) + (" ..." if len(done.left_out) > 5 else "")
        print(f"left out, as {kind} does not take them: {names}", file=sys.stderr)
    return OK


def _rm(args: argparse.Namespace, place: Place, step: int | None) -> int:
    from dlrover_adapters.checkpoint.listing import delete, newest, retain

    named = args.step or ([step] if step is not None else None)
    if (named is None) == (args.keep is None):
        raise SpecError("rm", "give --step N, or --keep N")
    if args.keep is not None:
        if args.keep < 1:
            raise SpecError("keep", f"{args.keep}: at least 1; --step N --force removes the last one")
        _found(place, None)
        gone = retain(place, args.keep, everybody=True)
    else:
        last = newest(_found(place, None))
        gone = [one.step for one in _found(place, named)]
        if last is not None and last.step in gone and not args.force:
            raise CoreError(f"step {last.step} is the newest complete one; --force removes it nevertheless")
        for number in gone:
            delete(place, number)
    if args.json:
        print(json.dumps({"removed": gone}))
    else:
        print(f"removed: {', '.join(map(str, gone)) or 'nothing'}")
    return OK


class _Said:
    """Says on stderr how far something is, once it takes longer than `QUIET_S`."""

    def __init__(self, what: str) -> None:
        self._what, self._done = what, 0
        self._next = time.monotonic() + QUIET_S
        self._talked = False

    def __enter__(self) -> _Said:  # noqa: PYI034  # Self needs 3.11
        return self

    def more(self, size: int) -> None:
        """So many bytes more."""
        self._done += size
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SAID_EACH_S
            self._talked = True
            line = f"dlrover ckpt: {self._what}: {_bytes(self._done)} so far"
            print(
                f"\r{line}" if sys.stderr.isatty() else line,
                end="" if sys.stderr.isatty() else "\n",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, *_: object) -> None:
        if self._talked and sys.stderr.isatty():
            print(file=sys.stderr)


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
