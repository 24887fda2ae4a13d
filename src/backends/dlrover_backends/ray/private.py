"""Every part of Ray that is no public API, in one place: docs/ray.md lists them. Imported by the desk and the keeper alone.

Tried with Ray 2.60. Where one of these is missing, `missing` says so before anything is started.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, NamedTuple

from dlrover_backends.ray.records import Actor

_SPACE = "dlrover"
"""The namespace of our keys in the cluster's key-value store."""
_POLL_S, _CALL_S = 60.0, 10.0
_PAUSE_S = 0.5
"""A driver's thread waits so long before it asks again a state service that did not answer."""
_FORGOTTEN_S = 240.0
"""The state service forgets a subscriber that has not asked for 300 s, and says nothing when it asks again."""


def missing() -> str:
    """The private part that this Ray lacks; empty: all are there."""
    from ray import _raylet
    from ray._private import state, utils
    from ray.experimental import internal_kv

    for owner, names in (
        (_raylet, ("GcsClient", "IMPLICIT_RESOURCE_PREFIX")),
        (utils, ("read_ray_address",)),
        (
            state.GlobalState,
            ("_connect_and_get_accessor", "get_draining_nodes", "job_table", "available_resources_per_node"),
        ),
        (
            internal_kv,
            ("_internal_kv_get", "_internal_kv_put", "_internal_kv_del", "_internal_kv_list", "_internal_kv_exists"),
        ),
    ):
        for name in names:
            if not hasattr(owner, name):
                return f"{owner.__name__}.{name}"
    return ""


def authenticate(address: str) -> None:
    """Raise Ray's `AuthenticationError` where the cluster does not take this process's token.

    Its `init` tries again for twenty seconds, and may end the process without a word. ``address``: empty, the one of this host.
    """
    from ray._private.utils import read_ray_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

    address = address or read_ray_address() or ""
    try:
        if address:
            GcsClient(address=address)
    except Exception as error:
        if type(error).__name__ == "AuthenticationError":
            raise


_SUBSCRIBERS = ("GcsLogSubscriber", "GcsErrorSubscriber")


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """A driver that connects within this block pauses between questions to a state service that is away.

    Two threads of a driver ask the service, one for what workers print and one for errors. While the service is away each
    question fails at once. Ray's own threads then ask again at once, and keep a core busy.
    """
    from ray import _raylet
    from ray._private import worker

    with contextlib.ExitStack() as undo:
        for name in filter(lambda one: hasattr(_raylet, one), _SUBSCRIBERS):
            own = getattr(_raylet, name)
            setattr(_raylet, name, waiting(own, worker.global_worker.threads_stopped))
            undo.callback(setattr, _raylet, name, own)
        yield


def waiting(subscriber: type[Any], stopped: threading.Event) -> type[Any]:
    """The same class, whose `poll` pauses after an empty answer, until ``stopped`` at the longest."""

    class Waiting(subscriber):  # type: ignore[misc]  # a class of Ray's, compiled
        def poll(self, timeout: float | None = None) -> Any:
            told = super().poll(timeout)
            # The logs' subscriber returns a mapping with lines, the errors' subscriber a pair. Without an answer the lines are
            # empty, and the pair's second part is None.
            page = told[-1] if isinstance(told, tuple) else (told or {}).get("lines")
            if not page:
                stopped.wait(_PAUSE_S)
            return told

    return Waiting


def actors(prefix: str) -> list[Actor]:
    """All actors, dead ones too, whose Ray namespace begins so; the state service keeps the last 100,000 dead ones."""
    from ray._private.state import state
    from ray.core.generated import gcs_pb2

    rows = state._connect_and_get_accessor().get_actor_table(None, None)  # the purpose of this module
    found = (gcs_pb2.ActorTableData.FromString(row) for row in rows)
    return [_actor(told, told.actor_id) for told in found if told.ray_namespace.startswith(prefix)]


def state_of(actor: str) -> str:
    """The state of the actor with this id, as Ray calls it; empty: Ray does not know it. No table is read."""
    from ray._private.state import state
    from ray._raylet import ActorID
    from ray.core.generated import gcs_pb2

    row = state._connect_and_get_accessor().get_actor_info(ActorID(bytes.fromhex(actor)))
    return gcs_pb2.ActorTableData.ActorState.Name(gcs_pb2.ActorTableData.FromString(row).state) if row else ""


