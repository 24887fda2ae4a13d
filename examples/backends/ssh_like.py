"""A backend of one's own: dlrover-run --backend examples/backends/ssh_like.py:SshLike:hosts=a+b --nnodes 2 train.py

Agents are processes that nobody here is the parent of, as ssh would leave them on other hosts. All that is known of them
lies in files: a master that is started again finds every node, and starts none twice.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from dlrover_core import AVOIDED, BackendContext, Changed, LaunchRefused, Listed, NodeLaunch, Observation

LOOK_S, START_S, SHELL_S = 0.1, 30.0, 2.0
# Runs a node's agent, writes down who it is, and how it ended. The second number tells it from another process with its pid.
REMOTE = """exec > /dev/null 2>&1; cd "$1" && dir=$2 && shift 2
"$@" < /dev/null > "$dir/output" 2>&1 &
echo $! $(cut -d ' ' -f 22 /proc/$!/stat) > "$dir/pid.part" && mv "$dir/pid.part" "$dir/pid"
wait $!; echo $? > "$dir/exit.part" && mv "$dir/exit.part" "$dir/exit"
"""


class Deposed(Exception):
    """A newer master has given orders."""


class SshLike:
    """Nodes are directories: ``name`` and ``host``, then ``pid``, then ``exit``; ``deleted`` when the job wants it no more."""

    def __init__(self, here: BackendContext) -> None:
        self.here, told = here, here.options(root=here.directory, hosts=os.uname().nodename)
        self.root, self.hosts = Path(told["root"], here.run or "run"), told["hosts"].split("+")
        self.lived: dict[str, float] = {}

    # ---- the port

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """Start a node. The directory is what makes it one node, however often and by whomever it is ordered."""
        if not self.here.command or shutil.which(self.here.command[0]) is None:
            raise LaunchRefused(f"no such program: {self.here.command[:1]}", permanent=True)
        with self.fenced(token):
            folder = self.folder(node.name)
            if folder.exists():
                return
            host = self.host_for(node)
            part = self.root / f"{folder.name}.{os.getpid()}.part"
            part.mkdir()
            (part / "name").write_text(node.name)
            (part / "host").write_text(host)
            part.rename(folder)
        # A login's environment and what the agent is told; none of this process's, which is marked to end with its launcher.
        env = {name: os.environ[name] for name in ("HOME", "LANG", "PATH", "TMPDIR", "USER") if name in os.environ}
        env |= self.here.environment(node) | {"DLROVER_TOKEN": self.here.token, "DLROVER_HOST": host}
        words = ("setsid", "--fork", "sh", "-c", REMOTE, "remote", self.here.cwd, str(folder), *self.here.command)
        await (await asyncio.create_subprocess_exec(*words, env=env)).wait()

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """End a node; its directory stays, because a name is used once."""
        with self.fenced(token):
            folder = self.folder(name)
            if not folder.exists():
                return
            asked = (folder / "deleted").exists()
            (folder / "deleted").touch()
        if grace_s > 0 and not asked:
            self.kill(folder, signal.SIGTERM)
        asyncio.get_running_loop().call_later(grace_s, self.kill, folder, signal.SIGKILL)

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        """Look again and again: all nodes first, then what has changed."""
        seen = self.look()
        yield Listed(tuple(seen.values()))
        while True:
            await asyncio.sleep(LOOK_S)
            before, seen = seen, self.look()
            for name, node in seen.items():
                if name not in before or before[name][:4] != node[:4]:
                    yield Changed(node)
            for name in before.keys() - seen.keys():
                yield Changed(Observation(name, "gone", host=before[name].host))

    async def room(self, group: str) -> int | None:
        """Hosts that share memory and processors never say no."""
        return None

    # ---- files, and processes that belong to nobody here

    def folder(self, name: str) -> Path:
        return self.root / hashlib.sha256(name.encode()).hexdigest()[:32]

    @contextlib.contextmanager
    def fenced(self, token: int) -> Iterator[None]:
        """One order at a time, and none of a master that has a successor."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "token").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if token < (newest := int(file.read() or 0)):
                raise Deposed(f"token {token}: a master with {newest} has given orders")
            file.truncate(0)
            file.write(str(token))
            file.flush()
            yield

    def host_for(self, node: NodeLaunch) -> str:
        """The host with the fewest nodes, of those that the node need not avoid. Where there are others alone it waits."""
        if not (fitting := [host for host in self.hosts if host not in node.avoid or len(self.hosts) == 1]):
            raise LaunchRefused(f"{AVOIDED}: {', '.join(self.hosts)}", permanent=False)
        busy = Counter(one.host for one in self.look().values())
        return min(fitting, key=lambda host: (busy[host], self.hosts.index(host)))

    def look(self) -> dict[str, Observation]:
        found = (self.seen(file.parent) for file in self.root.glob("*/name") if file.parent.suffix != ".part")
        return {node.name: node for node in found if node.phase != "gone"}

    def seen(self, folder: Path) -> Observation:
        name, host = (folder / "name").read_text(), (folder / "host").read_text()
        ended, pid, now = folder / "exit", folder / "pid", time.monotonic()
        if self.pid(folder) is not None or name not in self.lived:
            self.lived[name] = now
        if not ended.exists() and now - self.lived[name] < (SHELL_S if pid.exists() else START_S):
            return Observation(name, "running" if pid.exists() else "pending", host=host)
        if (folder / "deleted").exists():
            return Observation(name, "gone", host=host)
        if not ended.exists():  # nobody is left to say how it ended
            return Observation(name, "failed", -1, "it vanished, with the shell that ran it", host)
        code, age_us = int(ended.read_text()), int((time.time() - ended.stat().st_mtime) * 1e6)
        return Observation(
            name, "failed" if code else "succeeded", code, f"exit code {code}", host, age_us=max(0, age_us)
        )

    def pid(self, folder: Path) -> int | None:
        """The process that is the node, if it lives."""
        with contextlib.suppress(OSError, ValueError):
            pid, born = (folder / "pid").read_text().split()
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            return int(pid) if fields[0] not in {b"Z", b"X"} and fields[19].decode() == born else None
        return None

    def kill(self, folder: Path, number: int) -> None:
        if (pid := self.pid(folder)) is not None:
            os.kill(pid, number)
