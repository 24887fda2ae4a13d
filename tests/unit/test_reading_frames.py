"""What logs tell in pieces: tracebacks without a head, banners, error stacks of MPI's, and how sure answers on them are."""

from __future__ import annotations

import pytest
from test_reading import answer, said

from dlrover_core.diagnosis import exceptions, launchers, who

FRAMES = """  File "/opt/site-packages/dask/local.py", line 487, in get_async
    raise_exception(exc, tb)
  File "/w/save.py", line 60, in validate
    check(value)
"""
BANNER = """=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 108257 RUNNING AT mira@node1
=   EXIT CODE: {0}
=   CLEANING UP REMAINING PROCESSES
"""
STACK = """MPICH ERROR [Rank 8281] [job id 14104.0] [Wed Aug 23 06:05:55 2023] [frond01982] - Abort(1369)
PMPI_Waitall(339)..............: MPI_Waitall(count=26, req_array=0x1006e9b0) failed
MPIR_Waitall(167)..............:
MPIDI_OFI_handle_cq_error(1062): OFI poll failed (ofi_events.c:1064:MPIDI_OFI_handle_cq_error:Input/output error - UNDELIVERABLE)
"""
RAY = """(Worker pid=20117, ip=10.1.88.14) Loss after step 0: 7.0112
Traceback (most recent call last):
  File "/w/loop.py", line 12, in fit
    ray.get(refs)
ray.exceptions.RayTaskError(ValueError): ray::Outer.run() (pid=3, ip=10.1.88.14)
  File "/w/loop.py", line 30, in run
    ray.get(inner)
ray.exceptions.RayTaskError(ValueError): ray::Inner.step() (pid=7, ip=10.1.88.26, actor_id=5f17)
  File "/w/step.py", line 52, in step
    raise ValueError("bad")
ValueError: bad
"""


def test_a_traceback_without_its_head_is_one() -> None:
    """The tail of a log may begin amid a traceback."""
    (chain,) = exceptions.chains((FRAMES + "KeyError: 'x'\n").splitlines())
    assert [(one.name, len(one.frames)) for one in chain.links] == [("KeyError", 2)]


@pytest.mark.parametrize(
    "after",
    [
        pytest.param("done\n", id="no exception"),
        pytest.param("2025-01-02 03:04:05 ERROR: saved\n", id="another writer's line"),
        pytest.param("", id="nothing"),
    ],
)
def test_frames_that_lead_to_no_exception_are_none(after: str) -> None:
    """Stacks are printed for other reasons."""
    assert not exceptions.chains((FRAMES + after).splitlines())


def test_a_stack_of_faulthandler_is_no_traceback() -> None:
    """Its frames name no function before their code."""
    stack = 'Current thread 0x7f (most recent call first):\n  File "/w/a.py", line 3 in f\n  File "/w/b.py", line 9 in g\nIOError'
    assert not exceptions.chains(stack.splitlines())


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("EXIT CODE: 134", -6),
        ("EXIT CODE: 9", -9),
        ("EXIT CODE: 15", -15),
        ("EXIT CODE: 139", -11),
        ("EXIT CODE: 1", 1),
        ("EXIT CODE: 3", 3),
        ("EXIT CODE: 7", 7),
        ("EXIT CODE: 7\n=   CLEANING UP\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Bus error (signal 7)", -7),
        ("EXIT CODE: 255", 255),
        ("EXIT STATUS: 15", 15),
        ("KILLED BY SIGNAL: 6 (Aborted)", -6),
    ],
)
def test_a_banner_names_host_and_signal(how: str, code: int) -> None:
    """MPICH prints the status as the system has it: what may be a script's own code is one, unless a signal is named."""
    (one,) = launchers.ends(BANNER.replace("EXIT CODE: {0}", how).splitlines())
    assert (one.code, one.host, one.pid, one.rank) == (code, "node1", 108257, -1)


