"""Logs as observations: who wrote a line and when, what ended, what was handled, and what is only a sweep."""

from __future__ import annotations

import pytest

from dlrover_core.diagnosis import answers, clock, launchers, reading, rows, who
from dlrover_core.diagnosis.answers import Answer
from dlrover_core.diagnosis.matching import matcher
from dlrover_core.diagnosis.signatures import table

ERROR = '{0}Traceback (most recent call last):\n{0}  File "/w/train.py", line 7, in step\n{0}    x\n{0}{1}\n'
WATCHDOG = "[rank{0}]:[E1104 10:02:11.004 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: x\n"


def answer(*texts: str, names: tuple[str, ...] = ()) -> Answer:
    """What logs say."""
    given = []
    for number, text in enumerate(texts):
        lines = text.strip("\n").split("\n")
        given.append(rows.Text(names[number] if names else f"{number}.log", range(1, len(lines) + 1), lines))
    found = answers.answer(reading.read(given, matcher(table())))
    assert found is not None
    return found


def said(*texts: str) -> str:
    """The signature of the likeliest cause."""
    return answer(*texts).judgement.signature


@pytest.mark.parametrize(
    ("line", "body", "known"),
    [
        ('[rank3]:   File "x", line 3', '  File "x", line 3', {"rank": 3}),
        ("[default3]: KeyError: 1", "KeyError: 1", {"rank": 3, "local": 3}),
        ("[1,3]<stderr>:  x", "  x", {"rank": 3}),
        ("3:   x", "  x", {"rank": 3}),
        ("(RayTrainWorker pid=1234, ip=10.0.0.5)   x", "  x", {"host": "10.0.0.5", "pid": 1234}),
        ("2024-01-01T00:00:00.123456789Z stdout F   x", "  x", {}),
        ("Jan  5 10:20:07 gpu-7 kernel: NVRM: Xid", "NVRM: Xid", {"host": "gpu-7"}),
        ("[pod/train-worker-3/pytorch] x", "x", {"pod": "train-worker-3"}),
        ("node12: x", "x", {"host": "node12"}),
        ("gpu-07:4711:4803 [3] NCCL WARN x", "gpu-07:4711:4803 [3] NCCL WARN x", {"host": "gpu-07", "pid": 4711, "device": 3}),
        ("\x1b[36m[rank2]:\x1b[0m x", "x", {"rank": 2}),
        (
            '{"log":"KeyError: 1\\n","time":"2024-01-01T00:00:00Z","kubernetes":{"pod_name":"t-1","host":"n1"}}',
            "KeyError: 1",
            {"pod": "t-1", "host": "n1"},
        ),
        ("torch.cuda.OutOfMemoryError: CUDA out", "torch.cuda.OutOfMemoryError: CUDA out", {}),
    ],
)  # fmt: skip
def test_prefixes_are_peeled_and_heeded(line: str, body: str, known: dict[str, object]) -> None:
    """What launchers and collectors put before a line is taken off, and what it says of the writer is kept."""
    found = who.peel(line)
    assert found.body == body
    assert found.who == who.Who()._replace(**known)


def test_node_lists() -> None:
    """Slurm's lists of hosts and ranks are written out."""
    assert who.nodes("gpu[08-10,19],login1") == ["gpu08", "gpu09", "gpu10", "gpu19", "login1"]
    assert who.ranks("0-3,7") == [0, 1, 2, 3, 7]


