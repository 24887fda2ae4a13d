"""What users install is what we wrote: the wheel holds the right tree and works away from the checkout."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "dlrover_core": ROOT / "src" / "dlrover_core",
    "dlrover_adapters": ROOT / "src" / "adapters" / "dlrover_adapters",
    "dlrover_backends": ROOT / "src" / "backends" / "dlrover_backends",
}
TIMEOUT_S = 100

pytestmark = pytest.mark.xdist_group("wheel")  # they share one, and where it is installed

IMPORT_ALL_OF_CORE = """
import importlib, pkgutil, dlrover_core
for one in pkgutil.walk_packages(dlrover_core.__path__, "dlrover_core."):
    if not one.name.startswith("dlrover_core.testing"):
        importlib.import_module(one.name)
"""


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def _closure(requirements: list[str]) -> set[str]:
    """The distributions that ``requirements`` need here, with all that those need. Extras are left out."""
    names: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None, requirement
        if "extra ==" in requirement or name[0] in names:
            continue
        try:
            found = importlib.metadata.distribution(name[0])
        except importlib.metadata.PackageNotFoundError:
            assert ";" in requirement, f"{requirement} is required but not installed here"  # for another Python
            continue
        names.add(name[0])
        waiting += found.requires or []
    return names


def _link(distributions: set[str], folder: Path) -> None:
    """Makes ``distributions``, and nothing else of this environment, importable from ``folder``."""
    folder.mkdir()
    for name in distributions:
        dist = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in dist.files or () if file.parts[0] not in {"..", "__pycache__"}}:
            (folder / top).symlink_to(Path(str(dist.locate_file(top))).resolve())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as a release would be, but with the build tools at hand."""
    out = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a clean environment that holds the wheel and the dependencies it declares."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    python = home / "venv" / "bin" / "python"
    (site,) = (home / "venv" / "lib").glob("python3*/site-packages")
    metadata = zipfile.ZipFile(wheel).read(f"{wheel.name.split('-py3')[0]}.dist-info/METADATA").decode()
    # Links to what is installed here, so that this needs no network; the versions are those of constraints.txt.
    _link(_closure(re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)), home / "dependencies")
    (site / "dependencies.pth").write_text(f"{home / 'dependencies'}\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    _run(*pip, wheel, cwd=home)
    return python


def test_tree(wheel: Path) -> None:
    """The wheel holds every file of the three packages, side by side, and nothing else."""
    expected = {
        f"{name}/{file.relative_to(folder)}"
        for name, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected


def test_licence(wheel: Path) -> None:
    """The licence travels with the wheel."""
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_imports(python: Path, tmp_path: Path) -> None:
    """All three packages import away from the checkout, and come from the wheel."""
    code = "import dlrover_core, dlrover_adapters, dlrover_backends as b; print(dlrover_core.__file__, b.__file__)"
    for path in _run(python, "-I", "-c", code, cwd=tmp_path).split():
        assert Path(path).is_relative_to(python.parents[1])


def test_core_needs_only_what_it_declares(python: Path, tmp_path: Path) -> None:
    """Every module of the core imports with the declared dependencies alone, no extra installed."""
    _run(python, "-I", "-c", IMPORT_ALL_OF_CORE, cwd=tmp_path)


def test_version(python: Path, tmp_path: Path) -> None:
    """`dlrover-run --version` names its distribution and ends with 0, also without any extra."""
    shown = _run(python.parent / "dlrover-run", "--version", cwd=tmp_path)
    assert f"dlrover-core {importlib.metadata.version('dlrover-core')}" in shown


@pytest.mark.parametrize("group", ["dlrover.backends", "dlrover.transports", "dlrover.logs", "dlrover.stores"])
def test_entry_points(group: str) -> None:
    """Every implementation we register under an entry point can be loaded where its extra is installed."""
    points = [
        one for one in importlib.metadata.entry_points(group=group) if one.dist and one.dist.name == "dlrover-core"
    ]
    assert points
    for point in points:
        made = point.load()
        assert isinstance(made, type) or (group == "dlrover.backends" and callable(made)), point
