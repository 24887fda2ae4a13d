"""The list of what a script's workers import: for which script and which packages it holds, and what is in it."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.agent import import_list
from dlrover_adapters.agent.config import LaunchConfig, Mode
from dlrover_adapters.agent.import_list import ImportList, Learner, path_of, read, refuse, write
from dlrover_adapters.agent.import_watch import ImportWatch
from dlrover_adapters.cli import workers

LIST = ImportList(("json", "decimal"), ("mine",), ("HOME",), origins=("/lib/json.py", "/lib/decimal.py"))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script."""
    path = tmp_path / "train.py"
    path.write_text("import json, decimal, mine\n")
    return path


def config(script: Path, **settings: object) -> LaunchConfig:
    """Its workers' start."""
    made = LaunchConfig((str(script),), imports=str(script.parent / "imports"))
    return made._replace(**settings)  # type: ignore[arg-type]


def test_a_list_is_read_as_it_was_written(script: Path) -> None:
    """By its file, in a folder of this user's alone."""
    path = path_of(config(script))
    assert read(path, []) is None
    write(path, LIST, [], [str(script)])
    assert read(path, []) == LIST
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("change", ["script", "script gone", "packages", "version", "half", "no list"])
def test_a_list_holds_for_what_is_there(script: Path, tmp_path: Path, change: str) -> None:
    """Another text of the script, other packages, a damaged file: as if there were none."""
    site = tmp_path / "site-packages"
    site.mkdir()
    path, paths = path_of(config(script)), [str(tmp_path), str(site)]
    write(path, LIST, paths, [str(script)])
    assert read(path, paths) == LIST
    if change == "script":
        script.write_text("import json\n")
    elif change == "script gone":
        script.unlink()
    elif change == "packages":
        (site / "new-1.0.dist-info").mkdir()
        os.utime(site, ns=(1, 1))
    elif change == "version":
        raw = json.loads(Path(path).read_text())
        Path(path).write_text(json.dumps({**raw, "version": 0}))
    else:
        Path(path).write_text(Path(path).read_text()[:-9] if change == "half" else "[]")
    assert read(path, paths) is None


