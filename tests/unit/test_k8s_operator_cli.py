"""`dlrover k8s operator`: where it finds its own pod, and what it gives jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.cli import k8s_lines, k8s_log, k8s_masters, k8s_operator
from dlrover_backends.k8s import masters, transport
from dlrover_backends.k8s.elasticjob import leader, operator
from dlrover_backends.k8s.elasticjob.reconcile import Settings
from dlrover_backends.k8s.errors import NotFound, Request
from dlrover_core.errors import SpecError

PODS = {
    "/api/v1/namespaces/dlrover/pods/operator-0": {"spec": {"containers": [{"image": "registry/dlrover-core:7"}]}},
}

FILES = {"cacert": "ca", "cert": "client", "key": "client-key"}
NO_LOG = k8s_log.Told("", {})


class Cluster:
    """A connection to a cluster in which there is one pod."""

    namespace = "default"

    def __init__(self, *_: str) -> None:
        """Nothing is opened."""

    async def open(self) -> None:
        """Nothing is opened."""

    async def close(self) -> None:
        """Nothing is open."""

    async def ask(self, method: str, path: str, **_: Any) -> dict[str, Any]:
        """The pod."""
        if path not in PODS:
            raise NotFound(Request(method, path), 404, f"{path} not found")
        return PODS[path]


@pytest.fixture(name="given")
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, str]]:
    """What operators were made with; they end at once."""
    given: list[tuple[Settings, str]] = []

    class Made:
        def __init__(self, _: object, tells: object, settings: Settings, namespace: str, **_more: Any) -> None:
            assert isinstance(tells, k8s_masters.HttpMasters)
            given.append((settings, namespace))

        async def run(self) -> None:
            """It is over."""

    async def lead(_: leader.Leader, work: Any) -> None:
        await work()

    monkeypatch.setattr(transport, "Transport", Cluster)
    monkeypatch.setattr(operator, "Operator", Made)
    monkeypatch.setattr(leader.Leader, "lead", lead)
    monkeypatch.setenv(k8s_operator.NAMESPACE, "dlrover")
    monkeypatch.setenv(k8s_operator.POD, "operator-0")
    return given


@pytest.mark.parametrize(
    ("words", "namespace"), [([], "dlrover"), (["--namespace", "ml"], "ml"), (["--all-namespaces"], "")]
)
def test_its_image_is_its_own_pods(given: list[tuple[Settings, str]], words: list[str], namespace: str) -> None:
    """Whosever jobs it keeps, its own pod is where it runs; jobs' lines are read by the commands' parsers."""
    args = k8s_operator.parser().parse_args(words)
    assert asyncio.run(k8s_operator._run(args, NO_LOG)) == 0
    ((settings, where),) = given
    assert (settings.image, where) == ("registry/dlrover-core:7", namespace)
    assert isinstance(settings.lines, k8s_lines.Lines)


def test_racks_are_named_by_a_label(given: list[tuple[Settings, str]]) -> None:
    """Masters are told which; what is no label is refused before anything is made."""
    assert k8s_operator.run(["--rack", "example.com/rack"]) == 0
    ((settings, _),) = given
    assert settings.rack == "example.com/rack"
    with pytest.raises(SpecError, match="is no label's key"):
        k8s_operator.run(["--rack", "a,b"])


def test_a_pod_that_cannot_be_read_is_told(given: list[tuple[Settings, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to say in its place."""
    monkeypatch.setenv(k8s_operator.POD, "operator-1")
    with pytest.raises(SpecError, match=r"operator-1 cannot be read: .* not found; say --image IMG"):
        asyncio.run(k8s_operator._run(k8s_operator.parser().parse_args([]), NO_LOG))
    assert given == []


def test_files_of_etcd_are_read_where_the_operator_runs(given: list[tuple[Settings, str]], tmp_path: Path) -> None:
    """As the Secret `dlrover-operator` has them, mounted; jobs get them under names of their own."""
    for name in ("ca.pem", "client.pem", "client-key.pem", "word"):
        (tmp_path / name).write_text(f"the {name}", encoding="utf-8")
    files = "&".join(f"{key}={tmp_path}/{name}.pem" for key, name in FILES.items())
    assert k8s_operator.run(["--log", f"etcd://me@e1?{files}&password_file={tmp_path}/word"]) == 0
    ((settings, _),) = given
    at = "/etc/dlrover/log/etcd-"
    assert settings.etcd == (
        f"etcd://me:the%20word@e1:2379/dlrover?cacert={at}ca.pem&cert={at}client.pem&key={at}client-key.pem"
    )
    assert settings.etcd_files == {f"etcd-{name}.pem": f"the {name}.pem" for name in FILES.values()}


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("sqlite:///a", "sqlite: is no log that masters in pods share"),
        ("etcds://etcd:2379", "etcds: is not known"),
        ("etcd://etcd:2379?cacert=/none/c.pem&ttl=3", "cacert=/none/c.pem cannot be read"),
        ("etcd://etcd:2379?cert=/none/c.pem", "a client certificate needs both"),
    ],
)
def test_a_log_that_no_job_could_reach_is_refused(log: str, said: str) -> None:
    """Before anything is made."""
    with pytest.raises(SpecError, match=said):
        k8s_operator.run(["--log", log])


def test_what_an_etcd_has_of_a_job_is_removed_under_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the job's masters write; nothing without an etcd, or where an archive has the history, too."""
    erased = list[tuple[str, str, str]]()

    async def erase(*what: str) -> None:
        erased.append((what[0], what[1], what[2]))

    monkeypatch.setattr("dlrover_adapters.etcd.erasing.erase", erase)
    assert k8s_log.forgetting("") is None
    assert k8s_log.forgetting("etcd://e1?archive=s3://b/c") is None
    for url in ("etcd://e1/x?ttl=3", "etcd://e1/a%2F", "etcd://e1/a%20b"):
        forget = k8s_log.forgetting(url)
        assert forget is not None
        asyncio.run(forget("ml", "digits", "u-1", lambda: None))
        theirs = masters.by_namespace(k8s_log.read(url, masters.FILES_PATH).url, "ml")
        assert erased.pop() == (theirs, "digits", "u-1")
