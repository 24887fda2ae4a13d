"""What follows from a failure, in forms of other programs than those it was learned from: parents, watchdogs, limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_reading import ERROR, answer, said

from dlrover_core.diagnosis import reading, rows
from dlrover_core.diagnosis.evidence import KERNEL, LOG, PLATFORM
from dlrover_core.diagnosis.matching import matcher
from dlrover_core.diagnosis.signatures import table, tomllib

SUMMARY = """============================================================
pretrain.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2025-02-11_08:30:0{0}
  host      : cn-118
  rank      : 21 (local_rank: 5)
  exitcode  : {2} (pid: 5521)
  error_file: <N/A>
  traceback : To enable traceback see: x
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-02-11_08:30:0{1}
  host      : cn-118
  rank      : 18 (local_rank: 2)
  exitcode  : {2} (pid: 5518)
  error_file: <N/A>
  traceback : To enable traceback see: x
============================================================
"""
MONITOR = (
    "[rank40]:[E211 08:29:59.1 ProcessGroupNCCL.cpp:1316] [PG 0 Rank 40] Received a dump signal due to a timeout\n"
)
WATCHDOG = (
    "[rank40]:[E211 08:29:58.1 ProcessGroupNCCL.cpp:607] [Rank 40] Watchdog caught collective operation timeout: WorkNCCL("
    "SeqNum=7, OpType=_ALLGATHER_BASE, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.\n"
)


def test_aborts_on_other_hosts_after_a_collectives_report() -> None:
    """Ranks whose own words are elsewhere end by SIGABRT after one rank's watchdog has spoken; before it, they are the cause."""
    assert said(WATCHDOG + MONITOR + SUMMARY.format(0, 0, -6)) == "nccl.timeout"
    assert said(SUMMARY.format(0, 0, -6)) == "exit.sigabrt"
    before = "srun: error: cn-7: task 3: Aborted (core dumped)\n"
    assert said(before + "".join(f"step {number}\n" for number in range(2)) + WATCHDOG) == "exit.sigabrt"


def test_of_one_second_the_summary_s_first_failure_is_meant() -> None:
    """Ends of one second stand in a summary with the first below the others."""
    assert answer(SUMMARY.format(3, 3, 1)).rank == 18
    assert answer(SUMMARY.format(1, 3, 1)).rank == 21


@pytest.mark.parametrize(
    "raised",
    [
        "ChildProcessError: rollout worker died",
        "joblib.externals.loky.process_executor.TerminatedWorkerError: A worker process was unexpectedly terminated",
    ],
)
def test_a_parent_s_exception_about_a_child_that_was_killed(raised: str) -> None:
    """A pool that lost a worker tells less than the shell's or the scheduler's word on that worker."""
    told = ERROR.format("", raised)
    assert said(told + "run.sh: line 18: 20415 Killed    python tokenize.py\n") == "exit.sigkill"
    assert said(told) != "exit.sigkill"


def test_the_time_limit_of_a_job_that_had_failed_is_no_cause() -> None:
    """Ranks that raised and then hung until the scheduler's limit had failed before; one stopped by the limit had not."""
    limit = "slurmstepd: error: *** JOB 88123 ON cn-41 CANCELLED AT 2025-02-11T20:00:11 DUE TO TIME LIMIT ***\n"
    assert (
        said(ERROR.format("[rank3]: ", "ValueError: expected 4096 tokens, got 4095") + limit) == "exception.ValueError"
    )
    assert said("step 7 | loss 2.1\n" + limit + ERROR.format("[rank3]: ", "ValueError: bad")) == "slurm.time_limit"
    stopped = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Terminated."
    assert said(ERROR.format("[rank3]: ", stopped) + limit) == "slurm.time_limit"
    went_on = "".join(f"step {number} | loss 2.1\n" for number in range(9))
    assert said(ERROR.format("[rank3]: ", "ValueError: skipped") + went_on + limit) == "slurm.time_limit"


