"""Bugs, planted one at a time in a copy of the tree: tests must notice each. ``make campaign NAME=mutations``.

A mutation is a piece of a source file, what it is replaced by, and the tests that must then fail; they pass without it, which
is looked at, too. The copy lies in a temporary folder; the tree itself is not touched. A trial that "broke its promise" is a
mutation that survived: write the test that it lacks. ``python -m tools.mutations WORD`` tries those that have the word.
"""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tools.trials import ROOT, Found, Patience, Trials, _tried

JOBS = 1
LIMIT_S = 600.0
COPIED = ("benchmarks", "docs", "examples", "src", "tests", "tools")
FAILED, PASSED = 1, 0
ETCD = ("tests/integration/test_log_etcd.py",)


class Mutation(NamedTuple):
    """One bug: ``old`` stands in ``file`` once. ``tests``: files or tests, one of which must fail with ``new`` in its place."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def source(self, tree: Path) -> Path:
        """The file in a tree."""
        return tree / "src" / self.file

    def planted(self, text: str) -> str:
        """The text of the file with the bug. Raises AssertionError where it has changed."""
        count = text.count(self.old)
        assert count == 1, f"{self.file}: {self.old!r} stands there {count} times, not once: mend tools/mutations.py"
        return text.replace(self.old, self.new)


def _unit(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/test_{name}.py" for name in names)


def _of(file: str, tests: Sequence[str], *changes: tuple[str, str]) -> list[Mutation]:
    return [Mutation(file, old, new, tuple(tests)) for old, new in changes]


MUTATIONS: tuple[Mutation, ...] = (
    # ---- kernel
    *_of(
        "dlrover_core/kernel/engine.py",
        _unit("engine"),
        ("            return Resend(known.last + 1)", "            return None"),
        ("known.replies[-1 - back]", "known.replies[-back]"),
        ("now = max(now, self.state.at)", "now = int(now)"),
        ("if origin.boot == known.retired:", "if origin.boot is None:"),
        ("        self._bytes = size\n", "        self._bytes = self._bytes\n"),
        ("        self._sealed.append(batch.payload)", "        self._sealed[:] = [batch.payload]"),
    ),
    *_of(
        "dlrover_core/kernel/codec.py",
        _unit("codec", "events"),
        ("seq - back if back else 0", "back"),
        ("for step in range(version, kind.version):", "for step in range(version + 1, kind.version):"),
    ),
    *_of(
        "dlrover_core/kernel/state.py",
        _unit("state_codec"),
        ('if "lasts" not in field.metadata)', "if field.name)"),
    ),
    # ---- job
    *_of(
        "dlrover_core/job/incidents.py",
        _unit("failures", "recovery", "explain_incident"),
        ("earliest = min(incident.cause.at, death.at)", "earliest = incident.cause.at"),
        ("return sum(at > now - us(3600.0) for at in self.charged(name).software)", "return len(self.charged(name).software)"),
        ("return 0 if served else self.relaunches.get(place, 0)", "return self.relaunches.get(place, 0)"),
        ("            account.restarts -= 1", "            account.restarts -= 0"),
    ),
    *_of(
        "dlrover_core/job/hosts.py",
        _unit("hosts_memory", "hosts_rules"),
        ("[strike for strike in self.strikes if strike.at > now - us(WINDOW_S)]", "list(self.strikes)"),
        ("    known.until = min(known.until, record.at)", "    known.until = max(known.until, record.at)"),
    ),
    *_of(
        "dlrover_core/job/world.py",
        _unit("world"),
        ("slice_.offers.get(node, ()) if address != fact.store)", "slice_.offers.get(node, ()))"),
        ("    slice_.offers.pop(fact.node, None)", "    slice_.offers.get(fact.node)"),
    ),
    *_of(
        "dlrover_core/job/crash_loops.py",
        _unit("haste"),
        ("(self.early + 1 if early else 0)", "(self.early + 1)"),
    ),
    *_of(
        "dlrover_core/job/lineage.py",
        _unit("lineage", "shards"),
        ("            now, limit = base", "            now, limit = base[0], None"),
        ("        del self.known[self._at(of, step + 1) : self._at(generation, 0)]\n", ""),
        ("        if same is not None and not self._alike(same, told, resumed=resumed):", "        if same is None:"),
        ("            return consumed_alike(before, now)\n        makers", "            return True\n        makers"),
    ),
    # ---- rules
    *_of(
        "dlrover_core/rules/shards.py",
        _unit("shards"),
        ("    if known is None or known.terms != terms:", "    if known is None:"),
        ("    elif fact.cut:\n", "    elif not fact.cut:\n"),
    ),
    *_of(
        "dlrover_core/rules/worlds.py",
        _unit("world", "sets"),
        ("    if not all(coupling.over(state, name)", "    if not any(coupling.over(state, name)"),
        (" or len(offers) >= STORES_MAX:", ":"),
        ("    if found.many <= len(world.members):", "    if found.many < len(world.members):"),
    ),
    *_of(
        "dlrover_core/rules/plans.py",
        _unit("planning"),
        ("return None if drops.count >= TRIES_MAX", "return None if drops.count > TRIES_MAX"),
    ),
    *_of(
        "dlrover_core/rules/save_on_failure.py",
        _unit("checkpoints"),
        ("    if ended.waiting and now < at:", "    if now < at:"),
    ),
    *_of(
        "dlrover_core/rules/hosts.py",
        _unit("hosts_memory", "hosts_rules"),
        ("if len(ours) >= max(1, len(hosts) // SHARE):", "if len(ours) > len(hosts):"),
        ("return all(len(one.recent(now)) * LEMON <= mine", "return any(len(one.recent(now)) * LEMON <= mine"),
        ("spec.quarantine_s * 2 ** min(times, 16)", "spec.quarantine_s"),
    ),
    *_of(
        "dlrover_core/rules/incidents.py",
        _unit("failures"),
        ("fact.generation == newest.generation and not fact.asked:", "fact.generation == newest.generation:"),
    ),
    *_of(
        "dlrover_core/rules/silence.py",
        _unit("nodes"),
        ("        return max(by_silence, by_mass)", "        return by_silence"),
    ),
    *_of(
        "dlrover_core/rules/budgets.py",
        _unit("budget"),
        ("if command.node in state.budgets.spent or not state.job.live:", "if not state.job.live:"),
    ),
    # ---- logs
    *_of(
        "dlrover_core/logs/tables.py",
        _unit("log_tables", "log_sqlite", "log_tail"),
        ("PRAGMA synchronous = FULL", "PRAGMA synchronous = OFF"),
        ("WHERE (SELECT token FROM jobs WHERE id = ?7) = ?3", "WHERE (SELECT token FROM jobs WHERE id = ?7) >= ?3"),
        ("    upto = min(upto, head(db, job) - 1)", "    upto = min(upto, head(db, job))"),
        ("            if _snapshot_crc(snapshot) == crc:", "            if crc:"),
    ),
    *_of(
        "dlrover_core/logs/tail.py",
        _unit("log_tail", "broken_disk"),
        ("            self.cut(self.size)\n            raise", "            raise"),
    ),
    *_of(
        "dlrover_core/logs/recovery.py",
        _unit("log_tail"),
        (" is not None and copy.token >= self.row.token:", " is not None:"),
    ),
    *_of(
        "dlrover_core/logs/archive.py",
        _unit("archive"),
        ("if copy is None or copy.payload != batch.payload:", "if copy is None:"),
    ),
    # ---- etcd
    *_of(
        "adapters/dlrover_adapters/etcd/leadership.py",
        (*_unit("etcd_leadership"), *ETCD),
        ("conditions = [self._fence, etcd.modified(", "conditions = [etcd.modified("),
        ("        if head == (batch.last_seq, batch.token, batch.counter) or (", "        if ("),
        ("        if head == (batch.last_seq, batch.token, batch.counter) or (", "        if head.seq == batch.last_seq or ("),
    ),
    *_of(
        "adapters/dlrover_adapters/etcd/lease.py",
        _unit("etcd_lease"),
        ("min(ttl, timing.ttl_s) - timing.margin_s\n", "min(ttl, timing.ttl_s)\n"),
        (" or reply.kvs[0].create_revision != self._token:", ":"),
    ),
    # ---- publication of checkpoints
    *_of(
        "dlrover_core/checkpoint/slots.py",
        _unit("slots"),
        ("coupled and call - one.call >= lag and", "coupled and call - one.call >= lag - 1 and"),
    ),
    *_of(
        "dlrover_core/checkpoint/arena.py",
        _unit("arena"),
        ("self._set(self._slot(slot) + _STATE, EMPTY)", "self._slot(slot)"),
        ("if state == stamp.step + 1 and words == self._header(slot, stamp):", "if state == stamp.step + 1:"),
    ),
    *_of(
        "dlrover_core/checkpoint/retention.py",
        _unit("retention"),
        ("going = complete[:-keep]", "going = complete[: len(complete) - keep + 1]"),
    ),
    *_of(
        "dlrover_core/checkpoint/agreement.py",
        _unit("agreement"),
        ("for one in found)}, reverse=True):", "for one in found)}):"),
        ("if Refusal(piece.kind, place, piece.rank, piece.generation, piece.step) not in failed:", "if piece:"),
    ),
    *_of(
        "adapters/dlrover_adapters/checkpoint/seal.py",
        _unit("seal"),
        ("            if size != file.size:", "            if size > file.size:"),
        ('            place.rm(f"{folder}/{SEAL}")\n            raise', "            raise"),
    ),
)  # fmt: skip


class Nursery:
    """Copies of the tree, one for each trial that runs at the same time, for bugs to be planted in."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._home = Path(tempfile.mkdtemp(prefix="mutations-"))
        self._made = self._planted = 0
        self._lock = threading.Lock()
        self._sound: set[tuple[str, ...]] = set()

    def close(self) -> None:
        """Remove all copies."""
        shutil.rmtree(self._home, ignore_errors=True)

    @contextmanager
    def tree(self) -> Iterator[Path]:
        """A copy that nobody else uses."""
        try:
            found = self._free.get_nowait()
        except queue.Empty:
            found = self._copy()
        try:
            yield found
        finally:
            self._free.put(found)

    def _copy(self) -> Path:
        with self._lock:
            self._made += 1
            home = self._home / str(self._made)
        skipped = shutil.ignore_patterns("__pycache__", ".*_cache")
        for name in COPIED:
            shutil.copytree(ROOT / name, home / name, ignore=skipped)
        for one in ROOT.iterdir():
            if one.is_file() and not one.name.startswith("."):
                shutil.copy2(one, home / one.name)
        return home

    @contextmanager
    def planted(self, mutation: Mutation, tree: Path) -> Iterator[None]:
        """The bug is in the tree."""
        source = mutation.source(tree)
        sound = source.read_text(encoding="utf-8")
        self._write(source, mutation.planted(sound))
        try:
            yield
        finally:
            self._write(source, sound)

    def _write(self, source: Path, text: str) -> None:
        """Compiled code is told from newer code by size and whole seconds: each writing gets seconds of its own."""
        with self._lock:
            self._planted += 1
            number = self._planted
        source.write_text(text, encoding="utf-8")
        os.utime(source, (time.time(), time.time() - 1_000_000 + number))

    def trial(self, mutation: Mutation, patience: Patience) -> Found:
        """Plant a bug. Raises AssertionError where it survives, or where the tests fail without it."""
        with self.tree() as tree:
            if mutation.tests not in self._sound:
                code, said = _run(tree, mutation.tests, patience)
                assert code == PASSED, f"{' '.join(mutation.tests)} fail without any bug: {said}"
                self._sound.add(mutation.tests)
            with self.planted(mutation, tree):
                code, said = _run(tree, mutation.tests, patience)
        told = f"{mutation.file}: {mutation.old.strip()!r} -> {mutation.new.strip()!r}"
        assert code != PASSED, f"survived: {told}"
        assert code == FAILED, f"pytest ended with {code}: {told}: {said}"
        return {"mutation": told, "killed_by": said}