def _actor(told: Any, key: bytes) -> Actor:
    """An ``ActorTableData`` as we know it. What is published of an actor lacks its id, which is the message's ``key``."""
    from google.protobuf import json_format
    from ray.core.generated import gcs_pb2

    return Actor(
        id=key.hex(),
        name=told.name,
        namespace=told.ray_namespace,
        state=gcs_pb2.ActorTableData.ActorState.Name(told.state),
        # The address of one that is not placed yet is its creator's.
        host_id=(told.node_id or (told.address.node_id if told.pid else b"")).hex(),
        pid=told.pid,
        ended_ms=int(told.end_time),
        cause=json_format.MessageToDict(told.death_cause, preserving_proto_field_name=True),
    )


class Unpublished(Exception):
    """This Ray, or what is installed beside it, has no way to hear what its state service publishes."""


class Gap(Exception):
    """Something that was published may have been missed."""


class News(NamedTuple):
    """What was published.

    begins: from here on nothing is missed; what was before is in no message
    actors: actors that have changed, of the whole cluster, in order
    hosts:  have hosts come or gone?
    """

    begins: bool = False
    actors: tuple[Actor, ...] = ()
    hosts: bool = False


async def published(address: str, prefix: str = "") -> AsyncGenerator[News, None]:
    """What the state service publishes about actors of namespaces that begin so, and about hosts. Close it.

    Raises `Unpublished`, `Gap`, and whatever gRPC does.
    """
    try:  # gRPC for Python is no part of Ray's own smallest installation
        from ray._private.gcs_utils import create_gcs_channel

        line = create_gcs_channel(address, aio=True)
        subscriber = _Subscriber(line)
    except (ImportError, AttributeError) as error:
        raise Unpublished(str(error)) from error
    try:
        await subscriber.begin()
        yield News(begins=True)
        while True:
            yield await subscriber.news(prefix)
    except Exception as error:
        if _status(error) == "UNIMPLEMENTED":
            raise Unpublished("the state service has no such call") from error
        raise
    finally:
        await line.close()


class _Subscriber:
    """One subscriber to changes of actors and hosts.

    The state service keeps for it what it has not acknowledged. Its messages have numbers of all that it publishes to anybody, so
    that a hole between two says nothing.
    """

    def __init__(self, line: Any) -> None:
        from ray.core.generated import gcs_service_pb2, pubsub_pb2
        from ray.core.generated.gcs_service_pb2_grpc import ControlPlanePubSubGcsServiceStub

        self._messages, self._stub = gcs_service_pb2, ControlPlanePubSubGcsServiceStub(line)
        self._actors, hosts = pubsub_pb2.GCS_ACTOR_CHANNEL, pubsub_pb2.GCS_NODE_INFO_CHANNEL
        self._wanted = [pubsub_pb2.Command(channel_type=one, subscribe_message={}) for one in (self._actors, hosts)]
        self._id, self._last, self._publisher = os.urandom(28), 0, b""

    async def begin(self) -> None:
        """Subscribe."""
        wanted = self._messages.GcsSubscriberCommandBatchRequest(subscriber_id=self._id, commands=self._wanted)
        await self._stub.GcsSubscriberCommandBatch(wanted, timeout=_CALL_S)

    async def news(self, prefix: str) -> News:
        """What is published next; nothing after a minute in which nothing was. Raises `Gap`."""
        poll = self._messages.GcsSubscriberPollRequest(
            subscriber_id=self._id, max_processed_sequence_id=self._last, publisher_id=self._publisher
        )
        asked = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            told = await self._stub.GcsSubscriberPoll(poll, timeout=_POLL_S)
        except Exception as error:
            if _status(error) != "DEADLINE_EXCEEDED":
                raise
            told = None
        if time.clock_gettime(time.CLOCK_BOOTTIME) - asked > _FORGOTTEN_S:
            raise Gap("this process stood still, and may have been forgotten")
        if told is None:
            return News()
        if self._publisher not in {b"", told.publisher_id}:
            raise Gap("another state service publishes")
        self._publisher = told.publisher_id
        fresh = [one for one in told.pub_messages if one.sequence_id > self._last]
        self._last = max((self._last, *(one.sequence_id for one in fresh)))
        actors = [one for one in fresh if one.channel_type == self._actors]
        ours = [one for one in actors if one.actor_message.ray_namespace.startswith(prefix)]
        return News(actors=tuple(_actor(one.actor_message, one.key_id) for one in ours), hosts=len(fresh) > len(actors))


