"""The table of signatures, and its matching: every signature is found in its own lines and in nobody else's."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_adapters.matching import Re2Set
from dlrover_core.diagnosis import matching, patterns
from dlrover_core.diagnosis.evidence import CLASSES, OPENING, SOURCES
from dlrover_core.diagnosis.matching import HITS_MAX, LINE_BYTES_MAX, SAME_MAX, Matcher, ReSet, matcher
from dlrover_core.diagnosis.signatures import ACTIONS, CODES, SCOPES, own, table, tomllib
from dlrover_core.errors import SpecError

HERE = Path(__file__).parent
TABLE = table()
LINES = tomllib.loads((HERE / "signature_lines.toml").read_text(encoding="utf-8"))
CASES = [
    (name, line, wanted)
    for name, both in LINES.items()
    for wanted, key in ((True, "yes"), (False, "no"))
    for line in both[key]
]
ENGINES = {"re2": Matcher(TABLE, Re2Set), "re": Matcher(TABLE, ReSet)}
# Codes and watchers alone know these; no text does.
WORDLESS = {"exit.signal", "exit.code", "node.silent", "node.gone", "node.failed", "node.sigkill"}


def best(text: str, source: str = "") -> str | None:
    """The signature that the text has, by both engines."""
    hits = {engine: one.scan(text, source) for engine, one in ENGINES.items()}
    assert hits["re"] == hits["re2"], text
    hit = Matcher.best(hits["re"])
    return hit.signature.id if hit is not None else None


@pytest.mark.parametrize("wanted", [True, False], ids=["yes", "no"])
def test_lines(wanted: bool) -> None:
    """A line of a failure has that failure's signature, with either engine; a near miss has not."""
    cases = [(name, line) for name, line, yes in CASES if yes is wanted]
    assert len(cases) > 150
    wrong = {line: found for name, line in cases if ((found := best(line)) == name) is not wanted}
    assert wrong == {}


def test_exceptions() -> None:
    """An exception that ends a traceback is known by its type; one that is only talked about is not."""
    types = [one.removeprefix("exception.") for one in TABLE.by_id if one.startswith("exception.")]
    assert len(types) > 40
    for type_ in types:
        for before in ("", "[rank3]: ", "worker-3 | ", "2026-01-04 10:20:30,123 ERROR [rank 3] ", "(Trainer pid=81) "):
            assert best(f"{before}{type_}: 'words'") == f"exception.{type_}"
        for line in (
            f"WARNING caught {type_}: 'words', skipping the sample",
            f"raise {type_}('words')",
            f"{type_}s are handled by the loop",
            f"retrying after {type_}: words",
        ):
            assert best(line) != f"exception.{type_}", line


STATUSES = tomllib.loads((HERE.parents[1] / "src/dlrover_core/diagnosis/statuses.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("[rank3] call at solver.cc:81 returned {}", r"[A-Z]+(?:_[A-Z]+)+|(?:cudaError|hipError|rocblas_status_)\w+"),
        ("{}: 2025-04-08-18:07:20.444.436 words", r"E[A-Z\d]\d{4}"),
        ("error=1, Error Code: {}; Request ID: 1A2B", r"[A-Z][a-z]\w+"),
    ],
    ids=["constant", "cann", "store"],
)
def test_a_published_status_means_its_signature(form: str, names: str) -> None:
    """A library's name of a status is known wherever it stands alone, and no part of another word is taken for one."""
    told = [(name, row["id"]) for row in STATUSES["status"] for name in row["names"] if re.fullmatch(names, name)]
    assert len(told) >= 10
    for name, id_ in told:
        assert best(form.format(name)) == id_, name
        assert best(f"see docs of My{name}s") != id_, name


def test_every_status_is_of_one_form_and_names_a_signature() -> None:
    """No row of the statuses is lost for a wrong id, and no name twice."""
    names = [name for row in STATUSES["status"] for name in row["names"]]
    assert len(names) == len(set(names)) > 150
    for row in STATUSES["status"]:
        for name in row["names"]:
            known = TABLE.coded("status", name)
            assert known is not None, name
            assert known.id == row["id"], name


