"""The decision procedure, case by case: which observation is the root, what is set aside and why, and whom to blame."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_core.diagnosis.cascades import Member
from dlrover_core.diagnosis.evidence import (
    CASC,
    CGROUP,
    CHECK,
    DATA,
    ERROR,
    EXIT,
    HANG,
    HW,
    KERNEL,
    LOG,
    LOSS,
    NET,
    NODE,
    PLAT,
    PLATFORM,
    RES,
    SLOW,
    SOFT,
    USER,
    Evidence,
)
from dlrover_core.diagnosis.procedure import Judgement, judge
from dlrover_core.diagnosis.signatures import Signature, Table

SECOND = 1_000_000
T0 = 10_000 * SECOND

ROWS = {
    "xid.ecc_double": (HW, "reset"), "xid.fallen_off": (HW, "isolate"), "xid.remap": (HW, "obs"), "xid.app": (USER, "proc"),
    "xid.cleanup": (CASC, "obs"), "xid.nvlink": (NET, "proc"), "cuda.ecc": (HW, "reset"), "cuda.illegal_access": (USER, "proc"),
    "cuda.driver": (USER, "fail"), "cuda.advice": (SOFT, "obs"), "nccl.timeout": (CASC, "check"), "nccl.lagging": (CASC, "proc"),
    "nccl.aborted": (CASC, "obs"), "nccl.remote": (CASC, "obs"), "gloo.peer": (CASC, "obs"), "cgroup.oom": (RES, "mem+"),
    "net.link_down": (NET, "obs"), "k8s.preempted": (PLAT, "relaunch"), "k8s.oom": (RES, "mem+"), "k8s.crash_loop": (CASC, "obs"),
    "node.gone": (PLAT, "relaunch"), "node.silent": (PLAT, "relaunch"), "exit.sigkill": (PLAT, "relaunch"),
    "exit.sigterm": (PLAT, "relaunch"), "exit.sigabrt": (SOFT, "proc"), "exit.sigsegv": (SOFT, "proc"),
    "exit.silent": (SOFT, "proc"), "exception.KeyError": (USER, "proc"), "exception.FileNotFoundError": (USER, "fail"),
    "exception.RuntimeError": (USER, "proc"), "data.connection": (DATA, "wait"), "check.failed": (HW, "isolate"),
    "hang.rank": (SOFT, "proc"), "loss.nan": (HW, "proc"), "loss.nan_everywhere": (USER, "proc"), "slow.rank": (HW, "obs"),
    "port.in_use": (SOFT, "proc"), "disk.full": (RES, "relaunch"), "cuda.launch_failure": (SOFT, "proc"),
    "slurm.cancelled": (USER, "fail"), "cuda.contained": (HW, "proc"), "peermem.context": (SOFT, "proc"),
}  # fmt: skip
GENERAL = "cuda.launch_failure"
TABLE = Table(
    tuple(
        Signature(name, name, verdict, action, "process", 0.8, general=name == GENERAL)
        for name, (verdict, action) in ROWS.items()
    )
)

_SOURCE = {
    "xid": KERNEL, "cuda": ERROR, "nccl": LOG, "gloo": ERROR, "cgroup": CGROUP, "net": KERNEL, "k8s": PLATFORM, "node": NODE,
    "exit": EXIT, "exception": ERROR, "data": ERROR, "check": CHECK, "hang": HANG, "loss": LOSS, "slow": SLOW, "port": ERROR,
    "disk": ERROR, "slurm": PLATFORM, "peermem": KERNEL,
}  # fmt: skip


class Scene:
    """Observations in the making: eight ranks, two on each of the nodes n0 to n3, unless said."""

    def __init__(self) -> None:
        self.seen: list[Evidence] = []

    def see(self, at_s: float, signature: str, rank: int = -1, **more: Any) -> Scene:
        """One observation, ``at_s`` after the beginning; of a node where no rank is given."""
        node = more.pop("node", f"n{rank // 2}" if rank >= 0 else "")
        more.setdefault("source", _SOURCE[signature.split(".", maxsplit=1)[0]])
        more.setdefault("host", f"host-of-{node}")
        at = T0 + round(at_s * SECOND)
        seq = len(self.seen) + 1
        one = Evidence(
            seq, at, node, rank, more.pop("exit_code", 1), more.pop("step", -1), more.pop("text", ""), ROWS[signature][0],
            signature, more.pop("confidence", 0.8), **more,
        )  # fmt: skip
        self.seen.append(one)
        return self

    def cascades(self, at_s: float, ranks: Sequence[int], signature: str = "nccl.timeout", **more: Any) -> Scene:
        """These ranks complain about somebody else."""
        for place, rank in enumerate(ranks):
            self.see(at_s + place * 0.01, signature, rank, **more)
        return self

    def judge(self, **more: Any) -> Judgement:
        """The judgement, which must be that of any order of arrival."""
        found = judge(self.seen, TABLE, **more)
        for order in (self.seen[::-1], self.seen[1::2] + self.seen[::2]):
            assert judge(order, TABLE, **more) == found
        return found


MEMBERS = tuple(Member(f"n{index}", f"host-of-n{index}", 2 * index, 2) for index in range(4))


def why(judgement: Judgement) -> dict[int, str]:
    """What was set aside, and why."""
    return dict(judgement.discarded)


def test_nothing_is_nothing_to_judge() -> None:
    """Without evidence there is no judgement."""
    with pytest.raises(ValueError, match="nothing was seen"):
        judge([], TABLE)


# ---- the window, copies, warnings, last words


def test_what_is_outside_the_window_is_another_story() -> None:
    """Eleven minutes before the first death and five after it bound what may be its cause; both ends say why."""
    found = (
        Scene()
        .see(-661, "xid.fallen_off", node="n0")
        .see(0, "exit.silent", 2)
        .see(301, "xid.ecc_double", node="n1")
        .judge()
    )
    assert found.signature == "exit.silent"
    assert "before the first death" in why(found)[1]
    assert "after the first death" in why(found)[3]
    inside = Scene().see(-599, "xid.fallen_off", node="n1").see(0, "exit.silent", 2).judge()
    assert inside.signature == "xid.fallen_off"


def test_a_nodes_end_is_seen_late() -> None:
    """Silence takes its time: a node that is given up after five minutes still explains its peers' complaints."""
    found = Scene().cascades(0, [0, 1, 4, 5]).see(330, "node.silent", node="n1").judge()
    assert (found.signature, found.blamed) == ("node.silent", "n1")


