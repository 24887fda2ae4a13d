"""`dlrover diagnose`: what failed, whose fault it was and what usually suffices, from log files alone. No job is needed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli.places import NOT_FOUND, OK, QUIET_S, UNREADABLE
from dlrover_adapters.cli.read import as_json
from dlrover_adapters.cli.signatures import ACTIONS, file_argument, own

if TYPE_CHECKING:
    from dlrover_adapters.cli.log_files import Line
    from dlrover_core.diagnosis.procedure import Judgement
    from dlrover_core.diagnosis.signatures import Table

EXAMPLES = f"""\
  dlrover diagnose train.log                  one log of all ranks, as a launcher wrote it
  dlrover diagnose logs/*/*/stderr.log        a file per rank, as torchrun or dlrover-run --log-dir writes them
  kubectl logs train-0 | dlrover diagnose -   from a pipe; files may be compressed with gzip
  dmesg | dlrover diagnose - slurm-88123.out --json | jq '{{signature, rank, action}}'
  dlrover diagnose train.log --signatures mine.toml

  whose a line is: [rank3]:, worker-3 |, 3: and the like before it, else the file's name; when: its own
  time, else that of a line before. Files that cannot be read are told, the rest is judged.

  here {NOT_FOUND} means that nothing in the files is known as a failure, and {UNREADABLE} that a file could not be read"""

SHOWN_MAX = 8


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `diagnose` takes."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="log files of one failure, from any host; -: stdin")
    file_argument(parser)
    parser.add_argument("--json", action="store_true", help="for programs: one object")


def run(args: argparse.Namespace) -> int:
    """`dlrover diagnose`."""
    from dlrover_adapters.cli import log_files
    from dlrover_core.diagnosis import offline
    from dlrover_core.diagnosis.matching import matcher
    from dlrover_core.diagnosis.signatures import table

    extra = own(args.signatures)
    known = table(extra)
    reader = log_files.Reader(matcher(known), _progress(args.files))
    lines: list[Line] = []
    unread = 0
    for path in dict.fromkeys(args.files):
        try:
            lines += reader.read(path)
        except log_files.Unreadable as error:
            print(f"dlrover diagnose: {error}", file=sys.stderr)
            unread += 1
    failures, undated = log_files.together([line for line in lines if _failure(known, line)])
    if undated and len(undated) < len(args.files):
        print(
            f"dlrover diagnose: no times to compare in {', '.join(undated)}: taken with the others' first",
            file=sys.stderr,
        )
    judgement = offline.diagnose([line.observation for line in failures], extra) if failures else None
    if args.json:
        print(as_json(_values(known, judgement, failures, len(args.files) - unread)))
    elif judgement is not None:
        print(_told(known, judgement, failures))
    elif unread < len(args.files):
        print("nothing in it is known as a failure; 'dlrover signatures' lists what is")
    if unread:
        return UNREADABLE
    return OK if judgement is not None else NOT_FOUND


def _failure(known: Table, line: Line) -> bool:
    signature = known.get(line.signature)
    return signature is not None and bool(signature.verdict)


def _told(known: Table, judgement: Judgement, lines: Sequence[Line]) -> str:
    """The judgement for people."""
    from dlrover_core.history.phrases import safe

    signature, root = known.get(judgement.signature), lines[judgement.root.seq - 1]
    title = signature.title if signature is not None else judgement.signature
    told = [
        f"{title} (signature {judgement.signature}, class {judgement.verdict}, {judgement.confidence:.0%} sure)",
        f"  where     {_where(judgement, root)}",
        f"  evidence  {root.file}:{root.number}: {judgement.root.text[:300]}",
    ]
    if judgement.root.place:
        told.append(f"  place     {judgement.root.place}")
    told.append(f"  suffices  {judgement.action}: {ACTIONS.get(judgement.action, judgement.action)}")
    told.append(f"  rule      {judgement.rule}")
    aside = Counter((lines[seq - 1].signature, why) for seq, why in judgement.discarded)
    for (name, why), times in aside.most_common(SHOWN_MAX):
        told.append(f"  not it    {name}{f' ({times} lines)' if times > 1 else ''}: {why}")
    if len(aside) > SHOWN_MAX:
        told.append(f"            and {len(aside) - SHOWN_MAX} more kinds; --json has all")
    return safe("\n".join(told))


def _where(judgement: Judgement, root: Line) -> str:
    who = f"rank {judgement.rank}" if judgement.rank >= 0 else "no single rank"
    blamed = judgement.host or judgement.blamed
    return (
        f"{who}; at fault: {blamed}" if blamed and blamed != os.path.basename(root.file) else f"{who}, in {root.file}"
    )


def _values(known: Table, judgement: Judgement | None, lines: Sequence[Line], files: int) -> Mapping[str, Any]:
    """The judgement for programs."""
    seen = [
        {
            "file": line.file,
            "line": line.number,
            "signature": line.signature,
            "rank": line.observation.rank,
            "text": line.observation.text.splitlines()[-1] if line.observation.text else "",
        }
        for line in lines
    ]
    if judgement is None:
        return {"files": files, "signature": None, "seen": seen}
    signature = known.get(judgement.signature)
    for seq, why in judgement.discarded:
        seen[seq - 1]["not_it"] = why
    return {
        "files": files,
        "signature": judgement.signature,
        "title": signature.title if signature is not None else "",
        "class": judgement.verdict,
        "confidence": round(judgement.confidence, 3),
        "action": judgement.action,
        "rank": judgement.rank,
        "node": judgement.blamed,
        "host": judgement.host,
        "rule": judgement.rule,
        "place": judgement.root.place,
        "root": seen[judgement.root.seq - 1],
        "seen": seen,
    }


def _progress(files: Sequence[str]) -> Callable[[str, int], None]:
    """Says now and then how far it has come, if a person may be waiting."""
    last = time.monotonic()

    def told(name: str, done: int) -> None:
        nonlocal last
        if time.monotonic() - last < QUIET_S or not sys.stderr.isatty():
            return
        last = time.monotonic()
        size = os.path.getsize(name) if name in files and os.path.exists(name) else 0
        share = f" of {size / 2**20:,.0f}" if size and not name.endswith(".gz") else ""
        print(f"dlrover diagnose: {name}: {done / 2**20:,.0f}{share} MiB", file=sys.stderr)

    return told
