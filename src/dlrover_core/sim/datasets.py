"""What fails in the field: published failure counts as named data sets, each with its source, never blended.

Sites differ by a factor of ten in what breaks and how often; an average of them describes nobody. A data set gives a hazard
per node, and causes by count. What a count cannot say (how a cause strikes, what its victims write, how long a repair takes) is
our reading of it, the same for all sets; ``assumed`` says what else is ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple

from dlrover_core.errors import PlanError

HARDWARE, NETWORK, PLATFORM = "hardware", "network", "platform"
SOFTWARE, USER, PLANNED = "software", "user", "planned"
CLASSES = (HARDWARE, NETWORK, PLATFORM, SOFTWARE, USER, PLANNED)

RARELY_A_RACK = 1 / 8
"""The share of failures of a switch or a cable that take a whole rack along."""


class Shape(NamedTuple):
    """How a failure strikes. ``scope``: what it takes; ``hosts``: it belongs to a machine, and stays with it until a repair;
    ``repeats``: whoever starts there, or the same program, again meets it again.
    """

    doc: str
    scope: str
    hosts: bool = False
    repeats: bool = False


SHAPES = {
    "fail": Shape("a worker raises; a restart cures it", "worker"),
    "kill": Shape("a worker is killed; a restart cures it", "worker"),
    "hang": Shape("a worker makes no step, nor does anybody, until a watchdog kills it", "worker"),
    "slow": Shape("a worker computes more slowly for a while", "worker"),
    "code": Shape("the program fails, and will do so until somebody has mended it", "worker", repeats=True),
    "node": Shape("the platform takes a node away, its host is fine", "node"),
    "sick": Shape("workers of a host fail until its inspection takes it away", "host", hosts=True, repeats=True),
    "gone": Shape("a host goes, and its scheduler says so", "host", hosts=True),
    "dark": Shape("a host goes without a word", "host", hosts=True),
    "link": Shape("as sick; one in eight takes its whole rack along", "host", hosts=True, repeats=True),
    "stop": Shape("all workers are stopped and begin again, as planned", "job"),
}


class Cause(NamedTuple):
    """One row of a published table. ``words``: the line that a victim writes last; ``repair``: what its machine then needs."""

    name: str
    cases: int
    kind: str
    shape: str
    words: str = ""
    repair: str = ""

    @property
    def scope(self) -> str:
        """What it takes: worker, node, host, or job."""
        return SHAPES[self.shape].scope

    @property
    def repeats(self) -> bool:
        """Does a mere restart meet it again?"""
        return SHAPES[self.shape].repeats

    @property
    def label(self) -> str:
        """What a fault of this cause carries: its words, which a classifier may see, else its name."""
        return self.words or self.name


class Dataset(NamedTuple):
    """``rate``: failures per 1000 node-days, of all causes but the user's where ``user_per_day`` gives those per day of a job."""

    name: str
    title: str
    source: str
    rate: float
    causes: tuple[Cause, ...]
    assumed: tuple[str, ...] = ()
    user_per_day: float | None = None

    def cause_of(self, label: str) -> Cause | None:
        """The cause whose faults carry this label."""
        return next((one for one in self.causes if one.label == label), None)

    def hazard(self, cause: Cause) -> float:
        """Failures per node and day; of user causes, where those are given per job, per job and day."""
        if self.per_job(cause):
            return (self.user_per_day or 0.0) * cause.cases / self._count(per_job=True)
        return self.rate / 1000 * cause.cases / self._count(per_job=False)

    def per_job(self, cause: Cause) -> bool:
        """Is this cause's hazard one of jobs, however many nodes they have?"""
        return cause.kind == USER and self.user_per_day is not None

    def _count(self, *, per_job: bool) -> int:
        return sum(one.cases for one in self.causes if self.per_job(one) == per_job)


_CUDA = "RuntimeError: CUDA error: "
_NCCL = "torch.distributed.DistBackendError: NCCL error: "
_WATCHDOG = (
    "torch.distributed.DistBackendError: [Rank 0] Watchdog caught collective operation timeout: OpType=ALLREDUCE, "
    "Timeout(ms)=600000"
)