def test_copies_from_all_ranks_are_one() -> None:
    """The same from a node within five seconds is one observation, and no repetition that speaks against it."""
    scene = Scene()
    for rank in (2, 3):
        scene.see(rank * 0.5, "cuda.illegal_access", rank)
    found = scene.cascades(2, [0, 1]).judge()
    assert (found.verdict, found.signature, found.action) == (USER, "cuda.illegal_access", "proc")
    assert "copy" in why(found)[2]


def test_a_warning_is_no_anchor() -> None:
    """A warning is no cause while anything else was seen, and all there is if nothing else was."""
    found = Scene().see(-5, "xid.remap", node="n1").see(-1, "cuda.advice", 2).see(0, "exception.KeyError", 4).judge()
    assert (found.signature, why(found)[1]) == ("exception.KeyError", "a warning, no cause")
    assert Scene().see(0, "xid.remap", node="n1").judge().signature == "xid.remap"


def test_the_last_words_say_more_than_the_code() -> None:
    """A rank that its own watchdog aborted is a cascade, though SIGABRT is none; one that just died is the root."""
    scene = Scene()
    for rank in (0, 1, 4, 5):
        scene.see(1, "nccl.timeout", rank).see(1.1, "exit.sigabrt", rank, exit_code=-6)
    found = scene.see(0, "exit.silent", 2).judge()
    assert (found.signature, found.rank) == ("exit.silent", 2)
    assert why(found)[2] == "only how it ended: the rank says why"


