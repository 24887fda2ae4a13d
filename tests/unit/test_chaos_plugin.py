"""The pytest plugin, in runs inside the run: what it prints, what it refuses, and that it is not there until it is used.

The simulation is replaced by one that breaks a promise whenever a worker and a master are killed: the real one has its own tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from dlrover_core.sim.faults import Fault
from dlrover_core.sim.scenario import Plan, Scenario, plan_of

pytest_plugins = ["pytester"]

SRC = Path(__file__).parents[2] / "src"
PLUGIN = ("-p", "dlrover_core.testing.plugin")

FAKE = """
import sys, types
import pytest
from dlrover_core.sim.run import Broken, Run
from dlrover_core.rules.model import MODEL
from dlrover_core.testing.swarm import draw

def simulate(plan, *, watch=(), **options):
    simulate.plans.append(plan)
    kinds = [fault.kind for fault in plan.faults]
    if "kill_worker" in kinds and "crash_master" in kinds:
        raise Broken(f"of {len(kinds)} faults two are bad", 57, "NodeJoined(node='worker-1-1')")
    hash = str(len(simulate.plans)) if "hand_over" in kinds else plan.token()
    return Run(plan, "succeeded", "", MODEL.new(), log_hash=hash, goodput=0.9, hits={(one, "training"): 1 for one in kinds})

simulate.plans = []
sys.modules["dlrover_core.sim.simulation"] = types.SimpleNamespace(simulate=simulate)

@pytest.fixture
def plans():
    return simulate.plans
"""
SURVIVES = """
import pytest
from dlrover_core.sim.scenario import Scenario

@pytest.mark.chaos(seeds=40, faults=["kill_worker", "crash_master", "kill_node", "drop"])
def test_survives(chaos):
    assert chaos.simulate(Scenario(nodes=8)).outcome == "succeeded"
"""
TWO = "step 3: kill_worker 1\n  step 9: crash_master 2"


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder for runs inside the run, with the fake simulation."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    # Runs in processes of their own must find the packages as this one does.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SRC), str(SRC / "adapters"), str(SRC / "backends")]))
    pytester.makeconftest(FAKE)
    monkeypatch.setitem(sys.modules, "dlrover_core.sim.simulation", None)
    return pytester


def run(inner: pytest.Pytester, *args: str) -> pytest.RunResult:
    """One run inside this process."""
    return inner.runpytest_inprocess(*PLUGIN, "--strict-markers", "--strict-config", "-p", "no:cacheprovider", *args)


def token_of(result: pytest.RunResult) -> str:
    """The token in the command that a failure printed."""
    found = re.search(r"--chaos-replay (\S+)", result.stdout.str())
    assert found is not None
    return found[1]


def test_a_failure_says_all(inner: pytest.Pytester) -> None:
    """Seed, least faults, the promise and its event, and a command that replays just that; which indeed fails again."""
    inner.makepyfile(test_it=SURVIVES)
    result = run(inner)
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [
            r"chaos: base seed 0, 1 tests",
            r".*Broken: of 2 faults two are bad \(record 57.*",
            r"-+ chaos -+",
            r"seed \d+, number \d+: \d+ faults, shrunk to 2 in \d+ replays",
            r"  .*: (kill_worker|crash_master) \d+.*",
            r"  .*: (kill_worker|crash_master) \d+.*",
            r"scenario: Scenario\(nodes=1, steps=200\)",
            r"broken: of 2 faults two are bad",
            r"  at record 57: NodeJoined\(node='worker-1-1'\)",
            r"replay: pytest test_it.py::test_survives --chaos-replay chaos1-.*",
            r"chaos: base seed 0, 1 tests, \d+ seeds, \d+ faults struck",
        ]
    )
    token = token_of(result)
    assert {fault.kind for fault in plan_of(token).faults} == {"kill_worker", "crash_master"}
    assert 0 <= plan_of(token).seed - zlib.crc32(b"test_it.py::test_survives") < 40
    again = run(inner, "test_it.py::test_survives", "--chaos-replay", token)
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["a replay, seed *", "broken: of 2 faults two are bad"])
    again.stdout.no_fnmatch_line("*shrunk*")


def test_the_same_seeds_every_time(inner: pytest.Pytester) -> None:
    """What is found depends on the test's id and the base seed alone."""
    inner.makepyfile(test_it=SURVIVES)
    assert token_of(run(inner)) == token_of(run(inner))
    assert token_of(run(inner)) != token_of(run(inner, "--chaos-seed", "1000000"))


