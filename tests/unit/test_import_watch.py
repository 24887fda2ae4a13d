"""Watching imports: how long they take, what they read of the environment, and that nothing of the watch is left behind."""

from __future__ import annotations

import builtins
import importlib
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.agent import import_watch
from dlrover_adapters.agent.config import LaunchConfig
from dlrover_adapters.agent.import_list import Learner, path_of
from dlrover_adapters.agent.import_watch import WATCHED_S, ImportWatch, bootstrap, unwatchable
from dlrover_adapters.cli import workers

Install = Callable[[str, str], None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes a module with this text: in site-packages, or with a name that begins with ``my`` among the script's own."""
    site = tmp_path / "site-packages"
    site.mkdir()
    before = set(sys.modules)
    for folder in (tmp_path, site):
        monkeypatch.syspath_prepend(str(folder))

    def install(name: str, text: str) -> None:
        (tmp_path if name.startswith("my") else site).joinpath(f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    yield install
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def watch() -> Iterator[Callable[..., ImportWatch]]:
    """Begins a watch, which ends with the test."""
    begun: list[ImportWatch] = []

    def begin(**settings: object) -> ImportWatch:
        begun.append(ImportWatch(**settings))  # type: ignore[arg-type]
        begun[-1].begin()
        return begun[-1]

    yield begin
    for one in begun:
        one.end()


def test_it_leaves_nothing_behind(watch: Callable[..., ImportWatch]) -> None:
    """After its end the interpreter imports, and the environment answers, as before."""
    load, kind = bootstrap._find_and_load, type(os.environ)
    one = watch()
    assert bootstrap._find_and_load is not load
    one.end()
    one.end()
    assert bootstrap._find_and_load is load
    assert type(os.environ) is kind


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import system that has no such function."""
    monkeypatch.setattr(import_watch, "bootstrap", None)


def with_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is there, and is called with something else."""
    real = bootstrap._find_and_load
    monkeypatch.setattr(bootstrap, "_find_and_load", lambda spec: real(spec.name, spec))


def unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is there, and import statements go another way."""
    real = builtins.__import__
    monkeypatch.setattr(
        builtins, "__import__", lambda name, *rest: None if name == import_watch._TRIED else real(name, *rest)
    )


def with_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has replaced `os.environ`."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.fixture
def tried_anew() -> Iterator[None]:
    """What this process can watch is found out anew, before and after."""
    unwatchable.cache_clear()
    yield
    unwatchable.cache_clear()


@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize("strange", [without, with_another_shape, unused, with_another_environment])
def test_another_interpreter_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, strange: Callable[..., None]
) -> None:
    """Nothing is replaced, no list is made, scripts run as ever, and one line says so on the command line."""
    config = LaunchConfig(("train.py",), imports=str(tmp_path))
    with monkeypatch.context() as patch:
        strange(patch)
        load, kind = bootstrap._find_and_load, type(os.environ)
        one = ImportWatch()
        learner = Learner(str(tmp_path / "list.json"), one)
        learner.begin()
        assert (bootstrap._find_and_load, type(os.environ)) == (load, kind)
        assert learner.stepped() == 0
        assert not one.whole
        assert path_of(config) == ""
        assert workers.imports("auto", "folder") == ""
    said = capfd.readouterr().err
    assert said.startswith("dlrover-run: --preload auto does nothing in this interpreter: ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_this_interpreter_can_be_watched() -> None:
    """Every one that we promise: 3.10 to 3.14."""
    assert unwatchable() == ""
    assert workers.imports("auto", "folder") == "folder"
    assert workers.imports("torch", "folder") == ""


def test_a_script_without_a_step_is_watched_for_so_long(
    watch: Callable[..., ImportWatch], monkeypatch: pytest.MonkeyPatch, installed: Install, tmp_path: Path
) -> None:
    """Then everything is as it was, and a step that comes later makes no list."""
    installed("too_late", "")
    load, kind = bootstrap._find_and_load, type(os.environ)
    for use in (lambda: importlib.import_module("too_late"), lambda: os.environ.get("HOME"), lambda: list(os.environ)):
        one = watch()
        learner = Learner(str(tmp_path / "list.json"), one)
        one.until -= WATCHED_S
        assert use()
        assert (bootstrap._find_and_load, type(os.environ)) == (load, kind)
        assert not one.whole
        learner.stepped()
    assert not (tmp_path / "list.json").exists()


def test_another_thread_reads_the_environment_while_the_watch_ends(
    watch: Callable[..., ImportWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call has begun by the watch's class and goes on by the interpreter's."""
    monkeypatch.setenv("SEEN", "1")
    for call in (lambda: os.environ["SEEN"], lambda: os.environ.update(SEEN="1"), lambda: "SEEN" in set(os.environ)):
        one = watch()
        for name in ("was_read", "was_set", "enumerated"):
            monkeypatch.setattr(one, name, lambda _: one.end())  # noqa: B023  # called before the next turn
        call()
        one.end()
    assert os.environ["SEEN"] == "1"


def test_what_others_replace_meanwhile_stays_theirs(
    watch: Callable[..., ImportWatch], monkeypatch: pytest.MonkeyPatch, installed: Install
) -> None:
    """A hook of another library that calls ours, and another object as `os.environ`."""
    installed("after_the_end", "")
    one = watch()
    ours = bootstrap._find_and_load
    calls: list[str] = []

    def theirs(name: str, import_: Any) -> Any:
        calls.append(name)
        return ours(name, import_)

    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "_find_and_load", theirs)
        patch.setattr(os, "environ", dict(os.environ))
        one.end()
        assert bootstrap._find_and_load is theirs
        assert type(os.environ) is dict
        importlib.import_module("after_the_end")
        assert calls == ["after_the_end"]
    bootstrap._find_and_load = import_watch._original
    assert type(os.environ) is os._Environ


def test_imports_take_time_once(installed: Install, watch: Callable[..., ImportWatch]) -> None:
    """What one import needs of others is counted as a part of it, not twice; work between imports is not counted."""
    installed("inner_one", "import time\ntime.sleep(0.05)")
    installed("outer_one", "import inner_one, time\ntime.sleep(0.05)")
    one = watch()
    importlib.import_module("outer_one")
    assert 100_000 <= one.spent_us < 200_000 + 100_000
    spent = one.spent_us
    importlib.import_module("outer_one")
    assert one.spent_us - spent < 20_000


@pytest.mark.parametrize(
    "reading",
    ["os.environ['SET']", "os.getenv('SET')", "'SET' in os.environ", "os.environ.setdefault('SET', '1')"],
)
def test_a_module_that_reads_what_the_script_has_set(
    installed: Install, watch: Callable[..., ImportWatch], monkeypatch: pytest.MonkeyPatch, reading: str
) -> None:
    """It, and the module for whose sake it is imported, end the list; what was imported before stays in it."""
    monkeypatch.delenv("SET", raising=False)
    installed("harmless", "")
    installed("reader", f"import os\n{reading}")
    installed("needs_reader", "import reader")
    one = watch()
    os.environ["SET"] = "1"
    importlib.import_module("harmless")
    importlib.import_module("needs_reader")
    assert one.cut is not None
    place, why = one.cut
    kept = list(sys.modules)[:place]
    assert why.startswith("reader reads SET")
    assert "harmless" in kept
    assert not {"reader", "needs_reader"} & set(kept)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("copier", "import os\ncopy = dict(os.environ), {**os.environ}, os.environ.copy(), list(os.environ.items())"),
        ("another", "import os\nos.environ.get('ANOTHER')"),
        ("my_config", "import os\nos.environ['SET']"),
        ("excused", "import os\nos.environ['SET']"),
    ],
)
def test_what_reads_nothing_that_is_set(
    installed: Install, watch: Callable[..., ImportWatch], monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """Copies of the whole environment, other variables, modules of the script's own, and those that are put right."""
    monkeypatch.setenv("SET", "0")
    installed(name, text)
    one = watch(given=["SET"], excused=["excused"])
    importlib.import_module(name)
    assert one.cut is None


@pytest.mark.parametrize(
    "text",
    [
        "os.chdir('/')",
        "sys.modules['optional_one'] = types.ModuleType('optional_one')",
        "sys.modules['optional_one'] = None",
        "import my_preparation",
        "import my_preparation, my_program",
    ],
)
def test_what_a_script_does_before_its_next_imports(
    installed: Install, watch: Callable[..., ImportWatch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    """Another current folder, or a module made by hand: what is imported after it may see that, and is not listed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "optional_one", raising=False)
    installed("first_one", "import sys, types\nsys.modules['first_one.made'] = types.ModuleType('made')")
    installed("second_one", "import sys, types\nsys.modules['second_one.made'] = types.ModuleType('made')")
    installed("my_preparation", "import sys\nimport first_one\nsys.modules['optional_one'] = None")
    installed("my_program", "import second_one")
    one = watch()
    importlib.import_module("first_one")
    importlib.import_module("colorsys")
    assert one.cut is None
    exec(text, {"os": os, "sys": sys, "types": types})  # noqa: S102  # as a script has it
    importlib.import_module("second_one")
    assert one.cut is not None
    kept = list(sys.modules)[: one.cut[0]]
    assert "first_one" in kept
    assert "second_one" not in kept
    assert "optional_one" in one.cut[1] or "current folder" in one.cut[1]


def test_a_library_that_sets_what_it_reads(installed: Install, watch: Callable[..., ImportWatch]) -> None:
    """It does so in the zygote too. A module of the script's own that sets a variable is as good as the script."""
    installed("sets_and_reads", "import os\nos.environ['LIBRARY'] = '1'\nos.environ['LIBRARY']")
    installed("my_settings", "import os\nos.environ['MINE'] = '1'")
    installed("reads_mine", "import os\nos.environ['MINE']")
    one = watch()
    try:
        importlib.import_module("sets_and_reads")
        assert one.cut is None
        importlib.import_module("my_settings")
        importlib.import_module("reads_mine")
        assert one.sets == {"MINE"}
        assert one.cut is not None
    finally:
        for name in ("LIBRARY", "MINE"):
            os.environ.pop(name, None)


def test_a_change_that_comes_too_late_is_told(
    watch: Callable[..., ImportWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with the module that read the variable before the fork; never for one that did no harm in an earlier run."""
    told: list[tuple[str, str]] = []
    for name in ("LATE", "KNOWN", "UNREAD", "SAME"):
        monkeypatch.setenv(name, "0")
    read = {"LATE": "hub", "KNOWN": "hub", "SAME": "hub"}
    one = watch(read=read, harmless=["KNOWN"], conflicting=lambda *words: told.append(words))
    os.environ.update(KNOWN="1", UNREAD="1", SAME="0")
    assert told == []
    os.environ["LATE"] = "1"
    os.environ["LATE"] = "2"
    assert one.conflict == ("LATE", "hub")
    assert told == [("LATE", "hub")]


def test_a_failed_import_looks_as_ever(installed: Install, watch: Callable[..., ImportWatch]) -> None:
    """No frame of ours stands in its traceback."""
    installed("raises", "raise RuntimeError('at import')")
    watch()
    for name in ("raises", "is_not_there"):
        with pytest.raises((RuntimeError, ModuleNotFoundError)) as caught:
            exec(f"import {name}", {})  # noqa: S102  # an import statement, as a script has it
        shown = "".join(traceback.format_exception(caught.value))
        assert "agent/import_watch" not in shown
        assert "frozen importlib" not in shown


def test_a_worker_without_a_step_ends_as_ever(tmp_path: Path) -> None:
    """An interpreter may end, fork and start others while it is watched."""
    script = """
import os, subprocess, sys
from dlrover_adapters.agent.import_watch import ImportWatch
ImportWatch().begin()
os.environ["CHILD"] = "told"
said = subprocess.run([sys.executable, "-c", "import os; print(os.environ['CHILD'])"], capture_output=True, text=True)
if os.fork() == 0:
    import json
    os._exit(0 if os.environ["CHILD"] == "told" and type(os.environ) is os._Environ else 1)
print(said.stdout.strip(), os.wait()[1])
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (found.stdout, found.stderr) == ("told 0\n", "")