def test_who_says_where_says_more() -> None:
    """A line of a rank's output and its death are one and the same: the one that knows the place in the program is kept."""
    scene = Scene().see(0, "exception.KeyError", 2, source=LOG)
    found = scene.see(1, "exception.KeyError", 2, place="KeyError at train.py:3").judge()
    assert (found.root.seq, found.root.place) == (2, "KeyError at train.py:3")


def test_a_sweep_is_no_cause() -> None:
    """SIGTERM after somebody else's end, and SIGKILL long after it, are the launcher's."""
    scene = Scene().see(0, "exception.KeyError", 3)
    for rank in (0, 1, 2):
        scene.see(0.2, "exit.sigterm", rank, exit_code=-15).see(31, "exit.sigkill", rank, exit_code=-9)
    found = scene.judge()
    assert (found.signature, found.rank) == ("exception.KeyError", 3)
    assert set(why(found)) == {2, 3, 4, 5, 6, 7}
    first = Scene().see(0, "exit.sigterm", 2, exit_code=-15).cascades(0.5, [0, 1, 4]).judge()
    assert first.signature == "exit.sigterm"


# ---- sources


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    list(
        itertools.pairwise(
            ["xid.ecc_double", "k8s.oom", "cgroup.oom", "node.gone", "exception.KeyError", "exit.sigsegv"]
        )
    ),
)
def test_the_order_of_sources(stronger: str, weaker: str) -> None:
    """Kernel on hardware > platform's reason > host's resources > vanished node > a rank's words > a bare exit code."""
    scene = Scene().see(0, weaker, 2 if weaker.startswith("ex") else -1, node="n1")
    found = scene.see(1, stronger, 5 if stronger.startswith("ex") else -1, node="n2").cascades(2, [0, 1]).judge()
    assert found.signature == stronger
    assert {1, 3} <= set(why(found))


def test_a_cascade_is_never_root_while_a_cause_exists() -> None:
    """Whatever it is, and however late: a bare exit code beats a thousand complaints."""
    for cause in ("exit.silent", "exception.RuntimeError", "hang.rank", "port.in_use"):
        found = Scene().cascades(0, [0, 1, 4, 5, 6, 7]).see(60, cause, 2).judge()
        assert (found.signature, found.rank) == (cause, 2)


def test_a_node_that_its_own_ranks_explain_did_not_vanish() -> None:
    """A node that ends after its rank's exception ended with its ranks; one that vanished explains what others say then."""
    own = Scene().see(0, "exception.KeyError", 2).see(3, "node.gone", node="n1").judge()
    assert own.signature == "exception.KeyError"
    other = Scene().see(0, "node.gone", node="n1").see(1, "exception.RuntimeError", 0).judge()
    assert (other.signature, other.blamed) == ("node.gone", "n1")
    before = Scene().see(0, "exception.KeyError", 0).see(60, "node.gone", node="n1").judge()
    assert before.signature == "exception.KeyError"


# ---- pre-emption


def test_preemption_wins_inside_its_domain() -> None:
    """Whatever a pre-empted node still says, the kernel's word on its hardware too, is collateral."""
    scene = (
        Scene().see(0, "k8s.preempted", node="n1").see(1, "xid.fallen_off", node="n1").see(1, "exception.KeyError", 2)
    )
    found = scene.cascades(2, [0, 1, 4]).judge()
    assert (found.signature, found.blamed, found.action) == ("k8s.preempted", "n1", "relaunch")
    assert why(found)[2] == why(found)[3] == "collateral: the platform took a node of this job"


