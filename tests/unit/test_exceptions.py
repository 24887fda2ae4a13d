"""Tracebacks as structures: which exception of a chain tells what went wrong."""

from __future__ import annotations

import random

import pytest

from dlrover_core.diagnosis import classify
from dlrover_core.diagnosis.exceptions import chains
from dlrover_core.diagnosis.signatures import table

FRAME = '  File "/w/{0}.py", line {1}, in {0}\n    call()\n'
HEAD = "Traceback (most recent call last):\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"


def raised(name: str, words: str, where: str = "train", line: int = 7) -> str:
    """A traceback."""
    return HEAD + FRAME.format(where, line) + f"{name}: {words}\n"


REFUSED = raised("ConnectionRefusedError", "[Errno 111] Connection refused", "connect")
LOADER = (
    HEAD
    + FRAME.format("train", 3)
    + "ValueError: Caught ValueError in DataLoader worker process 3.\nOriginal "
    + raised("ValueError", "bad sample 7", "data", 31)
)
RAY = (
    "ray.exceptions.RayTaskError(KeyError): ray::Trainer.fit() (pid=3, ip=10.0.0.1)\n"
    + FRAME.format("loop", 12)
    + "KeyError: 'x'\n"
)
ELASTIC = raised(
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError", "\n=====\ntrain.py FAILED\n=====", "run"
)
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/w/main.py", line 3, in <module>
  |     go()
  | ExceptionGroup: two (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/w/part.py", line 9, in part
    |     go()
    | ZeroDivisionError: division by zero
    +------------------------------------
"""
JAVA = """org.apache.spark.SparkException: Job aborted
\tat org.apache.spark.Job.run(Job.java:3)
Caused by: java.lang.OutOfMemoryError: Java heap space
\tat x.y.z(D.java:1)
\t... 3 more
"""


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (REFUSED + CAUSE + raised("MaxRetryError", "no more"), "ConnectionRefusedError", "[Errno 111]"),
        (LOADER, "ValueError", "bad sample 7"),
        (RAY, "KeyError", "'x'"),
        (RAY.replace("'x'\n", "'x'\n\n") + ELASTIC, "ChildFailedError", ""),
        (GROUP, "ZeroDivisionError", "division"),
        (JAVA, "OutOfMemoryError", "Java heap"),
        # A look-up that was only tried is no failure; whoever fails in handling it is.
        (raised("KeyError", "'cached'") + HANDLING + raised("ValueError", "no such option"), "ValueError", "no such"),
        (
            raised("ValueError", "the first") + HANDLING + raised("TypeError", "in cleaning up"),
            "ValueError",
            "the first",
        ),
        # A general type gives way to one that tells, wherever it stands.
        (raised("RuntimeError", "it failed") + CAUSE + raised("IndexError", "list index"), "IndexError", "list index"),
        (
            raised("OSError", "[Errno 28] No space left on device") + HANDLING + raised("RuntimeError", "x"),
            "OSError",
            "28",
        ),
        (
            raised("torch._dynamo.exc.BackendCompilerFailed", "backend='inductor' raised:\nAssertionError: bad stride"),
            "AssertionError",
            "bad stride",
        ),
    ],
)
def test_the_innermost_that_tells(text: str, name: str, words: str) -> None:
    """Causes come before what they caused, what was wrapped before its wrapper, what tells before what is general."""
    told = classify.telling(table(), chains(text.splitlines())[-1])
    assert told.name == name
    assert words in told.message


def test_two_failures_are_two_chains() -> None:
    """Exceptions hang together only by words that say so."""
    found = chains((REFUSED + "step 4\n" + raised("KeyError", "'x'")).splitlines())
    assert [one.links[-1].name for one in found] == ["ConnectionRefusedError", "KeyError"]
    assert found[0].last < found[1].first


def test_foreign_lines_within_a_traceback() -> None:
    """Other writers' lines between frames belong to no message, and the exception is found behind them."""
    lines = raised("KeyError", "'x'").splitlines()
    lines[2:2] = ["    [INFO] saving", "2026-01-04 10:20:01 INFO step 3"]
    (chain,) = chains(lines)
    assert chain.links[0].text == "KeyError: 'x'"


@pytest.mark.parametrize(
    ("text", "signature", "verdict"),
    [
        (
            raised("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (8x512 and 768x64)"),
            "exception.RuntimeError",
            "USER",
        ),
        (
            raised("requests.exceptions.HTTPError", "429 Client Error: Too Many Requests for url: x"),
            "hub.rate_limited",
            "DATA",
        ),
        (raised("requests.exceptions.HTTPError", "401 Client Error: Unauthorized for url: x"), "auth.refused", "USER"),
        (raised("OSError", "[Errno 107] Transport endpoint is not connected: '/mnt/x'"), "storage.gone", "DATA"),
        (raised("OSError", "[Errno 122] Disk quota exceeded: '/home/x'"), "disk.full", "RES"),
        (raised("PIL.UnidentifiedImageError", "cannot identify image file 'x.jpg'"), "data.sample", "DATA"),
        (raised("Exception", "odd") + CAUSE + ELASTIC, "exception.Exception", "USER"),
        (LOADER, "exception.ValueError", "USER"),
    ],
)
def test_class_by_type_and_content(text: str, signature: str, verdict: str) -> None:
    """What an exception says counts beside its type: USER is what is left."""
    found = classify.of_exception(table(), text)
    assert found is not None
    assert (found.signature, found.verdict) == (signature, verdict)


def test_the_place_is_the_cause_own() -> None:
    """A chain's place is where the telling exception was raised, with prefixes of a launcher before each line."""
    text = "\n".join(f"[rank3]: {line}" for line in LOADER.splitlines())
    assert classify.place_of(text) == "ValueError at w/data.py:31 in data"


def test_content_makes_a_general_type_sure() -> None:
    """The same general type is sure where its words are known, and unsure where they are not."""
    known = classify.of_exception(
        table(), raised("RuntimeError", "The size of tensor a (4) must match the size of tensor b (5)")
    )
    vague = classify.of_exception(table(), raised("RuntimeError", "it did not work"))
    assert known is not None
    assert vague is not None
    assert known.confidence >= 0.85
    assert vague.confidence <= 0.6


def test_two_ranks_write_line_by_line() -> None:
    """Tracebacks of two writers in one stream are both read, whether they say the same or not."""
    one, other = raised("KeyError", "'x'").splitlines(), raised("ValueError", "bad", "step", 9).splitlines()
    mixed = [line for pair in zip(one, other, strict=True) for line in pair]
    assert [chain.links[-1].text for chain in chains(mixed)] == ["KeyError: 'x'", "ValueError: bad"]
    twice = [line for line in one for _ in range(2)]
    assert {chain.links[-1].name for chain in chains(twice)} == {"KeyError"}


def test_a_traceback_that_was_cut_off_is_none() -> None:
    """One that begins anew long before an exception came is read from its own beginning."""
    cut = (HEAD + FRAME.format("old", 1) * 3).splitlines()
    found = chains([*cut, *raised("KeyError", "'x'").splitlines()])
    assert [frame[0] for frame in found[0].links[0].frames] == ["/w/train.py"]


def shuffled(seed: int, *texts: str) -> list[str]:
    """Lines of several writers in one stream: each one's in order, in runs of one to three."""
    chance, rest = random.Random(seed), [text.splitlines() for text in texts]
    # The traceback of each begins before the first has its exception.
    made = [lines.pop(0) for lines in rest]
    while any(rest):
        lines = chance.choice([lines for lines in rest if lines])
        run = chance.randint(1, 3)
        made += lines[:run]
        del lines[:run]
    return made


@pytest.mark.parametrize("seed", range(40))
def test_tracebacks_of_three_ranks_mixed_in_any_way(seed: int) -> None:
    """Each exception is found once, with its own words, and no line belongs to two of them."""
    texts = [
        raised("KeyError", "'label'"),
        raised("ValueError", "bad", "step", 9),
        raised("zmq.error.Again", "busy", "put", 4),
    ]
    found = chains(shuffled(seed, *texts))
    assert sorted(chain.links[-1].text for chain in found) == ["Again: busy", "KeyError: 'label'", "ValueError: bad"]
    rows = [row for chain in found for row in chain.rows]
    assert len(rows) == len(set(rows))


def test_a_chain_goes_on_from_its_own_rank_s_exception() -> None:
    """Of two ranks' exceptions that were mixed, the one before an empty line goes on; line by line, each goes on."""
    chain = raised("KeyError", "'label'") + HANDLING + raised("ValueError", "no label", "step", 9)
    twice = [line for line in chain.splitlines() for _ in range(2)]
    assert [[one.name for one in its.links] for its in chains(twice)] == [["KeyError", "ValueError"]] * 2
    lines, other = chain.splitlines(), raised("zmq.error.Again", "busy", "put", 4).splitlines()
    mixed = [lines[0], *other[:-1], *lines[1:5], other[-1], *lines[5:]]
    assert mixed.index(lines[3]) < mixed.index("") < mixed.index(other[-1])
    assert [[one.name for one in its.links] for its in chains(mixed)] == [["KeyError", "ValueError"], ["Again"]]
    chain = raised("KeyError", "'label'", "step", 3) + HANDLING + raised("ValueError", "no label", "step", 9)
    lines = chain.splitlines()
    mixed = [*lines[:3], *other[:-1], lines[3], other[-1], *lines[4:]]
    assert mixed.index(other[-1]) == mixed.index("") - 1
    assert [[one.name for one in its.links] for its in chains(mixed)] == [["KeyError", "ValueError"], ["Again"]]


@pytest.mark.parametrize("word", ["Loss: 2.13", "WARNING: slow disk", "Saving: /ckpt/7", "Epoch: 3", "Rank: 4", "Done"])
def test_words_of_others_within_a_traceback_are_no_exception(word: str) -> None:
    """A word with a colon is an exception's type only at the end of the frames, and its line stays to be read."""
    lines = (HEAD + FRAME.format("train", 3) * 2 + "KeyError: 'x'\n").splitlines()
    lines[3:3] = [word]
    (chain,) = chains(lines)
    assert chain.links[-1].text == "KeyError: 'x'"
    assert 3 not in chain.rows


def test_a_cut_traceback_before_two_mixed_ones() -> None:
    """Exceptions belong to the tracebacks that began last: one that was cut off has none."""
    cut = (HEAD + FRAME.format("old", 1)).splitlines()
    found = chains([*cut, *shuffled(3, raised("KeyError", "'x'"), raised("ValueError", "bad", "step", 9))])
    assert [chain.links[0].name for chain in found] == ["KeyError", "ValueError"]
    assert not any("old" in frame[0] for chain in found for frame in chain.links[0].frames)


def test_where_an_exception_is_from() -> None:
    """The type's package and the library that raised it, without the machine's own path."""
    text = (
        HEAD
        + '  File "/opt/py/lib/python3.11/multiprocessing/connection.py", line 399, in _recv\n    raise EOFError\nEOFError\n'
    )
    assert chains(text.splitlines())[0].links[0].origin == "EOFError:  (raised in multiprocessing/connection.py: _recv)"
    text = HEAD + FRAME.format("train", 3) + "wandb.errors.errors.CommError: timed out\nmore\n"
    assert chains(text.splitlines())[0].links[0].origin == "wandb.errors.errors.CommError: timed out"
    assert chains(raised("ValueError", "bad").splitlines())[0].links[0].origin == ""


def test_two_ranks_exceptions_in_one_line() -> None:
    """A type that stands there twice is that type."""
    text = HEAD + FRAME.format("train", 3) + "RuntimeErrorRuntimeError: CUDA error: x\n: CUDA error: x\n"
    only = chains(text.splitlines())[0].links[0]
    assert (only.name, only.message.split("\n")[0]) == ("RuntimeError", "CUDA error: x")


@pytest.mark.parametrize("name", ["EOFError", "BrokenPipeError", "ConnectionResetError", "_pickle.UnpicklingError"])
def test_a_closed_pipe_between_processes_is_a_consequence(name: str) -> None:
    """Whoever reads from a process that is gone did not fail by itself; the same type elsewhere did."""
    end = '  File "/usr/lib/python3.11/multiprocessing/connection.py", line 399, in _recv\n    x\n'
    end += f"{name}: pickle data was truncated\n"
    found = classify.of_exception(table(), HEAD + end)
    assert found is not None
    assert (found.signature, found.verdict) == ("process.peer", "CASC")
    found = classify.of_exception(table(), raised("KeyError", "'x'") + HANDLING + HEAD + end)
    assert found is not None
    assert found.signature == "exception.KeyError"
    found = classify.of_exception(table(), raised("EOFError", "Ran out of input"))
    assert found is not None
    assert found.signature != "process.peer"


@pytest.mark.parametrize(
    ("words", "signature"),
    [
        ("aiohttp.client_exceptions.ClientResponseError: 503, message='Service Unavailable'", "data.connection"),
        ("httpx.HTTPStatusError: Server error '502 Bad' for url 'https://x'", "data.connection"),
        ("openai.InternalServerError: Error code: 500 - {'error': 'x'}", "data.connection"),
        ("some.ApiError: HTTP status 403: no", "auth.refused"),
        ("some.ApiError: HTTP response code 404", "hub.missing"),
        ("some.ApiError: failed with status code 429", "hub.rate_limited"),
        ("some.ApiError: HTTP status 200: what", "exception.ApiError"),
    ],
)
def test_a_servers_status_in_any_wording(words: str, signature: str) -> None:
    """It counts beside the type."""
    found = classify.of_exception(table(), HEAD + FRAME.format("train", 3) + words + "\n")
    assert found is not None
    assert found.signature == signature


BITS = (
    *(
        "Traceback (most recent call last):",
        '  File "/a/b.py", line 3, in f',
        "    x = 1",
        "    ^^^^^",
        "",
        "INFO fine",
    ),
    *("RuntimeError", "RuntimeError: boom", ": Traceback (most recent call last):", "KeyError: 'a'"),
    *(
        CAUSE.strip(),
        HANDLING.strip(),
        "Exception in thread Thread-1:",
        "RuntimeError: Caught X in DataLoader worker 0.",
    ),
    *("Original Traceback (most recent call last):", "  what():  boom", "terminate called without an active exception"),
    *("  + Exception Group Traceback (most recent call last):", "  | ExceptionGroup: many (2 sub-exceptions)"),
    *("  +-+---------------- 1 ----------------", "    | ValueError: 1", "    +-----------------------------------"),
    *("Caused by: java.io.IOException: x", "\tat a.b.C(C.java:1)", "[rank1]: ValueError: y"),
)


@pytest.mark.parametrize("seed", range(4))
def test_torn_tracebacks_are_chains_of_lines_of_their_own(seed: int) -> None:
    """Whatever lines come in whatever order: no line belongs to two chains, and each chain has one."""
    dice = random.Random(seed)
    for _ in range(500):
        lines = [dice.choice(BITS) for _ in range(dice.randrange(1, 12))]
        rows = [row for chain in chains(lines) for row in chain.rows]
        assert len(rows) == len(set(rows)), lines
        assert all(chain.rows for chain in chains(lines)), lines