def test_any_type_is_an_exception_of_the_program() -> None:
    """A type that the table does not have has a signature of its own, judged as the family is."""
    hit = Matcher.best(ENGINES["re"].scan("my.package.StrangeError: no"))
    assert hit is not None
    assert (hit.signature.id, hit.signature.verdict, hit.subject) == ("exception.StrangeError", "USER", "StrangeError")
    assert TABLE.get("exit.code77") is not None
    assert TABLE.get("exit.signal-35") is not None
    assert TABLE.get("exception.") is None
    assert TABLE.get("nothing") is None


def test_the_table() -> None:
    """Every row has known words in it, a way to be seen, an origin, and confidence between 0 and 1."""
    for one in TABLE.by_id.values():
        assert one.action in ACTIONS, one
        assert one.scope in SCOPES, one
        assert one.verdict in CLASSES or (one.verdict == "" and one.action == "obs"), one
        assert one.sources, one
        assert set(one.sources) <= set(SOURCES), one
        assert 0 < one.confidence <= 1, one
        assert 0 <= one.priority <= 100, one
        assert one.title, one
        assert {code.partition(":")[0] for code in one.codes} <= set(CODES), one
        seen = one.patterns or one.codes or set(one.sources) & set(OPENING) or one.id in WORDLESS | {"exception"}
        assert seen, f"{one.id}: nothing would ever find it"


def test_ids_and_codes_are_unique() -> None:
    """No row takes another's place by mistake, and no code means two things."""
    rows = tomllib.loads((HERE.parents[1] / "src/dlrover_core/diagnosis/signatures.toml").read_text(encoding="utf-8"))
    ids = [row["id"] for row in rows["signature"]]
    ids += [f"exception.{type_}" for group in rows["exceptions"] for type_ in group["types"]]
    assert sorted(ids) == sorted(set(ids))
    codes = [code for one in TABLE.by_id.values() for code in one.codes]
    assert sorted(codes) == sorted(set(codes))


def test_every_signature_has_lines() -> None:
    """Whatever has a pattern has a line that is it, and one that is nearly it."""
    for one in TABLE.by_id.values():
        if one.patterns and not one.id.startswith("exception."):
            assert LINES[one.id]["yes"], one.id
            assert LINES[one.id]["no"], one.id
    assert set(LINES) <= set(TABLE.by_id)


def test_every_pattern_is_linear_and_tells_what_it_needs() -> None:
    """No pattern has what an engine could not run in linear time, and each has a word that its matches contain."""
    for one in TABLE.by_id.values():
        for pattern in one.patterns:
            assert patterns.words(pattern), pattern
        for pattern in (*one.unless, *filter(None, [one.subject])):
            patterns.words(pattern)
    for coded in TABLE.code_patterns:
        if coded.kind != "reason":  # any word may be a platform's
            assert patterns.words(coded.pattern), coded
        assert not coded.otherwise or TABLE.get(coded.otherwise) is not None


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a(?=b)", "look-ahead"),
        ("a(?!b)", "look-ahead"),
        ("(?<=a)b", "look-behind"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "back-reference"),
        (r"(?P<n>a)(?P=n)", "back-reference"),
        ("(?>a)b", "atomic"),
        ("a*+b", "possessive"),
        ("(a+)+b", "endless"),
        (r"(\w+ ?)*x", "endless"),
        ("a{2000}", "repetition"),
        ("[[:alpha:]]x", "class by name"),
        (r"\pLx", "not all engines"),
        (r"ab\Z", "not all engines"),
        ("(ab", "without its"),
        ("ab)", "unmatched"),
        ("[ab", "without its"),
        ("a**b", "not a regular expression"),
        ("x*", "every line"),
        ("", "every line"),
        ("ä", "ASCII"),
        ("a" * 1001, "longer"),
    ],
)
def test_unfit_patterns_are_refused(pattern: str, why: str) -> None:
    """What one engine would refuse, or take for ever with, is refused in words."""
    with pytest.raises(patterns.Unfit, match=why):
        patterns.words(pattern)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("abc def", {"abc def"}),
        (r"\bABC\b x", {"abc x"}),
        ("abc?de", set()),
        ("abcd?efgh", {"efgh"}),
        ("abcd+efgh", {"abcd", "efgh"}),
        ("one|three", {"one", "three"}),
        ("(?:one|three)x", {"one", "three"}),
        ("(?:one|.)x", set()),
        ("(?:long words)?x", set()),
        (r"a\.b[cd]e", {"a.b"}),
    ],
)
def test_what_a_match_contains(pattern: str, words: set[str]) -> None:
    """The words that are looked for first are in every match; a long one is better than a short one."""
    assert patterns.words(pattern) <= words
    assert bool(patterns.words(pattern)) is bool(words)