def test_preemption_wins_over_what_it_causes_elsewhere() -> None:
    """Errors of other nodes from a minute before its notice on are collateral; a hardware fault there is not."""
    found = Scene().see(30, "k8s.preempted", node="n1").see(0, "data.connection", 0).see(20, "exit.sigkill", 2).judge()
    assert found.signature == "k8s.preempted"
    other = Scene().see(0, "k8s.preempted", node="n1").see(1, "xid.fallen_off", node="n3").judge()
    assert (other.signature, other.blamed) == ("xid.fallen_off", "n3")


def test_preemption_long_after_an_error_is_not_its_cause() -> None:
    """What broke minutes before the platform took a node broke by itself."""
    found = Scene().see(0, "exception.KeyError", 0).see(200, "k8s.preempted", node="n1").judge()
    assert (found.signature, found.blamed, found.rank) == ("exception.KeyError", "", 0)


# ---- counting


def test_the_same_place_on_several_nodes_is_the_program() -> None:
    """An illegal access on two nodes is no GPU's fault: nobody is blamed, nobody is evicted."""
    found = Scene().see(0, "cuda.illegal_access", 1).see(0.5, "cuda.illegal_access", 6).cascades(1, [2, 3]).judge()
    assert (found.verdict, found.blamed, found.action) == (USER, "", "proc")


def test_the_programs_error_on_several_nodes_beats_one_nodes_hardware() -> None:
    """A KeyError at the same line on two nodes has no GPU for its cause; a RuntimeError may have."""
    scene = Scene().see(-300, "xid.fallen_off", node="n3")
    for rank in (0, 2):
        scene.see(0, "exception.KeyError", rank, place="KeyError@train.py:next_batch")
    assert scene.judge().signature == "exception.KeyError"
    scene = Scene().see(0, "xid.fallen_off", node="n3")
    for rank in (0, 2):
        scene.see(1, "exception.RuntimeError", rank, place="RuntimeError@train.py:step")
    assert scene.judge().signature == "xid.fallen_off"


def test_twice_on_one_node_is_its_hardware() -> None:
    """The second incident on one node in 24 hours speaks against it; elsewhere it does not, nor do two lines of one incident."""
    first = Scene().see(0, "cuda.illegal_access", 2).seen[0]
    scene = Scene().see(0, "cuda.illegal_access", 3).cascades(1, [0, 1])
    assert scene.judge().action == "proc"
    again = scene.judge(history=[first])
    assert (again.verdict, again.action, again.blamed, again.host) == (HW, "isolate", "n1", "host-of-n1")
    assert scene.judge(history=[first._replace(node="n2", host="host-of-n2")]).action == "proc"
    for again_here in ("xid.app", "cuda.contained"):
        apart = Scene().see(-60, again_here, 2).see(0, again_here, 3).cascades(1, [0])
        assert apart.judge().action == ROWS[again_here][1], "one fault is told by several lines"
    apart = Scene().see(-60, "peermem.context", node="n1").see(0, "peermem.context", node="n1").cascades(1, [0])
    assert (apart.judge().verdict, apart.judge().action) == (HW, "isolate")
    assert apart.judge(members=MEMBERS[1:2]).verdict == SOFT, "with one host there is nothing to compare it with"


def test_a_python_exception_is_never_hardware() -> None:
    """A data error comes back on the rank that reads the data: that its node sees it twice says nothing about the node."""
    past = Scene().see(0, "exception.KeyError", 3, place="KeyError@train.py:f").seen[0]
    found = Scene().see(0, "exception.KeyError", 3, place="KeyError@train.py:f").judge(history=[past])
    assert (found.verdict, found.blamed, found.rank) == (USER, "", 3)


def test_the_same_place_on_another_node_later_is_the_program() -> None:
    """It moved with the rank, so it is not the node's."""
    past = Scene().see(0, "cuda.illegal_access", 3, place="a").seen[0]
    found = Scene().see(0, "cuda.illegal_access", 6, place="a").judge(history=[past])
    assert (found.verdict, found.action, found.blamed) == (USER, "fail", "")


