"""What the smoke test and the campaign `misleading` do with a seed: a failure among misleading evidence, told to a real engine.

A job of several nodes trains. Something fails: a program's mistake, a kill, a shortage, a server, the platform, or in a third of
the seeds the hardware of one host. All ranks end of it, and around it stands what misleads: kernel messages of no consequence,
warnings and repaired errors on innocent hosts, complaints that name innocent peers, handled exceptions, hardware faults of an
hour ago. All of it arrives late and in a drawn order. No innocent host may be kept off, and no innocent node replaced.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.unit.drive import SECOND, Drive

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.matching import Matcher, matcher
from dlrover_core.diagnosis.signatures import table
from dlrover_core.job import evidence, hosts, incidents, nodes

SMOKE = range(60)
TRIALS = 1000
DECOYS_MAX, LATE_MAX_S, OLD_S = 8, 20.0, 3600.0
FAILED_S = 100.0
AFTER_S = 900.0

_TRACE = 'Traceback (most recent call last):\n  File "/job/train.py", line {line}, in {function}\n    {code}\n{error}\n'

OFF_THE_BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus."
DOUBLE_BIT = "NVRM: Xid (PCI:0000:3b:00): 48, pid=4711, name=python3, DBE (double bit error)"
SWITCH = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
NO_ROUTE = "node{n}:711:902 [0] ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable"
NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691"
TIMED_OUT = "torch.distributed.DistBackendError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88)"


class Seen(NamedTuple):
    """One thing seen: when it happened and arrived, in seconds, and how it is told to the engine."""

    at_s: float
    arrives_s: float
    tell: Callable[[Drive, float], None]


class Failure(NamedTuple):
    """What fails.

    ``words``: its lines, each with a source.
    ``hardware``: its host may be kept off.
    ``goes``: its node may be replaced.
    """

    name: str
    exit_code: int
    error: str = ""
    words: tuple[tuple[str, str], ...] = ()
    hardware: bool = False
    goes: bool = False


def _raised(error: str) -> str:
    return _TRACE.format(line=31, function="step", code="loss = model(batch)", error=error)


INNOCENT = (
    Failure("a program's mistake", 1, _raised("KeyError: 'labels'")),
    Failure("a shape", 1, _raised("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x4)")),
    Failure("the GPU's memory", 1, _raised("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")),
    Failure("an illegal access", 1, _raised("RuntimeError: CUDA error: an illegal memory access was encountered")),
    Failure("a device's assertion", 1, _raised("RuntimeError: CUDA error: device-side assert triggered")),
    Failure("an object store", 1, _raised("ConnectionError: HTTPSConnectionPool(host='s3.local'): Max retries exceeded")),
    Failure("a stale handle", 1, _raised("OSError: [Errno 116] Stale file handle: '/mnt/data/shard-7'")),
    Failure("a segmentation fault", -11),
    Failure("an abort", -6, words=(("log", "terminate called after throwing an instance of 'std::bad_alloc'"),)),
    Failure("a kill that nobody explains", -9, goes=True),
    Failure("a group's memory", -9, words=(("cgroup", "the memory group's OOM killer took process 4711 (python3)"),), goes=True),
    Failure("an NCCL call", 1, _raised(f"{NCCL}, unhandled system error")),
    Failure("a lost queue pair", 1, words=(("log", NO_ROUTE),)),
    Failure("nobody's fault", 1, _raised(TIMED_OUT)),
)  # fmt: skip
GUILTY = (
    Failure("a GPU off the bus", -6, words=(("kernel", OFF_THE_BUS),), hardware=True, goes=True),
    Failure("a double-bit error", 1, _raised("RuntimeError: CUDA error: uncorrectable ECC error encountered"),
            (("kernel", DOUBLE_BIT),), hardware=True, goes=True),
    Failure("a switch", -6, words=(("kernel", SWITCH),), hardware=True, goes=True),
)  # fmt: skip

# Kernel messages and words of innocent nodes. None of them speaks against a host.
DECOYS = (
    ("kernel", "NVRM: Xid (PCI:0000:5e:00): 31, pid=811, name=python3, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS"),
    ("kernel", "NVRM: Xid (PCI:0000:5e:00): 43, pid=811, name=python3, Ch 00000008"),
    ("kernel", "NVRM: Xid (PCI:0000:5e:00): 13, pid=811, name=python3, Graphics Exception: ESR 0x504648=0x1000e"),
    ("kernel", "NVRM: Xid (PCI:0000:5e:00): 45, pid=811, name=python3, Ch 0000000c"),
    ("kernel", "NVRM: Xid (PCI:0000:5e:00): 63, pid=811, Row Remapper: New row marked for remapping, reset gpu to activate."),
    ("kernel", "NVRM: Xid (PCI:0000:5e:00): 92, pid=811, High single-bit ECC error rate"),
    ("kernel", "NVRM: Xid (PCI:0000:5e:00): 145, RLW_REMAP Nonfatal XC0 i0 Link -1 (0x00000004 0x00000000)"),
    ("kernel", "nvidia-nvswitch1: SXid (PCI:0000:c2:00.0): 12028, Non-fatal, Link 12 egress non-posted PRIV error"),
    ("kernel", "pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)"),
    ("kernel", "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x1f2 offset:0x0)"),
    ("kernel", "mlx5_core 0000:17:00.0 eth2: Link down"),
    ("kernel", "mlx5_core 0000:17:00.0 eth2: Link up"),
    ("kernel", "thermal thermal_zone0: critical temperature not reached, 81 C, throttling off"),
    ("log", "GPU 2: volatile uncorrectable ECC errors: 0, aggregate 0"),
    ("log", "WARNING: GPU 3 runs at 83 C, clocks are lowered"),
    ("log", "WARNING:data: retrying shard 12 after ConnectionResetError: [Errno 104] Connection reset by peer"),
    ("log", "node{n}:811:902 [1] transport/net_ib.cc:94 NCCL WARN NET/IB : Got async event : port error"),
    ("log", "node{n}:811:902 [1] NCCL WARN NET/IB : Got completion from peer 10.0.0.{peer}<4242> with error 12, opcode 0"),
    ("log", "[rank{rank}]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.{peer}]:4242"),
    ("log", "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88) ran for 600043 milliseconds"),
    ("log", "node{n}:811:902 [1] NCCL WARN Connection closed by remote peer node{peer}<4242>"),
    ("log", "[rank{rank}]: ValueError: could not decode sample 88, skipping batch"),
    ("slow", "slow.rank"),
    ("loss", "loss.spike"),
)  # fmt: skip
# What speaks against a host, and is long over.
OLD = (
    ("kernel", "NVRM: Xid (PCI:0000:5e:00): 79, pid=811, GPU has fallen off the bus."),
    ("kernel", "NVRM: Xid (PCI:0000:5e:00): 48, pid=811, name=python3, DBE (double bit error)"),
    ("kernel", SWITCH),
)
ECHOES = (
    _raised("RuntimeError: [gloo] Connection closed by peer [10.0.0.{peer}]:4242"),
    _raised(f"{NCCL}, remote process exited or there was a network error"),
    _raised(TIMED_OUT),
)  # fmt: skip


def trial(seed: int) -> dict[str, Any]:
    """One failure among misleading evidence. Raises AssertionError where somebody innocent is accused.

    What it came to: how many incidents were judged by hardware, and how many hosts were kept off rightly.
    """
    dice = random.Random(seed)
    count, nproc = dice.choice((3, 4, 6, 8)), dice.choice((1, 2, 4))
    job = Drive(nodes_min=count, nodes_max=count, nproc=nproc, max_restarts=9).up()
    failure = dice.choice(GUILTY) if seed % 3 == 2 else dice.choice(INNOCENT)
    victim = dice.randrange(count)
    for one in sorted(_told(dice, job, failure, victim, count, nproc), key=lambda one: one.arrives_s):
        job.now = max(job.now, _at(one.arrives_s))
        one.tell(job, one.at_s)
    _recover(job)
    job.wait(AFTER_S)
    node, host = f"worker-{victim}-0", f"host-of-worker-{victim}-0"
    kept_off = [one.host for one in job.facts(hosts.HostQuarantined)]
    wrong = [one for one in kept_off if not (failure.hardware and one == host)]
    gone = [
        f"{one.node} ({one.rule})"
        for one in job.facts(incidents.ActionChosen)
        if one.action in (ladder.RELAUNCH_NODE, ladder.ISOLATE_HOST, ladder.RELAUNCH_MORE_MEMORY)
        and not (failure.goes and one.node == node)
    ]
    verdict = job.facts(incidents.Diagnosed)[-1]
    assert not wrong, f"{failure.name} on {node}: {wrong} kept off, by {verdict.signature}"
    assert not gone, f"{failure.name} on {node}: {gone} replaced, by {verdict.signature}"
    return {
        "hardware": int(failure.hardware),
        "kept_off": int(host in kept_off),
        "judged": len(job.facts(incidents.Diagnosed)),
    }


def _recover(job: Drive) -> None:
    """What was planned anew comes, and the next world makes a step."""
    for one in job.facts(nodes.NodePlanned):
        if one.node not in job.members and not one.node.endswith("-0"):
            place, incarnation = one.node.rsplit("-", 1)
            job.observe(f"{place}-{int(incarnation) - 1}", "gone")
            job.observe(one.node, "running", host=f"host-of-{one.node}")
            job.join(one.node)
    if job.members:
        job.run(10)


def _told(dice: random.Random, job: Drive, failure: Failure, victim: int, count: int, nproc: int) -> list[Seen]:
    """Everything that is told of one failure, each with its time of arrival."""
    told: list[Seen] = []
    rank = victim * nproc + dice.randrange(nproc)

    def add(at_s: float, tell: Callable[[Drive, float], None]) -> None:
        told.append(Seen(at_s, max(at_s, FAILED_S) + dice.random() * LATE_MAX_S, tell))

    for source, text in failure.words:
        of = rank if source == "log" else -1
        add(FAILED_S - dice.random() * 2, _evidence(victim, of, source, text.format(n=victim)))
    add(FAILED_S, _exit(victim, rank, failure.exit_code, failure.error))
    for other in range(count * nproc):
        if other != rank:
            echo = dice.choice(ECHOES).format(peer=dice.randrange(count))
            code = dice.choice((1, 1, 1, -6, -15))
            add(FAILED_S + dice.random() * 15, _exit(other // nproc, other, code, echo if code == 1 else ""))
    innocent = [index for index in range(count) if index != victim]
    for _ in range(dice.randrange(2, DECOYS_MAX + 1)):
        index = dice.choice(innocent)
        source, text = dice.choice(DECOYS)
        of = index * nproc + dice.randrange(nproc) if source in ("log", "slow", "loss") else -1
        words = text.format(n=index, rank=of, peer=dice.randrange(count))
        add(FAILED_S + dice.uniform(-60, 15), _evidence(index, of, source, words))
    if dice.random() < 0.5:
        source, text = dice.choice(OLD)
        add(FAILED_S - dice.uniform(OLD_S / 3, OLD_S), _evidence(dice.choice(innocent), -1, source, text))
    return told


def _at(seconds: float) -> int:
    return 5_000 * SECOND + round(seconds * SECOND)


def _exit(index: int, rank: int, code: int, error: str) -> Callable[[Drive, float], None]:
    def tell(job: Drive, at_s: float) -> None:
        age_us = max(0, job.now - _at(at_s))
        job.exit(f"worker-{index}-0", rank, code, error, 1, tail=error, age_us=age_us)

    return tell


def _evidence(index: int, rank: int, source: str, text: str) -> Callable[[Drive, float], None]:
    """What an agent makes of a line: nothing, where its table knows nothing in it."""
    known = table()
    named = known.get(text)
    hit = None if named else Matcher.best(matcher(known).scan(text, source))
    signature = named.id if named else hit.signature.id if hit else ""

    def tell(job: Drive, at_s: float) -> None:
        if signature:
            subject = hit.subject if hit else ""
            age_us = max(0, job.now - _at(at_s))
            job.do(evidence.ReportEvidence(f"worker-{index}-0", source, signature, text, rank, 1, age_us, "", subject))

    return tell
