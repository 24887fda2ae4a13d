"""The same scripts under `torchrun` and under `dlrover-run`: what a script sees, where its output goes, how its end is told.

What differs on purpose is listed here, with the reason, and in docs/from-torchrun.md; everything else must be equal.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from running import BIN, BOUND_S, SCRIPTS

# Of a rank's environment: ours alone (None under torchrun), or another value for the same purpose.
DIFFERS = {
    "FOLDER": "the test's own",
    "_": "the shell's word for the command",
    "MASTER_ADDR": "the address of this generation's store; torchrun names it localhost",
    "MASTER_PORT": "a free port, another one for every generation",
    "TORCHELASTIC_RUN_ID": "drawn at random, unless --rdzv-id is given",
    "TORCHELASTIC_ERROR_FILE": "an absolute path; under torchrun relative if --log-dir is",
    "DLROVER_AGENT_SOCKET": "where the step signal goes",
    "DLROVER_GROUP": "whose program it is, in a job of several groups",
    "DLROVER_PLACE": "which node of its group",
    "DLROVER_LOCAL_NODE": "marks what belongs to a node of this host",
    "DLROVER_RUN_MARK": "marks what belongs to this run, so that nothing is left behind",
    "GLIBC_TUNABLES": "copies of 16 MiB and more, as those of checkpoints, go past the caches",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "is_available() must not initialise CUDA in the process that workers are forked from",
    "RES_OPTIONS": "a question to a name server that is lost costs 1 s and not 5",
    "TORCH_FR_BUFFER_SIZE": "torch's flight recorder, by which a hang is explained",
    "TORCHINDUCTOR_CACHE_DIR": "torch sets it, to its own default, as soon as torch._dynamo is imported: earlier here",
}

# Of the other facts.
FACTS_DIFFER = {
    "environment": "compared by DIFFERS",
    "stdin": "/dev/null: workers come and go, and a restarted one would read the rest",
    "descriptors": "for the step signal, what is measured beside it, and the file into which stacks would go",
    "warnings": "torch is imported already, so the filters it sets are there: see the test of warnings",
    "ignored": "glibc's own two signals (32, 33), ignored by posix_spawn, are not counted",
    "handlers": "compared without them too",
}
GLIBC_SIGNALS = 0b11 << 31

# They share what they launch, which the first of them waits for.
pytestmark = [pytest.mark.xdist_group("parity"), pytest.mark.timeout(300)]


class Launch(NamedTuple):
    """One line for both launchers."""

    options: tuple[str, ...]
    program: tuple[str, ...]
    env: Mapping[str, str] = {}


SCRIPT = str(SCRIPTS / "parity.py")
FAILS = ("-r", "3", "--max-restarts", "0")
QUICK = {"DLROVER_WARM": "core"}  # for those in which only the end matters
OF_A_KIND = pytest.mark.nightly(reason="an exception and a signal stand for the other ends in make test")
BY_PATH = pytest.mark.nightly(
    reason="test_dlrover_run.py has a --run-path, and here a script stands for it in make test"
)
PATH = pytest.param("path", marks=BY_PATH)
ENDS = [pytest.param("exit", marks=OF_A_KIND), "raise", pytest.param("record", marks=OF_A_KIND), "signal"]
LAUNCHES = {
    "script": Launch(("-t", "3", "--max-restarts", "3"), (SCRIPT, "--exercise", "${local_rank}", "$$x", "--", "-r")),
    "module": Launch(
        (
            *("-r", "0:1,1:2", "-t", "0:2,1:1", "--role", "trainer", "--local-ranks-filter", "1"),
            *(
                "--duplicate-stdout-filters",
                "apple,raw",
                "--virtual-local-rank",
                "--signals-to-handle",
                "SIGTERM,SIGUSR1",
            ),
            *("--max-restarts", "1", "-m"),
        ),
        ("parity", "--lr=1"),
        {"PYTHONPATH": str(SCRIPTS), "CUDA_VISIBLE_DEVICES": "5,GPU-7", "OMP_NUM_THREADS": "3"},
    ),
    "path": Launch(("--max-restarts", "0", "--run-path"), (SCRIPT, "--lr=1")),
    "program": Launch(
        ("--max-restarts", "0", "--no-python", "-r", "1"),
        ("sh", "-c", 'echo "$0 $RANK $LOCAL_RANK $WORLD_SIZE $1"', "${local_rank}", "$$x"),
        {"PET_TEE": "0:1", **QUICK},
    ),
    "exit": Launch(FAILS, (SCRIPT, "--end", "exit"), QUICK),
    "raise": Launch(FAILS, (SCRIPT, "--end", "raise"), QUICK),
    "record": Launch(FAILS, (SCRIPT, "--end", "record"), QUICK),
    "signal": Launch(FAILS, (SCRIPT, "--end", "signal"), QUICK),
}


class Told(NamedTuple):
    """What one launch left behind."""

    code: int
    out: str
    err: str
    facts: dict[int, dict[str, Any]]
    files: dict[str, str]
    folder: Path


def launched(folder: Path, launcher: str, name: str) -> Told:
    """Run it to its end."""
    launch, place = LAUNCHES[name], folder / f"{launcher}-{name}"
    place.mkdir()
    line = [str(BIN / launcher), "--standalone", "--nproc-per-node", "2", "--log-dir", str(place / "logs")]
    if launcher == "dlrover-run":
        line += ["--state-dir", str(place / "state"), "--job-id", name]
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("PET_", "TORCH", "OMP_", "DLROVER"))
    }
    run = subprocess.run(
        [*line, *launch.options, *launch.program],
        env={**inherited, **launch.env, "FOLDER": str(place)},
        cwd=folder,
        input="a line of input\n",
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    facts = {int(one.stem[-1]): json.loads(one.read_text()) for one in place.glob("parity-*.json")}
    return Told(run.returncode, run.stdout, run.stderr, facts, kept(place / "logs"), place)


def kept(logs: Path) -> dict[str, str]:
    """The log files below the run's own folder, empty ones left out."""
    found = {}
    for path in logs.rglob("*.log"):
        run, *rest = path.relative_to(logs).parts
        assert "_" in run
        if text := path.read_text():
            found["/".join(rest)] = text
    return found


