"""Several hosts: they meet, die whole, come back and leave; the host of the masters is restarted; strangers are told."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_net import Host, Net, best, loopback, where
from running import SCRIPTS, eventually

WHERE, STEPS, FAILS = (str(SCRIPTS / name) for name in ("where.py", "steps.py", "raises.py"))
QUICK_END = ("--set", "stop_grace_s=5")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def net() -> Iterator[Net]:
    """Hosts a, b and c."""
    with best() as made:
        yield made


@pytest.fixture
def hosts(net: Net, tmp_path: Path) -> Iterator[list[Host]]:
    """All three, nothing running."""
    made = [Host(net, name, tmp_path) for name in "abc"]
    with made[0], made[1], made[2]:
        yield made


def c10d(host: Host, nodes: str, job: str = "many") -> tuple[str, ...]:
    """What every host says: meet at ``host``."""
    at = f"{host.address}:{host.net.port}"
    return ("--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", at, "--rdzv-id", job, *QUICK_END)


@pytest.fixture(
    params=[best, pytest.param(loopback, marks=pytest.mark.nightly(reason="the best kind stands for it in make test"))]
)
def each_net(request: pytest.FixtureRequest) -> Iterator[Net]:
    """Both kinds of hosts, where network namespaces are permitted."""
    with request.param() as made:
        yield made


def test_hosts_meet_at_an_endpoint(each_net: Net, tmp_path: Path) -> None:
    """Two hosts with the same flags, whoever comes first: one world, whose store is where rank 0 runs; both exit with 0.

    Nothing is left on either.
    """
    with Host(each_net, "a", tmp_path) as a, Host(each_net, "b", tmp_path) as b:
        # On loopback every host is this machine, and whoever comes first has the masters.
        early, words = (b, "waiting for a master at") if each_net.prefixes["a"] else (a, "job many")
        early.start(*c10d(a, "2"), WHERE)
        early.says(words)
        (a if early is b else b).start(*c10d(a, "2"), WHERE)
        assert (a.ended(), b.ended()) == (0, 0)
        seen = [where((a, b), rank) for rank in (0, 1)]
        assert [one["WORLD_SIZE"] for one in seen] == ["2", "2"]
        assert [one["GROUP_RANK"] for one in seen] == ["0", "1"]
        first = a if (a.folder / "where-0").exists() else b
        assert {one["MASTER_ADDR"] for one in seen} == {first.address}
        for host in (a, b):
            assert "job many succeeded" in host.said()
            assert host.left() == []


def test_static_ranks_and_the_root_cause_everywhere(hosts: list[Host]) -> None:
    """--node-rank decides who is who, whoever comes first. A failing rank's words reach both hosts, first; both exit with 1."""
    a, b, _ = hosts
    at = ("--nnodes", "2", "--master-addr", a.address, "--master-port", str(a.net.port), "--job-id", "many", *QUICK_END)
    b.start(*at, "--node-rank", "1", "--max-restarts", "0", FAILS)
    b.says("waiting for a master")
    assert "cannot be asked: Connection refused" in b.said()
    a.start(*at, "--node-rank", "0", "--max-restarts", "0", FAILS)
    assert (a.ended(), b.ended()) == (1, 1)
    assert (
        f"on the host of {a.address}:{a.net.port}, which said the rest and has the log: dlrover explain many"
        in b.said()
    )
    assert (a.folder / "ran-0").exists()
    assert (b.folder / "ran-1").exists()
    for host in (a, b):
        told = host.said()
        assert "root cause: rank 1 on worker-1-0: ValueError: bad batch 17" in told
        assert told.index("root cause:") < told.index("job many failed")
        assert host.left() == []


def test_masters_of_their_own(hosts: list[Host]) -> None:
    """`dlrover master` prints what to run; hosts that run it train; Ctrl-C on it stops the job everywhere."""
    master, b, c = hosts
    master.start("master", "--nnodes", "2", "--job-id", "many", "--bind", at(master), program="dlrover")
    master.says("run this on each host")
    line = next(one for one in master.said().splitlines() if "--master" in one).split()[1:-1]
    assert line[line.index("--master") + 1] == at(master)
    for host in (b, c):
        host.start(*line, *QUICK_END, STEPS, "--term")
    master.until(1, 2)
    eventually(lambda: bool(b.told(0) + c.told(0)), "rank 0")
    master.signal()
    assert master.ended() == 130
    assert (b.ended(), c.ended()) == (1, 1)
    assert "job many stopped (dlrover master got SIGINT)" in b.said()
    assert [host.left() for host in hosts] == [[], [], []]


def at(host: Host) -> str:
    """Where this host's masters listen."""
    return f"{host.address}:{host.net.port}"