def test_missing_on_one_node_is_the_nodes_missing_on_all_the_programs() -> None:
    """A file or a driver that one of several nodes lacks: that node. All lack it: nobody is evicted, the program is wrong."""
    for name in ("cuda.driver", "exception.FileNotFoundError"):
        one = Scene().see(0, name, 2).see(0, name, 3).cascades(1, [0, 1, 4, 5]).judge()
        assert (one.blamed, one.action, one.verdict) == ("n1", "isolate", PLAT)
        scene = Scene()
        for rank in range(8):
            scene.see(0, name, rank)
        found = scene.judge()
        assert (found.blamed, found.action, found.verdict) == ("", "fail", USER)
    alone = Scene().see(0, "exception.FileNotFoundError", 0).cascades(1, [1, 2, 3]).judge()
    assert (alone.verdict, alone.blamed, alone.rank) == (USER, "", 0)


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("signature", ["xid.ecc_double", "xid.fallen_off", "check.failed", "cuda.ecc"])
def test_a_global_symptom_evicts_nobody(signature: str, nodes: int) -> None:
    """Where every node shows it, no node stands out: it is checked, not evicted."""
    scene = Scene()
    for index in range(nodes):
        scene.see(index, signature, -1, node=f"n{index}")
    found = scene.judge(members=MEMBERS[:nodes])
    assert (found.action, found.blamed) == ("check", "")
    assert Scene().see(0, signature, -1, node="n1").judge(members=MEMBERS[:nodes]).blamed == "n1"


def test_nan_on_all_ranks_evicts_nobody() -> None:
    """A loss that is no number on several nodes is the program's."""
    scene = Scene()
    for rank in range(8):
        scene.see(0, "loss.nan", rank)
    found = scene.judge()
    assert (found.verdict, found.blamed) == (USER, "")
    assert Scene().see(0, "loss.nan_everywhere", 0).judge().blamed == ""


# ---- only cascades


def test_the_ranks_that_are_named_are_blamed() -> None:
    """A watchdog that names the lagging ranks is believed, if it names at most two; their node is found."""
    found = Scene().cascades(0, [0, 1, 2, 3]).see(1, "nccl.lagging", 0, subject="5").judge(members=MEMBERS)
    assert (found.rank, found.blamed, found.host) == (5, "n2", "host-of-n2")
    many = Scene().cascades(0, [0, 1]).see(1, "nccl.lagging", 0, subject="4,5,6,7").judge(members=MEMBERS)
    assert (many.blamed, many.rule) == ("", "cascades: cannot attribute")


def test_a_named_peer_is_found_by_its_host() -> None:
    """Who is named by its address is found where anybody has that address."""
    scene = Scene()
    for rank in (0, 1, 4, 5, 6, 7):
        scene.see(0, "gloo.peer", rank, subject="host-of-n1:4242")
    assert scene.judge(members=MEMBERS).blamed == "n1"
    stranger = Scene().cascades(0, [0, 1], "gloo.peer", subject="10.9.9.9:1").judge(members=())
    assert stranger.blamed == ""


def test_the_rank_that_is_behind_is_blamed() -> None:
    """Of those who say how far they had come the one with the fewest collectives is the one that the others wait for."""
    scene = Scene()
    for rank in range(8):
        scene.see(0, "nccl.timeout", rank, text=f"last enqueued NCCL work: {90 if rank == 6 else 91}")
    found = scene.judge()
    assert (found.rank, found.blamed) == (6, "n3")


def test_the_rank_that_nobody_heard_of_is_blamed() -> None:
    """All ranks complain but one, or but those of one node."""
    found = Scene().cascades(0, [0, 1, 2, 4, 5, 6, 7]).judge()
    assert found.rank == 3
    found = Scene().cascades(0, [0, 1, 4, 5, 6, 7]).judge(members=MEMBERS)
    assert (found.blamed, found.rule.split(":")[0]) == ("n1", "cascades.unheard")


