"""Names in the cluster: a run's Ray namespace, its placement groups, and its keys in the key-value store.

Every one begins with `PREFIX`, by which ``dlrover ray ls`` finds what a killed launcher has left.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote, unquote

PREFIX = "dlrover:"
TOKEN, PLACE, DELETED = "token", "place", "deleted"  # kinds of keys; the token is a number


class Run(NamedTuple):
    """A run in the cluster.

    job: the job's name
    run: the id of this life of it
    """

    job: str
    run: str

    @property
    def space(self) -> str:
        """The run's Ray namespace, and what its keys begin with."""
        return f"{PREFIX}{quote(self.job, safe='')}:{quote(self.run, safe='')}"

    def group(self, node: str) -> str:
        """The name of a node's placement group, which no namespace keeps apart from others'."""
        return f"{self.space}/{node}"

    def key(self, kind: str, node: str = "") -> str:
        """A key in the cluster's key-value store."""
        return f"{self.space}/{kind}/{node}"


def run_of(space: str) -> Run | None:
    """The run whose namespace this is; None: it is somebody else's."""
    words = space.partition("/")[0].split(":")
    if len(words) != 3 or f"{words[0]}:" != PREFIX:
        return None
    return Run(unquote(words[1]), unquote(words[2]))