def test_once_per_seed(inner: pytest.Pytester) -> None:
    """Each seed is drawn once, in order, out of the kinds that the marker allows; --chaos-seeds overrides the number."""
    inner.makepyfile(
        """
        import pytest

        @pytest.mark.chaos(seeds=7, faults=["kill_node", "drop"])
        def test_one(chaos, plans):
            before = len(plans)
            run = chaos.simulate()
            assert plans[before:] == [run.plan]
            assert {fault.kind for fault in run.plan.faults} <= {"kill_node", "drop"}

        def test_two(chaos, plans):
            assert [one.seed - plans[0].seed for one in plans] == list(range(len(plans)))
            print("there were", len(plans))
        """
    )
    result = run(inner, "-s")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*there were 7*", "chaos: base seed 0, 2 tests, 8 seeds, * faults struck"])
    run(inner, "-s", "--chaos-seeds", "3").stdout.fnmatch_lines(["*there were 3*"])


def test_coverage_is_printed(inner: pytest.Pytester) -> None:
    """With -v the matrix of fault kinds and states is printed."""
    inner.makepyfile(
        "import pytest\n\n@pytest.mark.chaos(seeds=3, faults=['drop'])\ndef test_it(chaos):\n    chaos.simulate()\n"
    )
    run(inner, "-v").stdout.re_match_lines([r" +training", r"  drop +\d+"])
    run(inner).stdout.no_re_match_line(r"  drop")


def test_what_the_test_asserts(inner: pytest.Pytester) -> None:
    """An assertion of the test itself is a promise as well: shrunk to no faults where it holds for none of the plans."""
    inner.makepyfile(
        """
        import pytest
        from dlrover_core.sim.scenario import Scenario

        @pytest.mark.chaos(seeds=40, faults=["drop"])
        def test_fast(chaos):
            run = chaos.simulate(Scenario(nodes=8))
            assert run.goodput >= 0.95
        """
    )
    result = run(inner)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E * assert 0.9 >= 0.95", "*number 1: * shrunk to 0 in *", "  no faults at all", "broken: AssertionError at *"]
    )


def test_pytest_outcomes(inner: pytest.Pytester) -> None:
    """A test that skips is skipped at once; one that calls pytest.fail has failed, and is shrunk."""
    inner.makepyfile(
        """
        import pytest

        @pytest.mark.chaos(seeds=40)
        def test_skips(chaos):
            pytest.skip("not here")

        @pytest.mark.chaos(seeds=40)
        def test_fails(chaos):
            chaos.simulate(faults=[])
            pytest.fail("by hand")
        """
    )
    result = run(inner)
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["  no faults at all"])


def test_what_is_printed(inner: pytest.Pytester) -> None:
    """Of all that the seeds have printed only the words of the shrunk failure are shown."""
    inner.makepyfile(
        """
        import pytest

        @pytest.mark.chaos(seeds=40, faults=["kill_worker", "crash_master", "kill_node", "drop"])
        def test_it(chaos):
            print("a run begins")
            chaos.simulate()
        """
    )
    result = run(inner)
    result.assert_outcomes(failed=1)
    assert result.stdout.str().count("a run begins") == 1 + 1  # in the source that is shown