def test_launchers_words() -> None:
    """Each launcher's form gives rank, host and code."""
    text = """\
ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 1 (pid: 12) of binary: /usr/bin/python
srun: error: gpu[12-13]: tasks 3,8: Exited with exit code 7
srun: error: gpu12: task 4: Segmentation fault (core dumped)
mpirun noticed that process rank 5 with PID 123 on node gpu07 exited on signal 9 (Killed).
=   RANK 6 PID 77 RUNNING AT gpu08
=   KILLED BY SIGNAL: 11 (Segmentation fault)
  time      : 2023-05-05_09:49:54
  host      : gpu01
  rank      : 2 (local_rank: 2)
  exitcode  : -11 (pid: 99)
  error_file: <N/A>
  traceback : Signal 11 (SIGSEGV) received by PID 99"""
    found = [(one.rank, one.local, one.host, one.code) for one in launchers.ends(text.splitlines())]
    assert found == [
        (-1, 1, "", -9), (3, -1, "", 7), (8, -1, "", 7), (4, -1, "gpu12", -11), (5, -1, "gpu07", -9), (6, -1, "gpu08", -11),
        (2, 2, "gpu01", -11),
    ]  # fmt: skip


def test_the_summary_names_rank_and_host() -> None:
    """Of a launcher's summary the first failure is the cause, with its rank and host; those it stopped are swept."""
    entry = (
        "[{0}]:\n  time      : 2023-05-05_09:49:{1}\n  host      : gpu0{0}\n  rank      : {0} (local_rank: 0)\n"
        "  exitcode  : {2} (pid: 9{0})\n  error_file: <N/A>\n  traceback : x\n"
    )
    found = answer(
        "Failures:\n" + entry.format(1, 57, -15) + "Root Cause (first observed failure):\n" + entry.format(4, 54, -11)
    )
    assert (found.judgement.signature, found.rank, found.host) == ("exit.sigsegv", 4, "gpu04")


def test_a_sweep_is_no_cause() -> None:
    """Closing signals, a cancelled step and forced termination come from a failure; they are none, whatever stands first."""
    sweep = "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 12 closing signal SIGTERM\n"
    step = "slurmstepd: error: *** STEP 8.0 ON gn-1 CANCELLED AT 2025-05-17T04:11:02 ***\n"
    assert said(sweep + "srun: error: gn-2: task 3: Segmentation fault\n") == "exit.sigsegv"
    assert said(step + "srun: error: gn-2: task 3: Exited with exit code 3\n") == "exit.code3"
    assert said(ERROR.format("", "KeyError: 'x'") + sweep + step) == "exception.KeyError"
    # Nothing failed before: its owner cancelled it.
    assert (
        said("slurmstepd: error: *** JOB 8 ON gn-1 CANCELLED AT 2025-05-17T04:11:02 ***\n" + sweep) == "slurm.cancelled"
    )


def test_an_abort_after_a_collectives_report_is_an_echo() -> None:
    """A process that aborts itself after its watchdog's report is explained by it."""
    text = WATCHDOG.format(0) + WATCHDOG.format(1) + "Aborted (core dumped)\n"
    found = answer(text)
    assert (found.judgement.signature, found.unknown, found.rank) == ("nccl.timeout", False, -1)
    assert "flight recorder" in found.next


def test_what_was_handled_is_set_aside() -> None:
    """A traceback after which the run makes steps is no cause; where nothing else is there, it is the likeliest."""
    handled = ERROR.format("", "ConnectionError: reset") + "".join(f"step {number} loss 2.1\n" for number in range(5))
    assert said(handled + ERROR.format("", "KeyError: 'x'")) == "exception.KeyError"
    assert said(handled) == "data.connection"


def test_the_specific_before_the_general() -> None:
    """Of one rank's burst the words that tell most are meant, though a general symptom came first."""
    text = "gpu-1:22:40 [0] NCCL WARN Cuda failure 'x'\n[rank0]: RuntimeError: NCCL error: unhandled system error\n"
    assert said(text + "[rank0]: OSError: [Errno 28] No space left on device\n") == "disk.full"


