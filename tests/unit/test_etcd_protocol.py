"""etcd's messages: built from what the `etcd3` package holds, on today's protobuf, seen by nobody else in the process."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dlrover_adapters.etcd import protocol
from dlrover_core.errors import SpecError

SOURCES = [str(Path(__file__).parents[2] / one) for one in ("src", "src/adapters", "src/backends")]
REMEDY = "pip install 'dlrover-core[etcd]'"
IMPLEMENTATIONS = ["upb", "python"]


def run(script: str, implementation: str = "") -> str:
    """What a script prints in a process of its own."""
    script = f"import sys\nsys.path[:0] = {SOURCES!r}\n{textwrap.dedent(script)}"
    chosen = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation} if implementation else {}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=chosen)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_messages_of_every_implementation(implementation: str) -> None:
    """With protobuf's C implementation and without, messages go into bytes and come back; the default pool knows none."""
    told = run(
        """
        from google.protobuf import descriptor_pool
        from google.protobuf.internal import api_implementation
        from dlrover_adapters.etcd.protocol import load
        rpc, kv, stubs = load()
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=b"k", value=b"v", lease=2**62))
        txn = rpc.TxnRequest(compare=[rpc.Compare(key=b"k", target=rpc.Compare.CREATE, create_revision=3)], success=[put])
        again = rpc.TxnRequest.FromString(txn.SerializeToString())
        assert again == txn and again.success[0].request_put.lease == 2**62 and again.compare[0].result == rpc.Compare.EQUAL
        event = rpc.WatchResponse(events=[kv.Event(type=kv.Event.DELETE, kv=kv.KeyValue(key=b"k", mod_revision=9))])
        assert rpc.WatchResponse.FromString(event.SerializeToString()).events[0].kv.mod_revision == 9
        assert rpc.WatchRequest.FromString(b"\\x1a\\x00").SerializeToString() == b"\\x1a\\x00"
        assert (rpc.NONE, rpc.NOSPACE) == (0, 1)
        assert {"KVStub", "LeaseStub", "WatchStub", "MaintenanceStub", "AuthStub", "ClusterStub"} <= set(dir(stubs))
        for name in ("kv.proto", "rpc.proto", "auth.proto"):
            try: descriptor_pool.Default().FindFileByName(name)
            except KeyError: continue
            raise SystemExit(f"{name} leaks")
        assert not [name for name in sys.modules if name.startswith("etcd3")]
        print(api_implementation.Type())
        """,
        implementation,
    )
    assert told == implementation


def test_built_once() -> None:
    """A process has one set of messages: those of one log are those of another."""
    assert protocol.load() is protocol.load()


def test_importing_the_package_imports_neither_grpc_nor_protobuf() -> None:
    """Who only reads an address, or lists the logs there are, pays for neither."""
    told = run(
        """
        import dlrover_adapters.etcd
        assert "EtcdLog" in dlrover_adapters.etcd.__all__
        import dlrover_adapters.etcd.address, dlrover_adapters.etcd.keys
        print(sorted(name for name in sys.modules if name.split(".")[0] in ("grpc", "google", "etcd3")))
        """
    )
    assert told == "[]"


@pytest.mark.parametrize("blocked", ["grpc", "google.protobuf", "google"])
def test_missing_packages_are_named(blocked: str) -> None:
    """Opening the log without grpc or protobuf says what is missing and how to get it."""
    told = run(
        f"""
        import asyncio

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name == {blocked!r} or name.startswith({blocked + "."!r}):
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Blocker())
        from dlrover_adapters.etcd import EtcdLog
        from dlrover_core.errors import SpecError
        try:
            asyncio.run(EtcdLog.open_url("etcd://127.0.0.1:1/p", None))
        except SpecError as error:
            print(error)
        """
    )
    assert blocked in told
    assert REMEDY in told


def refused() -> str:
    """Why the protocol cannot be built."""
    with pytest.raises(SpecError) as caught:
        protocol.load.__wrapped__()
    assert REMEDY in str(caught.value)
    return str(caught.value)


def test_etcd3_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without etcd3 there are no messages; the remedy is named."""

    def files(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    assert "needs the messages of etcd3" in refused()


class Lying:
    """A file of a distribution."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def locate(self) -> Path:
        """Where it lies."""
        return self.path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "kv_pb2.py").unlink(), "lacks the files of etcd3.etcdrpc"),
        (lambda folder: (folder / "rpc_pb2_grpc.py").unlink(), "lacks the files of etcd3.etcdrpc"),
        (
            lambda folder: (folder / "kv_pb2.py").write_text("DESCRIPTOR = pool.AddSerializedFile(b'x')"),
            "holds no descriptor",
        ),
    ],
)
def test_another_etcd3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    """A fork, or half an installation, is told from the release whose messages we know."""
    folder = protocol._folder()
    for path in folder.glob("*_pb2*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    change(tmp_path)
    monkeypatch.setattr(importlib.metadata, "files", lambda _: [Lying(path) for path in sorted(folder.glob("*.py"))])
    monkeypatch.setattr(Lying, "locate", lambda self: tmp_path / self.path.name)
    assert says in refused()


def test_a_distribution_without_a_list_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some installers leave none."""
    monkeypatch.setattr(importlib.metadata, "files", lambda _: None)
    assert "lacks the files" in refused()


def test_built_by_many_threads_at_once() -> None:
    """Logs that are opened at the same time build the messages in threads of their own, and none of them fails."""
    with ThreadPoolExecutor(4) as threads:
        builds = [threads.submit(protocol.load.__wrapped__) for _ in range(12)]
    assert all(one.result().rpc.NOSPACE == 1 for one in builds)