def _status(error: Exception) -> str:
    """The name of a gRPC status; empty: it is another error."""
    code = getattr(error, "code", None)
    return str(getattr(code(), "name", "")) if callable(code) else ""


def draining() -> Mapping[str, int]:
    """Hosts that are being drained, by id: when that ends, in milliseconds of the wall clock; 0: no deadline."""
    from ray._private.state import state

    return dict(state.get_draining_nodes())


def free() -> Mapping[str, Mapping[str, float]]:
    """The resources that each host has left, by the host's id."""
    from ray._private.state import state

    found: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return found


def implicit(name: str) -> str:
    """A resource of which every host has 1, though none says so, as Ray Serve uses it to spread replicas."""
    from ray._raylet import IMPLICIT_RESOURCE_PREFIX  # type: ignore[attr-defined]  # compiled

    return f"{IMPLICIT_RESOURCE_PREFIX}{name}"


def get(key: str) -> bytes | None:
    """A value of the cluster's key-value store; None: it has none."""
    from ray.experimental import internal_kv

    found: bytes | None = internal_kv._internal_kv_get(key, namespace=_SPACE)
    return found


def put(key: str, value: bytes, *, overwrite: bool = True) -> bool:
    """Write a value; was there none before? Without ``overwrite`` an old one stays."""
    from ray.experimental import internal_kv

    return not internal_kv._internal_kv_put(key, value, overwrite, namespace=_SPACE)


def keys(prefix: str) -> list[str]:
    """The keys that begin so."""
    from ray.experimental import internal_kv

    return [one.decode() for one in internal_kv._internal_kv_list(prefix, namespace=_SPACE)]


def remove(prefix: str) -> None:
    """Remove all keys that begin so."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(prefix, del_by_prefix=True, namespace=_SPACE)


def uploaded(env: Mapping[str, Any]) -> dict[str, Any]:
    """A runtime environment whose folders lie in the cluster: ``working_dir`` and ``py_modules`` are addresses there.

    Ray does this for a driver's own runtime environment alone, and refuses an actor's that names folders. What nobody refers to
    is removed after ten minutes.
    """
    from ray._private import worker
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    heeds_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    scratch = worker.global_worker.node.get_runtime_env_dir_path()
    found = upload_py_modules_if_needed(dict(env), heeds_gitignore, scratch)
    found = dict(upload_working_dir_if_needed(found, heeds_gitignore, scratch))
    found.pop("excludes", None)
    return found


def own_driver() -> str:
    """Ray's id of this process as a driver: what it calls a job."""
    import ray

    return str(ray.get_runtime_context().get_job_id())


def has_ended(driver: str) -> bool:
    """Has this driver's process ended, as the cluster knows? One that it does not know may live."""
    from ray._private.state import state

    return any(one["JobID"] == driver and one["IsDead"] for one in state.job_table())


def is_there(package: str) -> bool:
    """Does the cluster still have a package that was sent to it?"""
    from ray.experimental import internal_kv

    return bool(internal_kv._internal_kv_exists(package))


def storage() -> str:
    """Where the cluster's state service keeps its state: ``memory``, ``redis`` or ``rocksdb``; empty: the head did not say."""
    from ray._common.usage import usage_constants
    from ray.experimental import internal_kv

    key = f"{usage_constants.EXTRA_USAGE_TAG_PREFIX}gcs_storage"
    told = internal_kv._internal_kv_get(key, namespace=usage_constants.USAGE_STATS_NAMESPACE)
    return told.decode() if told else ""


def label_fault(labels: Mapping[str, str]) -> str:
    """What Ray does not take of label selectors; empty: it takes them, or will say so itself."""
    try:
        from ray._private.label_utils import validate_label_selector
    except ImportError:
        return ""
    return validate_label_selector(dict(labels)) or ""
