"""`dlrover doctor`: every fault it looks for is found where it is put, told with its unit, and answered with what to do."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

from dlrover_adapters.cli import doctor, doctor_evidence, doctor_state
from dlrover_adapters.cli import doctor_machine as machine
from dlrover_adapters.cli import doctor_network as network
from dlrover_adapters.cli.doctor_check import Check, Finding, Result, Verdict, examine, fail, ok, size, warn
from dlrover_adapters.cli.doctor_checkpoints import checkpoint_memory
from dlrover_adapters.cli.main import main
from dlrover_core.errors import SpecError

GIB = 2**30
MOUNTS = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:40 / {point} rw - {kind} server:/home rw\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    """A machine told by files below ``root``."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def said(finding: Finding, verdict: str, *words: str) -> None:
    """The finding has this verdict, these words, and, unless all is well, advice."""
    assert finding.verdict.value == verdict, finding
    for word in words:
        assert word in f"{finding.found} -> {finding.advice}"
    assert verdict == "OK" or finding.advice


# ---- the frame


def test_a_check_that_hangs_is_given_up() -> None:
    """A system call that never comes back costs its bound, and the advice says what it probably is."""
    never = threading.Event()
    result = asyncio.run(examine(Check("disk", lambda: never.wait() and ok(""), 0.05, "name another directory")))
    never.set()
    said(result.finding, "FAIL", "no answer within 0.05 s", "name another directory")


def test_a_check_that_waits_is_cancelled() -> None:
    """An asynchronous check is cancelled at its bound, so that it can tidy up."""
    tidied: list[str] = []

    async def forever() -> Finding:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            tidied.append("yes")
        return ok("")

    said(asyncio.run(examine(Check("fork", forever, 0.05))).finding, "FAIL", "no answer")
    assert tidied == ["yes"]


@pytest.mark.parametrize(
    ("error", "words"),
    [(PermissionError(1, "not permitted"), "not permitted"), (ZeroDivisionError("x"), "bug of ours")],
)
def test_a_check_that_breaks_hides_no_other(error: Exception, words: str) -> None:
    """What a check raises is its finding."""

    def broken() -> Finding:
        raise error

    said(asyncio.run(examine(Check("x", broken))).finding, "FAIL", words)


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """0 with OK and WARN, 1 as soon as one check FAILs, 2 for wrong usage; --json is one object with every number."""
    findings = [ok("fine", size=1), warn("slow", "be faster")]
    monkeypatch.setattr(
        doctor, "checks", lambda args: [Check(f"c{n}", lambda one=one: one) for n, one in enumerate(findings)]
    )
    assert main(["doctor"]) == 0
    assert "1 OK, 1 WARN, 0 FAIL" in capsys.readouterr().out
    findings.append(fail("broken", "mend it"))
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "FAIL"
    assert [one["verdict"] for one in told["checks"]] == ["OK", "WARN", "FAIL"]
    assert told["checks"][0]["values"] == {"size": 1}
    assert told["checks"][2]["advice"] == "mend it"
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--endpoint", "host:port"])
    assert left.value.code == 2
    assert "HOST[:PORT]" in capsys.readouterr().err


def test_all_checks_are_made() -> None:
    """An endpoint, a log and a GPU are looked for only when asked for; the clock comes last, to see how far both clocks went."""
    plain = argparse.Namespace(gpu=False, state_dir=None, preload="none", endpoint=None, log=None)
    names = [one.name for one in doctor.checks(plain)]
    assert names[-1] == "clock"
    full = argparse.Namespace(
        gpu=True, state_dir=Path("/x"), preload="a, b", endpoint=network.Endpoint("h", 1), log="etcd://h/p"
    )
    more = {one.name for one in doctor.checks(full)}
    assert more - set(names) == {"gpu", "endpoint", "log"}
    assert all(one.bound_s <= 180 for one in doctor.checks(full))
    assert doctor.modules("a, b") == ("a", "b")
    assert doctor.modules("") == ()
    assert doctor.modules("none") is None


