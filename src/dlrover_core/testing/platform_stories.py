"""What a backend must say of its platform beside starts and ends: why a node waits, lost hosts, hosts' names, notices.

Not every platform has all of it. Stories that need the platform to do something ask the `Stand` for it, and are skipped, with a
reason, where it cannot: `Stand.can` and `Stand.cannot`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dlrover_core.errors import LaunchRefused
from dlrover_core.runtime.backend import AVOIDED, Observation
from dlrover_core.spec import DEFAULT_GROUP
from dlrover_core.testing.backend_stand import Seen, Stand, Watch, make_launch, watching
from dlrover_core.testing.stories import story

HOST_S = 1.0
"""A host that is not named this long after its node runs is taken for one that has no name."""
SLACK_S = 2.0
"""By so much two answers about one deadline may differ."""
OLD_S = 3.0


class PlatformStories:
    """Stories about what platforms announce. A part of `BackendConformance`."""

    token: int
    run: Callable[[Any], None]

    # ---- queues

    @story
    async def test_a_node_that_waits_says_why(self, stand: Stand) -> None:
        """Without room a node is pending or refused for now, with a reason; with room it runs, and waits no more."""
        stand.need("waits", "fill", "free")
        assert stand.can.fill is not None
        assert stand.can.free is not None
        node = make_launch()
        async with watching(stand.backend) as watch:
            await stand.can.fill()
            refused = await self._refused_for_now(stand, node)
            if refused is None:
                seen = await watch.until(lambda seen: node.name in seen and bool(seen[node.name].waits))
                assert seen[node.name].phase == "pending", seen[node.name]
                async with watching(stand.backend) as later:
                    assert later.nodes[node.name].waits, "a new list does not say why it waits"
            await stand.can.free()
            if refused is not None:
                await stand.backend.launch(node, self.token)
            seen = await watch.running(node.name)
            assert not seen[node.name].waits, seen[node.name]
            assert set(watch.phases(node.name)) <= {"pending", "running"}, watch.phases(node.name)

    @story
    async def test_a_full_platform_has_no_place(self, stand: Stand) -> None:
        """While nobody is placed there is no room, or nobody knows."""
        stand.need("waits", "fill", "free")
        assert stand.can.fill is not None
        await stand.can.fill()
        assert await stand.backend.room(DEFAULT_GROUP) in (0, None)

    async def _refused_for_now(self, stand: Stand, node: Any) -> LaunchRefused | None:
        try:
            await stand.backend.launch(node, self.token)
        except LaunchRefused as error:
            refused = error
        else:
            return None
        assert not refused.permanent, f"refused for good, and others would have had room: {refused}"
        assert refused.reason
        return refused

    # ---- hosts

    @story
    async def test_a_running_node_has_a_host(self, stand: Stand) -> None:
        """A node's host is named once the node runs, or soon after, and keeps its name; a later list has it too."""
        node = make_launch()
        async with watching(stand.backend) as watch:
            host = await self._host(stand, watch, node)
            async with watching(stand.backend) as later:
                assert later.nodes[node.name].host == host
            named = {one.host for one in watch.seen(node.name) if one.host}
            assert named == {host}, f"one node, several hosts: {named}"

    @story
    async def test_hosts_are_avoided(self, stand: Stand) -> None:
        """A node never runs on a host that it is to avoid: it runs elsewhere, or waits, and says `AVOIDED`."""
        stand.need("avoid")
        first = make_launch(0)
        async with watching(stand.backend) as watch:
            host = await self._host(stand, watch, first)
            second = make_launch(1)._replace(avoid=(host,))
            refused = await self._refused_for_now(stand, second)
            if refused is not None:
                assert refused.reason.startswith(AVOIDED), refused
                return

            def settled(seen: Seen) -> bool:
                one = seen.get(second.name)
                return one is not None and (one.phase == "running" or one.waits.startswith(AVOIDED))

            one = (await watch.until(settled))[second.name]
            assert one.phase != "running" or one.host != host, (
                f"it runs on {host}, which it was to avoid; a backend that cannot keep off a host says so: `cannot['avoid']`"
            )

    async def _host(self, stand: Stand, watch: Watch, node: Any) -> str:
        """The host of a node that is launched for this. Skips where there is none."""
        stand.need("hosts")
        await stand.backend.launch(node, self.token)
        await watch.running(node.name)
        try:
            seen = await asyncio.wait_for(watch.until(lambda seen: bool(seen[node.name].host)), HOST_S)
        except asyncio.TimeoutError:
            stand._replace(cannot={"hosts": f"it names no host within {HOST_S:g} s of a start"}).need("hosts")
            raise
        return seen[node.name].host

    @story
    async def test_a_lost_host_is_no_end(self, stand: Stand) -> None:
        """A node whose host cannot be reached is ``lost``, neither gone nor failed, also in a new list; then it runs again."""
        stand.need("lost", "lose", "reach")
        assert stand.can.lose is not None
        assert stand.can.reach is not None
        node = make_launch()
        async with watching(stand.backend) as watch:
            await stand.backend.launch(node, self.token)
            await watch.running(node.name)
            await stand.can.lose(node.name)
            seen = await watch.until(lambda seen: seen[node.name].phase == "lost")
            assert seen[node.name].reason, "it does not say why"
            async with watching(stand.backend) as later:
                assert later.nodes[node.name].phase == "lost"
            await stand.can.reach(node.name)
            await watch.running(node.name)
            assert set(watch.phases(node.name)) <= {"pending", "running", "lost"}, watch.phases(node.name)

    # ---- notices

    @story
    async def test_a_notice_is_told(self, stand: Stand) -> None:
        """What will be taken away is announced, with its time, and runs meanwhile; a later list tells the same deadline."""
        async with watching(stand.backend) as watch:
            left_s = await self._warned(stand, watch, 600.0)
            assert left_s is None or abs(left_s - 600.0) <= SLACK_S, f"{left_s:g} s instead of 600 s"
            # Time itself is what is tried: a list that repeats a notice says how old it is.
            await asyncio.sleep(OLD_S)
            async with watching(stand.backend) as later:
                again_s = _left_s(later.nodes[make_launch().name])
                assert (again_s is None) == (left_s is None)
                assert again_s is None or abs(again_s + OLD_S - 600.0) <= SLACK_S, (
                    f"{again_s:g} s are left after {OLD_S:g} of 600 s: `notice_us` counts from `age_us` ago"
                )

    @story
    async def test_the_newest_notice_is_told(self, stand: Stand) -> None:
        """A deadline that moves, later or sooner, is told."""
        stand.need("notices", "warn")
        assert stand.can.warn is not None
        name = make_launch().name
        async with watching(stand.backend) as watch:
            if await self._warned(stand, watch, 600.0) is None:
                return
            for next_s in (3000.0, 60.0):
                await stand.can.warn(name, next_s)
                await watch.until(lambda seen, next_s=next_s: _near(seen[name], next_s))  # type: ignore[misc]

    @story
    async def test_a_notice_is_withdrawn(self, stand: Stand) -> None:
        """A notice that no longer holds is not told any more, and the node runs on."""
        stand.need("notices", "warn", "withdraw")
        assert stand.can.withdraw is not None
        name = make_launch().name
        async with watching(stand.backend) as watch:
            await self._warned(stand, watch, 600.0)
            await stand.can.withdraw(name)
            seen = await watch.until(lambda seen: not seen[name].notice)
            assert seen[name].phase == "running"
            async with watching(stand.backend) as later:
                assert not later.nodes[name].notice

    async def _warned(self, stand: Stand, watch: Watch, after_s: float) -> float | None:
        """A node runs and is announced to be taken away; the time that is left to it, None where the platform does not say."""
        stand.need("notices", "warn")
        assert stand.can.warn is not None
        node = make_launch()
        await stand.backend.launch(node, self.token)
        await watch.running(node.name)
        await stand.can.warn(node.name, after_s)
        seen = await watch.until(lambda seen: bool(seen[node.name].notice))
        assert seen[node.name].phase == "running", seen[node.name]
        return _left_s(seen[node.name])


def _left_s(seen: Observation) -> float | None:
    return (seen.notice_us - seen.age_us) / 1e6 if seen.notice_us else None


def _near(seen: Observation, left_s: float) -> bool:
    told = _left_s(seen)
    return told is not None and abs(told - left_s) <= SLACK_S