def test_each_script_has_its_own(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its real path and how it is named; without a warm process, and unless it is asked for, there is none."""
    mine = path_of(config(script))
    link = script.with_name("link.py")
    link.symlink_to(script)
    assert path_of(config(link)).rpartition("-")[2] == mine.rpartition("-")[2]
    others = [path_of(config(script.with_name("b.py"))), path_of(config(script, argv=("train",), mode=Mode.MODULE))]
    monkeypatch.setenv("DLROVER_WARM", "core")
    assert len({mine, *others, path_of(config(script))}) == 4
    assert path_of(config(script, preload=None)) == ""
    assert path_of(config(script, imports="")) == ""
    assert path_of(config(script, mode=Mode.COMMAND)) == ""


def test_a_removed_folder_has_none(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is started anew all the same, and says itself what it misses."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert path_of(config(script, argv=("train",), mode=Mode.MODULE)) == ""
    assert path_of(config(script, argv=("train.py",))) == ""
    assert path_of(config(script))


@pytest.mark.parametrize(("keep", "left"), [(1, ("json",)), (0, ())])
def test_what_was_refused_is_remembered(script: Path, keep: int, left: tuple[str, ...]) -> None:
    """Wholly, or from one module on; where there is no list, or no disk, nothing happens."""
    path = path_of(config(script))
    refuse(path, "nothing there yet")
    write(path, LIST, [], [str(script)])
    refuse(path, "it leaves threads running", keep)
    found = read(path, [])
    assert found is not None
    assert found.modules == left
    assert (found.cut if keep else found.refused) == "it leaves threads running"


def test_old_lists_go(script: Path) -> None:
    """There are never more than so many."""
    folder = script.parent / "imports"
    for number in range(import_list.LISTS_MAX + 3):
        write(str(folder / f"{number}.json"), LIST, [], [str(script)])
        os.utime(folder / f"{number}.json", (number, number))
    write(str(folder / "newest.json"), LIST, [], [str(script)])
    names = {one.name for one in folder.iterdir()}
    assert len(names) == import_list.LISTS_MAX
    assert "newest.json" in names
    assert "0.json" not in names


def module(name: str, origin: str) -> types.ModuleType:
    """One that came from this file."""
    made = types.ModuleType(name)
    made.__spec__ = types.SimpleNamespace(name=name.removeprefix("alias_"), origin=origin)  # type: ignore[assignment]
    return made


@pytest.fixture
def run(script: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Learner, str]:
    """A worker whose script has imported modules of all kinds by its first step."""
    path = path_of(config(script))
    mine = script.with_name("mine.py")
    mine.write_text("")
    for folder in ("/env/site-packages", "/env/dist-packages"):
        monkeypatch.syspath_prepend(folder)
    learner = Learner(path, ImportWatch(), ahead=["known_one"])
    for name, origin in {
        "fine": "/env/site-packages/fine.py",
        "alias_fine": "/env/site-packages/fine.py",
        "mine": str(mine),
        "named_otherwise": "/env/site-packages/setuptools/_named_otherwise/__init__.py",
        "package_of.fine": "/env/site-packages/package_of/fine/__init__.py",
        "package_of.native": "/env/site-packages/package_of/native.cpython-311-x86_64-linux-gnu.so",
        "made_by_hand": "",
        "built": "built-in",
        "dlrover_adapters.torch.huggingface": "/env/site-packages/dlrover_adapters/torch/huggingface.py",
        "known_one": "/env/dist-packages/known_one.py",
        "by_its_own_path": "/other/site-packages/by_its_own_path.py",
    }.items():
        monkeypatch.setitem(sys.modules, name, module(name, origin))
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "blocked", None)
    learner._names = tuple(sys.modules)
    return learner, path


def test_only_installed_modules_are_listed(run: tuple[Learner, str], script: Path) -> None:
    """By their own names; the script's own modules, and those that it forbids, are known as such."""
    learner, path = run
    learner.learn()
    found = read(path, tuple(sys.path))
    assert found is not None
    assert set(found.modules) == {"fine", "known_one", "package_of.fine", "package_of.native"}
    assert dict(zip(found.modules, found.origins, strict=True))["fine"] == "/env/site-packages/fine.py"
    assert {"mine", "blocked", "by_its_own_path"} <= set(found.local)
    assert not {"made_by_hand", "built", "__main__"} & set(found.local)
    sources = {one[0] for one in json.loads(Path(path).read_text())["sources"]}
    assert {str(script), str(script.with_name("mine.py"))} <= sources


def test_a_forked_worker_begins_without_touching_the_names_of_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in pages that it shares with the warm process until then: copying those would cost each restart milliseconds."""

    class Untouched(dict[str, types.ModuleType]):
        def __iter__(self) -> Any:
            raise AssertionError("the names are read")

        keys = items = __iter__

    with monkeypatch.context() as patch:
        patch.setattr(sys, "modules", Untouched(sys.modules))
        for path in ("", "list.json"):
            Learner(path, ImportWatch(), ahead=["known_one"])
        Learner("", ImportWatch()).stepped()


def test_what_the_framework_found_out_is_listed(run: tuple[Learner, str]) -> None:
    """Also where nothing else is new."""
    learner, path = run
    for told in ((), ("vectors: avx2",), ("vectors: avx512",)):
        learner._found = lambda told=told: told  # type: ignore[misc]
        learner.learn()
    found = read(path, tuple(sys.path))
    assert found is not None
    assert found.found == ("vectors: avx2", "vectors: avx512")


def test_a_list_grows_and_a_cut_one_does_not(run: tuple[Learner, str], script: Path) -> None:
    """What a later run imports besides is added, unless it is known why the list ends where it does."""
    learner, path = run
    write(path, LIST, sys.path, [str(script)])
    learner.learn()
    found = read(path, sys.path)
    assert found is not None
    assert found.modules[:2] == LIST.modules
    assert {"fine", "known_one"} <= set(found.modules)
    write(path, LIST._replace(cut="why"), sys.path, [str(script)])
    learner.learn()
    assert read(path, sys.path) == LIST._replace(cut="why")


@pytest.mark.parametrize(
    ("text", "modules", "ahead"),
    [("auto", (), True), ("", (), False), ("none", None, False), ("a, b", ("a", "b"), False), ("auto,a", ("a",), True)],
)
def test_what_is_typed_wins(text: str, modules: tuple[str, ...] | None, *, ahead: bool) -> None:
    """`--preload`: by what was learnt, torch alone, no warm process, these, or both."""
    assert workers.preload(text) == modules
    assert workers.ahead(text) == ahead