TOKENS = sorted({word for _, line, _ in CASES for word in line.split(" ")})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from(TOKENS), st.sampled_from(["\n", "\r\n", "é", "\x1b[31m", "\ud800"])), max_size=40
    )
)
def test_both_engines_agree_on_anything(words: list[str]) -> None:
    """Whatever is made of the words of failures, both engines find the same in it."""
    best(" ".join(words))


def test_a_chunk_is_searched_as_its_lines_are() -> None:
    """Many lines at once give what each gives alone, each with its number."""
    lines = [line for _, line, _ in CASES]
    together = ENGINES["re2"].scan("\n".join(lines[:60]))
    alone = [
        (number, hit.signature.id) for number, line in enumerate(lines[:60], 1) for hit in ENGINES["re2"].scan(line)
    ]
    assert [(hit.number, hit.signature.id) for hit in together] == [
        one for index, one in enumerate(alone) if [name for _, name in alone[: index + 1]].count(one[1]) <= SAME_MAX
    ][:HITS_MAX]


@pytest.mark.parametrize("engine", ENGINES)
def test_empty_lines_cost_nothing(engine: str) -> None:
    """No pattern runs over all of a flood of empty lines from each of them: seconds, in which no other thread has a turn."""
    began = time.thread_time()
    hits = ENGINES[engine].scan("\n" * 50_000 + "torch.cuda.OutOfMemoryError: CUDA out of memory.")
    assert time.thread_time() - began < 0.5
    assert [hit.number for hit in hits] == [50_001]


