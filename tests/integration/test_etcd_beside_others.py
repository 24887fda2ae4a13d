"""The etcd log in one process with TensorFlow, Ray, and a host program's own etcd clients: nobody disturbs anybody."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tools.etcd_cluster import Cluster

SOURCES = [str(Path(__file__).parents[2] / one) for one in ("src", "src/adapters", "src/backends")]
BOUND_S = 110

PRELUDE = f"""
import sys
sys.path[:0] = {SOURCES!r}
URL, ENDPOINT = sys.argv[1:]

import structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is what a test looks at

def ours():
    # Lead, append, follow, take a snapshot: every service of the protocol but Maintenance.
    import asyncio
    from dlrover_core.kernel.codec import Codec
    from dlrover_core.kernel.events import Record, Registry
    from dlrover_core.kernel.log import Appended, Snapshot
    from dlrover_core.job.progress import Progressed
    from dlrover_adapters.etcd import EtcdLog

    codec = Codec(Registry([Progressed]))

    async def story():
        log = await EtcdLog.open_url(URL, codec)
        lead = await log.lead("job", "me")
        event = Progressed("workers", 1, 60)
        head = await log.head("job")
        batch = codec.batch(lead.token, 1, [Record(head + 1, 5, lead.token, 0, event)])
        assert await lead.append(batch) == Appended(head + 1)
        async for record in log.follow("job", head):
            assert record == batch.records[0]
            break
        await lead.snapshot(Snapshot(head + 1, "s", b"state"))
        assert await log.latest_snapshot("job") == Snapshot(head + 1, "s", b"state")
        await lead.resign()
        await log.close()

    asyncio.run(asyncio.wait_for(story(), 30))

def tensorflow():
    import tensorflow
    assert int(tensorflow.reduce_sum(tensorflow.constant([1, 2, 3]))) == 6
    # Its own messages, through the shared pool.
    example = tensorflow.train.Example()
    example.features.feature["a"].int64_list.value.append(7)
    assert tensorflow.train.Example.FromString(example.SerializeToString()) == example

def ray():
    import ray
    from ray.core.generated import common_pb2
    address = common_pb2.Address(ip_address="10.0.0.1", port=7)
    assert common_pb2.Address.FromString(address.SerializeToString()) == address

HOST = {{}}

def host():
    # A host's own client: files of the same names in the shared pool, of another version, and modules of etcd3's names.
    if not HOST:
        import types
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
        pool = descriptor_pool.Default()
        for file, package, name in (("kv.proto", "mvccpb", "KeyValue"), ("auth.proto", "authpb", "User"),
                                    ("rpc.proto", "etcdserverpb", "RangeRequest")):
            proto = descriptor_pb2.FileDescriptorProto(name=file, package=package, syntax="proto3")
            message = proto.message_type.add(name=name)
            message.field.add(name="theirs", number=77, type=9, label=1)
            pool.AddSerializedFile(proto.SerializeToString())
            HOST[name] = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{{package}}.{{name}}"))
        for name in ("etcd3", "etcd3.etcdrpc", "etcd3.etcdrpc.kv_pb2", "etcd3.etcdrpc.rpc_pb2"):
            HOST[name] = sys.modules[name] = types.ModuleType(name)
    for name in ("KeyValue", "User", "RangeRequest"):
        made = HOST[name](theirs="x")
        assert HOST[name].FromString(made.SerializeToString()).theirs == "x"
        assert [field.name for field in HOST[name].DESCRIPTOR.fields] == ["theirs"]
    for name in ("etcd3", "etcd3.etcdrpc", "etcd3.etcdrpc.kv_pb2", "etcd3.etcdrpc.rpc_pb2"):
        assert sys.modules[name] is HOST[name]
        assert set(vars(HOST[name])) == {{"__name__", "__doc__", "__package__", "__loader__", "__spec__"}}
"""


def run(script: str, etcd: Cluster, prefix: str, implementation: str = "", path: Path | None = None) -> str:
    """What a script prints in a process of its own."""
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(path) if path else "",
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation,
    }
    if not implementation:
        del environment["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"]
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(script), etcd.url(prefix), etcd.endpoints[0]]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=BOUND_S, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


OTHERS = pytest.mark.nightly(reason="'host ours', without the two that are 1.5 GB, stands for it in make test")


@pytest.mark.parametrize(
    "order",
    [
        "host ours",
        pytest.param("ours tensorflow ray host", marks=OTHERS),
        pytest.param("ray host tensorflow ours", marks=OTHERS),
    ],
)
def test_all_in_one_process(etcd_server: Cluster, etcd_prefix: str, order: str) -> None:
    """In whatever order they come, each works, and still does when all the others are there."""
    steps = order.split()
    told = run(f"for step in {steps + steps!r}: globals()[step](); print(step)", etcd_server, etcd_prefix)
    assert told.split() == steps + steps


@pytest.mark.parametrize("order", ["ours theirs", "theirs ours"])
def test_beside_etcd3_itself(etcd_server: Cluster, etcd_prefix: str, order: str) -> None:
    """Where protobuf is told to be slow, `etcd3` can be imported; then both clients work side by side."""
    told = run(
        f"""
        def theirs():
            import etcd3
            host, port = ENDPOINT.split(":")
            client = etcd3.client(host=host, port=int(port))
            client.put("{etcd_prefix}/theirs", "x")
            assert client.get("{etcd_prefix}/theirs")[0] == b"x"
            client.close()
            assert sys.modules["etcd3.etcdrpc"].__file__

        for step in {order.split() * 2!r}: globals()[step](); print(step)
        """,
        etcd_server,
        etcd_prefix,
        implementation="python",
    )
    assert told.split() == order.split() * 2


def test_beside_an_etcd3_that_cannot_be_imported(etcd_server: Cluster, etcd_prefix: str, tmp_path: Path) -> None:
    """`etcd3` does not import beside today's protobuf, and another package of its name may lie before it: we import neither."""
    (tmp_path / "etcd3").mkdir()
    (tmp_path / "etcd3" / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    told = run(
        """
        try:
            import etcd3
        except RuntimeError as error:
            print(error)
        ours()
        print("etcd3" in sys.modules)
        """,
        etcd_server,
        etcd_prefix,
        path=tmp_path,
    )
    assert told.split("\n") == ["not this one", "False"]


def test_the_real_etcd3_is_broken_and_not_needed(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Importing the real `etcd3` beside a C protobuf fails, before us and after us, and does us no harm."""
    told = run(
        """
        def broken():
            try:
                import etcd3
            except TypeError as error:
                return "cannot be created directly" in str(error)

        print(broken()); ours(); print(broken()); ours()
        """,
        etcd_server,
        etcd_prefix,
    )
    assert told.split() == ["True", "True"]