@pytest.mark.parametrize("hours", [1, -8, 5.5])
def test_zones_that_differ(hours: float) -> None:
    """A platform's events in another zone are of the same minutes as the program's words: the program's error stays the root."""
    clock_of = "2026-03-01 {:02d}:{:02d}:{:02d}"
    minutes = int((12 + hours) * 60)
    events = (
        f"{clock_of.format(minutes // 60, minutes % 60 + 1, 0)} kubelet, gpu-7: pod train-1 reason: Error exit code 1\n"
    )
    program = f"{clock_of.format(12, 0, 30)} step 3\n" + ERROR.format("", "KeyError: 'x'")
    for texts in ((program, events), (events, program), (program + events,), (events + program,)):
        assert said(*texts) == "exception.KeyError"


def test_the_order_of_lines_wins() -> None:
    """Times within a file never go back; a stamp of another zone is moved to its neighbours."""
    stamps = [["2026-01-01T10:00:00Z"], ["2026-01-01T10:00:05Z", "2026-01-01 18:00:05"], ["2026-01-01 18:00:09"], []]
    times, kind = clock.in_order(stamps)
    assert kind == clock.CALENDAR
    assert [round(one - times[0]) for one in times] == [0, 5, 9, 9]
    times, kind = clock.in_order([["23:59:58"], ["00:00:03"]])
    assert (kind, round(times[1] - times[0])) == (clock.DAY, 5)


