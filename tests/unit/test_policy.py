"""The policy: every number of the ladder, as a user may set it in a file, and the hook that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlrover_adapters.cli import policies
from dlrover_core.diagnosis import policy
from dlrover_core.diagnosis.policy import Policy
from dlrover_core.errors import SpecError

HOOK = """
class Mine:
    def choose(self, judgement, choice, context):
        return None

class Silent:
    pass
"""


def written(folder: Path, text: str) -> str:
    """A file with that text."""
    path = folder / "policy.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_says_what_differs(tmp_path: Path) -> None:
    """What a file sets is carried in the spec; what it does not set keeps its default; nothing set is nothing carried."""
    text = policies.read(written(tmp_path, 'user_repeats = 3\nfail_at_once = ["SyntaxError"]\nretry_pause_s = 2\n'))
    assert json.loads(text) == {"user_repeats": 3, "fail_at_once": ["SyntaxError"], "retry_pause_s": 2}
    assert policy.parsed(text) == Policy(user_repeats=3, fail_at_once=("SyntaxError",), retry_pause_s=2)
    assert policies.read(written(tmp_path, "user_repeats = 1")) == Policy().to_json() == ""
    assert policy.parsed("") == Policy()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("user_repeat = 3", "policy.user_repeat: there is no such setting; there are escalate_after,"),
        ("user_repeats = -1", "policy.user_repeats: not a whole number from 0 on: -1"),
        ("user_repeats = 1.5", "policy.user_repeats: not a whole number"),
        ("user_repeats = true", "policy.user_repeats: not a whole number"),
        ("retry_pause_s = 'x'", "policy.retry_pause_s: not a number"),
        ("retry_pause_s = inf", "policy.retry_pause_s: not a number"),
        ("fail_at_once = 'KeyError'", "policy.fail_at_once: a list of names"),
        ("fail_at_once = [1]", "policy.fail_at_once: a list of names"),
        ("memory_factor = 0.5", "policy.memory_factor: memory never shrinks"),
        ("isolate_confidence = 1.1", "policy.isolate_confidence: between 0 and 1"),
        ("hook = 'a.b'", "policy.hook: 'a.b' is not of the form module:Class"),
        ("hook = 3", "policy.hook: a text, got 3"),
        ("hook = 'no_such_module_here:A'", "policy.hook: no_such_module_here:A cannot be loaded: ModuleNotFoundError"),
        ("user_repeats = ", "is not TOML"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, text: str, said: str) -> None:
    """A name that there is not lists those that there are; a value that cannot be names its setting."""
    with pytest.raises(SpecError) as error:
        policies.read(written(tmp_path, text))
    assert said in str(error.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    """Its name and the reason."""
    with pytest.raises(SpecError, match=r"nowhere.toml cannot be read"):
        policies.read(str(tmp_path / "nowhere.toml"))


def test_every_number_is_explained() -> None:
    """Each setting has a default, and a line for people; durations and memory say their unit in their name."""
    for name, (value, doc) in policy.table(Policy()).items():
        assert doc, name
        assert not isinstance(value, float) or name.endswith(("_s", "_factor", "_first", "_then", "_confidence")), name


def test_settings_of_a_later_version_are_left_out() -> None:
    """A log of a newer version can still be read."""
    assert policy.parsed('{"of_tomorrow": 1, "user_repeats": 2}') == Policy(user_repeats=2)


def test_a_hook_is_made_from_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of the working directory's modules, with the one method that it needs."""
    (tmp_path / "my_recovery_policy.py").write_text(HOOK, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    text = policies.read(written(tmp_path, 'hook = "my_recovery_policy:Mine"'))
    made = policies.hook(text)
    assert type(made).__name__ == "Mine"
    assert policies.hook("") is None
    with pytest.raises(SpecError, match="has no method choose"):
        policies.hook('{"hook": "my_recovery_policy:Silent"}')
