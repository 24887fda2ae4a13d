"""`dlrover diagnose`: what failed, whose fault it was and what usually suffices, from log files alone. No job is needed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dlrover_adapters.cli.places import NOT_FOUND, OK, QUIET_S, UNREADABLE
from dlrover_adapters.cli.read import as_json
from dlrover_adapters.cli.signatures import ACTIONS, file_argument, own

if TYPE_CHECKING:
    from dlrover_core.diagnosis.answers import Answer, Cause
    from dlrover_core.diagnosis.procedure import Judgement
    from dlrover_core.diagnosis.reading import Read
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

SHOWN_MAX, LINE_MAX = 8, 200


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `diagnose` takes."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="log files of one failure, from any host; -: stdin")
    file_argument(parser)
    parser.add_argument(
        "--explain", action="store_true", help="also each line that was considered, and why it is not the cause"
    )
    parser.add_argument("--json", action="store_true", help="for programs: one object (docs/diagnose.schema.json)")


def run(args: argparse.Namespace) -> int:
    """`dlrover diagnose`."""
    from dlrover_adapters.cli import log_files
    from dlrover_core.diagnosis import answers, reading, rows
    from dlrover_core.diagnosis.matching import Sieve, matcher
    from dlrover_core.diagnosis.rows import Text
    from dlrover_core.diagnosis.signatures import table

    extra = own(args.signatures)
    known = table(extra)
    reader = log_files.Reader(Sieve(known, rows.MARKS), _progress(args.files))
    texts: list[Text] = []
    unread = 0
    for path in dict.fromkeys(args.files):
        try:
            texts.append(reader.read(path))
        except log_files.Unreadable as error:
            print(f"dlrover diagnose: {error}", file=sys.stderr)
            unread += 1
    read = reading.read(texts, matcher(known))
    if read.untimed and len(read.untimed) < len(args.files):
        print(
            f"dlrover diagnose: no times to compare in {', '.join(read.untimed)}: taken with the others' first",
            file=sys.stderr,
        )
    answer = answers.answer(read, extra)
    if args.json:
        print(as_json(answers.values(answer, read, known, len(args.files) - unread)))
    elif answer is not None:
        print(_told(known, answer, read, explain=args.explain))
    elif unread < len(args.files):
        print("nothing in it is known as a failure; 'dlrover signatures' lists what is, and")
        print("'dlrover signatures --learn FILE --as ID' drafts a signature of your own from it")
    if unread:
        return UNREADABLE
    return OK if answer is not None else NOT_FOUND


def _told(known: Table, answer: Answer, read: Read, *, explain: bool) -> str:
    """The answer for people."""
    from dlrover_core.diagnosis.evidence import CASC
    from dlrover_core.history.phrases import safe

    first = answer.judgement
    told = []
    if answer.unknown:
        told += ["unknown: nothing in it says for sure what failed first; the likeliest:", ""]
    elif first.verdict == CASC and not first.blamed and first.rank < 0:
        told += ["consequences alone: which rank failed first, or was late, is not in it; what it says:", ""]
    told += [
        f"{_title(known, first)} (signature {first.signature}, class {first.verdict}, {answer.causes[0].confidence:.0%} sure)",
        f"  where     {_where(answer)}",
        *_quoted(answer.causes[0]),
    ]
    if first.root.place:
        told.append(f"  place     {first.root.place}")
    told += [
        f"  suffices  {first.action}: {ACTIONS.get(first.action, first.action)}",
        f"  rule      {first.rule}",
        f"  look at   {answer.next}",
    ]
    for number, cause in enumerate(answer.causes[1:], 2):
        one = cause.judgement
        told += [
            "",
            f"{number}. {_title(known, one)} (signature {one.signature}, class {one.verdict}, {cause.confidence:.0%})",
            *_quoted(cause, 1),
            f"  not first {cause.why_not}",
        ]
    return safe("\n".join([*told, "", *_aside(answer, read, explain=explain)]).rstrip())


def _title(known: Table, judgement: Judgement) -> str:
    signature = known.get(judgement.signature)
    return signature.title if signature is not None else judgement.signature


def _quoted(cause: Cause, most: int = 3) -> list[str]:
    """Its lines, as they stand in the files."""
    said = list(dict.fromkeys((spot.file, spot.number, spot.line) for spot in cause.lines))[:most]
    lines = [f"  evidence  {file}:{number}: {line[:LINE_MAX]}" for file, number, line in said]
    return [line if not at else line.replace("  evidence", "          ", 1) for at, line in enumerate(lines)]


def _aside(answer: Answer, read: Read, *, explain: bool) -> list[str]:
    """What else was considered, and why it is not the cause."""
    seen = {one.seq: one for one in answer.seen}
    if explain:
        told = [
            f"  not it    {read.spots[seq - 1].file}:{read.spots[seq - 1].number}: {seen[seq].signature}: {why}"
            for seq, why in answer.judgement.discarded
            if seq in seen
        ]
        return told + [
            f"  not it    {spot.file}:{spot.number}: {spot.signature or spot.line[:60]}: {why}"
            for spot, why in read.aside
        ]
    counted = Counter((seen[seq].signature, why) for seq, why in answer.judgement.discarded if seq in seen)
    counted.update((spot.signature or "an exception", why) for spot, why in read.aside)
    told = [
        f"  not it    {name}{f' ({times} lines)' if times > 1 else ''}: {why}"
        for (name, why), times in counted.most_common(SHOWN_MAX)
    ]
    if len(counted) > SHOWN_MAX:
        told.append(f"            and {len(counted) - SHOWN_MAX} more kinds; --explain has all")
    return told


def _where(answer: Answer) -> str:
    parts = [f"rank {answer.rank}"] if answer.rank >= 0 else []
    if answer.host or answer.node:
        parts.append(f"host {answer.host}" if answer.host else f"node {answer.node}")
    if answer.device:
        parts.append(f"device {answer.device}")
    named = ", ".join(parts) or "the log does not name a rank or a host"
    return (
        f"{named}; at fault: {answer.judgement.host or answer.judgement.blamed}" if answer.judgement.blamed else named
    )


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