def test_nobody_is_blamed_without_a_reason() -> None:
    """Everybody complains about nobody: it cannot be attributed, and says so."""
    found = Scene().cascades(0, range(8)).judge(members=MEMBERS)
    assert (found.blamed, found.rank, found.verdict, found.rule) == ("", -1, CASC, "cascades: cannot attribute")
    assert found.confidence <= 0.3


# ---- all of it


ANY = st.lists(
    st.tuples(
        st.integers(-700, 400),
        st.sampled_from(sorted(ROWS)),
        st.integers(-1, 7),
        st.sampled_from(["", "a.py:f", "b.py:g"]),
    ),
    min_size=1,
    max_size=14,
)


@given(ANY, st.randoms(use_true_random=False))
@settings(max_examples=examples(60, 150), deadline=None)
def test_the_order_of_arrival_never_matters(seen: list[tuple[int, str, int, str]], dice: Any) -> None:
    """Any set of observations has one judgement; all of it but the root and what agrees with it is set aside with a reason."""
    scene = Scene()
    for at_s, signature, rank, place in seen:
        scene.see(at_s, signature, rank, place=place, **({} if rank >= 0 else {"node": f"n{at_s % 4}"}))
    shuffled = list(scene.seen)
    dice.shuffle(shuffled)
    found = judge(scene.seen, TABLE)
    assert judge(shuffled, TABLE) == found
    renumbered = judge([one._replace(seq=place) for place, one in enumerate(shuffled, 1)], TABLE)
    assert renumbered._replace(root=found.root, discarded=found.discarded) == found
    assert renumbered.root._replace(seq=found.root.seq) == found.root
    assert found.root in scene.seen
    assert found.root.seq not in why(found)
    assert set(why(found)) <= {one.seq for one in scene.seen}
    inside = [one for one in scene.seen if "death" not in why(found).get(one.seq, "")]
    if found.root.verdict == CASC:
        assert all(one.verdict == CASC or ROWS[one.signature][1] == "obs" or one.seq in why(found) for one in inside)
    if found.action in ("isolate", "reset"):
        on = {one.node for one in inside if one.signature == found.signature}
        assert len(on) == 1 or len(on) < len({one.node for one in inside})


def complaints(nodes: int) -> tuple[Scene, tuple[Member, ...]]:
    """Eight ranks on each node complain at once, in shuffled order, and one has a cause."""
    scene, ranks = Scene(), nodes * 8
    for rank in range(ranks):
        scene.see((rank * 7919 % ranks) / 100, "nccl.timeout", rank, node=f"n{rank // 8}", text="last enqueued work: 7")
        scene.see((rank * 7919 % ranks) / 100 + 1, "exit.sigabrt", rank, node=f"n{rank // 8}")
    scene.see(3, "exit.silent", 77, node="n9")
    return scene, tuple(Member(f"n{index}", f"h{index}", index * 8, 8) for index in range(nodes))


def calls(scene: Scene, members: tuple[Member, ...]) -> int:
    """How many functions are called for a judgement: its work, on any machine the same."""
    counted = 0

    def count(_frame: object, what: str, _arg: object) -> None:
        nonlocal counted
        counted += what in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = judge(scene.seen, TABLE, members=members)
    finally:
        sys.setprofile(None)
    assert found.root.verdict == CASC or found.rank == 77
    return counted


def test_work_grows_as_the_ranks_do() -> None:
    """2,048 ranks' cascades cost eight times what 256 ranks' do, and no more; how long that is, `bench_diagnosis` measures."""
    few, many = calls(*complaints(32)), calls(*complaints(256))
    assert many < 9 * few
    assert many < 60 * 2 * 2048


# ---- lines of living ranks


ROWS_BEYOND = Table(
    tuple(
        Signature(name, name, verdict, action, "gpu" if name.startswith("cuda.ecc") else "process", 0.8)
        for name, (verdict, action) in ROWS.items()
    )
)


