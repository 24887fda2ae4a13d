"""The pytest plugin: the fixture and the marker ``chaos``, and options to try more seeds, and to replay one.

    @pytest.mark.chaos(seeds=200)
    def test_my_backend_survives(chaos):
        run = chaos.simulate(Scenario(nodes=64), backend=MyBackend)
        run.check(invariants.DEFAULT)

The test runs once per seed, with all other fixtures as they are, until it fails. Seeds follow from the test's id, so they are the
same on every machine and under any number of workers. Everything else is loaded when a test first uses the fixture.
"""

from __future__ import annotations

import argparse
import re
import shlex
import time
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dlrover_core.testing.chaos import Chaos, Found
    from dlrover_core.testing.regressions import Regression

SEEDS = 100
SHRINK_S = 60.0  # at least so long may shrinking take, longer where the budget is
MARKER = (
    "chaos(seeds=100, faults=...): run a test that takes the fixture `chaos` once per seed, with faults drawn out of `faults` "
    "(kinds by name; default: all)"
)
_NAME = "dlrover_core.testing.plugin"
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class _Installed:
    """What the entry point names. With ``-p dlrover_core.testing.plugin`` the module is there already, and twice is an error."""

    @staticmethod
    def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
        """Register the module, unless it is."""
        if not pluginmanager.has_plugin(_NAME):
            pluginmanager.import_plugin(_NAME)


installed = _Installed()


# ---- options


def _number(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}")
    return int(text)