def test_not_the_plan(inner: pytest.Pytester) -> None:
    """A failure that depends on something else than the plan is told to."""
    inner.makepyfile(
        """
        from dlrover_core.sim.faults import Fault

        def test_it(chaos, plans):
            chaos.simulate(faults=[Fault("step 1", "drop")])
            assert len(plans) > 3
        """
    )
    result = run(inner)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["run once more it did not fail: *"])


def test_several_simulations(inner: pytest.Pytester) -> None:
    """Where the second simulation of a test fails, its token replays the second."""
    inner.makepyfile(
        """
        from dlrover_core.sim.faults import Fault
        from dlrover_core.sim.scenario import Scenario

        def test_it(chaos, plans):
            chaos.simulate(Scenario(nodes=2), faults=[])
            print("first", plans[-1].scenario.nodes)
            kinds = ["drop", "kill_worker", "drop", "crash_master"]
            chaos.simulate(Scenario(nodes=3), [Fault(f"step {n}", kind) for n, kind in enumerate(kinds, 1)])
        """
    )
    result = run(inner)
    result.assert_outcomes(failed=1)
    token = token_of(result)
    assert token.endswith("@2")
    result.stdout.fnmatch_lines(["*4 faults, shrunk to 2 in *", "  step 2: kill_worker 0", "  step 4: crash_master 0"])
    again = run(inner, "--chaos-replay", token, "-s")
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["*first 2"])


def test_regressions_come_first(inner: pytest.Pytester) -> None:
    """A token of the file is replayed before any seed, in the test it names or in all, and told with what it once was."""
    bad = Plan("engine", Scenario(), (Fault("step 3", "kill_worker", 1), Fault("step 9", "crash_master", 2)), 9).token()
    inner.makepyfile(test_it=SURVIVES, test_other="def test_other(chaos):\n    chaos.simulate(faults=[])\n")
    inner.path.joinpath("CHAOS_REGRESSIONS").write_text(f"{bad} test_it.py::test_survives  # the second death\n")
    result = run(inner)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        ["a regression is back: the second death", *(f"*{one.strip()}" for one in TWO.split("\n"))]
    )
    inner.path.joinpath("CHAOS_REGRESSIONS").write_text(f"{bad}\n")
    run(inner).assert_outcomes(failed=2)
    inner.path.joinpath("CHAOS_REGRESSIONS").write_text("")
    inner.makeini("[pytest]\nchaos_regressions = old/tokens.txt\n")
    result = run(inner)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*chaos_regressions: *old/tokens.txt*"])


def test_two_logs_of_one_plan(inner: pytest.Pytester) -> None:
    """--chaos-check-determinism runs each plan twice, and tells logs that differ."""
    inner.makepyfile(
        """
        import pytest

        @pytest.mark.chaos(seeds=3, faults=["drop"])
        def test_same(chaos, plans):
            chaos.simulate()
            assert plans[-1] == plans[-2]

        @pytest.mark.chaos(seeds=3, faults=["hand_over"])
        def test_differs(chaos):
            chaos.simulate()
        """
    )
    result = run(inner, "--chaos-check-determinism")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*one plan, two logs: *", "replay: pytest *::test_differs --chaos-replay * --chaos-*"])
    test, _, token, option = re.findall(r"^replay: pytest (\S+) (\S+) (\S+) (\S+)$", result.stdout.str(), re.MULTILINE)[
        0
    ]
    run(inner, test, "--chaos-replay", token, option).assert_outcomes(failed=1)


def test_what_writes_its_own_plan(inner: pytest.Pytester) -> None:
    """A story that fails says why in one line, and which command tells it again: the same test, under the same seeds."""
    inner.makepyfile(
        """
        def test_story(chaos):
            with chaos.story(nodes=1, steps=5) as story:
                story.at("step 9").kill_worker()
        """
    )
    result = run(inner, "--chaos-seed", "7")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*- chaos -*",
            "broken: the story goes otherwise: step 9: kill_worker 0: its moment never came",
            "  at record *: *",
            "replay: pytest test_*.py::test_story --chaos-seed 7",
        ]
    )