def test_a_gpu_by_its_address() -> None:
    """What the kernel says of a PCI address is said of the rank that NCCL had put there."""
    text = (
        "gpu-7:100:100 [3] NCCL INFO comm 0x1 rank 11 nranks 16 cudaDev 3 nvmlDev 3 busId 3b000 - Init COMPLETE\n"
        "Jan  5 10:20:07 gpu-7 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    )
    found = answer(text)
    assert (found.judgement.signature, found.rank, found.host, found.device) == (
        "xid.fallen_off",
        11,
        "gpu-7",
        "0000:3b:00",
    )


def test_no_file_is_a_host() -> None:
    """Where no line names a host, none is at fault."""
    found = answer("RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    assert (found.judgement.signature, found.judgement.blamed, found.host, found.node) == ("cuda.ecc", "", "", "")


def test_three_causes_and_why_not() -> None:
    """The likeliest three are named, each with its lines, and why the first was preferred."""
    text = (
        ERROR.format("[rank1]: ", "KeyError: 'x'")
        + "[rank2]: OSError: [Errno 28] No space left on device\n"
        + WATCHDOG.format(0)
    )
    found = answer(text)
    assert [one.judgement.signature for one in found.causes] == ["exception.KeyError", "disk.full"]
    assert found.causes[0].lines[0].number == 4
    assert found.causes[1].why_not


def test_wrapped_lines_are_whole_again() -> None:
    """Lines that a terminal broke at its width are read as they were written."""
    long = (
        "[rank1]: OSError: [Errno 28] No space left on device: '/tmp/cache/a-long-name-of-a-folder/more/and-a-file.bin'"
    )
    text = "\n".join([long, "[rank0]: " + "x" * 120, "[rank0]: " + "y" * 120, "[rank2]: " + "z" * 120])
    broken = "\n".join(line[at : at + 60] for line in text.split("\n") for at in range(0, len(line), 60))
    assert said(broken) == said(text) == "disk.full"


def test_a_context_switch_that_times_out_after_a_fault() -> None:
    """Of a GPU whose program has just faulted, the fault is the cause: no host is given up for what follows."""
    line = "[Wed Jan 31 23:33:{0} 2024] NVRM: Xid (PCI:0000:cb:00): {1}, pid=44, name=python, x\n"
    found = answer(line.format(28, 13) + line.format(33, 109)).judgement
    assert (found.signature, found.verdict) == ("xid.app", "USER")
    assert answer(line.format(28, 109)).judgement.signature == "xid.gsp"


def test_the_last_burst_of_a_kernels_log() -> None:
    """Where nobody's end is known, what came long before the last burst is another story."""
    line = "[{0} 2024] NVRM: Xid (PCI:0000:cb:00): {1}, pid=44, name=python, x\n"
    assert said(line.format("Wed Jan 31 20:00:00", 48) + line.format("Wed Jan 31 23:33:33", 79)) == "xid.fallen_off"


def test_a_worker_gone_after_it_complained_is_an_echo() -> None:
    """A platform's word that a worker is gone, after its collectives had timed out, is no cause."""
    gone = "(raylet) A worker died or was killed while executing a task by an unexpected system error.\n"
    assert said(WATCHDOG.format(3) + gone) == "nccl.timeout"
    assert said(gone) == "ray.system_error"


def test_a_header_alone_may_have_the_prefix() -> None:
    """Where only a traceback's first line names the rank, the traceback is that rank's."""
    found = answer(
        '[rank1] Traceback (most recent call last):\n  File "/w/train.py", line 7, in step\n    x\nKeyError: 1\n'
    )
    assert (found.judgement.signature, found.rank) == ("exception.KeyError", 1)


def test_one_rank_that_failed_said_the_words() -> None:
    """Words that name no rank are those of the only one that its launcher says failed."""
    text = (
        ERROR.format("", "KeyError: 'x'")
        + "ERROR: failed (exitcode: 1) local_rank: 5 (pid: 9) of binary: /usr/bin/python\n"
    )
    assert answer(text).rank == 5


NFS = "[88123.1] nfs: server nas-2 not responding, still trying"
NOT_READY = "Warning  NodeNotReady  4m  node-controller  Node is not ready"
ORTE = "ORTE has lost communication with a remote daemon."
STEP = "step {0:6} | loss 2.1034 | tokens/s 41211\n"
ENDED = "ERROR: failed (exitcode: {1}) local_rank: {0} (pid: 9) of binary: /usr/bin/python\n"


@pytest.mark.parametrize(("steps", "cause"), [(5, "exception.KeyError"), (60, "exit.silent")])
def test_progress_between_an_exception_and_an_unexplained_end(steps: int, cause: str) -> None:
    """Other ranks' few steps after an exception do not hide it where nothing else explains the end; many steps do."""
    progress = "".join(STEP.format(number) for number in range(steps))
    assert said(ERROR.format("", "KeyError: 'x'") + progress + ENDED.format(5, 1)) == cause


def test_progress_between_a_collectives_reports() -> None:
    """An abort after a collective's timeout is its echo, though other ranks' steps stand between the lines."""
    progress = "".join(STEP.format(number) for number in range(4))
    assert said(WATCHDOG.format(2) + progress + ENDED.format(2, -6)) == "nccl.timeout"


def test_an_exception_that_was_handled_explains_no_other_end() -> None:
    """Where something else tells why, what was handled stays aside."""
    progress = "".join(STEP.format(number) for number in range(4))
    later = ERROR.format("", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert said(ERROR.format("", "KeyError: 'x'") + progress + later + ENDED.format(5, 1)) == "cuda.oom"


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Nov 15 06:16:34 kestrel43 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "kestrel43"),
        ("2024-11-15T06:16:34.2+01:00 kestrel43 kernel: NVRM: Xid (PCI:0000:3b:00): 48, DBE", "kestrel43"),
        (f"{ORTE}\n\n  HNP daemon   : [[1,0],0] on node head-1\n  Remote daemon: [[1,0],1] on node cn-7\n", "cn-7"),
        ("[setup] node-35: nvidia-smi\nFailed to initialize NVML: Driver/library version mismatch", "node-35"),
        ("[setup] node-35: Failed to initialize NVML: Driver/library version mismatch", "node-35"),
        (ERROR.format("", "ray.exceptions.ActorDiedError: The actor died.\n\tpid: 8\n\tip: 10.0.3.9"), "10.0.3.9"),
        ("The node with node id: 4f and address: 10.0.3.9 and node name: 10.0.3.9 has been marked dead", "10.0.3.9"),
    ],
)  # fmt: skip
def test_hosts_in_words(text: str, host: str) -> None:
    """Syslog, Ray, Open MPI and shells name the host that a failure is about."""
    assert answer(text).host == host