Pair = tuple[Told, Told]


class Pairs(dict[str, Pair]):
    """Every launch under both, made when a test asks for it: theirs, ours. Side by side, as most of it is importing torch."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Pair:
        with ThreadPoolExecutor(2) as pool:
            theirs, ours = pool.map(
                lambda launcher: launched(self._folder, launcher, name), ("torchrun", "dlrover-run")
            )
        self[name] = theirs, ours
        return self[name]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """What the launches told."""
    return Pairs(tmp_path_factory.mktemp("parity"))


def environment(told: Told, rank: int) -> dict[str, str]:
    """What must be equal of a rank's environment."""
    return {key: value for key, value in told.facts[rank]["environment"].items() if key not in DIFFERS}


# ---- what a script sees


@pytest.mark.parametrize("name", ["script", "module", PATH])
def test_every_variable_is_there_with_its_value(pairs: Pairs, name: str) -> None:
    """Each rank has each variable that torchrun gives, equal but for those listed; and no more than those listed."""
    theirs, ours = pairs[name]
    for rank in (0, 1):
        assert environment(ours, rank) == environment(theirs, rank)
        assert set(theirs.facts[rank]["environment"]) <= set(ours.facts[rank]["environment"])
        mine = ours.facts[rank]["environment"]
        assert Path(mine["TORCHELASTIC_ERROR_FILE"]).is_absolute()
        assert "DLROVER_TOKEN" not in mine
    if name == "module":
        assert [ours.facts[rank]["environment"]["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["5", "GPU-7"]
        assert ours.facts[1]["environment"]["LOCAL_RANK"] == "0"
        assert ours.facts[1]["environment"]["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1"


@pytest.mark.parametrize("name", ["script", "module"])
def test_a_script_cannot_tell_the_launchers_apart(pairs: Pairs, name: str) -> None:
    """Arguments, `__main__`, paths, streams, signals, mask, limits, session, priority, threads: all as under torchrun."""
    theirs, ours = pairs[name]
    for rank in (0, 1):
        expected, found = (
            {key: value for key, value in one.facts[rank].items() if key not in FACTS_DIFFER} for one in (theirs, ours)
        )
        assert found == expected
        assert found["leads_session"]
        assert handlers(ours, rank) == handlers(theirs, rank)
        assert ignored(ours, rank) == ignored(theirs, rank)
        assert theirs.facts[rank]["warnings"] == [
            one for one in ours.facts[rank]["warnings"] if one in theirs.facts[rank]["warnings"]
        ]
        assert len(ours.facts[rank]["descriptors"]) <= len(theirs.facts[rank]["descriptors"]) + 4
        assert (theirs.facts[rank]["stdin"], ours.facts[rank]["stdin"]) == ("pipe", "device")


def handlers(told: Told, rank: int) -> dict[str, str]:
    """What is done about each signal."""
    return dict(told.facts[rank]["handlers"])


def ignored(told: Told, rank: int) -> int:
    """The mask of ignored signals, as the kernel has it."""
    return int(told.facts[rank]["ignored"], 16) & ~GLIBC_SIGNALS


@BY_PATH
def test_run_path_runs_the_script_as_main(pairs: Pairs) -> None:
    """Under both it is ``__main__`` with its arguments; torchrun runs it inside a process of multiprocessing's, we do not."""
    theirs, ours = pairs["path"]
    for rank in (0, 1):
        for fact in ("argv", "name", "file", "cwd", "leads_group"):
            if fact == "leads_group":
                assert ours.facts[rank][fact]  # torchrun leaves these workers in its own group: Ctrl-C hits them twice
            else:
                assert ours.facts[rank][fact] == theirs.facts[rank][fact]


def test_what_scripts_do_works_alike(pairs: Pairs) -> None:
    """Collectives, the store, data loaders by fork and spawn, children of their own, threads: same results; exit handlers ran."""
    theirs, ours = pairs["script"]
    for rank in (0, 1):
        assert ours.facts[rank]["done"] == theirs.facts[rank]["done"]
        assert ours.facts[rank]["done"]["sum"] == 3.0
        assert (ours.folder / f"atexit-{rank}").exists()
    assert ours.facts[0]["done"]["child"] == ["__mp_main__", "__mp_main__"]
    assert ours.facts[0]["done"]["loader_spawn"] == [0, 1, 4, 9]


# ---- where its output goes


def shown(text: str) -> list[str]:
    """The workers' lines on a console: the order of ranks is chance, of a rank's own lines it is not."""
    ours = [line for line in text.splitlines() if re.match(r"(\[\w+\]:)?(out|apple|err|pear|raw|\d) ", line)]
    return sorted(ours, key=lambda line: line[-1] if line[-1] in "01" else "")


@pytest.mark.parametrize("name", ["script", "module", PATH, "program"])
def test_output_goes_to_the_same_places(pairs: Pairs, name: str) -> None:
    """Console with prefixes, files in the same folders with the same text, filtered ones too, by redirects, tee and filters."""
    theirs, ours = pairs[name]
    assert shown(ours.out) == shown(theirs.out)
    assert shown(ours.err) == shown(theirs.err)
    assert {place: sorted(text.splitlines()) for place, text in ours.files.items()} == {
        place: sorted(text.splitlines()) for place, text in theirs.files.items()
    }
    assert (ours.code, theirs.code) == (0, 0)
    if name == "module":
        assert ours.files["attempt_0/filtered_stdout.log"] == "[trainer1]:apple of 1\n[trainer1]:raw of 1\n"


# ---- how its end is told


@pytest.mark.parametrize("name", ENDS)
def test_failures_have_one_exit_status(pairs: Pairs, name: str) -> None:
    """However rank 1 fails, the launcher's status is 1; its exit handlers ran, or not, alike; rank 0 was stopped."""
    theirs, ours = pairs[name]
    assert (ours.code, theirs.code) == (1, 1)
    for rank in (0, 1):
        assert (ours.folder / f"atexit-{rank}").exists() == (theirs.folder / f"atexit-{rank}").exists()
    assert ours.files["attempt_0/1/stderr.log"] == theirs.files["attempt_0/1/stderr.log"]


@pytest.mark.parametrize(
    ("name", "theirs_says", "ours_says"),
    [
        pytest.param("exit", "exitcode  : 3 ", "exitcode : 3", marks=OF_A_KIND),
        ("raise", "exitcode  : 1 ", "ValueError: bad batch 17"),  # torchrun tells the exception only with @record
        pytest.param(
            "record", "RuntimeError: cannot open shard 9", "RuntimeError: cannot open shard 9", marks=OF_A_KIND
        ),
        ("signal", "Signal 11 (SIGSEGV)", "exitcode : -11 (killed by SIGSEGV)"),
    ],
)
def test_the_summary_says_at_least_as_much(pairs: Pairs, name: str, theirs_says: str, ours_says: str) -> None:
    """Who, where, how and why, the root cause first; and whatever torchrun's summary knows."""
    theirs, ours = pairs[name]
    assert theirs_says in theirs.err
    summary = ours.err[ours.err.index("dlrover-run: root cause:") :]
    assert ours_says in summary
    for field in ("time", "host", "rank", "exitcode", "logs"):
        assert re.search(rf"^ +{field} +: \S", summary, re.MULTILINE), field
    assert "rank      : 1 (local_rank: 1)" in theirs.err
    assert re.search(r"rank +: 1 \(local rank 1, node worker-0-0\)", summary)
    assert "pear of 1" in summary