def line(scene: Scene, at_s: float, signature: str, rank: int, **more: Any) -> Scene:
    """What a rank wrote while it lived."""
    return scene.see(at_s, signature, rank, source="log", exit_code=0, **more)


@pytest.mark.parametrize("before_s", [2, 20, 500])
@pytest.mark.parametrize("who", [2, 5])
@pytest.mark.parametrize(("exit_code", "signature"), [(-9, "exit.sigkill"), (-11, "exit.sigsegv")])
def test_a_printed_exception_explains_no_kill(before_s: float, who: int, exit_code: int, signature: str) -> None:
    """A traceback that was handled, on the rank that is killed later or on any other, is not why: the bare exit is the root."""
    scene = line(Scene(), -before_s, "exception.KeyError", who, place="KeyError at a/b.py:3 in f")
    line(scene, -before_s, "exception.KeyError", 7, place="KeyError at a/b.py:3 in f")
    found = scene.see(0, signature, 2, exit_code=exit_code).judge()
    assert (found.signature, found.rank, found.root.place) == (signature, 2, "")
    assert why(found)[1].startswith("handled")


@pytest.mark.parametrize(
    ("before_s", "signature"), [(1, "exception.KeyError"), (20, "exception.KeyError"), (40, "exit.silent")]
)
def test_a_printed_exception_may_be_its_ranks_last_words(before_s: float, signature: str) -> None:
    """Who ends with 1 within seconds of an exception ended of it; half a minute later no more."""
    assert line(Scene(), -before_s, "exception.KeyError", 2).see(0, "exit.silent", 2).judge().signature == signature


@pytest.mark.parametrize("exit_code", [-6, 1])
@pytest.mark.parametrize("rank", [2, 5])
def test_a_machines_words_win_in_the_log_alone(exit_code: int, rank: int) -> None:
    """A GPU that breaks is often told by one line only: a second before the first death, on whatever rank, it wins."""
    bare = "exit.sigabrt" if exit_code < 0 else "exit.silent"
    scene = line(Scene(), -1, "cuda.ecc", rank).see(0, bare, 2, exit_code=exit_code)
    found = judge(scene.seen, ROWS_BEYOND, complete=False)
    assert (found.signature, found.action, found.blamed) == ("cuda.ecc", "reset", f"n{rank // 2}")


@pytest.mark.parametrize(("rank", "root"), [(0, "exit.sigkill"), (3, "cuda.ecc")])
def test_an_old_word_on_a_machine_counts_where_somebody_died(rank: int, root: str) -> None:
    """Five minutes before a death it says nothing about another node's; on the same node it may."""
    scene = line(Scene(), -300, "cuda.ecc", rank).see(0, "exit.sigkill", 2, exit_code=-9)
    assert judge(scene.seen, ROWS_BEYOND).signature == root


def test_what_a_rank_says_again_at_its_end_is_told_by_its_end() -> None:
    """The line and the end are one observation, as early as the line; the end knows the place."""
    scene = line(Scene(), -1, "cuda.ecc", 2)
    line(scene, -0.5, "cuda.ecc", 4)
    found = scene.see(0, "cuda.ecc", 2, place="RuntimeError at a.py:1").judge()
    assert (found.root.seq, found.root.place) == (3, "RuntimeError at a.py:1")
    assert why(found)[1].startswith("a copy")


def test_words_are_the_cause_where_only_cascades_died() -> None:
    """A traceback ten minutes before everybody gives up on somebody may well be why: it stays before cascades."""
    scene = line(Scene(), -600, "exception.KeyError", 2)
    found = scene.cascades(0, [0, 4, 6], source="error").judge()
    assert found.signature == "exception.KeyError"


def test_no_node_is_taken_out_on_a_guess() -> None:
    """Below 75 % confidence no host is left and no living node is replaced; the same sure enough is answered in full."""
    unsure = Scene().see(0, "cuda.ecc", 2, confidence=0.6).cascades(1, [0, 4]).judge()
    sure = Scene().see(0, "cuda.ecc", 2).cascades(1, [0, 4]).judge()
    assert (unsure.signature, unsure.action, sure.action) == ("cuda.ecc", "check", "reset")
    assert "too unsure" in unsure.rule