def test_nothing_is_given_up_that_no_line_names() -> None:
    """Without rank, host or kernel line a GPU's error is to be checked; with a rank, its GPU is reset."""
    assert answer("RuntimeError: CUDA error: uncorrectable ECC error encountered").judgement.action == "check"
    assert answer("[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered").judgement.action == "reset"


def test_a_killed_rank_and_what_killed_it() -> None:
    """Where the platform took a pod and one rank alone was killed, it was that one."""
    text = (
        "  host      : cn-7\n  rank      : 2 (local_rank: 0)\n  exitcode  : -9 (pid: 339)\n  error_file: <N/A>\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 339\n"
        "1m    Normal   Preempted   pod/train-worker-2   Preempted by ml/urgent-0 on node cn-7\n"
    )
    found = answer(text)
    assert (found.judgement.signature, found.rank, found.host) == ("k8s.preempted", 2, "cn-7")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"{NFS}\n[88323.1] INFO: task python:4412 blocked for more than 120 seconds.\n", "host.nfs"),
        (
            f"{NOT_READY}\nNormal  TaintManagerEviction  30s  Marking for deletion Pod ml/train-worker-7\n",
            "k8s.node_lost",
        ),
        (
            WATCHDOG.format(1)
            + ERROR.format(
                "", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory."
            ),
            "nccl.timeout",
        ),
    ],
)
def test_what_follows_from_a_failure_is_no_cause(text: str, cause: str) -> None:
    """Tasks that wait for a file server, pods taken off a lost node, an allocation of absurd size."""
    assert said(text) == cause


def test_a_worker_of_an_engine_is_named_and_nobody_unheard_of() -> None:
    """An engine names the worker that died; of a log of one rank's words nobody says that rank 0 was missing."""
    found = answer(
        "ERROR 09-01 12:00:00 [multiproc_executor.py:154] Worker proc VllmWorker-1 died unexpectedly, shutting down."
    )
    assert (found.judgement.signature, found.rank) == ("engine.dead", 1)
    assert found.judgement.confidence < 0.75


REFUSED_BY_PEER = "RuntimeError: [/t/gloo/transport/tcp/pair.cc:799] connect [172.20.1.4]:41210: Connection refused"


def test_a_peer_that_was_killed_refuses_connections() -> None:
    """Whoever cannot connect to a rank that was killed before tells a consequence; else it is the network's word."""
    killed = "srun: error: gpu3: task 3: Killed\n"
    assert said(killed + ERROR.format("[rank0]: ", REFUSED_BY_PEER)) == "exit.sigkill"
    assert said(ERROR.format("[rank0]: ", REFUSED_BY_PEER) + killed) == "gloo.connect"
    assert said(ERROR.format("[rank0]: ", REFUSED_BY_PEER)) == "gloo.connect"


def test_a_launchers_ruler_ends_a_message() -> None:
    """What MPI, a tracker or a shell write after an exception is no part of what it says."""
    ruler = "-" * 74 + "\nMPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD\n"
    for after in (ruler, "wandb: ERROR could not sync\n", "Killed\n"):
        assert said(ERROR.format("", "ValueError: lr must be positive") + after) == "exception.ValueError"


def test_a_wrapper_of_a_wrapper_says_what_was_tried() -> None:
    """A compiler's call that failed is told by the compiler, not by the call."""
    inside = "CalledProcessError: Command '['/usr/bin/gcc', 'main.c']' returned non-zero exit status 1."
    text = ERROR.format("", "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\n" + inside)
    assert said(text) == "compile.failed"


def test_a_mistake_is_called_by_its_exception() -> None:
    """What the program did wrong is named after the exception that it raised, on whichever line of it the words stand."""
    words = (
        "ValidationError: 1 validation error for Config\n  Value error, heads (28) must be divisible by the size (8)."
    )
    assert said(ERROR.format("", words)) == "exception.ValidationError"