def test_a_host_that_dies_whole(hosts: list[Host]) -> None:
    """Its place is taken by a host that waited; it comes back and waits in turn; the other's agent is never restarted."""
    a, b, c = hosts
    for host in (a, b):
        host.start(*c10d(a, "2"), STEPS)
        host.says("job many")
    state = a.until(1, 2)
    agent = a.one("dlrover-agent").pid
    c.start(*c10d(a, "2"), STEPS)
    c.says("job many")
    c.one("dlrover-agent")
    eventually(lambda: a.status()["standbys"] == 1, "a standby")
    b.die()
    a.until(2, 2)
    eventually(lambda: bool(c.told(0) + c.told(1)), "a rank on the host that waited")
    b.start(*c10d(a, "2"), STEPS)
    b.says("job many")
    c.die()
    a.until(3, 2)
    assert a.one("dlrover-agent").pid == agent
    assert a.job().job.run == state.job.run
    for host in hosts:
        host.finish()
    assert (a.ended(), b.ended()) == (0, 0)
    assert [host.left() for host in hosts] == [[], [], []]


def test_the_host_of_the_masters_comes_back(hosts: list[Host]) -> None:
    """Its launcher is killed: the others' workers go on without masters. Started again it continues the very run."""
    a, b, _ = hosts
    for host in (a, b):
        host.start(*c10d(a, "2"), STEPS)
        host.says("job many")
    run = a.until(1, 2).job.run
    agent = b.one("dlrover-agent").pid
    a.die()
    assert b.processes("dlrover-agent")
    a.start(*c10d(a, "2"), STEPS)
    a.says("is alive in the log: its run goes on")
    state = a.until(2, 2)
    assert state.job.run == run
    kept = b.one("dlrover-agent")
    assert kept.pid == agent
    kept.kill()
    a.until(3, 2)
    assert b.one("dlrover-agent").pid != agent, "its launcher keeps an agent"
    for host in (a, b):
        host.finish()
    assert (a.ended(), b.ended()) == (0, 0)
    assert (a.left(), b.left()) == ([], [])


def test_hosts_come_late_and_leave(hosts: list[Host]) -> None:
    """MIN:MAX: one host begins, a late one makes it larger, leaves in order when asked by a signal, and the first goes on."""
    a, b, _ = hosts
    size = (*c10d(a, "1:2"), "--set", "last_call_s=0.5", "--set", "grow_window_s=0.1", "--on-join", "restart")
    a.start(*size, STEPS)
    a.until(1, 1)
    b.start(*size, STEPS, "--term")
    a.until(2, 2)
    eventually(lambda: bool(b.told(1) + b.told(0)), "a rank on host b")
    b.signal(signal.SIGTERM)
    assert b.ended() == 143
    assert "this host has left job many" in b.said()
    assert any(words[0] == "terminated" for words in b.told(1) + b.told(0))
    assert b.left() == []
    a.until(3, 1)
    a.signal(signal.SIGTERM)
    assert a.ended() == 143
    assert "job many stopped (dlrover-run got SIGTERM)" in a.said()
    assert a.left() == []


def test_who_is_not_of_this_job_is_told(hosts: list[Host]) -> None:
    """No token: the two lines that make one. A wrong token, another job's name, other sizes: said by name, and no harm done."""
    a, b, _ = hosts
    if a.net.prefixes["a"]:  # behind a loopback address launchers need to be given none
        b.start(*c10d(a, "2"), STEPS, token="")
        assert b.ended() == 2
        assert "several hosts need one job token" in b.said()
    a.start(*c10d(a, "1:2"), "--set", "last_call_s=0.1", STEPS)
    a.until(1, 1)
    for options, words in (
        ({"token": "another-token"}, "the job token is not this job's"),
        ({"job": "other"}, "leads job 'many', not 'other': say the same --rdzv-id on every host"),
        ({"nproc": "2"}, "turned away"),
    ):
        line = c10d(a, "1:2", str(options.get("job", "many")))
        b.start(*line, "--nproc-per-node", options.get("nproc", "1"), STEPS, token=options.get("token", "of-the-tests"))
        assert b.ended() == 77, options
        assert words in b.said()
        assert "Traceback" not in b.said()
        assert b.left() == []
    assert a.job().world.worlds["worker"].generation == 1
    a.finish()
    assert a.ended() == 0


def test_waiting_for_a_master_has_an_end(tmp_path: Path) -> None:
    """Nobody there: said where, for how long, and what to do."""
    with best() as net, Host(net, "b", tmp_path) as b:
        at = f"{net.addresses['a']}:{net.port}"
        b.start("--nnodes", "2", "--master", at, "--rdzv-conf", "join_timeout=0.5", *QUICK_END, STEPS)
        assert b.ended() == 70
        assert f"no master at {at} within 0.5 s" in b.said()
        assert "join_timeout" in b.said()
        assert b.left() == []


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """Something that is no master sits on the port: said, with what to do."""
    with loopback() as net, socket.create_server(("127.0.0.2", net.port)) as stranger, Host(net, "a", tmp_path) as a:
        a.start(*c10d(a, "2"), STEPS)
        connection, _ = stranger.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
            assert a.ended() == 2
        assert "is no dlrover master" in a.said()
        assert "give the masters another port" in a.said()
        assert a.left() == []