def test_lines_fit() -> None:
    """A finding is told in lines of the terminal's width, the advice below it with an arrow."""
    text = doctor.line(Result("shared memory", warn("word " * 40, "do " * 40), 1.0), width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.startswith("WARN  shared memory    word")
    assert "-> do" in text
    assert [size(one) for one in (12, 2048, 64 * 2**20, 1.5 * GIB, 2**42)] == [
        "12 B",
        "2.0 KiB",
        "64 MiB",
        "1.5 GiB",
        "4.0 TiB",
    ]


def test_workers_are_guessed(tmp_path: Path) -> None:
    """Rules of thumb are for as many workers as there are GPUs."""
    assert (
        doctor.expected_workers(tree(tmp_path, {f"proc/driver/nvidia/gpus/{n}/information": "" for n in range(16)}))
        == 16
    )
    assert 1 <= doctor.expected_workers(tmp_path / "none") <= doctor.WORKERS_MAX


# ---- the machine


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too old an interpreter fails; another distribution with our commands' names, and another environment's, are named."""
    said(machine.python((3, 9, 1)), "FAIL", "3.9.1", "3.10 or newer")
    said(machine.python(which="/elsewhere/bin/dlrover-run"), "WARN", "/elsewhere/bin/dlrover-run", "activate")
    ours = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.6.1" if name == "dlrover" else ours(name))
    said(machine.python(), "WARN", "'dlrover' 0.6.1", "pip uninstall dlrover")
    monkeypatch.setattr(machine, "lacking", lambda: "pidfd_open: Function not implemented; it needs Linux 5.4")
    said(machine.python(), "FAIL", "Python", "nothing can be started: pidfd_open")


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/pod/x\n", "sys/fs/cgroup/pod/cpu.max": "150000 100000\n"},
        {"proc/self/cgroup": "0::/../../pod\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"},
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/x\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's processor quota is found in version 1 and 2, here and in parents, and held against what is visible."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: range(64))
    said(machine.processors(2, tree(tmp_path, files), {}), "WARN", "64 for us", "cgroup quota 1.5", "OMP_NUM_THREADS")


def test_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_NUM_THREADS times workers is held against the processors."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: range(8))
    said(machine.processors(8, tmp_path, {}), "OK", "8 for us", "unset")
    said(machine.processors(8, tmp_path, {"OMP_NUM_THREADS": "8"}), "WARN", "64 threads", "set it to 1")
    said(machine.processors(8, tmp_path, {"OMP_NUM_THREADS": "many"}), "WARN", "'many' is no number")


def meminfo(total: int, free: int, swap: int = 0, unswapped: int = 0) -> str:
    """As the kernel writes it."""
    return (
        f"MemTotal: {total // 1024} kB\nMemAvailable: {free // 1024} kB\n"
        f"SwapTotal: {swap // 1024} kB\nSwapFree: {unswapped // 1024} kB\n"
    )


def test_memory(tmp_path: Path) -> None:
    """Memory left is the least of the machine's and the container's; a machine that swaps is told."""
    said(
        machine.memory(tree(tmp_path, {"proc/meminfo": meminfo(64 * GIB, 60 * GIB)})),
        "OK",
        "64 GiB, 60 GiB available; no swap",
    )
    said(
        machine.memory(tree(tmp_path, {"proc/meminfo": meminfo(64 * GIB, 60 * GIB, 8 * GIB, GIB)})),
        "WARN",
        "7.0 GiB used",
    )
    limits = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": str(4 * GIB),
        "sys/fs/cgroup/memory.current": str(4 * GIB),
    }
    said(machine.memory(tree(tmp_path, limits)), "WARN", "cgroup limit 4.0 GiB", "import torch")
    said(machine.memory(tmp_path / "nothing"), "WARN", "/proc mounted")


def test_limits(tmp_path: Path) -> None:
    """Open files, processes and locked memory are held against what so many workers need."""
    said(machine.open_files(8, soft=256), "WARN", "256 open files", "about 640 needed with 8 workers", "ulimit -n")
    said(machine.open_files(8, soft=resource.RLIM_INFINITY), "OK", "no limit")
    pids = {
        "proc/self/cgroup": "8:pids:/a\n",
        "sys/fs/cgroup/pids/a/pids.max": "300",
        "sys/fs/cgroup/pids/a/pids.current": "100",
    }
    said(machine.tasks(8, tree(tmp_path, pids)), "WARN", "room for 200", "about 512 needed", "--pids-limit")
    said(machine.locked_memory(tmp_path, soft=65536), "OK", "64 KiB", "no RDMA devices")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    said(machine.locked_memory(tmp_path, soft=65536), "FAIL", "mlx5_0", "memlock")
    said(machine.locked_memory(tmp_path, soft=resource.RLIM_INFINITY), "OK", "no limit")


def test_inotify(tmp_path: Path) -> None:
    """No inotify instance left for this user: output would come late."""

    class Exhausted:
        def inotify_init1(self, flags: int) -> int:
            return -1

    root = tree(tmp_path, {"proc/sys/fs/inotify/max_user_instances": "128\n"})
    said(machine.watches(root, Exhausted()), "WARN", "max_user_instances 128", "only 0 left")  # type: ignore[arg-type]
    said(machine.watches(root), "OK")


def test_evidence(tmp_path: Path) -> None:
    """It says which sources of evidence there are, and that none is needed: neither a kernel log nor a memory group."""
    bare = doctor_evidence.evidence(tmp_path, str(tmp_path / "none"))
    said(bare, "OK", "not the kernel's log", "No such file", "no memory control group")
    said(doctor_evidence.evidence(tmp_path, ""), "OK", "is off (DLROVER_KERNEL_LOG)")
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.events": "oom_kill 0\n",
            "sys/fs/cgroup/memory.max": "1000000\n",
            "kmsg": "",
        },
    )
    full = doctor_evidence.evidence(root, str(root / "kmsg"))
    said(full, "OK", f"the kernel's log ({root / 'kmsg'})", "cgroup version 2, a limit", "matched by")
    assert (full.values["kernel_log"], full.values["cgroup"], full.values["limited"]) == (True, 2, True)


@pytest.mark.parametrize(
    ("pattern", "soft", "verdict", "words"),
    [
        ("core", resource.RLIM_INFINITY, "WARN", "each worker's directory"),
        ("core", 0, "OK", "no core files"),
        ("|/usr/lib/systemd/systemd-coredump %P", 0, "OK", "piped to /usr/lib/systemd/systemd-coredump"),
        ("/var/crash/%p", 2**20, "OK", "/var/crash"),
    ],
)
def test_cores(tmp_path: Path, pattern: str, soft: int, verdict: str, words: str) -> None:
    """A crash that would fill the workers' own disk is told before it happens."""
    said(machine.cores(tree(tmp_path, {"proc/sys/kernel/core_pattern": pattern}), soft), verdict, words)


@pytest.mark.parametrize(
    ("total", "free", "verdict", "words"),
    [
        (64 * 2**20, 32 * 2**20, "FAIL", "--shm-size"),
        (2 * GIB, 2 * GIB, "WARN", "comfortable 4.0 GiB"),
        (8 * GIB, GIB, "WARN", "something fills it"),
        (64 * GIB, 60 * GIB, "OK", "60 GiB free"),
    ],
)
def test_shared_memory(tmp_path: Path, total: int, free: int, verdict: str, words: str) -> None:
    """Docker's 64 MiB fail, a small /dev/shm and a full one are told apart."""
    said(machine.shared_memory(8, tmp_path, (total, free)), verdict, words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("available", "verdict", "words"),
    [(GIB, "WARN", "states of ranks may take 768 MiB"), (64 * GIB, "OK", "by the host's available memory")],
)
def test_memory_for_checkpoints(tmp_path: Path, available: int, verdict: str, words: str) -> None:
    """What states may take here, by which limit."""
    root = tree(tmp_path, {"proc/meminfo": f"MemAvailable: {available // 1024} kB", "proc/self/cgroup": ""})
    said(checkpoint_memory(root), verdict, words)


def test_no_memory_for_checkpoints(tmp_path: Path) -> None:
    """A container that forbids anonymous files, and one whose /proc is not there."""

    def forbidden(_name: str, _flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    said(checkpoint_memory(tmp_path, forbidden), "FAIL", "memfd_create: Operation not permitted", "seccomp")
    said(checkpoint_memory(tmp_path), "WARN", "is not known", "is /proc mounted?")


def test_no_shared_memory(tmp_path: Path) -> None:
    """No /dev/shm at all."""
    said(machine.shared_memory(8, tmp_path / "none"), "FAIL", "cannot be used", "mount a tmpfs")


def test_clock() -> None:
    """A wall clock that was set meanwhile, one that nobody keeps, and one that may not be asked about."""
    began = machine.Clocks(1000.0, 10.0)
    kept, lost = machine.Discipline(True, 0.012), machine.Discipline(False, 16.0)
    later = machine.Clocks(1002.0, 12.0)
    said(machine.clock(began, later, lambda: kept), "OK", "at most 12 ms off")
    said(machine.clock(began, later, lambda: lost), "WARN", "unsynchronised", "chronyd")
    said(machine.clock(began, later, lambda: None), "OK", "may not be asked")
    said(machine.clock(began, machine.Clocks(1032.0, 12.0), lambda: kept), "WARN", "+30000.0 ms over 2.0 s")
    found = machine.discipline()
    assert found is None or 0 <= found.error_s < 1e6


# ---- the network


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node0", ("node0", 29400)),
        ("node0:1234", ("node0", 1234)),
        ("[::1]:7", ("::1", 7)),
        ("::1", ("::1", 29400)),
        ("[::1]", ("::1", 29400)),
    ],
)
def test_endpoints(text: str, expected: tuple[str, int]) -> None:
    """HOST[:PORT], with torchrun's port by default; IPv6 in brackets."""
    assert network.endpoint(text) == expected