@pytest.mark.parametrize(
    ("text", "cause", "rank"),
    [
        ("Shard process was signaled to shutdown with signal 9 rank=2\nError: ShardCannotStart\n", "exit.sigkill", 2),
        ("(VllmWorker TP1 pid=99) ERROR 10-02 09:01:44 [x.py:5] RuntimeError: unhandled system error\n", "nccl.system", 1),
        ("E0310 10:00:01.0 1 model_lifecycle.cc:642] failed to load 'm': Internal: ModuleNotFoundError: No module named 'x'\n",
         "exception.ModuleNotFoundError", -1),
        ("DistStoreError: Timed out after 901 seconds waiting for clients.\n" + ENDED.format(0, 1), "store.timeout", -1),
        ("Last State:  Terminated\n  Reason:       Error\n  Exit Code:    137\n", "exit.sigkill", -1),
        ("NAME READY STATUS RESTARTS\ntrain-worker-0  0/1     OOMKilled   0          42m\n", "k8s.oom", -1),
        ("88123  train OUT_OF_ME+    0:125 cn-[11-12]\n", "cgroup.oom", -1),
        (
            "[1.0] python invoked oom-killer: gfp_mask=0xcc0\n[1.1] Memory cgroup out of memory: Killed process 4411 (python)\n",
            "cgroup.oom", -1,
        ),
    ],
)  # fmt: skip
def test_words_of_servers_schedulers_and_kernels(text: str, cause: str, rank: int) -> None:
    """Launchers of servers, tables of kubectl and sacct, and the kernel's several lines of one OOM kill."""
    found = answer(text)
    assert (found.judgement.signature, found.judgement.rank) == (cause, rank)


@pytest.mark.parametrize(
    "before",
    [
        "'(ReadTimeoutError(HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out)' thrown while requesting x\n",
        "/v/image.py:13: UserWarning: Failed to load image extension: 'libc10_cuda.so: cannot open shared object file'\n",
        "[W socket.cpp:601] [c10d] The IPv6 network addresses of (m-0, 29500) cannot be retrieved (Name or service not known).\n",
        "/etc/profile.d/modules.sh: line 9: module: command not found\n",
        "WARNING: /dev/shm is only 64M; workers may run out of shared memory\n",
        "  Warning  FailedScheduling  23m  default-scheduler  0/14 nodes are available: 14 Insufficient nvidia.com/gpu.\n",
        "foo 1.0 requires numpy<2.0, but you have numpy 2.1.0 which is incompatible.\n",
        "Could not load dynamic library 'libcudart.so.11.0'; dlerror: cannot open shared object file\n",
    ],
)  # fmt: skip
def test_what_a_program_lives_through_is_no_cause(before: str) -> None:
    """Words before the exception that ended a program are not why: it went on to where it failed."""
    assert said(before + ERROR.format("", "KeyError: 'x'") + ENDED.format(0, 1)) == "exception.KeyError"


def test_words_before_an_exception_that_tells_nothing_are_why() -> None:
    """A general exception, and a fault of the machine, leave the words before them standing."""
    full = "cn-1:88:99 [0] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device\n"
    assert said(full + ERROR.format("", "DistBackendError: NCCL error: unhandled system error")) == "shm.full"
    broken = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    assert said(broken + ERROR.format("", "ValueError: bad")) == "cuda.ecc"


def test_whoever_tells_of_a_nodes_death_is_not_on_it() -> None:
    """Ray's driver names the dead node beside its own address."""
    found = answer(
        "(Worker pid=51, ip=10.4.0.32) loss: 1.9\n"
        "(Driver pid=50, ip=10.4.0.32) The node with node id: 8f205b12 and ip: 10.4.0.103 has been marked dead because the "
        "detector has missed too many heartbeats from it.\n"
        "(Driver pid=50, ip=10.4.0.32) \tip: 10.4.0.103\n"
        "(Driver pid=50, ip=10.4.0.32) The actor is dead because its node has died. Node Id: 8f205b12\n"
    )
    assert found.host == "10.4.0.103"


