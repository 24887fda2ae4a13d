"""How fast does the Kubernetes backend make, list and watch pods, and what does that cost a master?

The backend that masters use, with its production client, over HTTP against the fake API server in a process of its own on the
same cores; the server is held to recordings of a real one, and its speed bounds ours. Nothing runs in the pods.

- pods made: `--pods` launches, `--at-once` at a time, as many as a master orders together; until the API has accepted all;
- a list: all pods of the run are listed anew, `--lists` times in each trial, after two that load what it takes and open the
  connection; the processor time from the request to what the master is told. Even that is noisy where neighbours share caches,
  hence the many;
- watching: a process of its own observes `--watched` pods, and nothing changes in them. Measured are its share of a core over
  `--seconds`, and its memory, less that of a process that observes no pods;
- a failed pod: its status says so, and the next incarnation is launched at once; the time between the two requests.

No peer runs here. JobSet published 290 pods/s for its controller at 15,000 nodes, on a cluster; no ratio is made of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _bench import BROKEN, Result, Row, median, options, quantile, say
from tools.figures import interval

from dlrover_core import BackendContext, Changed, Listed
from dlrover_core.testing.backend_stand import make_launch

MEASURES = ("src/backends/dlrover_backends/k8s",)

RATE, LIST_MS, MEMORY_MIB, CORE, FAILED_MS = 300.0, 60.0, 120.0, 5.0, 100.0
LIMIT_S = 300.0
PODS = "/api/v1/namespaces/train/pods"


# ---- in processes of their own


def serve(folder: str) -> int:
    """The API server, until stdin ends."""
    from dlrover_backends.fake_k8s.cluster import FakeCluster

    with FakeCluster() as cluster:
        cluster.kubeconfig(Path(folder) / "kubeconfig")
        print("serves", flush=True)
        sys.stdin.read()
    return 0


def watch(folder: str, run: str, pods: int, seconds: float) -> int:
    """Observe a run and do nothing else; print memory and processor time."""

    async def observing() -> dict[str, float]:
        backend = made(folder, run)
        seen = backend.observe()
        async for one in seen:
            if isinstance(one, Listed):
                assert len(one.nodes) == pods, f"{len(one.nodes)} pods are listed, not {pods}"
                break
        # The first two seconds belong to the start.
        waiting = asyncio.ensure_future(anext(seen))
        await asyncio.sleep(2)
        before, began = time.process_time(), time.perf_counter()
        await asyncio.wait({waiting}, timeout=seconds)
        used, took = time.process_time() - before, time.perf_counter() - began
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await backend.close()
        return {"mib": memory_mib(), "core": 100 * used / took}

    print(json.dumps(asyncio.run(asyncio.wait_for(observing(), LIMIT_S))), flush=True)
    return 0


def memory_mib() -> float:
    """Resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


# ---- here


def made(folder: str, run: str) -> Any:
    """The backend of a run's master."""
    from dlrover_backends.k8s import backend

    config = f"image=bench:1,kubeconfig={folder}/kubeconfig"
    return backend(
        BackendContext("bench", run, ("127.0.0.1:1",), "t", arguments=("train.py",), args=config, directory=folder)
    )


async def launched(backend: Any, pods: int, at_once: int) -> float:
    """Launch so many nodes; seconds until all are accepted."""
    turns = asyncio.Semaphore(at_once)

    async def one(index: int) -> None:
        async with turns:
            await backend.launch(make_launch(index, job="bench"), 1)

    began = time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(pods)))
    return time.perf_counter() - began


async def listed(folder: str, run: str, pods: int, times: int) -> list[float]:
    """Processor time of lists, in ms each. Two lists before have opened the connection, and loaded what that takes."""
    backend = made(folder, run)
    used = list[float]()
    for _ in range(times + 2):
        before, seen = time.process_time(), backend.observe()
        first = await anext(seen)
        used.append(1000 * (time.process_time() - before))
        assert isinstance(first, Listed)
        assert len(first.nodes) == pods, f"{len(first.nodes)} pods are listed, not {pods}"
        await seen.aclose()
    await backend.close()
    return used[2:]


async def failed(folder: str, run: str, times: int) -> list[float]:
    """From a pod's failure to the launch of the next incarnation, in ms each."""
    from dlrover_backends.k8s import names
    from dlrover_backends.k8s.transport import Transport

    backend, kubelet = made(folder, run), Transport(f"{folder}/kubeconfig")
    for index in range(times):
        await backend.launch(make_launch(index, job="bench"), 1)
    seen, found = backend.observe(), list[float]()
    assert isinstance(await anext(seen), Listed)
    for index in range(times):
        name = make_launch(index, job="bench").name
        ended = {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "name": "node"}
        status = {"status": {"phase": "Failed", "containerStatuses": [ended]}}
        began = time.perf_counter()
        told = asyncio.ensure_future(kubelet.ask("PATCH", f"{PODS}/{names.pod_name(name, run)}/status", body=status))
        async for one in seen:
            if isinstance(one, Changed) and one.node.phase == "failed":
                assert one.node.name == name, f"{one.node.name} failed, and {name} was to"
                break
        launch = asyncio.ensure_future(backend.launch(make_launch(index, 1, job="bench"), 1))
        found.append(1000 * (time.perf_counter() - began))
        await asyncio.gather(told, launch)
    await seen.aclose()
    await backend.close()
    await kubelet.close()
    return found