LLAMA3 = Dataset(
    "llama3",
    "Llama 3 405B pre-training: 2,048 hosts of 8 H100, 54 days, 419 unexpected and 47 planned interruptions",
    "Llama Team, The Llama 3 Herd of Models, arXiv 2407.21783, table 5, by counts (the printed percentages do not add up)",
    466 / (2048 * 54) * 1000,
    (
        Cause("faulty GPU", 148, HARDWARE, "sick", f"{_CUDA}no CUDA-capable device is detected", "gpu"),
        Cause("GPU HBM3 memory", 72, HARDWARE, "sick", f"{_CUDA}uncorrectable ECC error encountered", "gpu"),
        Cause("software bug", 54, SOFTWARE, "fail", f"{_CUDA}an illegal memory access was encountered"),
        Cause("switch or cable", 35, NETWORK, "link", f"{_NCCL}NET/IB: Got completion with status=12", "switch"),
        Cause("unplanned host maintenance", 32, PLATFORM, "gone", "", "maintenance"),
        Cause("GPU SRAM", 19, HARDWARE, "sick", f"{_CUDA}hardware stack error", "gpu"),
        Cause("GPU system processor", 17, HARDWARE, "sick", f"{_CUDA}unspecified launch failure", "gpu"),
        Cause("NIC", 7, HARDWARE, "sick", f"{_NCCL}NET/IB: async fatal event: local catastrophic error", "reboot"),
        Cause("NCCL watchdog time-out", 7, SOFTWARE, "hang", _WATCHDOG),
        Cause("silent data corruption", 6, HARDWARE, "fail", "FloatingPointError: loss is NaN"),
        Cause("GPU thermal interface or sensor", 6, HARDWARE, "slow"),
        Cause("SSD", 3, HARDWARE, "sick", "OSError: [Errno 5] Input/output error", "rma"),
        Cause("power supply", 3, HARDWARE, "dark", "", "rma"),
        Cause("server chassis", 2, HARDWARE, "dark", "", "rma"),
        Cause("IO expansion board", 2, HARDWARE, "dark", "", "rma"),
        Cause("dependency", 2, SOFTWARE, "fail", "ConnectionError: cannot reach the metadata service"),
        Cause("CPU", 2, HARDWARE, "gone", "", "rma"),
        Cause("system memory", 2, HARDWARE, "gone", "", "rma"),
        Cause("planned", 47, PLANNED, "stop"),
    ),
)

RSC = Dataset(
    "rsc",
    "Meta's research cluster RSC-1, 16,000 A100; its sister RSC-2 has --set rate=2.34",
    "Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, arXiv 2410.21680: r_f = 6.50",
    6.50,
    (
        Cause("GPU", 11, HARDWARE, "sick", f"{_CUDA}uncorrectable ECC error encountered", "gpu"),
        Cause("DIMM", 8, HARDWARE, "gone", "", "rma"),
        Cause("PCIe", 6, HARDWARE, "sick", f"{_CUDA}no CUDA-capable device is detected", "reboot"),
        Cause("EUD", 4, HARDWARE, "sick", f"{_CUDA}unspecified launch failure", "gpu"),
        Cause("BIOS", 3, HARDWARE, "gone", "", "reboot"),
        Cause("NIC", 3, HARDWARE, "sick", f"{_NCCL}NET/IB: async fatal event: port error", "reboot"),
        Cause("PSU", 2, HARDWARE, "dark", "", "rma"),
        Cause("optics", 1, NETWORK, "link", f"{_NCCL}NET/IB: Got completion with status=12", "switch"),
    ),
    ("causes are those that made 39 nodes lemons, by percentages of 39; the rate is that of all failures",),
)

