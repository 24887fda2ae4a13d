"""`dlrover replay`: what another policy would have decided, from the same recorded observations."""

from __future__ import annotations

import argparse

from dlrover_adapters.cli import read, signatures
from dlrover_adapters.cli.places import FAILED, OK

EXAMPLES = """\
  dlrover replay digits --policy other.toml            every decision, as recorded and as it would have been
  dlrover replay digits --max-restarts 10              where would the budget have ended the job?
  dlrover replay digits --signatures mine.toml         would my signatures have named it?
  dlrover replay digits                                decides again as recorded: exit code 1 if anything comes out otherwise
  dlrover replay digits --policy other.toml --json | jq '.decisions[] | select(.same | not)'"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `replay` takes."""
    read.common_arguments(parser)
    parser.add_argument(
        "--policy", metavar="FILE.toml", help="the ladder's numbers, and a hook, as dlrover-run takes them"
    )
    signatures.file_argument(parser)
    parser.add_argument("--max-restarts", type=int, metavar="N", help="another --max-restarts than the job had")


async def run(args: argparse.Namespace) -> int:
    """`dlrover replay`. Without changes it is a check of the log: OK where every decision comes out as recorded."""
    from dlrover_adapters.cli import policies
    from dlrover_core.history.render_whatif import lines
    from dlrover_core.history.whatif import changed, plain, whatif

    text = policies.read(args.policy) if args.policy else None
    hook = policies.hook(text) if text else None
    own = signatures.own(args.signatures)
    change = changed(
        policy=text,
        signatures_=own if args.signatures else None,
        max_restarts=args.max_restarts,
    )
    async with read.opened(args) as source:
        records = [record async for record in source.log.read(source.job)]
    found = whatif(records, change=change, hook=hook, anew=bool(args.signatures))
    asked = bool(args.policy or args.signatures or args.max_restarts is not None)
    if args.json:
        print(read.as_json(plain(found)))
    else:
        print("\n".join(lines(found, asked=asked)))
    return OK if asked or found.exact else FAILED
