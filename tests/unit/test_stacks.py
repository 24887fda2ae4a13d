"""Stacks as `faulthandler` writes them: read, judged, told."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

import pytest

from dlrover_core.diagnosis import stacks
from dlrover_core.diagnosis.stacks import Frame

SITE = "/venv/lib/python3.11/site-packages/"
TRAIN = Frame("/job/train.py", 42, "step")
ALL_REDUCE = Frame(f"{SITE}torch/distributed/distributed_c10d.py", 3252, "all_reduce")
WRAPPER = Frame(f"{SITE}torch/distributed/c10d_logger.py", 83, "wrapper")


def test_a_real_dump_is_read() -> None:
    """The main thread is found among others, whatever they do."""
    ready, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        ready.set()
        done.wait(10)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    ready.wait(10)
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    done.set()
    thread.join()
    stack = stacks.main_thread(text)
    assert stack[0].function == "test_a_real_dump_is_read"
    assert len(stacks.threads(text)) >= 2


@pytest.mark.parametrize("text", ["", "garbage\n  File", "Current thread 0x1 (most recent call first):\n", "\0" * 99])
def test_no_dump_is_no_stack(text: str) -> None:
    """Whatever else is in the file, nothing is made of it."""
    assert stacks.main_thread(text) == ()


@pytest.mark.parametrize(
    ("stack", "source", "waits"),
    [
        ((ALL_REDUCE, WRAPPER, TRAIN), "", "all_reduce"),
        ((WRAPPER, TRAIN), "", "wrapper"),
        ((Frame(f"{SITE}torch/autograd/graph.py", 865, "_engine_run_backward"), TRAIN), "", "backward"),
        ((Frame(f"{SITE}torch/cuda/__init__.py", 1, "synchronize"), TRAIN), "", "synchronize"),
        ((TRAIN,), "loss = out.item()", "item"),
        ((TRAIN,), "time.sleep(60)", ""),
        ((Frame("/usr/lib/python3.11/queue.py", 171, "get"), TRAIN), "queue.get().item()", ""),
        ((TRAIN, ALL_REDUCE), "", ""),
        ((Frame("/usr/lib/python3.11/threading.py", 320, "wait"), TRAIN), "lock.acquire()", ""),
        ((), "", ""),
    ],
)
def test_who_waits_for_others(stack: tuple[Frame, ...], source: str, waits: str) -> None:
    """A stack that ends in a collective, in backward or in a wait for a device is a waiting one; all others are not."""
    assert stacks.waits_in(stack, source) == waits


def test_a_deep_stack_is_sent_with_the_users_own_frame() -> None:
    """The newest calls, and where in the user's program they come from."""
    deep = tuple(Frame(f"{SITE}lib/m.py", line, "f") for line in range(50))
    assert stacks.brief((*deep, TRAIN)) == (*deep[: stacks.FRAMES_MAX], TRAIN)
    assert stacks.brief((ALL_REDUCE, TRAIN)) == (ALL_REDUCE, TRAIN)
    assert stacks.brief(deep) == deep[: stacks.FRAMES_MAX]
    assert stacks.brief(()) == ()


def test_where_somebody_is() -> None:
    """The newest frame of the user's own code, with its line."""
    assert (
        stacks.where((ALL_REDUCE, WRAPPER, TRAIN), " dist.all_reduce(x)\n") == "step (train.py:42: dist.all_reduce(x))"
    )
    assert stacks.where((Frame("/usr/lib/python3.11/threading.py", 320, "wait"), TRAIN)) == "step (train.py:42)"
    assert stacks.where((ALL_REDUCE,)) == "all_reduce (distributed_c10d.py:3252)"
    assert stacks.where(()) == ""
