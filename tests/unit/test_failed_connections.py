"""A failed connection is told by its peer: whom words name, or the libraries that the call went through."""

from __future__ import annotations

import pytest
from test_reading import answer

from dlrover_core.diagnosis import classify
from dlrover_core.diagnosis.matching import matcher
from dlrover_core.diagnosis.signatures import table

LIB = "/opt/py/lib/python3.12/site-packages"
BARE = "ConnectionRefusedError: [Errno 111] Connection refused"
GRPC = (
    "grpc._channel._InactiveRpcError: <_InactiveRpcError of RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE\n"
    '\tdetails = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.4.0.77:7000: Connection refused"\n>'
)


def pool(host: str, port: int, url: str) -> str:
    """As urllib3 says it."""
    return (
        f"requests.exceptions.ConnectionError: HTTPConnectionPool(host='{host}', port={port}): Max retries exceeded "
        f"with url: {url} "
        "(Caused by NewConnectionError('Failed to establish a new connection: [Errno 111] Connection refused'))"
    )


def raised(words: str, *files: str) -> str:
    """A traceback through these files."""
    frames = "".join(f'  File "{file}", line {number}, in call\n    call()\n' for number, file in enumerate(files, 7))
    return f'Traceback (most recent call last):\n  File "/w/train.py", line 3, in main\n    main()\n{frames}{words}\n'


@pytest.mark.parametrize(
    ("words", "files", "signature"),
    [
        (BARE, (f"{LIB}/torch/distributed/rendezvous.py",), "net.reset"),
        (BARE, (f"{LIB}/torch/distributed/distributed_c10d.py", f"{LIB}/deepspeed/comm/torch.py"), "net.reset"),
        (BARE, (f"{LIB}/torch/distributed/checkpoint/filesystem.py", f"{LIB}/s3fs/core.py"), "data.connection"),
        (BARE, (f"{LIB}/redis/connection.py",), "data.connection"),
        (BARE, ("/w/sockets.py",), "net.reset"),
        (BARE, ("/usr/lib/python3.12/multiprocessing/connection.py",), "process.peer"),
        ("torch.distributed.DistNetworkError: failed to connect to 10.4.0.2:29500 (errno: 111 - refused).", (), "net.reset"),
        (GRPC, (f"{LIB}/dlrover/python/elastic_agent/master_client.py", f"{LIB}/grpc/_channel.py"), "net.reset"),
        (GRPC, (f"{LIB}/google/cloud/storage/client.py", f"{LIB}/grpc/_channel.py"), "data.connection"),
        (pool("10.4.0.9", 2379, "/version"), (f"{LIB}/etcd/client.py", f"{LIB}/urllib3/connection.py"), "net.reset"),
        (pool("10.96.0.1", 443, "/api/v1/namespaces/a/pods/b"), (f"{LIB}/urllib3/connection.py",), "net.reset"),
        (pool("minio.data", 9000, "/shards/0.tar"), (f"{LIB}/urllib3/connection.py",), "data.connection"),
        (pool("localhost", 8000, "/v1/completions"), (f"{LIB}/requests/adapters.py",), "process.peer"),
        (pool("reward.lab", 8100, "/score"), (f"{LIB}/requests/adapters.py",), "data.connection"),
        ("redis.exceptions.ConnectionError: Error 111 connecting to cache:6379. Connection refused.", (), "data.connection"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", ("/w/sockets.py",), "data.connection"),
        ("OSError: Timed out trying to connect to 'tcp://10.48.0.7:44783' after 10 s", (), "net.reset"),
        ("RuntimeError: Failed to connect to 10.4.0.9:7000", (f"{LIB}/redis/connection.py",), "data.connection"),
        ("RuntimeError: cannot connect the two halves of the model", (), "exception.RuntimeError"),
        ("kafka.errors.NoBrokersAvailable: NoBrokersAvailable", (), "data.connection"),
    ],
)  # fmt: skip
def test_a_connection_is_told_by_its_peer(words: str, files: tuple[str, ...], signature: str) -> None:
    """A rendezvous or a controller is a matter of the network, a database or an object store one of data."""
    found = classify.of_exception(table(), raised(words, *files))
    assert found is not None
    named = table().get(signature)
    assert named is not None
    assert (found.signature, found.verdict) == (signature, named.verdict)


def test_a_chain_names_its_peer_in_any_of_its_exceptions() -> None:
    """The refusal itself went through a socket: what was raised in handling it says for whom."""
    handling = "\nThe above exception was the direct cause of the following exception:\n\n"
    words = raised(BARE, "/usr/lib/python3.12/socket.py") + handling
    words += raised(
        "RuntimeError: cannot join the run", f"{LIB}/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py"
    )
    found = classify.of_exception(table(), words)
    assert found is not None
    assert found.signature == "net.reset"


def test_a_line_alone_names_its_peer() -> None:
    """Without a traceback the words decide."""
    (hit,) = matcher(table()).scan(
        "ERROR ConnectionRefusedError: [Errno 111] connect to etcd at 10.4.0.9:2379: Connection refused"
    )
    assert hit.signature.id == "net.reset"


def test_who_is_refused_while_another_rank_fails_by_itself_is_no_cause() -> None:
    """The rank that should have listened had failed; it is heard later."""
    store = raised(BARE, f"{LIB}/torch/distributed/rendezvous.py")
    other = raised("ModuleNotFoundError: No module named 'einops'")
    text = "".join(f"[rank{rank}]: {line}\n" for rank, words in ((1, store), (0, other)) for line in words.splitlines())
    found = answer(text)
    assert (found.judgement.signature, found.rank) == ("exception.ModuleNotFoundError", 0)
    alone = answer("".join(f"[rank1]: {line}\n" for line in store.splitlines()))
    assert (alone.judgement.signature, alone.judgement.confidence < 0.75) == ("net.reset", True)
