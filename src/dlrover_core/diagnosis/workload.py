"""What a step should cost by its tokens: sequences of unequal length must not look like a machine that gets slower.

Cost is close to affine in what was computed: ``c + a N + b S`` for N tokens and S, the sum of the squared lengths (attention's
part; after ResiHP). A trainer that reports N, or N and S, has the three coefficients fitted over its first `FITTED` steps, twice,
the second time without what lay far off. Then they are *frozen*: only their proportions matter, and a machine that becomes
slower multiplies all of them alike, so that nothing of it is explained away.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

FITTED = 200
SKIPPED = 20
FAR = 4.0  # deviations
SAME = 0.02  # work that varies by less explains nothing

Sample = tuple[float, float, float]


class Workload:
    """Turns the seconds of a step into the seconds that a typical step would have taken."""

    def __init__(self) -> None:
        self._skip = SKIPPED
        self._samples: list[Sample] = []
        self._weights = (1.0, 0.0, 0.0)
        self.fitted = False

    def explained(self, seconds: float, tokens: float, squares: float = 0.0) -> float | None:
        """The cost of a step with that work; None while the proportions are being learnt."""
        if self.fitted:
            constant, each, squared = self._weights
            return seconds / max(constant + each * tokens + squared * squares, 1e-9)
        if self._skip:
            self._skip -= 1
        else:
            self._samples.append((seconds, tokens, squares))
            if len(self._samples) == FITTED:
                self._fit()
        return None

    def _fit(self) -> None:
        """So that the expectation of a typical step is 1."""
        kept = self._samples
        weights = fit(kept)
        off = [seconds - expected(weights, tokens, squares) for seconds, tokens, squares in kept]
        far = FAR * max(1e-9, 1.4826 * median(abs(one - median(off)) for one in off))
        centre = median(off)
        kept = [sample for sample, one in zip(kept, off, strict=True) if abs(one - centre) <= far]
        weights = fit(kept)
        typical = median(expected(weights, tokens, squares) for _, tokens, squares in kept)
        actual = median(seconds for seconds, _, _ in kept)
        if typical > 0 and actual > 0:
            self._weights = (weights[0] / typical, weights[1] / typical, weights[2] / typical)
        self._samples, self.fitted = [], True


def expected(weights: Sample, tokens: float, squares: float) -> float:
    """By these coefficients."""
    return weights[0] + weights[1] * tokens + weights[2] * squares


def fit(samples: Sequence[Sample]) -> Sample:
    """Constant, per token, per squared length: none negative, and only those that the samples tell apart."""
    mean = _mean(samples)
    scaled = [(seconds, tokens / (mean[1] or 1.0), squares / (mean[2] or 1.0)) for seconds, tokens, squares in samples]
    varies = [_varies([one[column] for one in scaled]) for column in (1, 2)]
    best: Sample = (mean[0], 0.0, 0.0)
    error = _error(scaled, best)
    for columns in ((0, 1), (0, 2), (0, 1, 2), (1,), (2,), (1, 2)):
        if all(varies[column - 1] for column in columns if column):
            found = _least_squares(scaled, columns)
            if found is not None and min(found) >= 0 and _error(scaled, found) < error * (1 - 1e-9):
                best, error = found, _error(scaled, found)
    return best[0], best[1] / (mean[1] or 1.0), best[2] / (mean[2] or 1.0)


def _mean(samples: Sequence[Sample]) -> Sample:
    count = max(1, len(samples))
    return (
        sum(one[0] for one in samples) / count,
        sum(one[1] for one in samples) / count,
        sum(one[2] for one in samples) / count,
    )


def _varies(values: Sequence[float]) -> bool:
    return bool(values) and (max(values) - min(values)) > SAME


def _error(samples: Sequence[Sample], weights: Sample) -> float:
    return sum((seconds - expected(weights, tokens, squares)) ** 2 for seconds, tokens, squares in samples)


def _least_squares(samples: Sequence[Sample], columns: Sequence[int]) -> Sample | None:
    """The normal equations of these columns by Gauss; None where they have no single answer."""
    size = len(columns)
    rows = [[0.0] * (size + 1) for _ in range(size)]
    for seconds, tokens, squares in samples:
        full = (1.0, tokens, squares)
        values = [full[column] for column in columns]
        for i in range(size):
            for j in range(size):
                rows[i][j] += values[i] * values[j]
            rows[i][size] += values[i] * seconds
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-9 * len(samples):
            return None
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [left - factor * right for left, right in zip(rows[j], rows[i], strict=True)]
    answer = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * answer[j] for j in range(i + 1, size))
        answer[i] = (rows[i][size] - rest) / rows[i][i]
    weights = [0.0, 0.0, 0.0]
    for column, value in zip(columns, answer, strict=True):
        weights[column] = value
    return weights[0], weights[1], weights[2]