def watched(folder: str, run: str, pods: int, seconds: float) -> dict[str, float]:
    """Memory (MiB) and share of a core (%) of a process that observes this many pods."""
    words = [sys.executable, __file__, "--child", "watch", "--folder", folder, "--run", run]
    words += ["--watched", str(pods), "--seconds", str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the watching process failed: {done.stderr.strip()[-500:]}")
    told: dict[str, float] = json.loads(done.stdout)
    return told


async def _launch_all(folder: str, run: str, chosen: argparse.Namespace, pods: int) -> float:
    backend = made(folder, run)
    await launched(backend, 1, 1)  # the connection, and the owner
    took = await launched(backend, pods, chosen.at_once)
    await backend.close()
    return (pods - 1) / took


def measure(folder: str, chosen: argparse.Namespace, result: Result) -> None:
    """All rows. Raises RuntimeError and AssertionError where something else is there than should be."""
    rates, lists, waits = [], list[float](), list[float]()
    for number in range(chosen.trials):
        rates.append(asyncio.run(_launch_all(folder, f"rate{number}", chosen, chosen.pods)))
        lists.extend(asyncio.run(listed(folder, f"rate{number}", chosen.pods, chosen.lists)))
        waits.extend(asyncio.run(failed(folder, f"failed{number}", chosen.failures)))
        say(f"{number + 1}/{chosen.trials} {rates[-1]:,.0f} pods/s, {lists[-1]:.1f} ms for a list, {waits[-1]:.1f} ms")
    asyncio.run(_launch_all(folder, "watched", chosen, chosen.watched))
    memory, core = list[float](), list[float]()
    for _ in range(chosen.trials):
        none = watched(folder, "none", 0, 0.1)
        many = watched(folder, "watched", chosen.watched, chosen.seconds)
        memory.append(many["mib"] - none["mib"])
        core.append(many["core"])
        say(f"{chosen.watched} pods watched: {memory[-1]:.0f} MiB more than none; {core[-1]:.2f} % of a core")
    result.rows += [
        Row("pods made, through the API", "/s", rates, target=RATE, most=False),
        Row(f"a list of {chosen.pods} pods: processor time", "ms", lists, target=LIST_MS),
        Row(
            "pod failed to replacement requested, p99",
            "ms",
            [quantile(waits, 0.99)],
            target=FAILED_MS,
            n=len(waits),
            within=interval(waits, 0.99),
        ),
        Row(f"{chosen.watched} pods observed: memory above none", "MiB", memory, target=MEMORY_MIB),
        Row(f"{chosen.watched} pods observed, nothing happens: share of a core", "%", core, target=CORE),
    ]
    result.notes.append(
        f"of the {len(waits)} failures the median is {median(waits):.1f} ms; the master's decision itself is not in it"
    )


def main() -> int:
    """The server, and then each measurement."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--pods", type=int, default=500, metavar="N", help="pods made and listed (default 500)")
        parser.add_argument("--lists", type=int, default=20, metavar="N", help="lists in a trial (default 20)")
        parser.add_argument("--at-once", type=int, default=32, metavar="N", help="launches at a time (default 32)")
        parser.add_argument("--failures", type=int, default=80, metavar="N", help="failures in a trial (default 80)")
        parser.add_argument("--watched", type=int, default=2000, metavar="N", help="pods watched (default 2000)")
        parser.add_argument(
            "--seconds", type=float, default=8.0, metavar="S", help="of watching, in each trial (default 8)"
        )
        parser.add_argument("--child", choices=("serve", "watch"), help=argparse.SUPPRESS)
        parser.add_argument("--folder", help=argparse.SUPPRESS)
        parser.add_argument("--run", help=argparse.SUPPRESS)

    chosen = options(__doc__, trials=5, more=more)
    if chosen.child == "serve":
        return serve(chosen.folder)
    if chosen.child == "watch":
        return watch(chosen.folder, chosen.run, chosen.watched, chosen.seconds)
    result = Result("k8s", "no peer")
    os.environ.pop("KUBECONFIG", None)
    with tempfile.TemporaryDirectory(prefix="dlb-") as folder:
        words = [sys.executable, __file__, "--child", "serve", "--folder", folder]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                if server.stdout.readline().strip() != "serves":
                    print("the API server did not come up", file=sys.stderr)
                    return BROKEN
                measure(folder, chosen, result)
            except (AssertionError, RuntimeError) as error:
                print(f"bench_k8s: {error}", file=sys.stderr)
                return BROKEN
            finally:
                server.kill()
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
