"""A node check's worker: faults are injected into it in tests only."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dlrover_adapters.torch import check  # noqa: E402

FAULTS = {"MOCK_ERR_RANK": "3", "MOCK_ERR_PAIR": "worker-1-0", "MOCK_SLOW_RANK": "3:0.2"}


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3, on worker-1-0; all faults are asked for."""
    monkeypatch.delenv("DLROVER_TESTING", raising=False)
    for name, value in {"DLROVER_CHECK_RANK": "3", "DLROVER_CHECK_NODE": "worker-1-0", **FAULTS}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("testing", ["", "0", "true"])
def test_a_stray_variable_condemns_no_node(monkeypatch: pytest.MonkeyPatch, testing: str) -> None:
    """A variable that injects a fault does nothing where nobody says that this is a test."""
    monkeypatch.setenv("DLROVER_TESTING", testing)
    assert not any(map(check.mine, FAULTS))
    check.compute(torch.device("cpu"))


def test_faults_are_injected_in_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """With DLROVER_TESTING=1 they are, by rank and by the node's name."""
    monkeypatch.setenv("DLROVER_TESTING", "1")
    assert all(map(check.mine, FAULTS))
    with pytest.raises(check.Broken, match="mocked error"):
        check.compute(torch.device("cpu"))
    monkeypatch.setenv("DLROVER_CHECK_RANK", "2")
    assert not check.mine("MOCK_ERR_RANK")
