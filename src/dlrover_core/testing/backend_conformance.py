"""What every backend must do, as a test class: subclass it, give it your backend, run pytest.

```python
class TestMyBackend(BackendConformance):
    @contextlib.asynccontextmanager
    async def make_backend(self):
        async with my_empty_cluster() as cluster:
            yield Stand(cluster.backend, cluster.kill)       # kill(name): end that node from outside, as an accident does
```

The program of a node must live until it is deleted or killed. Tests are plain functions; each tells its story in an event
loop of its own (`run`), so no plugin is needed. What cannot be tried raises `unittest.SkipTest`, which pytest knows too. What a
platform announces (queues, lost hosts, notices) is in `platform_stories`: a `Stand` says what its platform can be made to do.
From the shell: ``dlrover conformance``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from unittest import SkipTest

from dlrover_core.errors import LaunchRefused
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import Backend, Listed
from dlrover_core.spec import DEFAULT_GROUP
from dlrover_core.testing.backend_stand import Stand, make_launch, watching
from dlrover_core.testing.platform_stories import PlatformStories
from dlrover_core.testing.stories import story

# A bound on every story: a backend that hangs fails its test by name.
STORY_S = 60.0
MANY = 20

Story = Callable[[Stand], Awaitable[None]]


class BackendConformance(PlatformStories):
    """The contract of `Backend`. Every test begins without nodes."""

    token = 7
    grace_s = 0.0
    # How a scheduler tells that a node's process was killed: by signal, or as a shell does.
    killed_codes: frozenset[int] = frozenset({-9, 137})
    # Does it refuse the orders of a deposed master? One that cannot, lists what it then finds, and core deletes it.
    fences = True
    # How long one story may take: a scheduler that pulls images needs longer.
    story_s = STORY_S

    def make_backend(self) -> AbstractAsyncContextManager[Stand]:
        """A backend without nodes; what it started is ended at the end."""
        raise NotImplementedError

    def nonsense(self) -> NodeLaunch | None:
        """A launch that can never succeed (a program, an image that does not exist); None where there is none."""
        return None

    def run(self, story: Story) -> None:
        """Tell a story to a new backend, in a new event loop."""

        async def told() -> None:
            async with self.make_backend() as stand:
                await story(stand)

        asyncio.run(asyncio.wait_for(told(), self.story_s))

    async def launch_all(self, backend: Backend, nodes: Iterable[NodeLaunch]) -> None:
        """Launch all at once."""
        await asyncio.gather(*(backend.launch(node, self.token) for node in nodes))

    # ---- launching

    @story
    async def test_nothing_is_listed_at_first(self, stand: Stand) -> None:
        """Without nodes the first thing told is an empty `Listed`: the master needs to know that there is nothing."""
        async with watching(stand.backend) as watch:
            assert watch.told[0] == Listed(())

    @story
    async def test_a_launched_node_runs(self, stand: Stand) -> None:
        """What is launched is seen to run, under the name it was given."""
        node = make_launch()
        async with watching(stand.backend) as watch:
            await stand.backend.launch(node, self.token)
            seen = await watch.running(node.name)
            assert set(seen) == {node.name}
            assert watch.phases(node.name)[-1] == "running"
            assert set(watch.phases(node.name)) <= {"pending", "running"}

    @story
    async def test_launch_is_idempotent(self, stand: Stand) -> None:
        """The same order, repeated one after another and at once, is one node."""
        node, other = make_launch(0), make_launch(1)
        async with watching(stand.backend) as watch:
            await self.launch_all(stand.backend, [node, node, node])
            await watch.running(node.name)
            await stand.backend.launch(node, self.token)
            await stand.backend.launch(other, self.token)
            seen = await watch.running(node.name, other.name)
            assert set(seen) == {node.name, other.name}
            await stand.kill(node.name)
            await watch.over(node.name)
            assert watch.nodes[other.name].phase == "running"

    @story
    async def test_many_at_once(self, stand: Stand) -> None:
        """Twenty launches at once are twenty nodes, and twenty deletions at once leave none."""
        nodes = [make_launch(index) for index in range(MANY)]
        names = [node.name for node in nodes]
        async with watching(stand.backend) as watch:
            await self.launch_all(stand.backend, nodes)
            assert set(await watch.running(*names)) == set(names)
            await asyncio.gather(*(stand.backend.delete(name, self.token, self.grace_s) for name in names))
            assert await watch.gone(*names) == {}

    @story
    async def test_long_and_foreign_names(self, stand: Stand) -> None:
        """A name comes back as it was given, long or not in ASCII."""
        nodes = [make_launch(job="訓練-ß"), make_launch(job="j" * 200)]
        async with watching(stand.backend) as watch:
            await self.launch_all(stand.backend, nodes)
            await watch.running(*(node.name for node in nodes))

    def test_nonsense_is_told(self) -> None:
        """What can never run is refused for good, or is seen to fail; it does not stay pending."""
        nonsense = self.nonsense()
        if nonsense is None:
            raise SkipTest("`nonsense` names no launch that can never succeed")

        async def story(stand: Stand) -> None:
            async with watching(stand.backend) as watch:
                refused = await _refusal(stand.backend, nonsense, self.token)
                if refused is None:
                    failed = await watch.over(nonsense.name)
                    assert failed.phase == "failed"
                    assert failed.reason
                else:
                    assert refused.permanent, refused
                    assert refused.reason
                    await watch.gone(nonsense.name)
                assert "running" not in watch.phases(nonsense.name)

        self.run(story)

    # ---- deaths

    @story
    async def test_a_death_is_seen(self, stand: Stand) -> None:
        """A node killed from outside is seen to have failed, with its exit code; it stays listed."""
        node = make_launch()
        async with watching(stand.backend) as watch:
            await stand.backend.launch(node, self.token)
            await watch.running(node.name)
            await stand.kill(node.name)
            dead = await watch.over(node.name)
            assert (dead.phase, dead.exit_code in self.killed_codes) == ("failed", True), dead
        async with watching(stand.backend) as later:
            assert later.nodes[node.name].phase == "failed"

    @story
    async def test_a_name_is_never_used_again(self, stand: Stand) -> None:
        """A late or repeated order does not bring back what died, nor what was deleted: it is ignored or refused for good."""
        dead, deleted, witness = make_launch(0), make_launch(1), make_launch(2)
        async with watching(stand.backend) as watch:
            await self.launch_all(stand.backend, [dead, deleted])
            await watch.running(dead.name, deleted.name)
            await stand.kill(dead.name)
            await watch.over(dead.name)
            await stand.backend.delete(deleted.name, self.token, self.grace_s)
            await watch.gone(deleted.name)
            for late in (dead, deleted):
                refused = await _refusal(stand.backend, late, self.token)
                assert refused is None or refused.permanent, refused
            # Were one of them started, it would be there no later than what is ordered after it.
            await stand.backend.launch(witness, self.token)
            await watch.running(witness.name)
            async with watching(stand.backend) as fresh:
                assert fresh.nodes[dead.name].phase == "failed"
                assert deleted.name not in fresh.nodes

    @story
    async def test_the_next_incarnation_runs(self, stand: Stand) -> None:
        """After a node died, the next incarnation in its place is another node with a life of its own."""
        first, second = make_launch(0, 0), make_launch(0, 1)
        async with watching(stand.backend) as watch:
            await stand.backend.launch(first, self.token)
            await watch.running(first.name)
            await stand.kill(first.name)
            await watch.over(first.name)
            await stand.backend.launch(second, self.token)
            await watch.running(second.name)
            await stand.backend.delete(first.name, self.token, self.grace_s)
            seen = await watch.gone(first.name)
            assert seen[second.name].phase == "running"

    # ---- deleting

    @story
    async def test_deleting_the_unknown_is_fine(self, stand: Stand) -> None:
        """Deleting what is not there, or is there no more, is done already."""
        node = make_launch()
        await stand.backend.delete("nobody", self.token, self.grace_s)
        async with watching(stand.backend) as watch:
            await stand.backend.launch(node, self.token)
            await watch.running(node.name)
            for _ in range(3):
                await stand.backend.delete(node.name, self.token, self.grace_s)
            await watch.gone(node.name)
            await stand.backend.delete(node.name, self.token, self.grace_s)

    @story
    async def test_a_deleted_node_is_gone(self, stand: Stand) -> None:
        """A deleted node is seen to be gone, a dead one too, and a new consumer's first list lacks both."""
        alive, dead, other = make_launch(0), make_launch(1), make_launch(2)
        async with watching(stand.backend) as watch:
            await self.launch_all(stand.backend, [alive, dead, other])
            await watch.running(alive.name, dead.name, other.name)
            await stand.kill(dead.name)
            await watch.over(dead.name)
            for name in (alive.name, dead.name):
                await stand.backend.delete(name, self.token, self.grace_s)
            await watch.gone(alive.name, dead.name)
        async with watching(stand.backend) as later:
            assert set(later.nodes) == {other.name}

    # ---- observing

    @story
    async def test_observing_again_begins_with_a_list(self, stand: Stand) -> None:
        """A new observation, after a cancelled one too, begins with a list of all nodes."""
        node = make_launch()
        await stand.backend.launch(node, self.token)
        for _ in range(3):
            async with watching(stand.backend) as watch:
                assert isinstance(watch.told[0], Listed)
                assert node.name in watch.nodes
                await watch.running(node.name)

    @story
    async def test_two_observe(self, stand: Stand) -> None:
        """Two consumers are both told everything: a deposed master may still watch while the new one does."""
        node = make_launch()
        async with watching(stand.backend) as one, watching(stand.backend) as two:
            await stand.backend.launch(node, self.token)
            await asyncio.gather(one.running(node.name), two.running(node.name))
            await stand.kill(node.name)
            assert (await one.over(node.name)).exit_code == (await two.over(node.name)).exit_code

    @story
    async def test_room(self, stand: Stand) -> None:
        """Room is a number of nodes, or None where it is unknown."""
        room = await stand.backend.room(DEFAULT_GROUP)
        assert room is None or (type(room) is int and room >= 0), room

    # ---- fencing

    def test_a_deposed_master_orders_nothing(self) -> None:
        """An order with a lower token than one before it changes nothing, and is no refusal for good."""
        if not self.fences:
            raise SkipTest("`fences` is False: core deletes what a deposed master still orders")

        async def story(stand: Stand) -> None:
            node, late = make_launch(0), make_launch(1)
            async with watching(stand.backend) as watch:
                await stand.backend.launch(node, self.token)
                await watch.running(node.name)
                refused = await _refused(stand.backend.launch(late, self.token - 1))
                assert refused, "an order of a deposed master was obeyed"
                refused = await _refused(stand.backend.delete(node.name, self.token - 1, self.grace_s))
                assert refused, "an order of a deposed master was obeyed"
                await stand.backend.launch(make_launch(2), self.token + 1)
                seen = await watch.running(node.name, make_launch(2).name)
                assert late.name not in seen

        self.run(story)


async def _refusal(backend: Backend, node: NodeLaunch, token: int) -> LaunchRefused | None:
    try:
        await backend.launch(node, token)
    except LaunchRefused as refused:
        return refused
    return None


async def _refused(order: Awaitable[object]) -> bool:
    try:
        await order
    except LaunchRefused as refused:
        return not refused.permanent
    except Exception:  # noqa: BLE001  # a backend's own error
        return True
    return False