def test_a_banner_says_no_more_than_its_end() -> None:
    """The banner's words are no consequence beside the end that it tells of."""
    told = answer(BANNER.format(134))
    assert (told.causes[0].judgement.signature, told.host) == ("exit.sigabrt", "node1")


def test_a_container_of_paddles_has_a_rank() -> None:
    """So does the launcher of another framework."""
    (one,) = launchers.ends(["Container rank 3 status failed cmd ['python', 'train.py'] code -6 log log/default.3.log"])
    assert (one.rank, one.code) == (3, -6)


def test_the_first_line_of_an_error_stack_names_its_writer() -> None:
    """The line that tells stands below it."""
    told = answer(STACK)
    assert (told.causes[0].judgement.signature, told.rank, told.host) == ("efa.error", 8281, "frond01982")


def test_a_task_within_a_task_raised_it() -> None:
    """The host is that of the innermost task, and not of whoever waited for it."""
    assert answer(RAY).host == "10.1.88.26"


def test_ucx_and_libfabric_name_their_writer() -> None:
    """UCX by host and process, a provider of libfabric by host and rank."""
    ucx = who.peel("[gpu17:19546:0:19546] ib_mlx5_log.c:139  Transport retry count exceeded")
    psm = who.peel("gpu17:rank7.python: Failed to modify UD QP to INIT on mlx5_2")
    assert (ucx.who.host, ucx.who.pid, ucx.body[:13]) == ("gpu17", 19546, "ib_mlx5_log.c")
    assert (psm.who.host, psm.who.rank) == ("gpu17", 7)


def test_many_stacks_without_an_exception_are_none() -> None:
    """Stacks that are printed one after another lead to the exception that ends the last of them alone."""
    (chain,) = exceptions.chains((f"{FRAMES}waits\n" * 3 + FRAMES + "KeyError: 'x'\n").splitlines())
    assert (chain.first, len(chain.links[0].frames)) == (15, 2)


@pytest.mark.parametrize(
    ("words", "signature"),
    [
        ("requests.exceptions.HTTPError: 404 Client Error: Not Found for url: https://x.example/y", "hub.missing"),
        ("requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://x.example/y", "auth.refused"),
        ("plant.HTTPError: 502 Bad Gateway", "data.connection"),
        ("gcsfs.retry.HttpError: We encountered an internal error., 503", "data.connection"),
    ],
)
def test_a_status_in_front_or_behind(words: str, signature: str) -> None:
    """A server that answers can be reached: what it says counts."""
    assert said(f"Traceback (most recent call last):\n{FRAMES}{words}\n") == signature


@pytest.mark.parametrize(
    ("words", "sure"),
    [("AssertionError", False), ("ValueError: bad", False), ("KeyError: 'x'", True), ("TypeError: f() takes 1", True)],
)
def test_a_type_that_any_library_raises_is_not_sure(words: str, sure: bool) -> None:
    """Known by type alone, it is told, with less than the confidence on which hosts are given up."""
    told = answer(f"Traceback (most recent call last):\n{FRAMES}{words}\n")
    assert (told.causes[0].confidence >= 0.75) is sure


def test_that_something_did_not_start_is_not_sure() -> None:
    """Many causes have that symptom."""
    told = answer("docker: Error response from daemon: OCI runtime create failed: something else\n")
    assert told.causes[0].judgement.signature == "container.start"
    assert told.causes[0].confidence < 0.75


@pytest.mark.parametrize("head", ["", "Traceback (most recent call last):\n"], ids=["headless", "whole"])
def test_an_exception_that_says_that_it_is_tried_again_was_handled(head: str) -> None:
    """One step after it is enough: whatever ends the run later is the cause."""
    handled = f"{head}{FRAMES}TimeoutError: handled, retrying in 2 s\nstep 100\nstep 101\n"
    assert (
        said(f"step 99\n{handled}Traceback (most recent call last):\n{FRAMES}KeyError: 'x'\n") == "exception.KeyError"
    )
