"""What ``--backend ray:...`` takes, and what it answers to what it does not; and what Ray's own refusals mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrover_backends.ray import faults, names, runtime_env, settings
from dlrover_backends.ray.names import Run
from dlrover_backends.ray.settings import Settings
from dlrover_core import BackendContext
from dlrover_core.errors import SpecError


def told(args: str) -> Settings:
    """The settings of a command line."""
    return settings.read(BackendContext("j", "r", ("m:1",), "t", args=args))


def test_arguments_come_back_as_they_were_written() -> None:
    """What has commas, percent signs or brackets survives; an address needs no quoting."""
    given = Settings("[fd00::1]:6379", "CPU=8,GPU=4,memory=64Gi,fast disk=1", "zone=!in(a,b);tier=50%", "./env, 2.yaml")
    assert told(settings.text(given)) == given
    assert told("address=10.0.0.1:6379") == Settings(address="10.0.0.1:6379")
    assert settings.text(Settings()) == ""


def test_resources() -> None:
    """Names as Ray has them, memory in bytes."""
    found = settings.resources_of("cpu=8, GPU=0.5,memory=1.5G,custom=2")
    assert found == {"CPU": 8.0, "GPU": 0.5, "memory": 1.5e9, "custom": 2.0}
    assert settings.resources_of("CPU=0,GPU=0.0001") == {"CPU": 0.0, "GPU": 0.0001}
    assert settings.resources_of("memory=2Gi") == {"memory": float(2 << 30)}


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ("address=ray://h:10001", "ray job submit"),
        ("address=h", "HOST:PORT"),
        ("address=h:99999", "HOST:PORT"),
        ("address=http://h:8265", "Ray's job server: name the head as HOST:6379"),
        ("resources=CPU", "NAME=AMOUNT"),
        ("resources=CPU%3D-1", "CPU=2, a number from 0"),
        ("resources=CPU%3Dnan", "a number from 0"),
        ("resources=GPU%3D1.5", "whole number"),
        ("resources=CPU%3D0.00001", "CPU='0.00001': Ray gives parts from 0.0001; write CPU=0.0001, more or 0"),
        ("resources=memory%3D64X", "memory=64G"),
        ("resources=CPU%3D1%2Ccpu%3D2", "stands twice"),
        ("resources=CPU%3D0%2CGPU%3D0", "nothing but 0"),
        ("label=ray.io/node-id%3Din(a)", "keeps its nodes off hosts by ray.io/node-id"),
        ("label=zone", "KEY=SELECTOR"),
        ("label=z%3Da%3Bz%3Db", "stands twice"),
        ("speed=1", "there is no 'speed'"),
    ],
)
def test_what_is_refused(args: str, word: str) -> None:
    """Each with the field, its value, and what to write."""
    with pytest.raises(SpecError, match="backend") as refused:
        told(args)
    assert word in str(refused.value)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("ray://127.0.0.1:10001", "RAY_ADDRESS='ray://127.0.0.1:10001' is Ray Client's"),
        (
            "http://127.0.0.1:8265",
            "RAY_ADDRESS='http://127.0.0.1:8265' is the address of Ray's job server: unset it, or",
        ),
        ("garbage", "RAY_ADDRESS='garbage' is not HOST:PORT"),
        ("local", "RAY_ADDRESS='local' is not HOST:PORT"),
    ],
)
@pytest.mark.parametrize("said", ["", "auto"])
def test_the_variable_is_refused_too(said: str, value: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no address is said Ray takes that of ``RAY_ADDRESS``: a wrong one is told before anything waits for its cluster."""
    monkeypatch.setenv("RAY_ADDRESS", value)
    for refuse in (settings.check_address, faults.probe, lambda one: told(f"address={one}")):
        with pytest.raises(SpecError, match="ray-address") as refused:
            refuse(said)
        assert word in str(refused.value)


