"""`dlrover data`: how far a job's data are, and the audit that proves each sample to be in the model's lineage once."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli import read
from dlrover_adapters.cli.places import FAILED, OK, NotFound, log_arguments, token_arguments

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dlrover_core.history.leased import LeasedRow
    from dlrover_core.history.ledger import DataRow
    from dlrover_core.job.state import JobState
    from dlrover_core.kernel.events import Record

EXAMPLES = """\
  dlrover data digits                     epoch, position, rate, time left, and what was trained again
  dlrover data digits --follow            a line whenever a state has told more, until the job ends
  dlrover data digits --json | jq '.[0].position'
  dlrover data verify digits              prove that each sample is in the model once, or name what is not; exit 1
  dlrover data verify digits --log etcd://e1:2379,e2:2379 --json | jq .proved"""

VERIFY = "verify"
SECOND_US = 1_000_000
QUIET_S = 1.0
"""So long a change that was not told waits for the next record."""
NO_DATA = (
    "has no data that we know of: let its script give FlashCheckpoint(data=...) an ElasticDataset, or lease samples"
)

NO_PROOF = (
    'has no model whose data could be audited: {} is leased with lineage="server", where the log itself is the list of what was '
    "used; dlrover data {} shows it"
)


class _What(argparse.Action):
    """The word ``verify``, or the job itself where there is no such word."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _: Any = None
    ) -> None:
        if values and values != VERIFY:
            if getattr(namespace, "job", None) is not None:
                parser.error(f"{values!r}: there is 'dlrover data JOB', and 'dlrover data verify JOB'")
            namespace.job, values = values, ""
        setattr(namespace, self.dest, values or "")


class _Job(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _: Any = None
    ) -> None:
        if namespace.job is not None:
            parser.error(f"{namespace.job!r} {values!r}: there is 'dlrover data JOB', and 'dlrover data verify JOB'")
        namespace.job = values


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `data` takes."""
    parser.set_defaults(job=None)
    parser.add_argument(
        "what", metavar=VERIFY, nargs="?", action=_What, help="audit the log, and show no more than that"
    )
    parser.add_argument("name", metavar="JOB", nargs="?", action=_Job, default=argparse.SUPPRESS, help=read.JOB_HELP)
    log_arguments(parser)
    token_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for programs: every field named, times in microseconds")
    parser.add_argument("--follow", "-f", action="store_true", help="go on as the log grows, until the job ends")


async def run(args: argparse.Namespace) -> int:
    """`dlrover data`."""
    async with read.opened(args) as source:
        if args.what == VERIFY:
            return await _verify(args, source)
        if args.follow:
            return await _follow(args, source)
        return await _show(args, source)


async def _show(args: argparse.Namespace, source: read.Source) -> int:
    from dlrover_core.history import leased, render_ledger
    from dlrover_core.history.ledger import ledger_of
    from dlrover_core.history.plain import plain
    from dlrover_core.job.state import FOLD

    state = FOLD.new()
    async for record in source.log.read(source.job):
        FOLD.apply(state, record)
    rows, leases = ledger_of(state), leased.leased_of(state)
    if args.json:
        print(read.as_json(plain((*rows, *leases))))
    elif not (rows or leases):
        raise NotFound(f"job {source.job!r} {NO_DATA}")
    else:
        shown = render_ledger.lines(rows, None if state.job.over else await source.now())
        print("\n".join([*shown, *leased.lines(leases, over=state.job.over)]))
    return OK


async def _follow(args: argparse.Namespace, source: read.Source) -> int:
    from dlrover_core.history import leased, render_ledger
    from dlrover_core.history.phrases import stamp
    from dlrover_core.history.plain import plain

    async with aclosing(_changes(source.log.follow(source.job))) as changes:  # type: ignore[type-var]  # a generator
        async for state, rows in changes:
            for row in rows:
                shown = leased.rows((row,)) if isinstance(row, leased.LeasedRow) else render_ledger.row([row])
                said = next(shown)
                line = read.as_line(plain(row)) if args.json else f"{stamp(state.at)}  {said}"
                print(line, flush=True)
            if state.job.over:
                break
    return OK