@pytest.mark.parametrize("text", ["", ":1", "h:0", "h:65536", "h:x"])
def test_wrong_endpoints(text: str) -> None:
    """What is no endpoint is told."""
    with pytest.raises(SpecError, match=r"HOST\[:PORT\]"):
        network.endpoint(text)


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback must work; another interface that does not is a warning, for one host needs loopback alone."""
    said(network.ports(), "OK", "127.0.0.1")
    monkeypatch.setattr(network, "interfaces", lambda: {"eth0": "203.0.113.9"})
    said(network.ports(), "WARN", "not on 203.0.113.9", "firewall")
    monkeypatch.setattr(network, "_reach_oneself", lambda address: "Network is unreachable")
    said(network.ports(), "FAIL", "127.0.0.1 (Network is unreachable)", "loopback up")


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """The host's own name resolves to these."""

    def resolve(host: str) -> list[str]:
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return list(addresses)

    monkeypatch.setattr(network, "resolve", resolve)
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.5"})


def test_hostname(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that does not resolve, resolves elsewhere, or to loopback on several hosts: gloo's traps, with the way out."""
    way_out = "export GLOO_SOCKET_IFNAME=eth0"
    named(monkeypatch)
    said(network.hostname(False, {}), "WARN", "does not resolve (Name or service not known)", way_out)
    said(network.hostname(True, {}), "FAIL", "does not resolve", way_out)
    said(network.hostname(True, {"GLOO_SOCKET_IFNAME": "eth0"}), "OK", "harmless")
    named(monkeypatch, "203.0.113.9")
    said(network.hostname(False, {}), "FAIL", "203.0.113.9 is no address of this machine", way_out)
    named(monkeypatch, "127.0.1.1")
    said(network.hostname(False, {}), "OK", "right for one host", way_out)
    said(network.hostname(True, {}), "FAIL", "which is themselves", way_out)
    said(network.hostname(True, {"GLOO_SOCKET_IFNAME": "eth0"}), "OK", "gloo uses the interface eth0")


def test_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interfaces that do not exist are told before a collective does; NCCL's take prefixes, lists and exclusions."""
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.5", "eth1": "10.1.0.5"})
    said(
        network.interface({"GLOO_SOCKET_IFNAME": "eth9"}), "FAIL", "no interface eth9", "export GLOO_SOCKET_IFNAME=eth0"
    )
    said(network.interface({"GLOO_SOCKET_IFNAME": "eth"}), "FAIL", "no interface eth:")
    said(network.interface({"NCCL_SOCKET_IFNAME": "eth"}), "OK", "NCCL_SOCKET_IFNAME=eth")
    said(network.interface({"NCCL_SOCKET_IFNAME": "^docker0,ib"}), "FAIL", "no interface ib")
    said(network.interface({}), "OK", "eth0 or eth1")


@contextmanager
def serving(answer: bytes) -> Iterator[int]:
    """A server on loopback that says ``answer`` to whoever connects; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    one, _ = server.accept()
                except OSError:
                    return
                with one:
                    one.settimeout(1.0)
                    try:
                        if one.recv(4096):
                            one.sendall(answer)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def test_endpoint_free_and_unknown() -> None:
    """A point on this machine is free; a name that does not resolve fails."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    said(network.rendezvous(network.Endpoint("127.0.0.1", port), {}), "OK", "this machine and free")
    said(network.rendezvous(network.Endpoint("no-such-host.invalid", 1), {}), "FAIL", "does not resolve", "/etc/hosts")


def test_endpoint_of_somebody_else() -> None:
    """A port that another program has is not taken for a master."""
    with serving(b"hello\n") as port:
        said(
            network.rendezvous(network.Endpoint("127.0.0.1", port), {}), "FAIL", "no dlrover master", f"sport = :{port}"
        )


def test_endpoint_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another host: refused means that nobody listens yet, silence means a firewall."""
    monkeypatch.setattr(network, "is_ours", lambda address: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    said(
        network.rendezvous(network.Endpoint("127.0.0.1", port), {}), "WARN", "nobody listens", "start dlrover-run there"
    )

    def silence(address: tuple[str, int], timeout: float) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silence)
    said(network.rendezvous(network.Endpoint("127.0.0.1", port), {}), "FAIL", "timed out", "firewall")


@pytest.mark.parametrize(
    ("date", "verdict", "words"),
    [("Mon, 20 Nov 2006 12:00:00 GMT", "WARN", "s off ours"), ("", "OK", "set DLROVER_TOKEN")],
)
def test_endpoint_with_a_master(date: str, verdict: str, words: str) -> None:
    """A master is known by its answer; a clock that is years off is told."""
    head = f"Date: {date}\r\n" if date else ""
    answer = f"HTTP/1.1 200 OK\r\n{head}Content-Length: 3\r\nConnection: close\r\n\r\nok\n".encode()
    with serving(answer) as port:
        said(network.rendezvous(network.Endpoint("127.0.0.1", port), {}), verdict, "a dlrover master answers", words)


# ---- the places


@pytest.mark.parametrize("kind", ["fuse.sshfs", "nfs4", "lustre"])
def test_state_directory_far_away(tmp_path: Path, kind: str) -> None:
    """A state directory on a network or FUSE file system is refused by name, before anything is written to it."""
    finding = doctor_state.state_directory(tmp_path / "x", MOUNTS.format(point=tmp_path, kind=kind))
    said(finding, "FAIL", f"is on a {kind} file system", "--state-dir")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow_loop(reason="the first log of a process imports its module, on a loop of the check's own")
def test_state_directory(tmp_path: Path) -> None:
    """A local one is tried for real: sync, lock, log; and left as it was, which is missing."""
    finding = doctor_state.state_directory(tmp_path / "a" / "b")
    said(finding, "OK", "will be made", "fsync", "locks and log work")
    assert finding.values["fsync_median_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow_loop(reason="the first log of a process imports its module, on a loop of the check's own")
@pytest.mark.parametrize(
    ("fault", "verdict", "words"),
    [
        (("_syncs", lambda folder: [0.5, 0.6, 0.7]), "WARN", "fsync 600.0 ms"),
        (("_locks", lambda folder: False), "FAIL", "a lock taken twice was given twice"),
        (("FREE_BYTES_FEW", 2**62), "WARN", "little room"),
        (("FREE_BYTES_MIN", 2**62), "FAIL", "make room"),
    ],
)
def test_state_directory_with_a_fault(
    tmp_path: Path, fault: tuple[str, object], verdict: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk, locks that do not lock, and no room."""
    monkeypatch.setattr(doctor_state, *fault)
    said(doctor_state.state_directory(tmp_path), verdict, words)


def test_state_directory_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of another user is refused, as dlrover-run does; and one that cannot be written to."""
    (tmp_path / "link").symlink_to(tmp_path)
    said(doctor_state.state_directory(tmp_path / "link"), "FAIL", "is not a directory of user")
    said(doctor_state.state_directory(Path("/proc/dlrover")), "FAIL", "cannot be written to", "--state-dir")


def test_sockets(tmp_path: Path) -> None:
    """Too long a path for sockets is found by making one."""
    said(doctor_state.sockets(), "OK", "Unix sockets work")
    long = tmp_path / ("x" * 100)
    long.mkdir()
    said(doctor_state.sockets(str(long)), "FAIL", "no Unix socket", "TMPDIR")
    assert list(long.iterdir()) == []


def test_verdicts_are_ordered_by_harm() -> None:
    """The worst verdict is the machine's."""
    make: list[Callable[[], Finding]] = [lambda: ok("a"), lambda: warn("b", "c"), lambda: fail("d", "e")]
    results = [Result("x", one(), 0.0) for one in make]
    assert [doctor.as_values(results[: n + 1])["verdict"] for n in range(3)] == ["OK", "WARN", "FAIL"]
    assert [one.verdict for one in results] == [Verdict.OK, Verdict.WARN, Verdict.FAIL]