def test_records_of_other_call_sites_are_no_part_of_a_message() -> None:
    """A logger puts its call site before each line of a traceback: another site's record is another story."""
    site = "2025-02-11 08:30:01,{0} - ERROR - [{1}] "
    lines = [
        (1, "trainer.py:88", "Traceback (most recent call last):"),
        (1, "trainer.py:88", '  File "/w/train.py", line 7, in step'),
        (1, "trainer.py:88", "    batch = table[key]"),
        (2, "trainer.py:88", "KeyError: 'tokens'"),
        (9, "server.py:412", "the engine is dead"),
        (9, "server.py:412", "EngineDeadError: see the stack trace above for the root cause"),
    ]
    assert said("\n".join(site.format(at, where) + words for at, where, words in lines)) == "exception.KeyError"
    vllm = "(EngineCore_DP0 pid=77) ERROR 02-11 08:30:0{} [{}] {}"
    assert said("\n".join(vllm.format(at, where, words) for at, where, words in lines)) == "exception.KeyError"


def test_a_warning_that_is_printed_as_an_exception() -> None:
    """Programs go on after a warning's stack to the exception that ended them; a warning that ended one is its cause."""
    warned = ERROR.format("", "FutureWarning: the default of weights_only changes")
    assert (
        said(warned + "loading\n" + ERROR.format("", "ZeroDivisionError: division by zero"))
        == "exception.ZeroDivisionError"
    )
    assert said(warned) == "exception.FutureWarning"


def test_an_interpreter_that_was_ending_already() -> None:
    """A fatal error of an interpreter that finishes is the wake of what ended it."""
    ending = "Fatal Python error: _enter_buffered_busy: could not acquire lock at interpreter shutdown, possibly due to daemons\n"
    assert said("srun: error: cn-4: task 9: Killed\n" + ending) == "exit.sigkill"
    assert said(ending) == "native.python"


def test_what_was_cancelled_says_less_than_what_cancelled_it() -> None:
    """A future is cancelled because something else failed."""
    cancelled = ERROR.format("", "asyncio.exceptions.CancelledError")
    assert said(cancelled + ERROR.format("[rank1]: ", "KeyError: 'x'")) == "exception.KeyError"
    assert said(cancelled) == "exception.CancelledError"


def test_the_peer_that_an_mpi_process_lost() -> None:
    """The host that went away is told lines below, and is not the one that tells of it."""
    text = (
        "An MPI communication peer process has unexpectedly disconnected.  This\nusually indicates a failure in the peer\n\n"
        "  Local host: ip-10-3-0-9\n  Local PID:  12629\n  Peer host:  ip-10-3-0-71\n"
    )
    found = answer(text)
    assert (found.judgement.signature, found.host) == ("mpi.peer_lost", "ip-10-3-0-71")


def test_mpi_s_first_process_and_those_that_were_shut_down() -> None:
    """Who ended first is told by the launcher alone; all other words are of those that Horovod shut down."""
    shut = (
        "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by an exception\n"
    )
    ended = (
        "mpirun detected that one or more processes exited with non-zero status. The first process to do so was:\n\n"
    )
    found = answer(shut + ended + "  Process name: [[4411,1],6]\n  Exit code:    3\n")
    assert (found.rank, found.judgement.unknown) == (6, True)


def test_a_kernel_s_word_on_a_gpu_before_a_tool_s() -> None:
    """A tool that finds no GPU says less than its Xid; the bus's corrected errors are no bus error of a process."""
    tool = "cn-20: Unable to determine the device handle for GPU0000:5E:00.0: Unknown Error\n"
    xid = "[88123.1] NVRM: Xid (PCI:0000:5e:00): 119, pid=881, Timeout after 6s of waiting for RPC response from GPU0 GSP!\n"
    assert said(tool + xid) == "xid.gsp"
    assert said(tool) == "gpu.init"
    corrected = (
        "[88122.9] pcieport 0000:5d:00.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)\n"
    )
    assert said(corrected + xid) == "xid.gsp"


