import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrover_adapters.checkpoint.listing import COMPLETE, INCOMPLETE, delete, look, steps
from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.reader import StepReader
from dlrover_adapters.checkpoint.seal import seal


def killed_at(number: int, work: Callable[[], Any]) -> bool:
    """Do it in a child that is killed before its ``number``-th change of the file system; was it?"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: forking with threads about
        child = os.fork()
    if child == 0:
        left = [number]
        for name in ("write", "fsync", "fdatasync", "rename", "unlink", "rmdir", "mkdir", "open"):
            real = getattr(os, name)

            def counted(*args: Any, _real: Any = real, **options: Any) -> Any:
                left[0] -= 1
                if left[0] <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return _real(*args, **options)

            setattr(os, name, counted)
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_kill_at_any_point_never_leaves_something_taken_for_complete(tmp_path: Path) -> None:
    """Killed before any change of the file system while writing and sealing: the step is incomplete, or complete and whole.

    A second try, over what the first one left, succeeds.
    """
    from tests.unit.stored import sharded, state

    arenas = sharded(state(), 2)

    def work(place: Place) -> None:
        for arena in arenas:
            write_part(arena.view(), place, run="r")
        seal(place, 120, [0, 1])

    number, complete = 0, 0
    while True:
        number += 1
        place = Place(str(tmp_path / str(number)))
        alive = not killed_at(number, lambda place=place: work(place))
        for one in steps(place):
            if one.state == COMPLETE:
                complete += 1
                StepReader(place, 120).verify()
        if alive:
            break
        work(place)
        assert look(place, 120).state == COMPLETE
        StepReader(place, 120).verify()
    assert number > 25
    assert complete >= 1


def test_a_kill_while_a_step_is_removed_never_leaves_something_taken_for_complete(tmp_path: Path) -> None:
    """Killed before any change of the file system while removing: the step is complete and whole, or not complete, or gone."""
    from tests.unit.stored import sharded, state

    arenas = sharded(state(), 2)
    number, states = 0, set()
    while True:
        number += 1
        place = Place(str(tmp_path / str(number)))
        for arena in arenas:
            write_part(arena.view(), place, run="r")
        seal(place, 120, [0, 1])
        alive = not killed_at(number, lambda place=place: delete(place, 120))
        for one in steps(place):
            states.add(one.state)
            if one.state == COMPLETE:
                StepReader(place, 120).verify()
        if alive:
            break
        delete(place, 120)
        assert steps(place) == []
    assert states == {COMPLETE, INCOMPLETE}
