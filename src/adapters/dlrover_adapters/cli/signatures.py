"""`dlrover signatures`: what failures we know, by what each is known, and what usually suffices."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli.places import OK, NotFound
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_core.diagnosis.signatures import Signature, Table

EXAMPLES = """\
  dlrover signatures                          one line for each: id, class, what usually suffices, what it is
  dlrover signatures cuda.ecc                 by what it is known, and where that knowledge is from
  dlrover signatures nccl                     all whose id begins so
  dlrover signatures --json | jq '.[] | select(.class == "HW").id'
  dlrover signatures --signatures mine.toml   with your own; wrong ones are told by file, id and reason
  dlrover signatures --learn train.log --as plant.cooling >> mine.toml
                                              a draft from a log that is not known, and what else it would match;
      --against old/*.log                     looked for in these logs as well"""

FILE_BYTES_MAX = 1024 * 1024
LEARN_BYTES_MAX, MATCHES_MAX = 4 * 1024 * 1024, 5


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
    parser.add_argument("--learn", metavar="FILE", help="draft a signature from a log that is not known; needs --as")
    parser.add_argument(
        "--as", metavar="ID", dest="name", help="the id of the drafted signature, such as plant.cooling"
    )
    parser.add_argument(
        "--against", metavar="FILE", nargs="+", default=[], help="with --learn: other logs that the draft is tried on"
    )
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
    if args.learn is not None or args.name is not None:
        return _learn(args, known)
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


def _learn(args: argparse.Namespace, known: Table) -> int:
    """A draft on stdout; what there is to know about it on stderr."""
    from dlrover_core.diagnosis import learning, signatures
    from dlrover_core.diagnosis.matching import matcher

    if args.learn is None or args.name is None:
        raise SpecError("--learn", "takes a log and --as ID: dlrover signatures --learn train.log --as plant.cooling")
    lines = _read(args.learn)
    draft = learning.draft(lines, args.name)
    if draft is None:
        raise NotFound(f"{args.learn}: no line of it speaks of an error in words that could be known again")
    made = signatures.own(draft.toml(), "the draft")
    tell = functools.partial(print, file=sys.stderr)
    tell(f"{args.learn}:{draft.number}: {draft.line[:200]}")
    standing = next(iter(matcher(known).scan(draft.line)), None)
    if standing is not None and standing.signature.verdict:
        tell(f"it is known already, as {standing.signature.id}: {standing.signature.title}")
    if args.name in known.by_id:
        tell(f"there is a signature {args.name}: yours will take its place")
    own_only = matcher(
        signatures.Table(tuple(one for one in signatures.table(made).by_id.values() if one.id == args.name))
    )
    for path in (args.learn, *args.against):
        hits = own_only.scan("\n".join(_read(path)))
        for hit in hits[:MATCHES_MAX]:
            tell(f"  matches {path}:{hit.number}: {hit.line.strip()[:160]}")
        if len(hits) > MATCHES_MAX:
            tell(f"  matches {len(hits) - MATCHES_MAX} more lines of {path}, or more")
        if not hits:
            tell(f"  matches nothing in {path}")
    print(draft.toml(), end="")
    return OK


def _read(path: str) -> list[str]:
    """The last lines of a log. Raises `SpecError`."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - LEARN_BYTES_MAX))
            return file.read().decode(errors="replace").splitlines()
    except OSError as error:
        raise SpecError("--learn", f"{path}: {error.strerror or error}") from error


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