def test_budget(inner: pytest.Pytester) -> None:
    """No seed is begun after the budget, at least one is run, and the summary says what was cut short."""
    inner.makepyfile(
        """
        import pytest
        from dlrover_core.testing import plugin

        class Clock:
            now = 0.0

            def monotonic(self):
                self.now += 25.0
                return self.now

        @pytest.fixture(autouse=True)
        def clock(monkeypatch):
            monkeypatch.setattr(plugin, "time", Clock())

        @pytest.mark.chaos(seeds=40, faults=["drop"])
        def test_it(chaos):
            chaos.simulate()
        """
    )
    result = run(inner, "--chaos-budget", "1m")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["chaos: *, 3 seeds, *; 1 tests were cut short by --chaos-budget"])
    assert "cut short" not in run(inner).stdout.str()


def test_kept(inner: pytest.Pytester) -> None:
    """--chaos-keep leaves what was printed, the log and a timeline of the shrunk failure, by test and seed."""
    inner.makepyfile(test_it=SURVIVES)
    result = run(inner, "--chaos-keep", "kept")
    (folder,) = inner.path.joinpath("kept").iterdir()
    result.stdout.fnmatch_lines([f"kept: kept/{folder.name}"])
    assert token_of(result) in (folder / "plan.txt").read_text()
    assert (folder / "timeline.mmd").read_text().startswith("gantt\n")
    assert [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] == []


