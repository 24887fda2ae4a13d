"""The corpus is what its README says: its form, its split by source, no reserved thread, no text twice."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from corpus import (
    ASIDE,
    CHECKING,
    DRAWN,
    FOLDER,
    HELDOUT,
    PARTS,
    RESERVED,
    SECOND,
    TEACHING,
    cases,
    causes,
    checks,
    held_out,
    perturbed,
    read,
)

from dlrover_core.diagnosis import signatures

KEYS = {"id", "source", "family", "settled", "settled_by", "text", "label"}
LABEL = {"root", "class", "never"}
MAY = {"rank", "host", "device", "accept", "accept_classes"}
CLASSES = {"USER", "SOFT", "HW", "RES", "NET", "PLAT", "DATA", "CASC"}
ACTIONS = {"isolate", "reset", "relaunch"}
NUMBER = re.compile(r"(\d+)$")


@pytest.mark.parametrize("part", PARTS)
def test_every_file_has_the_published_form(part: str) -> None:
    """Keys, classes and actions are those of the README, and a host that is named is in the text."""
    for path in sorted((FOLDER / part).glob("*.toml")):
        told = read(path)
        assert set(told) == {"project", "incident"}, path.name
        assert path.stem == told["project"].replace("/", "--"), path.name
        for row in told["incident"]:
            label, where = row["label"], f"{path.name}: {row['id']}"
            assert set(row) == KEYS, where
            assert LABEL <= set(label) <= LABEL | MAY, where
            assert all(row[key] for key in KEYS), where
            assert row["settled"] in ("document", "text"), where
            assert {label["class"], *label.get("accept_classes", ())} <= CLASSES, where
            assert set(label["never"]) <= ACTIONS, where
            assert label.get("host", "") in row["text"], where
            assert re.fullmatch(r"[a-z0-9-]+", row["id"]), where


@pytest.mark.parametrize("part", DRAWN)
def test_a_project_is_in_the_part_that_its_name_gives(part: str) -> None:
    """The split is by the project's name alone."""
    for case in cases(part):
        assert held_out(case.project) == (part in (HELDOUT, ASIDE)), case.project
        assert part != CHECKING or checks(case.project), case.project


@pytest.mark.parametrize("part", PARTS)
def test_a_source_is_its_projects(part: str) -> None:
    """An incident's thread belongs to the project of its file."""
    for case in cases(part):
        assert case.project.lower() in case.source.lower(), case.source


def test_no_project_of_the_second_held_out_part_is_elsewhere() -> None:
    """Nobody has seen a log of its sources before."""
    others = {case.project.lower() for part in DRAWN for case in cases(part)}
    assert not others & {case.project.lower() for case in cases(SECOND)}


def test_no_project_teaches_and_checks() -> None:
    """A source that taught cannot check."""
    taught, checking = ({case.project.lower() for case in cases(part)} for part in (TEACHING, CHECKING))
    assert not taught & checking


@pytest.mark.parametrize("part", PARTS)
def test_no_thread_is_one_that_others_judge_by(part: str) -> None:
    """Threads whose number ends in 3 or 7 are left out."""
    for case in cases(part):
        number = NUMBER.search(case.source)
        assert number is not None, case.source
        assert number[1][-1] not in RESERVED, case.source


def test_nothing_is_there_twice() -> None:
    """An id, a thread and a text are there once, over all parts."""
    every = [case for part in PARTS for case in cases(part)]
    for what in ("id", "source", "text"):
        twice = [value for value, times in Counter(getattr(case, what) for case in every).items() if times > 1]
        assert not twice, (what, twice[:3])


def test_every_cause_is_a_published_signature_or_listed() -> None:
    """A label is a signature, an exception, or one of `causes.toml`."""
    known, listed = signatures.table(""), causes()
    for part in PARTS:
        for case in cases(part):
            for root in (case.root, *case.accept):
                assert root in listed or root.startswith("exception.") or known.get(root) is not None, (case.id, root)
    for row in listed.values():
        assert set(row) <= {"id", "class", "title", "same"}, row["id"]
        assert row["class"] in CLASSES, row["id"]


def test_each_part_is_large_enough_to_say_something() -> None:
    """No part has been lost."""
    assert len(cases(TEACHING)) >= 40
    assert len(cases(HELDOUT)) >= 12
    assert len(cases(ASIDE)) >= 10
    assert len(cases(CHECKING)) >= 30
    assert len(cases(SECOND)) >= 10


@pytest.mark.parametrize("part", PARTS)
def test_the_surroundings_keep_every_line_of_the_incident(part: str) -> None:
    """Noise comes between lines, a cut keeps the end, JSON and wrapping lose nothing, another host is another host."""
    for case in cases(part)[::5]:
        told = dict(perturbed(case))
        assert len(told) == (12 if case.host else 11), case.id
        lines = case.text.splitlines()
        for noise in ("noise between lines", "noise within tracebacks"):
            noisy = told[noise].splitlines()
            assert [line for line in noisy if line in lines] == lines, case.id
        twice = told["two ranks' tracebacks, line by line"].splitlines()
        assert list(dict.fromkeys(twice)) == list(dict.fromkeys(lines)), case.id
        assert told["last 200 lines of more"].splitlines()[-len(lines) :] == lines, case.id
        assert len(told["last 200 lines of more"].splitlines()) == 200, case.id
        assert [json.loads(line)["log"] for line in told["JSON lines"].splitlines()] == [f"{line}\n" for line in lines]
        assert max(map(len, told["wrapped at 120"].splitlines())) <= 120, case.id
        if case.host:
            assert case.host not in told["another host's name"], case.id


def test_the_surroundings_are_the_same_each_time() -> None:
    """A verdict that flips can be looked at again."""
    case = cases(TEACHING)[0]
    assert dict(perturbed(case)) == dict(perturbed(case))


def test_the_readme_counts_what_is_there() -> None:
    """The table of families is that of the files."""
    counts = {part: Counter(case.family for case in cases(part)) for part in DRAWN}
    told = re.findall(
        r"^\| ([a-z-]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$",
        (FOLDER / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    families = sorted(set().union(*counts.values()))
    assert told == [(of, *(str(counts[part][of]) for part in DRAWN)) for of in families]
