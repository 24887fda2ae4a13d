"""Whom a failed connection was to: a store of data, the job's rendezvous, a controller of the platform, or a process beside.

`Connection refused` says only that nobody listened. What that means depends on who should have: an object store or a database
that is away is a matter of data, and is waited for; a rendezvous, torch's store, etcd, an API server or a job's master is a
matter of the network, or a consequence of that process's end. The words name the peer (a scheme, a port, a product), or else the
call stack does: of the libraries that the call went through, the innermost that speaks one protocol decides. HTTP, gRPC and
sockets speak for anybody, and decide nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

DATA_SERVER, CONTROL, BESIDE, COORDINATOR = "data.connection", "net.reset", "process.peer", "jax.peer_lost"
TRACKER = "tracker.unreachable"
# Signatures of connections that may be to anybody.
OPEN = frozenset((DATA_SERVER, CONTROL))
# Exceptions that any layer raises: words of a connection say what they are.
GENERAL = frozenset(f"exception.{one}" for one in ("RuntimeError", "Exception", "OSError", "IOError", "Error"))

_REFUSED = re.compile(
    r"connection refused|ECONNREFUSED|\berrno:? ?111\b|was refused|actively refused"
    r"|failed to connect to (?:all addresses|any network)|connect call failed|connect(?:ion)? failure",
    re.IGNORECASE,
)
# A connection that did not come about for any other reason: words beside an address.
_UNMADE = re.compile(
    r"\b(?:timed ?out|time-?out|unable|failed|failure|cannot|could ?n[o']t|error)\b[^\n]{0,40}\b(?:connect(?:ing)?|establish)\b"
    r"|\bconnect(?:ing|ion)?\b[^\n]{0,60}\b(?:timed ?out|time-?out|failed)\b",
    re.IGNORECASE,
)
_ADDRESS = re.compile(
    r"\b(?:tcp|grpc|ucx|tls|ipv4|ipv6)://?|\b\d{1,3}(?:\.\d{1,3}){3}:\d{2,5}\b|\(\S{1,80}, \d{2,5}\)|\b[\w.-]+:\d{4,5}\b"
)
# Ports by custom: etcd, Kubernetes' API server, Slurm, torch's store, Ray's; databases, queues, file systems of clusters.
_CONTROL_PORTS = r"(?:2379|2380|6443|6817|6818|29[3-5]\d\d)"
_DATA_PORTS = r"(?:1433|1521|3306|5432|5672|7687|8020|9000|9042|9083|9092|9200|9870|11211|19530|27017|50070)"
_PORT = r"(?:[\w.\]-]:|\bport\W{1,3})"
_WORDS = (
    (
        DATA_SERVER,
        re.compile(
            rf"\b(?:s3a?|gs|gcs|hdfs|oss|abfss?|wasbs?|jdbc|mongodb|postgres(?:ql)?|mysql|rediss?|amqp|kafka)://|{_PORT}{_DATA_PORTS}\b"
            r"|\bamazonaws\.com|\bgoogleapis\.com|\bcore\.windows\.net|\b(?:minio|namenode|postgres|mysql|mongo|redis|kafka|cassandra"
            r"|elasticsearch|clickhouse|milvus|bucket)",
            re.IGNORECASE,
        ),
    ),
    (
        CONTROL,
        re.compile(
            rf"\b(?:c10d|TCPStore|TCP store|MASTER_ADDR|rendezvous|etcd|kube-?apiserver|kubernetes|raylet|GCS|slurmctld|slurmd)\b"
            rf"|\bRay (?:head|cluster|instance)\b|{_PORT}{_CONTROL_PORTS}\b|/apis?/v1/namespaces\b|/apis/[\w.]+/v\d"
            r"|\bThe connection to the server \S+ was refused\b|\(\S+, 29[3-5]\d\d\)",
            re.IGNORECASE,
        ),
    ),
)
# A file of a library that speaks one protocol.
_LIBRARIES = (
    (
        DATA_SERVER,
        re.compile(
            r"/(?:psycopg\w*|pymysql|MySQLdb|mysql|asyncpg|sqlalchemy|redis|aioredis|pymongo|motor|kafka|aiokafka|confluent_kafka|pika"
            r"|cassandra|elasticsearch|opensearchpy|clickhouse\w*|pymilvus|pyhive|boto\w*|botocore|aiobotocore|s3fs|s3transfer"
            r"|s3torchconnector|minio|gcsfs|google/cloud|google/api_core|adlfs|azure|oss2|tos|qcloud_cos|hdfs|pyhdfs|snakebite|pyarrow|petastorm"
            r"|webdataset|streaming|datasets|huggingface_hub|fsspec|alluxio\w*|lakefs\w*|smart_open|torchdata|megfile|petrel_client|aistore)/"
        ),
    ),
    (COORDINATOR, re.compile(r"/jax/_src/(?:distributed|clusters|multihost_utils)\b|/jax/experimental/multihost")),
    (
        CONTROL,
        re.compile(
            r"/torch/distributed/(?:rendezvous|distributed_c10d|elastic/|launcher/|run\.py|launch\.py|rpc/)|/etcd3?/|/kubernetes(?:_asyncio)?/"
            r"|/ray/|/dlrover\w*/|/deepspeed/(?:comm|launcher)/|/horovod/|/pyslurm/|/torch_xla/|/accelerate/state\.py|/lightning\S*/clusters/"
            r"|/megatron/core/(?:parallel_state|dist_checkpointing)|/mpi4py/"
        ),
    ),
)
# What mostly fails in libraries with one purpose.
_PURPOSES = (
    *(one for one in _LIBRARIES if one[0] == DATA_SERVER),
    (TRACKER, re.compile(r"/(?:wandb|mlflow|neptune|comet_ml|clearml|swanlab)/")),
    ("compile.failed", re.compile(r"/(?:torch/_(?:inductor|dynamo)|triton/compiler|torch/utils/cpp_extension)\b")),
)
_LOOPBACK = re.compile(r"(?:^|[^\w.\[])(?:localhost|127\.0\.0\.1|\[?::1\]?)(?=\W|$)")
# A server that words name: a refusal by it is that server's.
_SERVER = re.compile(r"https?://|\bHTTPS?ConnectionPool\(|\bhost='|\burl\b", re.IGNORECASE)

_URL = re.compile(r"https?://[\w-]+(?:\.[\w-]+)*\.[a-z]{2,}\b", re.IGNORECASE)


def refused(words: str) -> bool:
    """Do the words tell of a connection that nobody took?"""
    return _REFUSED.search(words) is not None


def unmade(words: str) -> bool:
    """Do they tell of a connection to an address that did not come about?"""
    return refused(words) or (_UNMADE.search(words) is not None and _ADDRESS.search(words) is not None)


def peer(words: str, frames: Sequence[tuple[str, str, str]] = ()) -> str:
    """The signature of a connection to whom words and call stack name; empty where neither does."""
    for name, pattern in _WORDS:
        if pattern.search(words):
            return name
    for file, _, _ in reversed(frames):
        path = file.replace("\\", "/")
        for name, pattern in _LIBRARIES:
            if pattern.search(path):
                return name
    return BESIDE if _LOOPBACK.search(words) else ""


def library(frames: Sequence[tuple[str, str, str]]) -> str:
    """The signature of what mostly fails in a library: the innermost of the call stack that has one purpose decides."""
    for file, _, _ in reversed(frames):
        path = f"/{file}".replace("\\", "/")
        for name, pattern in _PURPOSES:
            if pattern.search(path):
                return name
    return ""


def tracked(signature: str, frames: Sequence[tuple[str, str, str]]) -> str:
    """The tracker's signature, where a connection that failed was an experiment tracker's; else empty."""
    lost = signature in OPEN or signature in ("net.dns", "net.unreachable")
    return TRACKER if lost and library(frames) == TRACKER else ""


def meant(signature: str, words: str, frames: Sequence[tuple[str, str, str]] = ()) -> str:
    """The signature of a failed connection; empty: it is no connection, or stays what it was taken for.

    ``signature``: what the words alone were taken for: a connection to anybody, or an exception by its type.
    """
    turned_away = refused(words)
    lone = signature.startswith("exception") and (turned_away or (signature in GENERAL and unmade(words)))
    if signature not in OPEN and not lone:
        return ""
    # A URL in the words is the server's, whichever library started the process.
    name = peer(words, () if _URL.search(words) else frames)
    if name == BESIDE and not turned_away:  # a program's own server may answer late
        return ""
    return name or (CONTROL if (turned_away or lone) and not _SERVER.search(words) else "")