def test_a_launcher_of_one_host_s_ranks_is_on_that_host() -> None:
    """A launcher that knows a rank by its number on the host writes from that host."""
    ended = "cn-7: ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -7) local_rank: 3 (pid: 88) of binary: x"
    assert answer(f"cn-7: train.py failed\n{ended}\n").host == "cn-7"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("double free or corruption (!prev)", "native.heap"),
        (
            "cn-7:41:51 [2] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
            "ib.fatal",
        ),
        ("x509: certificate signed by unknown authority", "net.tls"),
    ],
)
def test_a_driver_s_report_on_its_workers(words: str, cause: str) -> None:
    """A driver that only says that a training failed outranks no word of a worker, and names nothing that it lived through."""
    report = ERROR.format(
        "", "ray.train.base_trainer.TrainingFailedError: The Ray Train run failed. Please inspect the errors."
    )
    assert said(f"(RayTrainWorker pid=881, ip=10.3.0.4) {words}\n" + report) == cause
    assert said(report) == "exception.TrainingFailedError"


def test_words_and_the_launcher_of_one_pod() -> None:
    """What a pod wrote before its launcher told of a rank's end is why that rank ended."""
    text = (
        "worker-1: corrupted size vs. prev_size\n"
        "worker-1: [2025-02-11 08:30:04,512] [ERROR] [launch.py:325] ['python', '--local_rank=3'] exits with return code = -6\n"
    )
    assert said(text) == "native.heap"


def test_a_line_of_a_terminal_s_width_is_not_always_broken() -> None:
    """One line may be as long as a terminal is wide: the next one begins anew, by what launchers and runs begin with."""
    long = (
        "cn-7:41:51 [2] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out".ljust(
            119
        )
        + "0"
    )
    assert said(f"step 1 | loss 2.1\n{long}\nsrun: error: cn-7: task 3: Exited with exit code 1\n") == "ib.fatal"


def test_what_an_ending_interpreter_ignores_is_inside_no_wrapper() -> None:
    """An exception in a destructor is not what a wrapper before it holds."""
    ignored = "Exception ignored in: <function Loader.__del__ at 0x7f>\n" + ERROR.format(
        "", "AssertionError: can only test a child"
    )
    build = "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/main.c', '-shared']' returned non-zero exit status 1."
    assert said(ERROR.format("", build) + ignored) == "compile.failed"
    other = "Exception in thread Thread-7 (_monitor):\n" + ERROR.format("", "AssertionError: can only test a child")
    assert said(ERROR.format("", build) + other) == "compile.failed"