@pytest.mark.parametrize(
    ("words", "signature"),
    [
        ("died with <Signals.SIGKILL: 9>.", "exit.sigkill"),
        ("died with <Signals.SIGSEGV: 11>.", "exit.sigsegv"),
        ("returned non-zero exit status 134.", "exit.sigabrt"),
    ],
)
def test_how_a_child_ended_in_the_words_of_whoever_ran_it(words: str, signature: str) -> None:
    """A `CalledProcessError` passes on a signal."""
    line = f"subprocess.CalledProcessError: Command '['python', 'train.py']' {words}"
    assert said(f"step 7 | loss 2.1\n{ERROR.format('', line)}") == signature


def test_an_engine_s_worker_that_was_killed() -> None:
    """Neither the parent's closed pipe nor its words on the worker are why."""
    pipe = (
        '  File "/usr/lib/python3.12/multiprocessing/connection.py", line 399, in _recv\n    raise EOFError\nEOFError\n'
    )
    text = "Rank 0 scheduler is dead. Please check if there are relevant logs.\nExit code: -9\n"
    assert said(f"{text}Traceback (most recent call last):\n{pipe}") == "exit.sigkill"


NCCL_LATE = (
    "2025-03-01T10:{0}:04 gpu-08 train[22]: [Rank {1}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=411, "
    "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out.\n"
)


def test_a_cause_is_as_old_as_the_wait_for_it() -> None:
    """A collective of half an hour ends half an hour after what stopped it."""
    xid = "2025-03-01T10:00:01 gpu-07 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.\n"
    assert said(xid + NCCL_LATE.format(30, 9) + NCCL_LATE.format(30, 10)) == "xid.fallen_off"
    assert said(xid + NCCL_LATE.format(55, 9) + NCCL_LATE.format(55, 10)) == "nccl.timeout"


@pytest.mark.parametrize(
    "after", ["Terminated\n", "[rank1]: SignalException: Process 4711 got signal: 15\nTerminated\n"]
)
def test_a_bare_word_of_a_shell_is_no_platforms_reason(after: str) -> None:
    """`Terminated` alone takes no node out."""
    found = answer(ERROR.format("[rank3]: ", "KeyError: 'x'") + after)
    assert found.judgement.signature == "exception.KeyError"
    assert found.judgement.action != "relaunch"


def test_a_step_cancelled_after_a_kill_is_swept() -> None:
    """The launcher tells of the kill before the scheduler cancels what is left."""
    killed = "ERROR failed (exitcode: -9) local_rank: 0 (pid: 12) of binary: /usr/bin/python\n"
    cancelled = "slurmstepd: error: *** STEP 9.0 ON n11 CANCELLED AT 2025-03-27T10:12:40 ***\n"
    assert said(killed + "srun: Terminating StepId=9.0\n" + cancelled) == "exit.sigkill"
    assert said(cancelled + "srun: error: n11: task 0: Killed\n") == "slurm.cancelled"


RAYLET = "(raylet) A worker died or was killed while executing a task by an unexpected system error. Exit type: SYSTEM_ERROR\n"


def test_ray_s_word_on_a_worker_is_an_echo_of_how_it_ended() -> None:
    """More is known of that end, and something is always left."""
    assert (
        said("failed (exitcode: -11) local_rank: 1 (pid: 12) of binary: /usr/bin/python\n" + RAYLET) == "exit.sigsegv"
    )
    assert said(ERROR.format("", "KeyError: 'x'") + RAYLET) == "exception.KeyError"
    assert said(RAYLET) == "ray.system_error"


