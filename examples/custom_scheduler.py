"""A job on a scheduler of one's own, which loses a node: python examples/custom_scheduler.py."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from dlrover_core import Changed, GroupSpec, JobSpec, Listed, Master, NodeLaunch, Observation, Training, open_log


class ToyScheduler:
    """Nodes are asyncio tasks. A real one talks to Slurm, Nomad, or whatever starts your machines."""

    def __init__(self, start: Callable[[NodeLaunch], Awaitable[str]]) -> None:
        self.start, self.tasks, self.seen, self.watchers, self.token = start, {}, {}, [], 0

    async def launch(self, node: NodeLaunch, token: int) -> None:
        assert token >= self.token, "orders of a deposed master are refused"
        self.token = token
        if node.name not in self.tasks:  # idempotent: a name is used once, for ever
            task = self.tasks[node.name] = asyncio.ensure_future(self.start(node))
            self.say(node.name, "running")
            task.add_done_callback(lambda _: self.say(node.name, "failed" if task.cancelled() else "succeeded"))

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        assert token >= self.token, "orders of a deposed master are refused"
        self.token = token
        if name in self.seen:
            asyncio.get_running_loop().call_later(grace_s, self.tasks[name].cancel)
            self.tasks[name].add_done_callback(lambda _: self.say(name, "gone"))

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        self.watchers.append(queue := asyncio.Queue())
        yield Listed(tuple(self.seen.values()))  # everything first, then every change
        while True:
            yield Changed(await queue.get())

    async def room(self, group: str) -> int | None:
        return None

    def say(self, name: str, phase: str) -> None:
        self.seen[name] = node = Observation(name, phase, -9 if phase == "failed" else 0, host="toyland")
        for queue in self.watchers:
            queue.put_nowait(node)
        if phase == "gone":
            del self.seen[name]


async def main() -> None:
    training, log, loop = Training(steps=100, step_s=0.01), await open_log("memory:"), asyncio.get_running_loop()
    backend, group = ToyScheduler(lambda node: training.agent("here", node)), GroupSpec("worker", 2, 2, nproc=2)
    ports = {"event_log": log, "listener": training.network.listener("here"), "backend": backend}
    master = Master(JobSpec("toy", (group,)), **ports, wall=lambda: time.time_ns() // 1000, holder="me", run_id="1")
    loop.call_later(0.5, lambda: backend.tasks["toy-worker-1-0"].cancel())  # a node dies
    print((await master.run()).state, "after", training.done, "steps:")
    print(*[type(record.event).__name__ async for record in log.read("toy")])


if __name__ == "__main__":
    asyncio.run(main())