def test_a_general_symptom_yields_to_words_that_tell_more() -> None:
    """Of one rank's burst the telling words are the root, though the general ones came first; another rank's are not."""
    own = Scene().see(0, "cuda.launch_failure", 2).see(4, "disk.full", 2).judge()
    others = Scene().see(0, "cuda.launch_failure", 2).see(4, "disk.full", 6).judge()
    assert (own.signature, others.signature) == ("disk.full", "cuda.launch_failure")


def test_a_cancelled_step_is_a_sweep() -> None:
    """A scheduler's cancelling is its owner's only if nothing failed before."""
    alone = Scene().see(5, "slurm.cancelled", 0).judge()
    after = Scene().see(0, "exception.KeyError", 2).see(5, "slurm.cancelled", 0).judge()
    assert (alone.signature, after.signature) == ("slurm.cancelled", "exception.KeyError")


MISLEADING = (
    "xid.remap", "xid.cleanup", "xid.app", "net.link_down", "nccl.timeout", "nccl.aborted", "nccl.remote", "gloo.peer",
    "exit.sigterm", "exit.sigkill", "exit.sigabrt", "data.connection", "slow.rank", "nccl.lagging", "cuda.launch_failure",
)  # fmt: skip


@pytest.mark.parametrize("hundred", range(10))
def test_misleading_evidence_takes_no_host_out(hundred: int) -> None:
    """A thousand seeded failures of the program among complaints, sweeps, old faults and warnings: no host is left for one."""
    for seed in range(hundred * 100, hundred * 100 + 100):
        chance = random.Random(seed)
        guilty = chance.randrange(8)
        scene = Scene().see(0, "exception.KeyError", guilty, place="KeyError at train.py:3")
        for _ in range(chance.randrange(1, 8)):
            rank = chance.choice([one for one in range(8) if one != guilty])
            scene.see(
                chance.uniform(0.5, 120), chance.choice(MISLEADING), rank, exit_code=chance.choice((0, 1, -6, -9, -15))
            )
        scene.see(-chance.uniform(700, 9000), "xid.ecc_double", node=f"n{chance.randrange(4)}")
        found = judge(chance.sample(scene.seen, len(scene.seen)), TABLE, members=MEMBERS)
        assert found.action not in ("isolate", "reset"), (seed, found)
        assert not found.blamed or found.signature != "exception.KeyError", (seed, found)


def test_nodes_that_were_only_swept_have_not_passed() -> None:
    """What one node lacks speaks against it only where the others went past that point, and were not just stopped."""
    scene = Scene().see(0, "exception.FileNotFoundError", 2).see(0, "exception.FileNotFoundError", 3)
    for rank in (0, 1, 4, 5):
        scene.see(2, "exit.sigterm", rank, exit_code=-15)
    found = scene.judge()
    assert (found.verdict, found.action) == (USER, "fail")


def test_a_device_that_no_host_has_is_the_programs_mistake() -> None:
    """A device index beyond the ranks of a host is no host's fault; one within them may be."""
    for device, action in ((2, "fail"), (1, "isolate")):
        scene = Scene()
        for rank in (2, 3):
            scene.see(0, "cuda.driver", rank, text=f"CUDA error on cuda:{device}")
        found = scene.cascades(1, [0, 1, 4, 5]).judge(members=MEMBERS)
        assert found.action == action, device


def test_a_loss_that_a_program_checks_speaks_of_no_machine() -> None:
    """A watcher that sees one rank's loss stand out means the machine; a program that checks its own does not."""
    assert Scene().see(0, "loss.nan", 3).judge().verdict == HW
    assert Scene().see(0, "loss.nan", 3, source=ERROR).judge().verdict == USER
