"""The commands on a real etcd: masters of several hosts for one job, who leads it after whom, and what is said of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import commands
import pytest
from hosts_net import TOKEN, Host, loopback
from running import BIN, BOUND_S, SCRIPTS, Job, eventually
from tools.etcd_cluster import Cluster

from dlrover_adapters.cli import doctor_log
from dlrover_adapters.cli.doctor_check import Verdict
from dlrover_core.job.job import JobCreated
from dlrover_core.job.state import JobState, fold
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.log import LeaderInfo
from dlrover_core.logs import open_log

STEPS = str(SCRIPTS / "steps.py")
QUICK_END = ("--set", "stop_grace_s=5")
# Masters that are stopped here stay stopped: how they would be replaced is told in test_kills.py.
SIZE = ("--nnodes", "2", "--job-id", "many", "--set", "last_call_s=0.5", "--set", "hung_s=0")

pytestmark = pytest.mark.timeout(120)


async def _records(url: str, job: str) -> list[Record]:
    async with open_log(url) as log:
        return [record async for record in log.read(job)]


async def _leader(url: str, job: str) -> LeaderInfo | None:
    async with open_log(url) as log:
        return await log.leader(job)


def records(url: str, job: str = "many") -> list[Record]:
    """All of a job's log."""
    return asyncio.run(_records(url, job))


