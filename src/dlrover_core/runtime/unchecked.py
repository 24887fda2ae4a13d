"""For agents that cannot be checked: workers are another launcher's, as torch's own elastic agent's are."""

from __future__ import annotations

from dlrover_core.job.checks import CheckWork, ReportCheck
from dlrover_core.runtime.duties import Desk, Orders


class Unchecked(Orders):
    """Says at once that all is well, so that nobody waits for a check, or takes the silence for a failure."""

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        told = (0, 0)
        while True:
            check = (await self.news(desk)).part(CheckWork)
            if check.number and (check.number, check.round) > told:
                told = (check.number, check.round)
                desk.send(ReportCheck(desk.node, *told, True))
