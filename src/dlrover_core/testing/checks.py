"""Node checks without nodes: a duty that answers after a while, for hosts that are well and for those that are not."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from dlrover_core.job.checks import CheckWork, ReportCheck
from dlrover_core.runtime.duties import Desk, Orders

CHECK_S = 1.0


class CheckStub(Orders):
    """The check of one agent. Its node fails alone while its ``host`` is among the ``sick``; its partners are told, and fail too.

    ``ill`` are the names of nodes at work on sick hosts, for their partners to know.
    """

    def __init__(self, host: str, sick: Collection[str], ill: set[str], check_s: float = CHECK_S) -> None:
        super().__init__()
        self._host, self._sick, self._ill, self._check_s = host, sick, ill, check_s

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        told = (0, 0)
        while True:
            check = (await self.news(desk)).part(CheckWork)
            if not check.number or check[:2] <= told:
                continue
            told = (check.number, check.round)
            fit = self._host not in self._sick
            if not fit:
                self._ill.add(desk.node)
            await asyncio.sleep(self._check_s)
            if desk.order.part(CheckWork)[:2] != told:
                continue
            ok = fit and not self._ill.intersection(check.others)
            took_us = round(self._check_s * 1e6)
            what = "" if ok else "its partner failed alone" if fit else f"{self._host} is sick"
            desk.send(ReportCheck(desk.node, *told, ok, fit, took_us, took_us // 2, what))