def test_a_launcher_s_host_is_no_host_that_went_past_a_failure() -> None:
    """The host of a remote shell runs no rank: what the only other host lacks is not compared with it."""
    text = ERROR.format(
        "worker-1: ", "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    )
    found = answer(text + "pdsh@worker-0: worker-1: ssh exited with exit code 1\n")
    assert (found.judgement.signature, found.judgement.verdict) == ("cuda.driver", "USER")
    assert found.judgement.action not in ("isolate", "reset", "relaunch")


@pytest.mark.parametrize(
    "words",
    [
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "[PG 0 Rank 5] Observed flight recorder dump signal from another rank via TCPStore.",
    ],
)
def test_words_of_peers_and_the_abort_of_another_rank(words: str) -> None:
    """A rank that aborts by itself is the cause, though its peers' words on it come first; of a peer's own abort it is none."""
    peer = f"[rank5]: {words}\n"
    found = answer(peer + "srun: error: cn-7: task 3: Aborted (core dumped)\n")
    assert (found.judgement.signature, found.rank) == ("exit.sigabrt", 3)
    assert said(peer + "srun: error: cn-7: task 5: Aborted (core dumped)\n") != "exit.sigabrt"


KILLED = "srun: error: cn-7: task 3: Killed\n"


@pytest.mark.parametrize(
    "words",
    [
        "[rank3]: Gradients are inf, reducing loss scale to 32768",
        "ERROR: Could not find a version that satisfies the requirement apex (from versions: none)",
        "ERROR: No matching distribution found for apex",
        "slurmstepd: pmixp_server: timeout set to 30",
        "cxi0: 120 requests, 0 failed",
    ],
)
def test_ordinary_words_before_a_kill(words: str) -> None:
    """An overflow of mixed precision, a package that is done without and counters of a fabric end no rank."""
    assert said(f"{words}\nusing what is there\n{KILLED}") == "exit.sigkill"
    assert (
        said(f"{words}\nusing what is there\nsrun: error: cn-7: task 3: Segmentation fault (core dumped)\n")
        == "exit.sigsegv"
    )


def test_a_package_that_is_not_there_and_nothing_else() -> None:
    """Where nothing else failed, the installer's word is the cause; the exit code of its script is its own."""
    words = "ERROR: No matching distribution found for apex\n"
    assert said(words) == "mistake.version"
    gave_up = "srun: error: cn-7: task 3: Exited with exit code 1\n"
    assert said(words + gave_up) == "mistake.version"
    assert said(f"[rank3]: {words}{gave_up}srun: error: cn-8: task 5: Killed\n") == "mistake.version"
    assert said(words + "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n") == "cuda.ecc"


def test_a_non_fatal_error_of_a_switch_before_a_gpu_s_memory_error() -> None:
    """What the fabric manager has only noted outranks no uncorrectable error."""
    noted = (
        "nv-fabricmanager: detected NVSwitch non-fatal error 10003 on fid 0 on NVSwitch pci bus id 00000000:c1:00.0\n"
    )
    assert said(noted + "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n") == "cuda.ecc"


def test_a_launcher_that_cannot_fork() -> None:
    """Not every fatal word of a launcher is the user's mistake: a want of processes passes."""
    found = answer("srun: fatal: can't fork: Resource temporarily unavailable\n").judgement
    assert (found.signature, found.action) == ("processes.exhausted", "wait")


def test_a_line_whose_words_stand_in_its_prefix_too() -> None:
    """A short line of a message may be found in the time before it: the last place counts."""
    site = "2025-02-11 08:30:01,{0} - ERROR - [trainer.py:88] "
    lines = [
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 7, in step',
        "    x",
        "ValueError: batch of",
        "8",
        "is not what was asked for",
    ]
    logged = [site.format(100 + at) + words for at, words in enumerate(lines)]
    (found,) = reading.read([rows.Text("0.log", range(1, 7), logged)], matcher(table())).observations
    assert found.text.endswith("ValueError: batch of\n8\nis not what was asked for")


# Words that count however long a run lived on: those on the machine, and of the platform that takes it away. So do all that the
# kernel or the platform says first (`DRASTIC` leaves them out): no program handles those.
LASTING = {"cuda.nvlink", "tpu.maintenance"}
LINES = tomllib.loads((Path(__file__).parent / "signature_lines.toml").read_text(encoding="utf-8"))
DRASTIC = [
    one
    for one in table().by_id.values()
    if one.action in ("fail", "relaunch", "isolate")
    and one.patterns
    and LOG in one.sources
    and one.sources[0] not in (KERNEL, PLATFORM)
]


def test_what_was_survived_is_no_cause() -> None:
    """Whatever asks for a job's end or a new node: a warning of it, many steps, and then a signal: the signal is told."""
    assert len(DRASTIC) > 25
    steps = "".join(f"step {number} | loss 2.1 | 1.8 s\n" for number in range(60))
    ends = {"exit.sigkill": KILLED, "exit.sigsegv": "srun: error: cn-7: task 3: Segmentation fault (core dumped)\n"}
    wrong = {}
    for signature, line in ((its, line) for its in DRASTIC for line in LINES[its.id]["yes"]):
        warned = f"2025-02-11 08:30:01,123 WARNING [rank 3] {line.removeprefix('ERROR: ')}\n"
        for end, words in ends.items():
            found = said(warned + steps + words)
            if found != (signature.id if signature.id in LASTING else end):
                wrong[line] = found
    assert wrong == {}


def test_a_pod_that_was_given_a_place_did_not_fail_for_want_of_one() -> None:
    """What a scheduler said before it assigned a pod is over: what ended the pod came later."""
    waits = (
        "Warning  FailedScheduling  16m  default-scheduler  0/3 nodes are available: 3 Insufficient nvidia.com/gpu.\n"
    )
    assigned = "Normal   Scheduled  9m  default-scheduler  Successfully assigned ml/train-0 to cn-7\n"
    evicted = "Warning  Evicted  4m  kubelet  The node was low on resource: ephemeral-storage.\n"
    assert said(waits) == "k8s.unschedulable"
    assert said(waits + assigned + evicted) == "k8s.evicted"
