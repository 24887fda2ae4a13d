"""An ElasticJob's command lines are read by the commands' own parsers before anything is made, and told in their words."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrover_adapters.cli.k8s_lines import Lines
from dlrover_backends.k8s.elasticjob import reconcile, translate
from dlrover_backends.k8s.elasticjob.reconcile import Observed, Settings
from dlrover_backends.k8s.elasticjob.shell import Word
from dlrover_core.errors import SpecError

Json = dict[str, Any]

JOBS: list[Json] = list(yaml.safe_load_all((Path(__file__).parent / "elasticjobs.yaml").read_text(encoding="utf-8")))
AT = "spec.replicaSpecs.worker.template.spec.containers[0].command: "


def job(line: str) -> Json:
    """A job whose worker runs a line in bash."""
    container = {"name": "main", "image": "a", "command": ["bash", "-c", line], "env": [{"name": "N", "value": "2"}]}
    worker = {"replicas": 4, "template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": f"{translate.GROUP}/{translate.VERSION}",
        "kind": translate.KIND,
        "metadata": {"name": "mnist", "namespace": "ml", "uid": "u-1", "resourceVersion": "1"},
        "spec": {"replicaSpecs": {"worker": worker}},
    }


@pytest.mark.parametrize("thing", JOBS, ids=lambda one: str(one["metadata"]["name"]))
def test_what_users_write_is_taken(thing: Json) -> None:
    """Agents and masters take the lines of every job of the file."""
    translate.read(copy.deepcopy(thing), Lines())


@pytest.mark.parametrize(
    "line",
    [
        "dlrover-run --max-restarts=3 --nnodes=1:$N train.py --backend k8s",
        "dlrover-run --nnodes=$UNKNOWN --rdzv_endpoint $ADDR:29500 --rdzv_backend=c10d train.py $MORE",
        "torchrun -r3 --log_dir /logs --signatures /etc/mine.toml --role a train.py",
        "dlrover-run --node_rank `hostname` --nproc_per_node 2 -m pkg.train --x=1",
        "dlrover-run --standby 2 --policy /etc/p.toml --detach --job-id a train.py",
        "dlrover-run --max-restarts $N train.py",
    ],
)
def test_lines_that_are_taken(line: str) -> None:
    """What is known in the pod alone, and files of its image, are in nobody's way."""
    translate.read(job(line), Lines())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "dlrover-run --max-restarst 3 train.py",
            "unrecognized arguments: --max-restarst (did you mean --max-restarts?)",
        ),
        ("dlrover-run --bogus train.py", "unrecognized arguments: --bogus"),
        ("dlrover-run --bogus $X train.py", "unrecognized arguments: --bogus"),
        (
            "dlrover-run --max-restarts many train.py",
            "argument --max-restarts/--max_restarts: invalid int value: 'many'",
        ),
        ("dlrover-run --on-join whenever train.py", "argument --on-join: invalid choice: 'whenever'"),
        ("dlrover-run --on-join= train.py", "its value is empty; give one, or leave the option out"),
        (
            "dlrover-run --backend k8s train.py",
            "--backend has no place in an ElasticJob: the operator makes this job's pods",
        ),
        ("dlrover-run --image a:1 train.py", "--image has no place in an ElasticJob"),
        ("dlrover-run --job my.toml", "--job has no place in an ElasticJob: the groups of this job are those of"),
        ("dlrover-run --local-nodes 2 train.py", "--local-nodes has no place in an ElasticJob: a pod is one node"),
        ("dlrover-run --master host:1 train.py", "--master has no place in an ElasticJob: the job's masters are pods"),
        (
            "dlrover-run --tls-ca /ca.pem train.py",
            "--tls-ca has no place in an ElasticJob: masters that are pods do not",
        ),
        ("dlrover-run --help", "--help prints its help, and runs nothing"),
        ("dlrover-run --show-config train.py", "--show-config prints something, and runs nothing"),
        ("dlrover-run --run-path --no-python train.py", "run-path: --run-path and --no-python exclude one another"),
        ("dlrover-run --logs-specs mine train.py", "logs-specs: 'mine' is a class of torch's agent"),
    ],
)
def test_lines_that_no_agent_would_take(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The container, and the parser's own words; nothing is printed."""
    with pytest.raises(SpecError) as wrong:
        translate.read(job(line), Lines())
    assert str(wrong.value).startswith(AT)
    assert said in str(wrong.value)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dlrover-run --max-restarts -3 train.py", "max_restarts: cannot be negative, got -3"),
        (
            "dlrover-run --set sotp_grace_s=3 train.py",
            "set: there is no duration 'sotp_grace_s' (did you mean stop_grace_s?)",
        ),
        ("dlrover-run --rdzv-conf soon train.py", "rdzv-conf: 'soon' is not KEY=VALUE"),
    ],
)
def test_lines_that_no_master_would_take(line: str, said: str) -> None:
    """What the job's spec forbids is told as the masters would."""
    with pytest.raises(SpecError) as wrong:
        translate.read(job(line), Lines())
    assert str(wrong.value).startswith("spec.replicaSpecs: masters would not take it: ")
    assert said in str(wrong.value)


def test_a_bad_line_makes_nothing() -> None:
    """`Accepted=False` with the words, in place of masters that fail."""
    seen = Observed(job("dlrover-run --max-restarst 3 train.py"))
    found = reconcile.reconcile(seen, Settings("a", lines=Lines()))
    assert found.writes == ()
    assert found.status is not None
    (accepted,) = found.status["conditions"]
    assert (accepted["type"], accepted["status"]) == ("Accepted", "False")
    assert "did you mean --max-restarts?" in accepted["message"]


def test_a_line_that_is_refused_again_and_again_holds_nothing_of_those_that_asked() -> None:
    """The operator asks every few seconds: what its callers have in hand must not live on in an error that is remembered."""

    class Held:
        """Something that a caller has in hand."""

    seen: list[weakref.ref[Held]] = []
    for _ in range(3):
        held = Held()
        seen.append(weakref.ref(held))
        with pytest.raises(SpecError, match="nodes: no"):
            _asked(held)
        del held
    gc.collect()
    assert [one() for one in seen] == [None, None, None]


def _asked(held: object) -> None:
    """Asks with ``held`` in its frame."""
    assert held
    try:
        Lines().line([Word("--nnodes", 0, 8), Word("none", 9, 13), Word("a.py", 14, 18)])
    except SpecError:
        raise SpecError("nodes", "no") from None