def test_a_flood_is_bounded() -> None:
    """Of one kind a few are told and of all kinds together a few more; a rare one is not lost among them."""
    flood = "NCCL WARN Call to connect to 10.1.0.3<39011> failed : Connection refused\n" * 2000
    hits = ENGINES["re2"].scan(flood + "RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    assert len(hits) == SAME_MAX + 1
    assert hits[-1].signature.id == "cuda.ecc"
    assert hits[-1].number == 2001


def test_a_line_is_cut() -> None:
    """Of an endless line its beginning counts."""
    words = "CUDA error: uncorrectable ECC error encountered"
    assert best(f"{words} {'x' * LINE_BYTES_MAX}") == "cuda.ecc"
    assert best(f"{'x' * LINE_BYTES_MAX} {words}") is None


def test_progress_bars_and_colours_are_no_words() -> None:
    """What a terminal would overwrite ends a line, and colours are taken out."""
    assert best("10%|#  | 3/30\rKeyError: 'x'") == "exception.KeyError"
    assert best("\x1b[31mERROR\x1b[0m \x1b[1mKeyError: 'x'\x1b[0m") == "exception.KeyError"


def test_the_source_is_heeded() -> None:
    """What the kernel alone can know is not believed of a program's output where the source is told, and the other way round."""
    assert best("memory.events: oom_kill 1", "hang") is None
    assert best("Terminated", "platform") == "k8s.node_lost"
    assert best("Terminated", "log") == "exit.sigterm"


@pytest.mark.parametrize(
    ("line", "subject"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 48, pid=1, DBE", "0000:3b:00"),
        ("To our best knowledge, ranks [3, 11] are the lagging ranks that caused this timeout", "3, 11"),
        ("Connection closed by peer [10.4.0.21]:9013", "10.4.0.21"),
        ("Memory cgroup out of memory: Killed process 20114 (python) total-vm:1kB", "20114 (python)"),
        ("nfs: server filer-3 not responding, still trying", "filer-3"),
        ("KeyError: 'x'", "KeyError"),
    ],
)
def test_subjects(line: str, subject: str) -> None:
    """A hit says whom or what the line names."""
    (hit,) = ENGINES["re2"].scan(line)
    assert hit.subject == subject


# ---- a user's own

MINE = """
[[signature]]
id = "plant.flux"
title = "the flux capacitor is empty"
class = "HW"
action = "isolate"
sources = ["log", "exit"]
patterns = ['flux capacitor \\w+ empty']
codes = ["exit:77"]

[[signature]]
id = "cuda.oom"
title = "ours"
class = "USER"
action = "fail"
sources = ["log"]
patterns = ['out of GPU bananas']
"""


def test_a_users_own_signatures() -> None:
    """They are found beside ours, take the place of ours of the same id and code, and need no code of ours."""
    mine = table(own(MINE, "mine.toml"))
    known = matcher(mine)
    (hit,) = known.scan("17: Flux capacitor is EMPTY", "log")
    assert (hit.signature.id, hit.signature.confidence, hit.signature.priority) == ("plant.flux", 0.8, 50)
    assert (
        known.scan("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "log")[0].signature.id
        != "cuda.oom"
    )
    coded = mine.coded("exit", 77)
    assert coded is not None
    assert coded.id == "plant.flux"
    assert TABLE.coded("exit", 77) is None


ROW = """[[signature]]
id = "plant.flux"
title = "t"
class = "HW"
action = "isolate"
sources = ["log"]
patterns = ["flux capacitor"]
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[signature", "mine.toml: not TOML"),
        ("[[signatures]]\nid = 'x'", "mine.toml: a file of signatures has tables [[signature]], and not 'signatures'"),
        ("", "mine.toml: a file of signatures has tables [[signature]]"),
        (ROW.replace('"HW"', '"HARDWARE"'), "mine.toml: plant.flux: there is no class 'HARDWARE'; there are USER"),
        (ROW.replace('"isolate"', '"burn"'), "plant.flux: there is no action 'burn'"),
        (ROW.replace('"log"', '"tape"'), "plant.flux: there is no source 'tape'"),
        (ROW.replace('"flux capacitor"', '"(?<=a)b"'), "plant.flux: pattern '(?<=a)b': look-behind"),
        (ROW.replace('"flux capacitor"', '"a("'), "plant.flux: pattern 'a(': a '(' without its ')'"),
        (ROW.replace('"flux capacitor"', "3"), "plant.flux: patterns: a list of texts, not [3]"),
        (ROW.replace('patterns = ["flux capacitor"]', ""), "plant.flux: it needs patterns or codes"),
        (ROW.replace('id = "plant.flux"', ""), "mine.toml: signature 1: 'id' is missing"),
        (ROW.replace('"plant.flux"', '"plant flux!"'), "an id is of at most 64 letters"),
        (ROW + "colour = 'red'", "plant.flux: there is no field 'colour'"),
        (ROW + "confidence = 2", "plant.flux: confidence: a number above 0, to 1"),
        (ROW + "priority = 101", "plant.flux: priority: a whole number"),
        (ROW + "codes = ['77']", "plant.flux: code '77' is none of exit:..."),
        (ROW + "codes = ['exit:abc']", "plant.flux: code 'exit:abc': a number"),
        (ROW + "subject = 'a(?!b)'", "plant.flux: subject 'a(?!b)': look-ahead"),
        (ROW + ROW, "plant.flux: there are two of this id"),
        ("".join(ROW.replace("plant.flux", f"p.n{n}") for n in range(257)), "257 signatures; at most 256"),
        (
            "".join(ROW.replace("plant.flux", f"p.n{n}").replace('"t"', f'"{"t" * 900}"') for n in range(99)),
            "bytes of signatures",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, words: str) -> None:
    """File, id and reason."""
    with pytest.raises(SpecError) as caught:
        own(text, "mine.toml")
    assert words in str(caught.value)


def test_own_signatures_are_plain_json() -> None:
    """They travel in the job's spec as a list of tables."""
    assert [row["id"] for row in json.loads(own(MINE, "mine.toml"))] == ["plant.flux", "cuda.oom"]


def test_without_a_faster_engine_the_standard_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose library is not there is passed over."""

    class Missing:
        name = "re2"

        def load(self) -> None:
            raise ModuleNotFoundError("No module named 're2'")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: [Missing()])
    matching.fastest.cache_clear()
    try:
        assert matching.fastest() is ReSet
    finally:
        matching.fastest.cache_clear()
