"""A job on a scheduler of one's own: everything a backend needs, and a run that loses a node. Run: python examples/custom_scheduler.py"""

import asyncio
import time
from collections.abc import AsyncIterator

from dlrover_core import Agent, Changed, GroupSpec, JobSpec, Listed, LaunchRefused, Master, MemoryLauncher, MemoryLog, Network, NodeLaunch, Observation, Training


class ToyScheduler:
    """Nodes are asyncio tasks. A real one talks to Slurm, Nomad, or whatever starts your machines."""

    def __init__(self, start) -> None:
        self.start, self.tasks, self.seen, self.watchers = start, {}, {}, []

    async def launch(self, node: NodeLaunch, token: int) -> None:
        if node.nproc > 64:
            raise LaunchRefused("a toy node has 64 slots", permanent=True)
        if node.name not in self.tasks:  # idempotent: a name is used once, for ever
            task = self.tasks[node.name] = asyncio.ensure_future(self.start(node))
            self.say(Observation(node.name, "running", host="toyland"))
            task.add_done_callback(lambda done: self.say(Observation(node.name, "failed" if done.cancelled() or done.exception() else "succeeded", -9 * done.cancelled())))

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        if name in self.seen:
            self.tasks[name].cancel()
            await asyncio.wait([self.tasks[name]])
            asyncio.get_running_loop().call_soon(self.say, Observation(name, "gone"))

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        self.watchers.append(queue := asyncio.Queue())
        try:
            yield Listed(tuple(self.seen.values()))  # everything first, then every change
            while True:
                yield Changed(await queue.get())
        finally:
            self.watchers.remove(queue)

    async def room(self, group: str) -> int | None:
        return None

    def say(self, node: Observation) -> None:
        self.seen.pop(node.name, None) if node.phase == "gone" else self.seen.update({node.name: node})
        for queue in self.watchers:
            queue.put_nowait(node)


async def main() -> None:
    network, training, log, boots = Network(), Training(steps=100, step_s=0.01), MemoryLog(), iter(range(1, 100))
    agent = lambda node: Agent(node.node, launcher=MemoryLauncher(node.node, 2, training), dialer=network.dialer(node.node), masters=["here"], boot=next(boots), host="toyland", address="toyland").run()  # noqa: E731
    backend, spec = ToyScheduler(agent), JobSpec("toy", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))
    master = Master(spec, event_log=log, listener=network.listener("here"), backend=backend, wall=lambda: time.time_ns() // 1000, holder="me", run_id="1")
    asyncio.get_running_loop().call_later(0.5, lambda: backend.tasks["toy-worker-1-0"].cancel())  # a node dies
    print(f"{(await master.run()).state} after {training.done} steps, in {len(set(training.starts))} starts")
    print(*[type(record.event).__name__ async for record in log.read("toy")], sep=" ")


if __name__ == "__main__":
    asyncio.run(main())
