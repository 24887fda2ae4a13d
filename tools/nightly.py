"""Runs all tests that `make test` leaves out, and says at its end what it ran: ``python -m tools.nightly``; `make nightly`.

The tests that are marked `nightly`, of all three suites; then unit tests and stories on each other Python that is here. An
interpreter is looked for on the PATH and among pyenv's. It gets an environment of its own under `.venv-pythons`, from the
group `elsewhere`, without torch: tests that need a library which is not there are skipped, and the last table says how many.
What each Python ran last is written to `tests/pythons.json`, which is committed: the classifiers may name no other Python.
Then the tests of the Ray backend run with older releases of Ray, each in an environment that has all else from this one.
Campaigns and benchmarks are not part of it: `make campaign`, `make bench`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.12", "3.13", "3.14")
"""Those that the classifiers name, but for the one that `make test` runs, and the next one."""
RAYS = ("2.58", "2.59")
"""Those that the extra `ray` allows, but for the newest, which `make test` runs."""
RAY_TESTS = ("backend", "job", "detached", "token", "head")
EXTRAS = "http,etcd,archive,diagnosis"
SIDE_BY_SIDE = ("-n", "3", "--dist", "loadgroup")
NO_TESTS = 5
RECORD = ROOT / "tests" / "pythons.json"


@dataclass
class Told:
    """What became of one part."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    """Why, and how often."""
    took_s: float = 0.0
    absent: str = ""
    """Why it was not run."""

    @property
    def good(self) -> bool:
        """Nothing failed. What could not be run is told, and is no failure."""
        return not self.counts["failed"]

    def line(self) -> str:
        """As a line of the last table."""
        if self.absent:
            return f"{self.name:<28} not here: {self.absent}"
        found = ", ".join(f"{self.counts[one]} {one}" for one in ("passed", "failed", "skipped") if self.counts[one])
        return f"{self.name:<28} {found or 'no test'} in {self.took_s:.0f} s"


def read(report: Path, told: Told) -> None:
    """Count what pytest wrote down."""
    for case in ET.parse(report).iter("testcase"):  # noqa: S314  # ours
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            told.counts["failed"] += 1
        elif skip is not None:
            told.counts["skipped"] += 1
            told.skipped[(skip.get("message") or "").removeprefix("Skipped: ")] += 1
        else:
            told.counts["passed"] += 1


def part(name: str, words: Sequence[str], python: str = sys.executable) -> Told:
    """Run pytest with these words. A run that ends badly without a failed test counts as one."""
    told, began = Told(name), time.monotonic()
    print(f"== {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        line = [python, "-m", "pytest", "-q", f"--junitxml={report}", *words]
        code = subprocess.run(line, cwd=ROOT, check=False).returncode
        if report.exists():
            read(report, told)
    if code not in (0, NO_TESTS) and told.good:
        told.counts["failed"] += 1
    told.took_s = time.monotonic() - began
    return told


def interpreter(version: str, places: Sequence[Path] | None = None) -> str:
    """One that runs; empty: none is here. A name on the PATH may be a stub that only says where it is not."""
    if places is None:
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        found = [Path(one) for one in [shutil.which(f"python{version}")] if one]
        places = [*found, *sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
    for one in places:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([str(one), "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return str(one)
    return ""


def environment(version: str, python: str) -> str:
    """The interpreter of an environment for that Python, made if need be. Raises `CalledProcessError`."""
    folder = ROOT / ".venv-pythons" / version
    inside = str(folder / "bin" / "python")
    if not (folder / ".installed").exists():
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [inside, "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, "--upgrade", "pip>=25.1"], check=True)
        subprocess.run(
            [*pip, "--editable", f"{ROOT}[{EXTRAS}]", "--group", f"{ROOT}/pyproject.toml:elsewhere"], check=True
        )
        (folder / ".installed").touch()
    return inside


def elsewhere(version: str, words: Sequence[str]) -> Told:
    """Unit tests and stories on another Python."""
    name = f"Python {version}: unit, stories"
    python = interpreter(version)
    if not python:
        return Told(name, absent=f"no python{version} on the PATH or among pyenv's")
    try:
        inside = environment(version, python)
    except subprocess.CalledProcessError as error:
        return Told(name, absent=f"its environment could not be made ({error})")
    suites = ("tests/unit", "tests/chaos", "-m", "not nightly", "--any-skip", "-n", "2", "-p", "no:cacheprovider")
    told = part(name, [*suites, *words], inside)
    if not words:
        record(version, told)
    return told


def below(version: str) -> str:
    """The interpreter of an environment with that Ray, and all else from this one, made if need be.

    Raises `CalledProcessError`.
    """
    folder = ROOT / ".venv-pythons" / f"ray-{version}"
    inside = str(folder / "bin" / "python")
    if not (folder / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        paths = {"base": str(folder), "platbase": str(folder)}
        here, there = sysconfig.get_path("purelib"), sysconfig.get_path("purelib", "venv", paths)
        Path(there, "below.pth").write_text(f"import site; site.addsitedir({here!r})\n", encoding="utf-8")
        pip = [inside, "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, f"ray=={version}.*"], check=True)
        # For the programs beside the interpreter.
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], check=True)
        (folder / ".installed").touch()
    return inside


def with_ray(version: str, words: Sequence[str]) -> Told:
    """The tests of the Ray backend with another Ray; those of the night, too."""
    name = f"Ray {version}: its backend"
    try:
        inside = below(version)
    except subprocess.CalledProcessError as error:
        return Told(name, absent=f"its environment could not be made ({error})")
    suites = [f"tests/integration/test_ray_{one}.py" for one in RAY_TESTS]
    return part(name, [*suites, "-p", "no:cacheprovider", *words], inside)


def record(version: str, told: Told, path: Path = RECORD) -> None:
    """Write down what a Python ran: when, on which commit, how many tests. A part that was not run leaves the record as it is."""
    if told.absent:
        return
    line = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    known = json.loads(path.read_text()) if path.exists() else {}
    counts = {one: told.counts[one] for one in ("passed", "failed", "skipped")}
    known[version] = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit, **counts}
    ordered = {one: known[one] for one in sorted(known, key=lambda one: int(one.partition(".")[2]))}
    path.write_text(json.dumps(ordered, indent=2) + "\n")


def parts(words: Sequence[str]) -> list[Callable[[], Told]]:
    """Everything, in order."""
    suites = {
        "unit": ("tests/unit", "-m", "nightly"),
        "stories": ("tests/chaos", "-m", "nightly"),
        "integration, side by side": ("tests/integration", "-m", "nightly and not alone", *SIDE_BY_SIDE),
        "integration, alone": ("tests/integration", "-m", "nightly and alone"),
    }
    here = [lambda name=name, line=line: part(name, [*line, *words]) for name, line in suites.items()]
    pythons = [lambda version=version: elsewhere(version, words) for version in PYTHONS]
    return [*here, *pythons, *(lambda version=version: with_ray(version, words) for version in RAYS)]


def summary(found: Sequence[Told]) -> str:
    """What was run, what was not, and why tests were skipped."""
    lines = ["", "what was run:", *(f"  {one.line()}" for one in found)]
    for one in found:
        if one.skipped:
            lines += ["", f"skipped in {one.name}:"]
            lines += [f"  {count:>5} x {why}" for why, count in one.skipped.most_common()]
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Run all parts, whatever fails, and tell."""
    os.environ["DLROVER_TESTS_NIGHT"] = "1"  # properties are tried with all their examples: tests/unit/examples.py
    found = [one() for one in parts(words)]
    print(summary(found))
    return 0 if all(one.good for one in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