ACME = Dataset(
    "acme",
    "Shanghai AI Laboratory's Acme, Seren and Kalos: 588 hosts of 8 A100, six months of jobs of all sizes",
    "Hu et al., Characterization of Large Language Model Development in the Datacenter, arXiv 2403.07648, table 3, by counts",
    281 / (588 * 184) * 1000,
    (
        Cause("NVLink error", 54, HARDWARE, "sick", f"{_CUDA}uncorrectable NVLink error detected", "gpu"),
        Cause("CUDA error", 21, HARDWARE, "fail", f"{_CUDA}an illegal memory access was encountered"),
        Cause("node failure", 16, HARDWARE, "gone", "", "reboot"),
        Cause("ECC error", 12, HARDWARE, "sick", f"{_CUDA}uncorrectable ECC error encountered", "gpu"),
        Cause("network error", 12, NETWORK, "link", f"{_NCCL}NET/IB: Got completion with status=12", "switch"),
        Cause("connection error", 147, NETWORK, "fail", "requests.exceptions.ConnectionError: Max retries exceeded"),
        Cause("S3 storage error", 10, NETWORK, "fail", "botocore.exceptions.EndpointConnectionError: no answer"),
        Cause("NCCL time-out", 6, SOFTWARE, "hang", _WATCHDOG),
        Cause("NCCL remote error", 3, NETWORK, "fail", f"{_NCCL}ncclRemoteError: the remote process exited"),
        Cause("dataloader killed", 6, USER, "fail", "RuntimeError: DataLoader worker is killed by signal: Killed"),
        Cause("attribute error", 67, USER, "code", "AttributeError: 'NoneType' object has no attribute 'shape'"),
        Cause("out of memory", 14, USER, "code", "torch.OutOfMemoryError: CUDA out of memory"),
        Cause("runtime error", 65, USER, "code", "RuntimeError: The size of tensor a must match"),
        Cause("assertion error", 105, USER, "code", "AssertionError: vocabulary size is not divisible"),
        Cause("value error", 33, USER, "code", "ValueError: unknown optimizer"),
        Cause("zero division", 5, USER, "code", "ZeroDivisionError: division by zero"),
        Cause("model loading error", 104, USER, "code", "RuntimeError: Error(s) in loading state_dict"),
        Cause("dataset loading error", 5, USER, "code", "datasets.exceptions.DatasetNotFoundError: no such dataset"),
        Cause("file not found", 568, USER, "code", "FileNotFoundError: [Errno 2] No such file or directory"),
        Cause("OS error", 266, USER, "code", "OSError: [Errno 122] Disk quota exceeded"),
        Cause("type error", 620, USER, "code", "TypeError: forward() got an unexpected keyword argument"),
        Cause("name error", 18, USER, "code", "NameError: name 'cfg' is not defined"),
        Cause("permission error", 7, USER, "code", "PermissionError: [Errno 13] Permission denied"),
        Cause("import error", 111, USER, "code", "ModuleNotFoundError: No module named 'flash_attn'"),
        Cause("key error", 260, USER, "code", "KeyError: 'input_ids'"),
        Cause("syntax error", 10, USER, "code", "SyntaxError: invalid syntax"),
        Cause("argument error", 3, USER, "code", "argparse.ArgumentError: unrecognized arguments"),
        Cause(
            "called process error", 4, USER, "code", "subprocess.CalledProcessError: returned non-zero exit status 1"
        ),
        Cause("index error", 23, USER, "code", "IndexError: list index out of range"),
    ),
    (
        "no hazard is published: 281 infrastructure failures over 588 hosts and 184 days, as if all were always in use",
        "the program's errors are of jobs, not of nodes: one a day of a long job's development",
        "of the program's errors only a killed data loader is cured by a restart",
    ),
    1.0,
)

BYTEROBUST = Dataset(
    "byterobust",
    "ByteDance's training platform: 55,365 incidents of 778,135 jobs in three months",
    "Wan et al., Robust LLM Training Infrastructure at ByteDance, arXiv 2509.16293, table 1, by counts",
    5.0,
    (
        Cause("CUDA error", 19_968, HARDWARE, "sick", f"{_CUDA}unspecified launch failure", "gpu"),
        Cause("CPU overload", 6_095, PLATFORM, "slow"),
        Cause("CPU out of memory", 5_567, SOFTWARE, "kill"),
        Cause("disk space", 2_755, SOFTWARE, "fail", "OSError: [Errno 28] No space left on device"),
        Cause("disk fault", 47, HARDWARE, "sick", "OSError: [Errno 5] Input/output error", "rma"),
        Cause("InfiniBand error", 1_599, NETWORK, "link", f"{_NCCL}NET/IB: Got completion with status=12", "switch"),
        Cause("file-system mount", 1_176, PLATFORM, "fail", "OSError: [Errno 107] Transport endpoint is not connected"),
        Cause("HDFS error", 1_104, PLATFORM, "fail", "hdfs.util.HdfsError: connection to the namenode timed out"),
        Cause("container error", 781, PLATFORM, "node"),
        Cause("external service", 128, PLATFORM, "fail", "ConnectionError: cannot reach the metadata service"),
        Cause("OS kernel panic", 203, HARDWARE, "dark", "", "reboot"),
        Cause("GPU memory error", 188, HARDWARE, "sick", f"{_CUDA}uncorrectable ECC error encountered", "gpu"),
        Cause("GPU unavailable", 76, HARDWARE, "sick", f"{_CUDA}no CUDA-capable device is detected", "gpu"),
        Cause("hang", 5_506, SOFTWARE, "hang", _WATCHDOG),
        Cause("slow", 442, HARDWARE, "slow"),
        Cause("NaN", 148, HARDWARE, "fail", "FloatingPointError: loss is NaN"),
        Cause("code or data change", 9_582, PLANNED, "stop"),
    ),
    ("no hazard is published: 5 per 1000 node-days, within the 2.3 to 6.5 of good fleets",),
)