def test_not_kept(inner: pytest.Pytester) -> None:
    """Where nothing can be written, the failure is told all the same."""
    inner.makepyfile(test_it=SURVIVES)
    inner.path.joinpath("kept").write_text("a file")
    result = run(inner, "--chaos-keep", "kept")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Broken: of 2 faults two are bad*", "replay: *", "not kept: *kept*"])
    result.stdout.no_fnmatch_line("*FileExistsError*")
    result.stdout.no_fnmatch_line("E *NotADirectoryError*")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--chaos-seeds", "0"), "*--chaos-seeds: at least 1 seed, got 0"),
        (("--chaos-seeds", "many"), "*--chaos-seeds: not a whole number: 'many'"),
        (("--chaos-seed", "1.5"), "*--chaos-seed: not a whole number: '1.5'"),
        (("--chaos-budget", "60 minutes"), "*--chaos-budget: not a duration such as 60s, 5m or 1h: '60 minutes'"),
        (("--chaos-budget", "0s"), "*--chaos-budget: not a duration*"),
        (("--chaos-replay", "seed7"), "*--chaos-replay: a replay token begins with 'chaos1-', this is 'seed7'*"),
        (("--chaos-replay", "chaos1-AAAAAAAA"), "*--chaos-replay: the replay token is damaged*"),
    ],
)
def test_wrong_options(inner: pytest.Pytester, args: tuple[str, str], told: str) -> None:
    """A value that means nothing is a usage error that says what would."""
    inner.makepyfile(test_it=SURVIVES)
    result = run(inner, *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([told])


@pytest.mark.parametrize(
    ("marker", "told"),
    [
        ("seeds=0", "*test_it.py::test_it: seeds is a number of at least 1, got 0"),
        ("200", "*the marker chaos has seeds=... and faults=..., not 200"),
        ("kinds=['drop']", "*the marker chaos has seeds=... and faults=..., not kinds"),
        ("faults=['burn_down']", "*no fault is called 'burn_down'; there are kill_worker, *"),
    ],
)
def test_wrong_markers(inner: pytest.Pytester, marker: str, told: str) -> None:
    """A marker that means nothing is refused before anything runs."""
    inner.makepyfile(test_it=f"import pytest\n\n@pytest.mark.chaos({marker})\ndef test_it(chaos):\n    pass\n")
    result = run(inner)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([told])


def test_wrong_markers_of_workers(inner: pytest.Pytester) -> None:
    """Under -n such a test fails with the same words."""
    inner.makepyfile("import pytest\n\n@pytest.mark.chaos(200)\ndef test_it(chaos):\n    pass\n")
    result = inner.runpytest_subprocess(*PLUGIN, "-n1")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*the marker chaos has seeds=... and faults=..., not 200"])


def test_async_tests(inner: pytest.Pytester) -> None:
    """A coroutine is no test of chaos, and fails with a word about why, with no plugin for such tests needed."""
    inner.makepyfile("async def test_it(chaos):\n    chaos.simulate()\n")
    result = run(inner)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a test of chaos is a plain function*"])


def test_somebody_elses_fixture(inner: pytest.Pytester) -> None:
    """Whoever has a fixture of the same name keeps it."""
    inner.makepyfile(
        "import pytest\n\n@pytest.fixture\ndef chaos():\n    return 3\n\ndef test_it(chaos):\n    assert chaos == 3\n"
    )
    result = run(inner)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("chaos: *")


def test_inert(inner: pytest.Pytester) -> None:
    """Without a test that uses it, nothing is printed, nothing loaded but the plugin, and broken files are nobody's business."""
    inner.makeconftest("")
    inner.path.joinpath("CHAOS_REGRESSIONS").write_text("broken\n")
    inner.makepyfile(
        """
        import sys

        def test_it():
            ours = {name for name in sys.modules if name.startswith("dlrover_core")}
            assert ours <= {"dlrover_core", "dlrover_core.testing", "dlrover_core.testing.plugin"}, ours
            assert "msgpack" not in sys.modules and "asyncio" not in sys.modules
        """
    )
    result = inner.runpytest_subprocess(
        *PLUGIN, "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:logging", "-p", "no:anyio"
    )
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*chaos: *")


def test_workers(inner: pytest.Pytester) -> None:
    """Under -n the same seeds are run, found, told and kept as without."""
    inner.makepyfile(test_it=SURVIVES, test_other="def test_other(chaos):\n    chaos.simulate(faults=[])\n")
    result = inner.runpytest_subprocess(*PLUGIN, "-n2", "--chaos-keep", "kept", "--chaos-budget", "60s")
    result.assert_outcomes(failed=1, passed=1)
    assert token_of(result) == token_of(run(inner))
    result.stdout.fnmatch_lines(
        ["*shrunk to 2 in*", "kept: *", "chaos: base seed 0, 2 tests, * seeds, * faults struck"]
    )


def test_cheap(inner: pytest.Pytester) -> None:
    """Beside what pytest itself loads, the plugin costs less than 10 ms of CPU."""
    code = "import pytest, argparse, time; t = time.process_time(); import dlrover_core.testing.plugin; "
    code += "print(time.process_time() - t)"
    took = min(
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60).stdout)
        for _ in range(3)
    )
    assert took < 0.010


@pytest.mark.parametrize("args", [(), PLUGIN, ("-p", "dlrover_chaos")])
def test_installed(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> None:
    """As an installed entry point it is loaded once, also for those who name it; -p no:dlrover_chaos leaves it out."""
    inner.makeconftest("")
    info = inner.path / "site" / "ours-1.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1\n")
    info.joinpath("entry_points.txt").write_text("[pytest11]\ndlrover_chaos = dlrover_core.testing.plugin:installed\n")
    inner.makepyfile("def test_it(chaos):\n    assert chaos.seed\n")
    monkeypatch.setenv("PYTHONPATH", f"{info.parent}{os.pathsep}{os.environ['PYTHONPATH']}")
    inner.runpytest_subprocess(*args).assert_outcomes(passed=1)
    if not args:
        inner.runpytest_subprocess("-p", "no:dlrover_chaos").assert_outcomes(errors=1)