async def _changes(records: AsyncIterator[Record]) -> AsyncIterator[tuple[JobState, list[DataRow | LeasedRow]]]:
    """The state, with the rows that have changed and are to be told now, until the job has ended.

    A leased dataset changes with every node's grants and acknowledgements, so these are looked at once a second at most, and at
    the job's end. What changes within the second is told when it is over, whether another record comes or not.
    """
    from dlrover_core.job import leases, shards
    from dlrover_core.job.state import FOLD

    state, rows, coming = FOLD.new(), _Rows(), _Coming(records)
    leased = False  # have leases changed since they were looked at?
    try:
        while True:
            record = await coming.next(QUIET_S if leased else None)
            if record is not None:
                FOLD.apply(state, record)
                leased = leased or type(record.event) in leases.FACTS.evolve
            over = state.job.over
            new = record is not None and isinstance(record.event, shards.DatasetRegistered)
            with_leases = over or new or (leased and (record is None or state.at >= rows.due))
            if with_leases or (record is not None and type(record.event) in shards.FACTS.evolve):
                leased = leased and not with_leases
                now = rows.changed(state, with_leases=with_leases)
                if now or over:
                    yield state, now
    except StopAsyncIteration:
        return
    finally:
        await coming.close()


class _Coming:
    """The records, one by one, or that none came in time."""

    def __init__(self, records: AsyncIterator[Record]) -> None:
        self._records = records
        self._next: asyncio.Future[Record] | None = None

    async def next(self, within_s: float | None) -> Record | None:
        """The next record; None: there was none ``within_s`` seconds. Raises `StopAsyncIteration`."""
        if within_s is None and self._next is None:
            return await anext(self._records)
        self._next = self._next or asyncio.ensure_future(anext(self._records))
        await asyncio.wait({self._next}, timeout=within_s)
        if not self._next.done():
            return None
        done, self._next = self._next, None
        return done.result()

    async def close(self) -> None:
        """Wait for none any more. What reads them ends before their log is closed: it may have a question under way."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        if isinstance(self._records, AsyncGenerator):
            await self._records.aclose()


class _Rows:
    """What was told of each dataset. ``due``: when changed leases are looked at again, microseconds."""

    def __init__(self) -> None:
        self.due = 0
        self._told: dict[tuple[str, str], DataRow | LeasedRow] = {}

    def changed(self, state: JobState, *, with_leases: bool) -> list[DataRow | LeasedRow]:
        """The rows that are not as they were told, which they are now."""
        from dlrover_core.history.leased import leased_of
        from dlrover_core.history.ledger import ledger_of

        every: list[DataRow | LeasedRow] = list(ledger_of(state))
        if with_leases:
            every += leased_of(state)
            self.due = state.at + SECOND_US
        now = [row for row in every if row != self._told.get((row.group, row.dataset))]
        self._told.update({(row.group, row.dataset): row for row in now})
        return now


async def _verify(args: argparse.Namespace, source: read.Source) -> int:
    from dlrover_core.history import lease_audit, render_ledger
    from dlrover_core.history.audit import Audit, proof_values
    from dlrover_core.history.plain import plain
    from dlrover_core.job import shards
    from dlrover_core.job.shards import LEASE

    audit, by_leases, served = Audit(), lease_audit.LeaseAudit(), set[str]()
    async for record in source.log.read(source.job):
        audit.feed(record)
        by_leases.feed(record)
        if isinstance(record.event, shards.DatasetRegistered) and record.event.assignment == LEASE:
            served.add(repr(record.event.name))
    proofs, leased = audit.proofs(), by_leases.proofs()
    if not (proofs or leased):
        why = NO_PROOF.format(", ".join(sorted(served)), source.job) if served else NO_DATA
        raise NotFound(f"job {source.job!r} {why}")
    wrong = any(one.findings for one in proofs) or any(one.findings for one in leased)
    if args.json:
        told = proof_values(proofs) | ({"proved": not wrong, "leased": plain(leased)} if leased else {})
        print(read.as_json(told))
    else:
        print("\n".join([*(render_ledger.proofs(proofs) if proofs else ()), *lease_audit.lines(leased)]))
    return FAILED if wrong else OK