UNICRON = Dataset(
    "unicron",
    "Alibaba's training clusters: what ended jobs, in tenths of a percent of them",
    "He et al., Unicron: Economizing Self-Healing LLM Training at Scale, arXiv 2401.00134, figure 1 and table 1",
    20.0,
    (
        Cause("ECC error", 50, HARDWARE, "sick", f"{_CUDA}uncorrectable ECC error encountered", "gpu"),
        Cause("NVLink error", 45, HARDWARE, "sick", f"{_CUDA}uncorrectable NVLink error detected", "gpu"),
        Cause("invalid DMA mapping", 21, HARDWARE, "gone", "", "reboot"),
        Cause("GPU driver error", 6, HARDWARE, "sick", f"{_CUDA}unknown error", "reboot"),
        Cause("task hang", 31, SOFTWARE, "hang", _WATCHDOG),
        Cause("illegal memory access", 21, SOFTWARE, "fail", f"{_CUDA}an illegal memory access was encountered"),
        Cause("CUDA error", 16, SOFTWARE, "fail", f"{_CUDA}unspecified launch failure"),
        Cause("NCCL time-out", 101, NETWORK, "fail", f"{_NCCL}ncclSystemError: the operation timed out"),
        Cause("other network error", 40, NETWORK, "fail", f"{_NCCL}ncclInternalError: Internal check failed"),
        Cause("link flapping", 39, NETWORK, "fail", f"{_NCCL}NET/IB: async fatal event: port error"),
        Cause("connection refused", 21, NETWORK, "fail", "ConnectionRefusedError: [Errno 111] Connection refused"),
        Cause("connection reset", 10, NETWORK, "fail", "ConnectionResetError: [Errno 104] Connection reset by peer"),
    ),
    (
        "no hazard is published with these shares: 20 per 1000 node-days, as fleets of that kind have (15 to 30)",
        "3.3 % of jobs ended by causes without a name are left out",
    ),
)

B200 = Dataset(
    "b200",
    "63 hosts of 8 B200, 55 days, 21 failures",
    "From Detection to Recovery: Operational Analysis on LLM Pre-training with 504 GPUs, arXiv 2605.09370, by counts",
    21 / (63 * 55) * 1000,
    (
        Cause("Xid 145 or 149, NVLink", 5, HARDWARE, "sick", f"{_CUDA}uncorrectable NVLink error detected", "gpu"),
        Cause("Xid 94, contained ECC", 2, HARDWARE, "fail", f"{_CUDA}uncorrectable ECC error encountered"),
        Cause("Xid 79, off the bus", 2, HARDWARE, "sick", f"{_CUDA}no CUDA-capable device is detected", "reboot"),
        Cause("Xid 119, GSP", 1, HARDWARE, "sick", f"{_CUDA}unspecified launch failure", "gpu"),
        Cause("unreachable", 2, HARDWARE, "dark", "", "reboot"),
        Cause("other GPU failure", 1, HARDWARE, "sick", f"{_CUDA}unknown error", "gpu"),
        Cause("fail-slow", 4, HARDWARE, "slow"),
        Cause("unknown", 4, SOFTWARE, "kill"),
    ),
    ("the four failures of unknown cause are cured by a restart",),
)

DATASETS = {one.name: one for one in (LLAMA3, RSC, ACME, BYTEROBUST, UNICRON, B200)}


def nearest(name: str, known: Iterable[str]) -> str:
    """``, did you mean ...?``; a full stop where nothing is near."""
    near = difflib.get_close_matches(name, list(known), 3, 0.6)
    return f", did you mean {' or '.join(near)}?" if near else "."


def dataset(name: str) -> Dataset:
    """The data set of that name. Raises `PlanError`."""
    found = DATASETS.get(name)
    if found is None:
        raise PlanError(f"no failure data is called {name!r}{nearest(name, DATASETS)} There are {', '.join(DATASETS)}")
    return found
