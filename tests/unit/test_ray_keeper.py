"""The actor of a node, as far as it needs no Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, threading
from dlrover_backends.ray import keeper
folder = os.getcwd()
print("begun", flush=True)
sys.stdin.readline()
looked = threading.Event()
sleep = keeper.time.sleep
def told(seconds):
    if not looked.is_set():
        looked.set()
        print("waits", flush=True)
    sleep(seconds)
keeper.time.sleep = told
keeper.enter_again()
print(os.getcwd() == folder and os.listdir())
"""


@pytest.mark.parametrize("is_late", [False, True])
def test_a_folder_that_ray_unpacks_anew(tmp_path: Path, is_late: bool) -> None:
    """A process that has begun in the old one is in the new one before it starts anything; it waits until that is there."""
    folder = tmp_path / "_ray_pkg_1"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        folder.rmdir()
        if not is_late:
            folder.mkdir()
            (folder / "train.py").touch()
        child.stdin.write("\n")
        child.stdin.flush()
        if is_late:
            assert child.stdout.readline() == "waits\n"
            whole = tmp_path / "whole"
            whole.mkdir()
            (whole / "train.py").touch()
            whole.rename(folder)
        assert child.stdout.readline() == "['train.py']\n"
    assert child.returncode == 0
