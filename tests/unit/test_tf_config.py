"""``TF_CONFIG``: who the tasks are, where they listen, and which one this is."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.agent.framework import Framework, load
from dlrover_adapters.peers import PEERS_VARIABLE, Peers
from dlrover_adapters.plain import tf_config
from dlrover_core.errors import SpecError

PLACES = {
    "ps": {0: ("10.0.0.1:20001",), 1: ("10.0.0.2:20002",)},
    "worker": {1: ("10.0.0.4:20004",), 0: ("10.0.0.3:20003",)},
}
SIZES = {"ps": 2, "worker": 2}
TASKS = {"ps": ["10.0.0.1:10001", "10.0.0.2:10002"], "worker": ["10.0.0.3:10003", "10.0.0.4:10004"]}


def of(group: str, place: int) -> dict[str, str]:
    """The environment of a worker."""
    return {"DLROVER_GROUP": group, "DLROVER_PLACE": str(place)}


def told(**more: dict[int, tuple[str, ...]]) -> Peers:
    """Addresses."""
    return Peers(3, {**PLACES, **more})


def made(where: Peers, group: str, place: int, *, partly: bool = False) -> tuple[Any, str]:
    """The variable, read, and what is missing."""
    text, missing = tf_config.config(where, SIZES, of(group, place), partly=partly)
    return json.loads(text) if text else None, missing


def test_every_task_knows_all() -> None:
    """In the order of their places, each where it listens; an evaluator is told of the cluster that it is not in."""
    for group, place in (("ps", 1), ("worker", 0), ("evaluator", 0)):
        wanted = {"cluster": TASKS, "task": {"type": group, "index": place}}
        assert made(told(), group, place) == (wanted, "")


def test_who_is_missing_is_waited_for() -> None:
    """All tasks, for a while; after it parameter servers alone, and whoever reads it."""
    one = {1: ("10.0.0.4:20004",)}
    assert made(told(worker=one), "worker", 1) == (None, "worker-0")
    found, _ = made(told(worker=one), "worker", 1, partly=True)
    assert found == {
        "cluster": {"ps": TASKS["ps"], "worker": ["10.0.0.4:10004"]},
        "task": {"type": "worker", "index": 0},
    }
    assert made(told(worker=one), "worker", 0, partly=True) == (None, "worker-0")
    assert made(told(ps={0: ("10.0.0.1:20001",)}), "worker", 0, partly=True) == (None, "ps-1")
    assert made(told(worker={}), "ps", 0, partly=True) == (None, "worker-0, worker-1")


def test_a_node_more_than_there_must_be_is_a_task() -> None:
    """A worker that a grown job adds sees itself."""
    found, _ = made(told(worker={**PLACES["worker"], 2: ("10.0.0.9:20009",)}), "worker", 2)
    assert found["cluster"]["worker"][2] == "10.0.0.9:10009"
    assert found["task"]["index"] == 2


def test_the_program_begins_once_it_can_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of addresses is watched until all are there; then, after a time, until enough are."""
    path = tmp_path / "peers.json"
    monkeypatch.setenv(PEERS_VARIABLE, str(path))

    def write(version: int, groups: Any) -> None:
        path.with_suffix(".new").write_text(json.dumps({"format": 1, "version": version, "groups": groups}))
        path.with_suffix(".new").replace(path)

    environ = {**of("worker", 0), tf_config.CLUSTER: "ps=2,worker=2,evaluator=1"}
    write(1, {"ps": {}, "worker": {}})
    later = threading.Timer(0.05, write, (2, PLACES))
    later.start()
    assert json.loads(tf_config.waited(environ, patience_s=60))["cluster"] == TASKS
    later.join()
    write(3, {**PLACES, "worker": {"0": ["10.0.0.3:20003"]}})
    for patience_s in (0.01, 0.0, -1.0):
        assert json.loads(tf_config.waited(environ, patience_s))["cluster"]["worker"] == ["10.0.0.3:10003"]


@pytest.mark.parametrize(
    ("text", "said"), [("", "missing: write"), ("ps:2", "'ps:2' is no GROUP=TASKS"), ("evaluator=1", "missing")]
)
def test_what_is_no_cluster(text: str, said: str) -> None:
    """It is told with what to write."""
    with pytest.raises(SpecError, match=said):
        tf_config.cluster(text)


def test_it_is_a_framework() -> None:
    """With all that an agent asks one for."""
    module = load(tf_config.__name__)
    wanted = {name for name in (*vars(Framework), *Framework.__annotations__) if not name.startswith("_")}
    assert not [name for name in wanted if not hasattr(module, name)]
