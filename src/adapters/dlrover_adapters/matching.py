"""Many patterns at once over google-re2: linear in the text, whatever the patterns, and faster than a loop over `re`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import re2

# A set is run by a table of states that it builds as it goes; without room for it, it would find nothing.
MEMORY_MAX = 128 * 1024 * 1024
# Counting takes a state for each number and each pattern that counts: text full of failures' words would then run at a hundredth
# of the speed. A set may find too much, so a bound of ten or more is none.
_BOUND = re.compile(r"(?<!\\)\{(\d+),\d{2,}\}")


class Re2Set:
    """A `dlrover_core.diagnosis.matching.SetMatcher`."""

    def __init__(self, patterns: Sequence[str]) -> None:
        options = re2.Options()
        options.case_sensitive = False
        options.encoding = re2.Options.Encoding.LATIN1  # bytes: what is no ASCII is nothing to our patterns
        options.max_mem = MEMORY_MAX
        options.log_errors = False
        self._set = re2.Set.SearchSet(options)
        for pattern in patterns:
            self._set.Add("(?m)" + _BOUND.sub(lambda found: "*" if found[1] == "0" else "+", pattern))
        self._set.Compile()

    def match(self, text: bytes) -> Sequence[int]:
        """Which of the patterns match somewhere in ``text``, and some that nearly do."""
        found: Sequence[int] = self._set.Match(text) or ()
        return found
