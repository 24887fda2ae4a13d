"""Requests, put together in one place: etcd's messages are verbose, and every key is bytes there."""

from __future__ import annotations

from typing import Any

from dlrover_adapters.etcd.keys import end_of
from dlrover_adapters.etcd.protocol import load


class Requests:
    """Makes requests of etcd's messages. ``rpc`` and ``kv`` have the messages themselves."""

    def __init__(self) -> None:
        self.protocol = load()
        self.rpc, self.kv = self.protocol.rpc, self.protocol.kv

    def range(self, key: str, *, end: str = "", limit: int = 0, revision: int = 0, **more: Any) -> Any:
        """A request for one key, or for those from ``key`` to before ``end``."""
        return self.rpc.RangeRequest(key=key.encode(), range_end=end.encode(), limit=limit, revision=revision, **more)

    def under(self, prefix: str, **more: Any) -> Any:
        """A request for all keys with this prefix."""
        return self.range(prefix, end=end_of(prefix), **more)

    def get_op(self, request: Any) -> Any:
        """A range as part of a transaction."""
        return self.rpc.RequestOp(request_range=request)

    def put_op(self, key: str, value: bytes, lease: int = 0) -> Any:
        """A put as part of a transaction."""
        return self.rpc.RequestOp(request_put=self.rpc.PutRequest(key=key.encode(), value=value, lease=lease))

    def delete_op(self, key: str, end: str = "") -> Any:
        """A deletion as part of a transaction, of one key or of those from ``key`` to before ``end``."""
        request = self.rpc.DeleteRangeRequest(key=key.encode(), range_end=end.encode())
        return self.rpc.RequestOp(request_delete_range=request)

    def created(self, key: str, revision: int) -> Any:
        """The condition that this key was created at ``revision``; 0: that it does not exist."""
        compare = self.rpc.Compare
        return compare(key=key.encode(), target=compare.CREATE, result=compare.EQUAL, create_revision=revision)

    def modified(self, key: str, revision: int) -> Any:
        """The condition that this key was last written at ``revision``; 0: that it does not exist."""
        compare = self.rpc.Compare
        return compare(key=key.encode(), target=compare.MOD, result=compare.EQUAL, mod_revision=revision)

    def txn(self, conditions: list[Any], then: list[Any], otherwise: list[Any] | None = None) -> Any:
        """If all conditions hold do this, else that: one revision."""
        return self.rpc.TxnRequest(compare=conditions, success=then, failure=otherwise or [])

    def watch_request(self, prefix: str, start_revision: int) -> Any:
        """The beginning of a watch on all keys with this prefix."""
        return self.rpc.WatchRequest(
            create_request=self.rpc.WatchCreateRequest(
                key=prefix.encode(), range_end=end_of(prefix).encode(), start_revision=start_revision
            )
        )

    def progress_request(self) -> Any:
        """A request newer than `etcd3`'s descriptors (etcd 3.4): field 3 of a WatchRequest, empty. Answered under watch id -1."""
        return self.rpc.WatchRequest.FromString(b"\x1a\x00")


def unknown_number(message: Any, field: int) -> int:
    """A number in a field that is newer than our descriptors; 0: it is not there."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    return next((int(one.data) for one in UnknownFieldSet(message) if one.field_number == field), 0)