def test_who_is_only_told_of_went_past_nothing() -> None:
    """A container that is set up wrongly speaks against no host because another pod crashes, too."""
    found = answer(
        "train-2k   0/1     CreateContainerConfigError   0          6m12s\n"
        "  Normal   Scheduled  6m12s  default-scheduler  Successfully assigned ml/train-2k to wk-04\n"
        '  Warning  Failed     61s    kubelet            Error: secret "keys" not found\n'
        "Warning  BackOff    12s (x3 over 40s)    kubelet            Back-off restarting failed container main in pod train-0\n"
    )
    assert (found.judgement.signature, found.judgement.action) == ("k8s.config", "fail")


def test_what_is_printed_after_a_launchers_report_is_not_inside_it() -> None:
    """Lines between the two are read."""
    report = ERROR.format(
        "", "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\nx FAILED\n====="
    )
    found = said(
        f"{report}1m  Normal  Preempted  pod/w-2  Preempted by ml/urgent on node a100-067\n{ERROR.format('', 'EOFError')}"
    )
    assert found == "k8s.preempted"


def test_what_others_wrote_within_a_traceback_is_read() -> None:
    """A kill that a scheduler tells of between two frames is seen; the traceback around it keeps its own lines."""
    peer = ERROR.format(
        "", "RuntimeError: [/src/gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.4.0.9]:4711"
    )
    lines = peer.splitlines()
    lines[2:2] = [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed."
    ]
    assert said("\n".join(lines)) == "cgroup.oom"


def test_an_exception_of_nobody_is_not_that_of_a_rank_that_a_signal_ended() -> None:
    """One rank alone failed, by a segmentation fault: words without a rank are another's."""
    peer = ERROR.format(
        "", "RuntimeError: [/src/gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.4.0.9]:4711"
    )
    summary = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-05-05_09:49:54
  host      : gpu01
  rank      : 2 (local_rank: 2)
  exitcode  : -11 (pid: 99)
  error_file: <N/A>
  traceback : Signal 11 (SIGSEGV) received by PID 99
"""
    found = answer(peer + summary)
    assert (found.judgement.signature, found.rank) == ("exit.sigsegv", 2)
    found = answer(peer + summary + "srun: error: gpu01: task 2: Exited with exit code 1\n")
    assert (found.judgement.signature, found.rank) == ("exit.sigsegv", 2)


@pytest.mark.parametrize(
    ("words", "cause", "verdict"),
    [
        ("DataLoader worker (pid 811) is killed by signal: Killed. ", "dataloader.killed", "RES"),
        (
            "DataLoader worker (pid(s) 811) exited unexpectedly with exit code 1. Details are lost.",
            "dataloader.exited",
            "USER",
        ),
        ("DataLoader timed out after 120 seconds", "dataloader.timeout", "DATA"),
    ],
)
def test_how_a_loader_failed(words: str, cause: str, verdict: str) -> None:
    """Memory is asked for only where a loader was killed; one that ended by itself or was slow is unsure."""
    empty = (
        ERROR.format("", "_queue.Empty") + "\nThe above exception was the direct cause of the following exception:\n\n"
    )
    found = answer(empty + ERROR.format("", f"RuntimeError: {words}"))
    assert (found.judgement.signature, found.judgement.verdict) == (cause, verdict)
    assert (found.causes[0].confidence >= 0.75) == (cause == "dataloader.killed")


def test_a_slow_server_tells_more_than_a_loader_that_waited() -> None:
    """A loader's time-out gives way to what it waited for."""
    slow = "[88123.4] nfs: server nas-2 not responding, still trying\n"
    assert said(slow + ERROR.format("", "RuntimeError: DataLoader timed out after 60 seconds")) == "host.nfs"


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: gpu-4: task 3: Exited with exit code 1",
        "Container trainer terminated: reason: Error, exitCode: 1",
        "[ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = 1",
    ],
)
def test_a_bare_exit_code_is_no_verdict(line: str) -> None:
    """An exit code of 1 alone speaks of no resource and of no host."""
    found = answer(line)
    assert (found.judgement.signature, found.judgement.verdict, found.unknown) == ("exit.silent", "SOFT", True)
    assert found.judgement.action not in ("isolate", "reset", "relaunch")
