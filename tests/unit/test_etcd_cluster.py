"""The etcd that tests and campaigns start: calls whose answers were lost."""

from __future__ import annotations

from typing import Any

import pytest
from tools.etcd_cluster import Cluster, EtcdError


class Answering(Cluster):
    """A cluster of two members that answer as told, without a process."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), 0
        self._members, self.version = [], "0"

    def revision(self) -> int:
        """The newest."""
        return 7

    def _talking(self) -> Any:
        return iter((0, 1))

    def _ask(self, number: int, method: str, request: dict[str, Any], timeout_s: float = 0.0) -> Any:
        self.asked += 1
        said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if said:
            raise OSError(f"{method}: {said}")
        return {}


@pytest.mark.parametrize("answers", [("",), ("timed out", ""), ("timed out", "required revision has been compacted")])
def test_a_compaction_whose_answer_was_lost_is_done(answers: tuple[str, ...]) -> None:
    """Asked again, a member refuses it because it is done: that ends the wait."""
    cluster = Answering(*answers)
    cluster.compact()
    assert cluster.asked == len(answers)


def test_a_compaction_that_nobody_answers_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of the last member stands in the error."""
    monkeypatch.setattr("tools.etcd_cluster.POLL_S", 0.0)
    ticks = iter(range(1000))
    monkeypatch.setattr("tools.etcd_cluster.time.monotonic", lambda: float(next(ticks)))
    with pytest.raises(EtcdError, match="refused"):
        Answering("refused").compact()
