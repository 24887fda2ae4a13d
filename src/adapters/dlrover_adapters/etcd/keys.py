"""Where things lie in etcd. All keys of one log begin with its prefix, those of one job with the job's name, escaped.

```
{prefix}/v1/names/{job}                         what `jobs()` lists; made with the first leader, deleted with the job (`erasing`)
{prefix}/v1/jobs/{job}/leader                   lease-bound; its create_revision is the fencing token; value: `Leader`
{prefix}/v1/jobs/{job}/head                     value: `Head`; rewritten by every append
{prefix}/v1/jobs/{job}/erased                   while a log is erased, instead of its head; value: the run that it began with
{prefix}/v1/jobs/{job}/log/{last_seq:020d}      value: one batch's payload; never rewritten, contiguous by sequence number
{prefix}/v1/jobs/{job}/snap/{seq:020d}/{part:04d}     a piece of a snapshot, at most `PART_BYTES`
{prefix}/v1/jobs/{job}/snap/{seq:020d}/manifest       written last, with its sums
```
A batch's key bears its *last* sequence number, so that the first key beyond ``after`` is the batch that holds ``after + 1``.
Batches without a head, beside ``erased``, are what is left of an erased log: the next leader deletes them (`deleting`).
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import msgpack

from dlrover_core.errors import LogError

PART_BYTES = 512 * 1024
SEQ_DIGITS = 20


class Head(NamedTuple):
    """The end of a job's log: its last sequence number, and what identifies its last batch."""

    seq: int = 0
    token: int = 0
    counter: int = 0

    def packed(self) -> bytes:
        """As it lies."""
        return bytes(msgpack.packb(("h1", *self)))

    @classmethod
    def unpacked(cls, raw: bytes) -> Head:
        """From what lies there. Raises `LogError`."""
        return cls(*_fields(raw, "h1", 3))


class Leader(NamedTuple):
    """Who leads, as it says of itself."""

    holder: str
    address: str = ""

    def packed(self) -> bytes:
        """As it lies."""
        return bytes(msgpack.packb(("l1", *self)))

    @classmethod
    def unpacked(cls, raw: bytes) -> Leader:
        """From what lies there. Raises `LogError`."""
        return cls(*_fields(raw, "l1", 2))


def _fields(raw: bytes, form: str, count: int) -> tuple[Any, ...]:
    try:
        found = msgpack.unpackb(raw, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise LogError(f"{raw[:40]!r} in etcd is not ours: {error}") from error
    if not isinstance(found, tuple) or found[:1] != (form,) or len(found) != count + 1:
        raise LogError(f"{raw[:40]!r} in etcd is not ours, or was written by another version")
    return found[1:]


def end_of(prefix: str) -> str:
    """The first key after all that begin with ``prefix``, which ends in ASCII."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


class Keys:
    """The keys of one job."""

    def __init__(self, prefix: str, job: str) -> None:
        self.job = job
        self.base = f"{jobs_prefix(prefix)}{quote(job, safe='', errors='surrogatepass')}/"
        self.name = names_prefix(prefix) + quote(job, safe="", errors="surrogatepass")
        self.leader, self.head = f"{self.base}leader", f"{self.base}head"
        self.log, self.snap = f"{self.base}log/", f"{self.base}snap/"
        self.erased = f"{self.base}erased"

    def batch(self, last_seq: int) -> str:
        """A batch's key, by the sequence number of its last record."""
        return f"{self.log}{last_seq:0{SEQ_DIGITS}d}"

    def part(self, seq: int, number: int) -> str:
        """A piece of a snapshot."""
        return f"{self.snap}{seq:0{SEQ_DIGITS}d}/{number:04d}"

    def manifest(self, seq: int) -> str:
        """What makes a snapshot whole."""
        return f"{self.snap}{seq:0{SEQ_DIGITS}d}/manifest"


def jobs_prefix(prefix: str) -> str:
    """What the keys of all jobs begin with."""
    return f"{prefix}/v1/jobs/"


def names_prefix(prefix: str) -> str:
    """What the keys begin with that name the jobs; apart, so that listing them does not walk through their logs."""
    return f"{prefix}/v1/names/"


def job_of(prefix: str, key: str) -> str:
    """The job that a key of `names_prefix` names."""
    return unquote(key[len(names_prefix(prefix)) :])