def test_the_variable_is_used_where_no_address_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said goes first, so that a wrong variable does no harm; one that names a cluster is named in faults."""
    monkeypatch.setenv("RAY_ADDRESS", "http://h:8265")
    settings.check_address("10.0.0.1:6379")
    assert told("address=10.0.0.1:6379") == Settings("10.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert told("") == Settings()
    assert "the Ray cluster at 10.0.0.2:6379" in faults.of_connect(ConnectionError("away"), "").text
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "the Ray cluster of this host" in faults.of_connect(ConnectionError("away"), "").text


def test_a_runtime_environment(tmp_path: Path) -> None:
    """JSON or YAML; its folder is relative to where the command was typed. What cannot be read is named."""
    (tmp_path / "env.yaml").write_text("working_dir: code\nenv_vars: {A: '1'}\n", encoding="utf-8")
    found = runtime_env.read("env.yaml", str(tmp_path))
    assert found == {"working_dir": f"{tmp_path}/code", "env_vars": {"A": "1"}}
    (tmp_path / "env.json").write_text('{"working_dir": "s3://b/c.zip"}', encoding="utf-8")
    assert runtime_env.read("env.json", str(tmp_path)) == {"working_dir": "s3://b/c.zip"}
    assert runtime_env.read("", str(tmp_path)) == {}
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    (tmp_path / "bad.yaml").write_text("a: [", encoding="utf-8")
    (tmp_path / "list.yaml").write_text("- a", encoding="utf-8")
    for name, word in (
        ("none.yaml", "cannot be read"),
        ("bad.json", "is not JSON"),
        ("bad.yaml", "is no YAML"),
        ("list.yaml", "holds no mapping"),
    ):
        with pytest.raises(SpecError, match=word):
            runtime_env.read(name, str(tmp_path))


MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.58.0
    Python: 3.10.14
This process on node 10.0.0.2 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""


UNKNOWN_TOKEN = (
    "RPC error: InvalidAuthToken: Authentication token is missing or incorrect. Ensure that the token for the cluster is "
    "available in a local file (e.g., ~/.ray/auth_token or via RAY_AUTH_TOKEN_PATH) or as the `RAY_AUTH_TOKEN` environment "
)
"""As Ray 2.60 said it."""


@pytest.mark.parametrize(
    ("error", "words", "permanent"),
    [
        (
            RuntimeError(MISMATCH),
            "runs Ray 2.58.0 with Python 3.10.14, and this is Ray 2.60.0 with Python 3.11.7: install",
            True,
        ),
        (ConnectionError("Could not find any running Ray instance. Please specify the one"), "ray start --head", True),
        (RuntimeError("Can't find a `node_ip_address.json` file from /tmp/ray/s"), "ray start --address=h:6379", True),
        (RuntimeError("Ray 2.61.0 has no GlobalState.get_draining_nodes"), "install Ray 2.58 to 2.60", True),
        (RuntimeError("Unauthenticated: RAY_AUTH_MODE"), "RAY_AUTH_TOKEN", True),
        (
            RuntimeError(UNKNOWN_TOKEN),
            "(RPC error: InvalidAuthToken: Authentication token is missing or incorrect): set",
            True,
        ),
        (ValueError("Invalid Ray address: 'http://h:8265'. It looks like"), "name its head as HOST:6379", True),
        (ValueError("Invalid address format: garbage"), "name its head as HOST:6379", True),
        (ValueError("Unable to parse port number from x (full address = h:x)"), "name its head as HOST:6379", True),
        (ConnectionError("ray client connection timeout"), "name its head as HOST:6379", True),
        (
            ConnectionError("the GCS is away"),
            "the Ray cluster at h:6379 cannot be joined: ConnectionError: the GCS",
            False,
        ),
    ],
)
def test_why_a_cluster_cannot_be_joined(error: Exception, words: str, permanent: bool) -> None:
    """Each says what to do, and whether waiting would mend it."""
    fault = faults.of_connect(error, "h:6379")
    assert words in fault.text
    assert fault.permanent is permanent


def test_why_a_node_is_refused() -> None:
    """What Ray's own checks refuse is refused for good; an error of the cluster's is not."""
    assert faults.of_order(ValueError("Invalid label selector")) == (
        "Ray does not take the node: Invalid label selector",
        True,
    )
    refused = faults.of_order(RuntimeError("Failed to upload working_dir"))
    assert refused is not None
    assert refused.permanent
    assert faults.of_order(ConnectionError("away")) is None
    said = "Failed to upload working_dir /a to the Ray cluster: {}"
    for words in (
        "StatusCode.UNAVAILABLE",
        "Deadline Exceeded",
        "Timed out while waiting for GCS",
        "failed to connect to all addresses",
    ):
        assert faults.of_order(RuntimeError(said.format(words))) is None, words
    # Ray says in its own words that it could not store a package, and why in the error that this one comes from.
    for cause in (ConnectionError("away"), type("RpcError", (Exception,), {})("code 14"), TimeoutError()):
        wrapped = RuntimeError(said.format("Failed to store package in the GCS"))
        wrapped.__cause__ = RuntimeError("Failed to store package in the GCS")
        wrapped.__cause__.__cause__ = cause
        assert faults.of_order(wrapped) is None, cause


def test_names_in_the_cluster() -> None:
    """A run is found by its namespace, whatever its job's name has in it; others' are left alone."""
    run = Run("a:b/ü c", "r-1")
    assert names.run_of(run.space) == run
    assert names.run_of(run.group("worker-0-0")) == run
    assert names.run_of("default") is None
    assert names.run_of("dlrover:only") is None