def dlrover(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """One command to its end."""
    return commands.dlrover(words, {**os.environ, "DLROVER_TOKEN": TOKEN, **(env or {})})


class Hosts:
    """Three hosts for masters, two that train, and the log they share."""

    def __init__(self, hosts: Sequence[Host], url: str) -> None:
        self.masters, self.trainers, self.url = hosts[:3], hosts[3:], url

    def lead(self, host: Host, *more: str) -> None:
        """Start a master there."""
        host.start("master", *SIZE, "--bind", self.at(host), "--log", self.url, *more, program="dlrover")

    @staticmethod
    def at(host: Host) -> str:
        """Where its masters listen."""
        return f"{host.address}:{host.net.port}"

    def train(self, *script: str) -> None:
        """Let both trainers join, knowing all masters."""
        masters = ",".join(self.at(one) for one in self.masters)
        for host in self.trainers:
            host.start("--nnodes", "2", "--master", masters, "--rdzv-id", "many", *QUICK_END, *script)

    def state(self) -> JobState:
        """The job by its log."""
        return fold(records(self.url))

    def leader(self, *, instead_of: str = "") -> Host:
        """The host that leads, when it is another than the one at ``instead_of``."""

        def look() -> Host | None:
            found = asyncio.run(_leader(self.url, "many"))
            at = found.address if found is not None else ""
            return next((one for one in self.masters if self.at(one) == at != instead_of), None)

        return eventually(look, "a leader")

    def trains(self) -> int:
        """Wait until a world of two makes steps; the newest step."""

        def look() -> int | None:
            state = self.state()
            world = state.world.worlds.get("worker")
            if world is None or not world.active or len(world.started) < 2:
                return None
            return state.progress.of("worker").step if state.progress.of("worker").step > 0 else None

        return eventually(look, "two nodes that train", 2 * BOUND_S)

    def decides(self, token: int) -> None:
        """Wait until a leader newer than ``token`` has recorded progress of the job."""
        eventually(lambda: self.state().token > token, "a decision of the new leader")


@pytest.fixture
def hosts(etcd_server: Cluster, etcd_prefix: str, tmp_path: Path) -> Iterator[Hosts]:
    """Nothing runs on them yet."""
    with loopback() as net, contextlib.ExitStack() as stack:
        made = []
        for number, name in enumerate("abcde", start=2):
            net.addresses[name], net.prefixes[name] = f"127.0.0.{number}", []
            net.options[name] = ["--local-addr", net.addresses[name]]
            made.append(stack.enter_context(Host(net, name, tmp_path)))
        yield Hosts(made, etcd_server.url(etcd_prefix, ttl="2"))


def test_a_master_that_hands_over_ends_with_75(hosts: Hosts) -> None:
    """SIGTERM: a service manager starts it again, which goes on with the run; nobody has stopped the job."""
    only = hosts.masters[0]
    hosts.lead(only)
    only.says(f"leads job many at {hosts.at(only)}")
    only.signal(signal.SIGTERM)
    assert only.ended() == 75
    assert "nobody stands by to lead it: start another dlrover master" in only.said()
    assert hosts.state().job.state == "created"


@pytest.mark.nightly(reason="test_etcd_chaos_masters.py, and test_hosts.py on SQLite, stand for it in make test")
def test_masters_of_three_hosts_lead_one_after_the_other(hosts: Hosts) -> None:
    """All begin at the same instant, and one run is begun. The leading master's host dies, the next one's is asked to go,

    and then the last one's, which says that nobody leads now, as `status` and commands do; one that is started anew goes on.
    Training goes on in its first generation, as one run. `dlrover stop` ends the job everywhere.
    """
    for host in hosts.masters:
        hosts.lead(host)
    hosts.train(STEPS, "--term")
    first = hosts.leader()
    hosts.trains()
    began, at = hosts.state(), Hosts.at(first)
    first.says(f"leads job many at {at}")
    for host in hosts.masters:
        if host is not first:
            host.says(f"stands by for job many; {at} leads")
    first.die()
    second = hosts.leader(instead_of=at)
    second.says(f"leads job many at {hosts.at(second)}")
    hosts.decides(began.token)
    token = hosts.state().token
    second.signal(signal.SIGTERM)
    third = hosts.leader(instead_of=hosts.at(second))
    assert second.ended() == 75
    assert f"job many goes on, led by {hosts.at(third)}" in second.said()
    assert second.left() == []
    hosts.decides(token)
    third.signal()
    assert third.ended() == 75
    assert "job many trains on, but nobody stands by to lead it: start another dlrover master" in third.said()
    assert "nobody leads it now" in dlrover("status", "many", "--log", hosts.url).stdout
    done = dlrover("suspend", "many", "--log", hosts.url, "--timeout", "3")
    assert done.returncode == 6
    assert "dlrover suspend: waiting: nobody leads job 'many'" in done.stderr
    hosts.lead(first)
    first.says("job many is alive in the log: its run goes on")
    assert hosts.leader() is first
    done = dlrover("stop", "many", "--log", hosts.url)
    assert (done.returncode, done.stdout) == (
        0,
        "job many: stopped (dlrover stop, by " + done.stdout.partition("by ")[2],
    )
    assert first.ended() == 1
    assert [one.ended() for one in hosts.trainers] == [1, 1]
    events = [one.event for one in records(hosts.url)]
    assert sum(isinstance(one, JobCreated) for one in events) == 1
    assert hosts.state().world.worlds["worker"].generation == began.world.worlds["worker"].generation == 1
    assert hosts.state().incidents.number == 0
    assert [one.left() for one in (*hosts.masters, *hosts.trainers)] == [[]] * 5


def test_who_may_stand_by(hosts: Hosts) -> None:
    """Not a master with another token, which would turn all agents away once it led, nor one of other settings: it is told which.

    A standby's master that is frozen until the job has ended, and is started anew then, finds that and ends: it begins no run.
    """
    leading, standby, other = hosts.masters
    hosts.lead(leading)
    hosts.leader()
    leading.says("leads job many")
    line = ("master", *SIZE, "--bind", hosts.at(other), "--log", hosts.url)
    hosts.lead(standby, "--max-restarts", "7")
    other.start(*line, token="quite-another-token", program="dlrover")
    assert other.ended() == 2
    assert f"not that of the master at {hosts.at(leading)}, which leads job 'many'" in other.said()
    assert standby.ended() == 2
    assert f"max_restarts is {hosts.state().job.spec.max_restarts} there, 7 here" in standby.said()
    hosts.lead(standby)
    standby.says("stands by for job many")
    frozen = standby.one("dlrover-master")
    frozen.kill(signal.SIGSTOP)
    assert dlrover("stop", "many", "--log", hosts.url).returncode == 0
    assert leading.ended() == 1
    frozen.kill()
    assert standby.ended() == 1
    assert sum(isinstance(one.event, JobCreated) for one in records(hosts.url)) == 1
    assert [one.left() for one in hosts.masters] == [[]] * 3


@pytest.mark.nightly(reason="test_kills.py, with the log on SQLite, stands for it in make test")
def test_a_leading_master_that_hangs_is_replaced(tmp_path: Path) -> None:
    """One host, nobody in reserve, a lease of a minute: the launcher kills the master that hangs; no lease is waited for."""
    with (
        Cluster() as etcd,
        Job(tmp_path, "--log", etcd.url("t", ttl="60"), *QUICK_END, "--set", "hung_s=1", STEPS) as job,
    ):
        job.trains(1)
        master, worker = job.one("dlrover-master"), job.one("worker-0")
        master.kill(signal.SIGSTOP)
        worker.kill()
        job.trains(2)
        assert f"the master that leads (process {master.pid}) has not answered for 1 s: it is stopped" in job.said()
        job.finish()
        assert job.ended() == 0
        assert job.left() == []


def test_the_control_plane_is_said_to_be_degraded(tmp_path: Path) -> None:
    """While etcd hangs training goes on; the launcher says so, `status` since when and why, and a follower waits for its end."""
    with Cluster() as etcd, Job(tmp_path, "--log", etcd.url("t", ttl="2"), *QUICK_END, STEPS) as job:
        job.trains(1)
        url = job.settings["log"]
        with (tmp_path / "events").open("wb") as out, (tmp_path / "remarks").open("wb") as remarks:
            line = [str(BIN / "dlrover"), "events", "e2e", "--follow", "--log", url]
            follower = subprocess.Popen(line, stdout=out, stderr=remarks)
        try:
            eventually(lambda: "WorkersStarted" in (tmp_path / "events").read_text(), "the follower")
            patience = (tmp_path / "remarks").read_text()  # where it had to wait for its first answer it says so
            etcd.pause(0)
            eventually(lambda: "control plane degraded: " in job.said(), "the launcher's word")
            before = int(job.until(lambda status: status["degraded"], "a master that knows")["step"])
            masters = ("--master", job.settings["masters"][0])
            done = dlrover("status", "e2e", "--log", url, "--state-dir", str(job.state))
            assert done.returncode == 0, done.stderr
            assert "job e2e  running" in done.stdout
            assert "control plane degraded since 20" in done.stdout
            assert "the log cannot be read: " in done.stderr
            told = json.loads(dlrover("status", "e2e", "--log", url, *masters, "--json").stdout)
            assert told["control_plane"]["degraded_since_us"] > 0
            assert told["state"] == "running"
            eventually(
                lambda: "the log cannot be followed now" in (tmp_path / "remarks").read_text(), "a word of the follower"
            )
            etcd.resume(0)
            eventually(lambda: "control plane is back" in job.said(), "the launcher's relief")
            eventually(lambda: "followed again" in (tmp_path / "remarks").read_text(), "the follower's relief")
            job.trains(1, beyond=before + 100)
            assert [words[0] for words in job.told()] == ["born"], "its worker has never been restarted"
            job.finish()
            assert job.ended() == 0
            eventually(lambda: "JobSucceeded" in (tmp_path / "events").read_text(), "the end in the follower's words")
        finally:
            etcd.resume(0)
            follower.send_signal(signal.SIGINT)
            follower.wait(BOUND_S)
        seqs = [int(line.split()[0]) for line in (tmp_path / "events").read_text().splitlines()]
        assert seqs == list(range(1, len(seqs) + 1))
        remarks_said = (tmp_path / "remarks").read_text().removeprefix(patience).splitlines()
        assert len(remarks_said) == 2, remarks_said
        assert all(one.startswith("dlrover events: ") for one in remarks_said)
        assert job.left() == []


def test_a_password_changed_under_a_job_does_not_end_it(tmp_path: Path) -> None:
    """A master that dies meanwhile is replaced by one that etcd refuses: training goes on until the password is right again."""
    with Cluster(user="root", password="correct-horse") as etcd:
        etcd.add_user("job", "one", "t")
        url, born = f"etcd://job@{etcd.endpoints[0]}/t", {"DLROVER_ETCD_PASSWORD": "one"}
        with Job(tmp_path, "--log", url, *QUICK_END, STEPS, env=born) as job:
            job.trains(1)
            etcd.change_password("job", "another")
            job.one("dlrover-master").kill()
            eventually(lambda: job.control_log().count("master cannot lead now") > 1, "masters that are refused")
            etcd.change_password("job", "one")
            status = job.until(lambda status: status["role"] == "leader", "the next master")
            job.trains(1, beyond=int(status["step"]) + 50)
            assert [words[0] for words in job.told()] == ["born"], "its worker has never been restarted"
            job.finish()
            assert job.ended() == 0
            assert job.left() == []
        done = dlrover("status", "e2e", "--log", url, "--json", env=born)
        assert (json.loads(done.stdout)["state"], json.loads(done.stdout)["control_plane"]) == ("succeeded", None)
        assert sum(isinstance(one.event, JobCreated) for one in records(etcd.url("t"), "e2e")) == 1


def test_a_log_that_cannot_be_right_is_told(tmp_path: Path) -> None:
    """The wrong CA, the wrong password: by every command, with the part that is wrong, and without the password.

    Where nobody is there `status` says it of log and masters, and `--follow` does not wait for what may be a wrong URL; a job
    that would begin then ends with the status of what may be tried again.
    """
    with Cluster(tls=True, user="root", password="correct-horse") as etcd:
        assert etcd.certificates is not None
        good = etcd.url("t")
        other = tmp_path / "other.pem"
        line = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=other")
        subprocess.run(
            ["/usr/bin/env", "openssl", *line, "-keyout", str(tmp_path / "key"), "-out", str(other)],
            check=True,
            capture_output=True,
        )
        wrong_ca = good.replace(str(etcd.certificates.cacert).replace("/", "%2F"), str(other))
        wrong_ca = wrong_ca.replace(str(etcd.certificates.cacert), str(other))
        assert wrong_ca != good
        wrong_password = good.replace("correct-horse", "battery-staple")
        nowhere = ("many", "--log", "etcd://127.0.0.1:1/t", "--state-dir", str(tmp_path))
        wrong = {
            ("status", "many", "--log", wrong_ca): "cacert",
            ("status", "many", "--log", wrong_password): "password",
            ("events", "many", "--follow", "--log", wrong_password): "password",
            ("stop", "many", "--log", wrong_password): "password",
        }
        asked = [*wrong, ("status", *nowhere, "--master", "127.0.0.1:1"), ("events", "--follow", *nowhere)]
        (tmp_path / "later").mkdir()
        with (
            ThreadPoolExecutor(len(asked)) as pool,
            Job(tmp_path, "--log", wrong_password, *QUICK_END, STEPS) as job,
            Job(tmp_path / "later", "--log", nowhere[2], *QUICK_END, STEPS) as later,
        ):
            *refused, status, events = pool.map(lambda words: dlrover(*words), asked)
            assert job.ended() == 2
            assert "password" in job.said()
            assert "battery-staple" not in job.said()
            assert later.ended() == os.EX_TEMPFAIL  # a service manager may try again
            assert later.said().splitlines()[-1].startswith("dlrover-run: log: etcd does not answer at ")
        for done, word in zip(refused, wrong.values(), strict=True):
            assert done.returncode in (2, 4), done.stderr
            assert word in done.stderr
            assert "correct-horse" not in done.stderr + done.stdout
            assert "battery-staple" not in done.stderr + done.stdout
    assert (status.returncode, events.returncode) == (4, 4)
    assert "the masters cannot be asked: " in status.stderr
    assert "dlrover status: waiting: no answer yet from etcd://127.0.0.1:1/t" in status.stderr
    assert status.stderr.count("\n") == 3
    assert "--log or --state-dir names another" in events.stderr


@pytest.mark.nightly(reason="Ctrl-C on one host stands for it in make test")
def test_ctrl_c_where_the_masters_stand_by(hosts: Hosts) -> None:
    """HOST of an endpoint, whose masters only stand by: Ctrl-C there stops the job all the same, through the one that leads.

    That one is its host's second: the first was killed, and the second leads long before the dead one's lease is over.
    """
    leading, host = hosts.masters[0], hosts.trainers[0]
    assert "ttl=2" in hosts.url
    hosts.url = hosts.url.replace("ttl=2", "ttl=60")
    leading.start(
        "master", "--nnodes", "1:2", *SIZE[2:], "--bind", hosts.at(leading), "--log", hosts.url, program="dlrover"
    )
    hosts.leader()
    token, master = hosts.state().token, leading.one("dlrover-master")
    killed = time.monotonic()
    master.kill()
    hosts.decides(token)
    assert time.monotonic() - killed < 15.0
    assert leading.one("dlrover-master").pid != master.pid
    c10d = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", hosts.at(host), "--rdzv-id", "many")
    host.start(*c10d, *SIZE[4:], "--log", hosts.url, STEPS, "--term")
    host.says(f"stands by for job many; {hosts.at(leading)} leads")
    eventually(lambda: bool(host.told(0)), "a rank")
    host.signal()
    assert (host.ended(), leading.ended()) == (130, 1)
    assert "job many stopped (dlrover-run got SIGINT)" in leading.said()
    assert (host.left(), leading.left()) == ([], [])


def test_the_doctor_looks_at_an_etcd(etcd_server: Cluster, etcd_prefix: str) -> None:
    """How many members answer, in what version and time; what is not well; and what cannot be reached or be right is a FAIL."""
    told = asyncio.run(doctor_log.log(etcd_server.url(etcd_prefix)))
    assert "1 of 1 members answer, etcd " in told.found
    assert "no TLS; a look takes " in told.found
    assert told.values["versions"] == [etcd_server.version]
    assert told.verdict is Verdict.WARN
    assert "one member is named" in told.advice
    beside = etcd_server.url(etcd_prefix, endpoints=[*etcd_server.endpoints, "127.0.0.1:1"])
    told = asyncio.run(doctor_log.log(beside))
    assert (told.values["members"], list(told.values["silent"])) == (1, ["127.0.0.1:1"])
    assert "127.0.0.1:1" in told.advice
    assert asyncio.run(doctor_log.log("etcd://h:0/p")).verdict is Verdict.FAIL


def _fill(etcd: Cluster) -> None:
    for number in range(100):
        etcd.put(f"z{number}", "x" * 200_000)


def test_an_etcd_without_room_is_told(tmp_path: Path) -> None:
    """A new job is refused with that reason, not for a leader that is none; the doctor says it too."""
    with Cluster(quota_bytes=1 << 20) as etcd:
        with pytest.raises(OSError, match="space exceeded"):
            _fill(etcd)
        with Job(tmp_path, "--log", etcd.url("t"), *QUICK_END, STEPS) as job:
            assert job.ended() == 2
            assert "is out of space" in job.said()
            assert "is led by" not in job.said()
        told = asyncio.run(doctor_log.log(etcd.url("t")))
        assert (told.verdict, told.values["alarms"]) == (Verdict.FAIL, ["NOSPACE"])
