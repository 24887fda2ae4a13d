"""Events of datasets in words."""

from __future__ import annotations

from dlrover_core.data.quota import DROP
from dlrover_core.history.words import Words
from dlrover_core.job import shards
from dlrover_core.words import count


def _registered(fact: shards.DatasetRegistered) -> str:
    epochs = f"{count(fact.epochs, 'epoch')}" if fact.epochs else "epochs without end"
    batch = f", {count(fact.global_batch, 'sample')} a step" if fact.global_batch else ""
    last = ", without its remainder" if fact.last == DROP else ""
    return (
        f"{fact.group} trains on {fact.name!r}: {count(fact.size, 'sample')} in order {fact.order!r} of seed {fact.seed}, "
        f"{epochs}{batch}{last}, assigned by {fact.assignment}"
    )


def _broken(fact: shards.LedgerBroken) -> str:
    who = f", as {fact.node} has it," if fact.node else ""
    return f"the data of step {fact.step} of generation {fact.generation}{who} do not go together: {fact.why}"


WORDS: Words = {
    shards.LedgerBroken: _broken,
    shards.DatasetRegistered: _registered,
}