def _run(tree: Path, tests: Sequence[str], patience: Patience) -> tuple[int, str]:
    """Pytest's exit status, and the first test that failed, or the end of what it said."""
    paths = os.pathsep.join(str(tree / "src" / one) for one in ("", "adapters", "backends"))
    strange = ("DLROVER", "PYTEST", "PYTHON")
    env = {key: value for key, value in os.environ.items() if not key.startswith(strange)} | {"PYTHONPATH": paths}
    line = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly", *tests]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(line, cwd=tree, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            patience.until(lambda: process.poll() is not None, f"pytest {' '.join(tests)}", LIMIT_S)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        said = output.read().splitlines()
    failed = [one.removeprefix("FAILED ").partition(" - ")[0] for one in said if one.startswith(("FAILED", "ERROR"))]
    return process.returncode, failed[0] if failed else " | ".join(said[-3:])


def campaign(first: int, count: int, machine: Mapping[str, Any], jobs: int) -> int:
    """Plant all, or ``count`` from ``first`` on, in turn; how many survived."""
    listed = hashlib.blake2b(repr(MUTATIONS).encode(), digest_size=8).hexdigest()
    numbers = range(first, min(len(MUTATIONS), first + count))
    trials = Trials(
        "mutations",
        numbers,
        {"list": listed},
        machine,
        lambda found: {"killed": sum("killed_by" in one for one in found)},
    )
    nursery = Nursery()
    try:
        return trials.run(lambda number, patience: nursery.trial(MUTATIONS[number], patience), jobs)
    finally:
        nursery.close()


def main(words: Sequence[str]) -> int:
    """Try those that are named, and write no result."""
    chosen = [one for one in MUTATIONS if not words or any(word in f"{one.file} {one.old}" for word in words)]
    nursery, survived = Nursery(), 0
    try:
        for number, one in enumerate(chosen):
            _, found = _tried(lambda _, patience, one=one: nursery.trial(one, patience), number, Patience())
            survived += "broken" in found
            print(
                found.get("broken") or f"killed: {found['mutation']} by {found['killed_by']}",
                f"({found['took_s']} s)",
                flush=True,
            )
    finally:
        nursery.close()
    print(f"{len(chosen) - survived} of {len(chosen)} were noticed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
