"""`dlrover signatures`: what failures we know, by what each is known, and what usually suffices."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli.places import OK, NotFound
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_core.diagnosis.signatures import Signature

EXAMPLES = """\
  dlrover signatures                          one line for each: id, class, what usually suffices, what it is
  dlrover signatures cuda.ecc                 by what it is known, and where that knowledge is from
  dlrover signatures nccl                     all whose id begins so
  dlrover signatures --json | jq '.[] | select(.class == "HW").id'
  dlrover signatures --signatures mine.toml   with your own; wrong ones are told by file, id and reason"""

FILE_BYTES_MAX = 1024 * 1024


def file_argument(parser: argparse.ArgumentParser) -> None:
    """A file of one's own signatures."""
    parser.add_argument(
        "--signatures",
        metavar="FILE.toml",
        help="signatures of your own, beside ours or in their place (docs/diagnosis.md)",
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `signatures` takes."""
    parser.add_argument("id", metavar="ID", nargs="?", help="one signature, or all whose id begins so; default: all")
    file_argument(parser)
    parser.add_argument("--json", action="store_true", help="for programs: every field of each")


def own(path: str | None) -> str:
    """A file of one's own signatures, checked, as `JobSpec.signatures` takes it; empty for none. Raises `SpecError`."""
    if path is None:
        return ""
    from dlrover_core.diagnosis import signatures

    try:
        if os.path.getsize(path) > FILE_BYTES_MAX:
            raise SpecError("signatures", f"{path}: larger than {FILE_BYTES_MAX:,} bytes")
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise SpecError("signatures", f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpecError("signatures", f"{path}: not a text in UTF-8: {error.reason}") from error
    return signatures.own(text, path)


def run(args: argparse.Namespace) -> int:
    """`dlrover signatures`."""
    from dlrover_core.diagnosis.signatures import table

    known = table(own(args.signatures))
    chosen = list(known.by_id.values())
    if args.id is not None:
        one = known.get(args.id)
        chosen = [one] if one is not None else [each for each in chosen if each.id.startswith(args.id)]
        if not chosen:
            near = difflib.get_close_matches(args.id, known.by_id, 3)
            raise NotFound(
                f"no signature {args.id!r}"
                + (f"; there is {', '.join(near)}" if near else "; 'dlrover signatures' lists all")
            )
    if args.json:
        print(json.dumps([fields(one) for one in chosen], indent=2, ensure_ascii=False))
    elif len(chosen) == 1:
        print(story(chosen[0]))
    else:
        width = max(len(one.id) for one in chosen)
        for one in chosen:
            print(f"{one.id:<{width}}  {one.verdict or '-':<4}  {one.action:<8}  {one.title}")
    return OK


def fields(one: Signature) -> Mapping[str, Any]:
    """For programs, by the names that files use."""
    told = one._asdict()
    return {"class" if name == "verdict" else name: value for name, value in told.items()}


_CLASSES = {
    "USER": "the program",
    "SOFT": "software, transient",
    "HW": "hardware",
    "RES": "a resource ran out",
    "NET": "the network",
    "PLAT": "the platform took it",
    "DATA": "data or storage",
    "CASC": "a consequence of somebody else's failure, never a cause while there is another",
    "": "no failure: words that hide or explain one",
}
ACTIONS = {
    "obs": "it is recorded, no more",
    "retry": "try again in place",
    "proc": "restart the processes",
    "relaunch": "relaunch the node",
    "isolate": "relaunch elsewhere, and keep off this host until it has proved itself",
    "reset": "relaunch elsewhere; this host's GPU needs a reset",
    "mem+": "relaunch with more memory",
    "shrink": "go on without it",
    "fail": "end the job",
    "wait": "wait, and try again",
    "check": "check the nodes first",
}


def story(one: Signature) -> str:
    """One signature for people."""
    lines = [
        f"{one.id}: {one.title}",
        "",
        f"  class       {one.verdict or '-'}: {_CLASSES[one.verdict]}; {one.confidence:.0%} sure",
        f"  suffices    {one.action}: {ACTIONS[one.action]}",
        f"  about       a {one.scope}",
        f"  seen in     {', '.join(one.sources)}",
    ]
    for name, values in (("known by", (*one.patterns, *one.codes)), ("unless", one.unless)):
        for value in values:
            lines.append(f"  {name:<10}  {value}")
            name = ""
    if one.subject:
        lines.append(f"  names       {one.subject}")
    if one.origin:
        lines.append(f"  from        {one.origin}")
    return "\n".join(lines)