def _seeds(text: str) -> int:
    if _number(text) < 1:
        raise argparse.ArgumentTypeError(f"at least 1 seed, got {text}")
    return int(text)


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([smh]?)", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"not a duration such as 60s, 5m or 1h: {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def _token(text: str) -> str:
    from dlrover_core.errors import PlanError
    from dlrover_core.testing.regressions import read_token

    try:
        read_token(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def pytest_addoption(parser: pytest.Parser) -> None:
    """One group. Values stay plain, so that they reach the workers of ``-n``."""
    group = parser.getgroup("chaos", "jobs under faults (dlrover-core)")
    add = group.addoption
    add("--chaos-seeds", type=_seeds, metavar="N", help="seeds per marked test, instead of what its marker says")
    add("--chaos-seed", type=_number, metavar="BASE", default=0, help="another BASE, other seeds (default: 0)")
    add("--chaos-replay", type=_token, metavar="TOKEN", help="run only this plan, which a failure has printed")
    add(
        "--chaos-budget", type=_duration, metavar="60s", help="begin no seed of a test once it has run so long: s, m, h"
    )
    add("--chaos-keep", metavar="DIR", help="of each failure, keep plan, log (JSON lines) and timeline (Mermaid) there")
    add("--chaos-check-determinism", action="store_true", help="run every plan twice: the logs must be the same")
    parser.addini(
        "chaos_regressions", "replay tokens that are run first (default: CHAOS_REGRESSIONS in the rootdir)", default=""
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known to --strict-markers."""
    config.addinivalue_line("markers", MARKER)


# ---- collection


_REGRESSIONS = pytest.StashKey["list[Regression]"]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse what is written wrong before anything runs; under ``-n``, whose workers may not, each such test does it."""
    if hasattr(config, "workerinput"):
        return
    chosen = [item for item in items if _takes_chaos(item)]
    for item in chosen:
        _marked(item)
    if chosen:
        _regressions(config)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Say the base seed, if anything depends on it."""
    many = sum(_takes_chaos(item) for item in items)
    return [f"chaos: base seed {config.option.chaos_seed}, {many} tests"] if many else []


def _takes_chaos(item: pytest.Item) -> bool:
    info = getattr(item, "_fixtureinfo", None)
    found = info.name2fixturedefs.get("chaos") if info is not None else None
    return found is not None and found[-1].func.__module__ == _NAME


def _marked(item: pytest.Item) -> tuple[int, tuple[str, ...] | None]:
    """How many seeds and which kinds the marker asks for: without one, a single seed of all kinds."""
    marker = item.get_closest_marker("chaos")
    if marker is None:
        return 1, None
    unknown = [*map(repr, marker.args), *sorted(set(marker.kwargs) - {"seeds", "faults"})]
    if unknown:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker chaos has seeds=... and faults=..., not {', '.join(unknown)}"
        )
    seeds, kinds = marker.kwargs.get("seeds", SEEDS), marker.kwargs.get("faults")
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise pytest.UsageError(f"{item.nodeid}: seeds is a number of at least 1, got {seeds!r}")
    if kinds is None:
        return item.config.option.chaos_seeds or seeds, None
    from dlrover_core.sim.faults import KINDS

    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    wrong = [repr(kind) for kind in kinds if kind not in KINDS]
    if wrong or not kinds:
        raise pytest.UsageError(f"{item.nodeid}: no fault is called {', '.join(wrong)}; there are {', '.join(KINDS)}")
    return item.config.option.chaos_seeds or seeds, kinds


def _regressions(config: pytest.Config) -> list[Regression]:
    if _REGRESSIONS not in config.stash:
        from dlrover_core.errors import PlanError
        from dlrover_core.testing.regressions import FILE, read

        named = config.getini("chaos_regressions")
        path = config.rootpath / (named or FILE)
        try:
            config.stash[_REGRESSIONS] = read(path) if named or path.is_file() else []
        except (OSError, PlanError) as error:
            raise pytest.UsageError(f"chaos_regressions: {error}") from error
    return config.stash[_REGRESSIONS]


# ---- running


_CHAOS = pytest.StashKey["Chaos"]()
_TOLD = pytest.StashKey["dict[str, Any]"]()


@pytest.fixture
def chaos(request: pytest.FixtureRequest) -> Chaos:
    """Jobs under faults: see `dlrover_core.testing.chaos.Chaos`."""
    from dlrover_core.testing.chaos import Chaos

    _, kinds = _marked(request.node)
    made = Chaos(_first_seed(request.node), kinds, twice=request.config.option.chaos_check_determinism)
    request.node.stash[_CHAOS] = made
    return made


def _first_seed(item: pytest.Item) -> int:
    return int(item.config.option.chaos_seed) + zlib.crc32(item.nodeid.encode())


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Put a hunt in place of a test that takes the fixture."""
    chaos = pyfuncitem.stash.get(_CHAOS, None)
    if chaos is None:
        return (yield)
    test = pyfuncitem.obj

    def hunted(**given: Any) -> None:
        __tracebackhide__ = True
        _hunt(pyfuncitem, chaos, lambda: _once(pyfuncitem.config, lambda: test(**given)))

    pyfuncitem.obj = hunted
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


def _once(config: pytest.Config, test: Callable[[], object]) -> None:
    """Run the test, and forget what runs before it have printed: of two hundred seeds only the one that fails is read."""
    __tracebackhide__ = True
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.read_global_capture()
    result = test()
    if hasattr(result, "close") and hasattr(result, "__await__"):
        result.close()
        pytest.fail("a test of chaos is a plain function: its jobs bring an event loop of their own", pytrace=False)


def _hunt(item: pytest.Function, chaos: Chaos, body: Callable[[], object]) -> None:
    __tracebackhide__ = True
    from dlrover_core.testing.chaos import hunt

    config, failures = item.config, (Exception, pytest.fail.Exception)
    seeds, _ = _marked(item)
    first, budget_s = _first_seed(item), config.option.chaos_budget or float("inf")
    began = time.monotonic()
    found, old = _replayed(item, chaos, body, failures)
    tried = 0
    if found is None and not config.option.chaos_replay:
        tried, found = hunt(
            chaos,
            body,
            range(first, first + seeds),
            failures=failures,
            enough=lambda: time.monotonic() - began >= budget_s,
            shrink_s=max(SHRINK_S, budget_s) if config.option.chaos_budget else SHRINK_S,
        )
    item.stash[_TOLD] = {
        "seeds": tried,
        "cut": found is None and tried < seeds and not config.option.chaos_replay,
        "hits": [[kind, state, many] for (kind, state), many in sorted(chaos.hits.items())],
        "text": [],
    }
    if found is not None:
        item.stash[_TOLD]["text"] = text = _text(item, found, old)
        text += _once_more(item, chaos, body, found, failures)
        raise found.error


def _replayed(
    item: pytest.Function, chaos: Chaos, body: Callable[[], object], failures: tuple[type[BaseException], ...]
) -> tuple[Found | None, Regression | None]:
    """The plan that was asked for, or else all that failed once, until one fails again."""
    __tracebackhide__ = True
    from dlrover_core.testing.chaos import replay
    from dlrover_core.testing.regressions import of, read_token

    if item.config.option.chaos_replay:
        return replay(chaos, body, *read_token(item.config.option.chaos_replay), failures), None
    for old in of(_regressions(item.config), item.nodeid):
        found = replay(chaos, body, old.plan, old.call, failures)
        if found is not None:
            return found, old
    return None, None


def _text(item: pytest.Function, found: Found, old: Regression | None) -> list[str]:
    """What a failure prints."""
    lines = [f"a regression is back: {old.why or old.token}"] if old is not None else []
    lines += found.lines()
    command = f"pytest {shlex.quote(item.nodeid)}"
    asked = item.config.option
    twice = " --chaos-check-determinism" if asked.chaos_check_determinism else ""
    if not found.token:
        # A story or a local job, which writes its own plan: the same seeds tell it again.
        command += f" --chaos-seed {asked.chaos_seed}" if asked.chaos_seed else ""
        command += f" --chaos-seeds {asked.chaos_seeds}" if asked.chaos_seeds else ""
        lines += [f"replay: {command}{twice}"]
    else:
        lines += [f"replay: {command} --chaos-replay {found.token}{twice}"]
        if old is None and not item.config.option.chaos_replay:
            from dlrover_core.testing.regressions import FILE, line

            named = item.config.getini("chaos_regressions") or FILE
            lines += [f"to replay it first from now on, add to {named}:", f"  {line(found.token, item.nodeid)}"]
    return lines


def _once_more(
    item: pytest.Function,
    chaos: Chaos,
    body: Callable[[], object],
    found: Found,
    failures: tuple[type[BaseException], ...],
) -> list[str]:
    """Run what was found again, so that it has the last word in what is captured, and in what is kept. What to say about it."""
    from dlrover_core.testing.chaos import replay
    from dlrover_core.testing.trace import keep

    place = item.config.option.chaos_keep
    if found.plan is None or not (found.replays or place):
        return []
    chaos.records = [] if place else None
    again = replay(chaos, body, found.plan, found.call, failures)
    told = [] if again is not None else ["run once more it did not fail: something else than the plan decides"]
    if place:
        name = re.sub(r"[^\w.-]+", "_", item.nodeid)[-100:]
        folder = Path(place) / f"{name}-{found.seed}"
        try:
            keep(folder, item.stash[_TOLD]["text"], chaos.records or [])
        except OSError as error:  # what was found is told all the same
            told.append(f"not kept: {error}")
        else:
            told.append(f"kept: {folder}")
    return told


# ---- reporting


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what was found to the report. The report travels from ``-n``'s workers with all that is plain in it."""
    report = yield
    told = item.stash.get(_TOLD, None)
    if told is not None and call.when == "call":
        report.chaos = told  # type: ignore[attr-defined]
        if report.failed and told["text"]:
            text = "\n".join(told["text"])
            section = getattr(report.longrepr, "addsection", None)
            if section is not None:
                section("chaos", text)
            else:
                report.sections.append(("chaos", text))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line, if any test was one of chaos; with ``-v`` the coverage matrix."""
    all_told = [
        report.chaos for reports in terminalreporter.stats.values() for report in reports if hasattr(report, "chaos")
    ]
    if not all_told:
        return
    from dlrover_core.testing.coverage import merged, table

    hits = merged({(kind, state): many for kind, state, many in told["hits"]} for told in all_told)
    seeds, cut = sum(told["seeds"] for told in all_told), sum(told["cut"] for told in all_told)
    terminalreporter.write_line(
        f"chaos: base seed {config.option.chaos_seed}, {len(all_told)} tests, {seeds} seeds, {hits.total()} faults struck"
        + (f"; {cut} tests were cut short by --chaos-budget" if cut else "")
    )
    if config.option.verbose > 0 and hits:
        for line in table(hits):
            terminalreporter.write_line(f"  {line}")
