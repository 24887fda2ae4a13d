"""`dlrover attach` of a job in a cluster: which job it shows, how it ends, and in whose name it speaks."""

from __future__ import annotations

import asyncio
import copy
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from k8s_inside import Inside

from dlrover_adapters.cli import k8s_attach
from dlrover_backends.k8s import jobs, masters, names
from dlrover_backends.k8s.errors import Request, of_answer
from dlrover_backends.k8s.reach import Reach

JOBS = "/apis/batch/v1/namespaces/ml/jobs"
PODS = "/api/v1/namespaces/ml/pods"
MASTERS: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {
        "name": "digits-masters",
        "labels": {names.LABEL_BY: names.BY, masters.LABEL_ROLE: masters.ROLE},
        "annotations": {names.NOTE_JOB: "digits"},
    },
    "spec": {
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "m", "image": "i", "env": [{"name": masters.RUN, "value": "u-1"}]}],
            }
        }
    },
}


async def attached(api: Inside, run: str = "u-1") -> k8s_attach._Showing:
    """What shows the job."""
    made = copy.deepcopy(MASTERS)
    made["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"] = run
    await api.ask("POST", JOBS, body=made)
    return k8s_attach._Showing(cast(Reach, SimpleNamespace(api=api)), await jobs.find(api, "ml", "digits"))


def test_another_job_of_the_name_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was removed and made again between two looks has another run: nothing of it would be shown, and no end told."""
    monkeypatch.setattr(k8s_attach, "LOOK_S", 0.0)

    async def story() -> None:
        api = Inside()
        showing = await attached(api)
        await api.ask("DELETE", f"{JOBS}/digits-masters", body={"propagationPolicy": "Background"})
        await api.ask("POST", JOBS, body=MASTERS)
        with pytest.raises(jobs.Missing):
            await showing.run()

    asyncio.run(asyncio.wait_for(story(), 20))


def test_ctrl_c_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server is frozen: the command ends all the same."""
    monkeypatch.setattr(k8s_attach, "LOOK_S", 0.0)

    async def story() -> None:
        api = Inside()
        showing, asked = await attached(api), asyncio.Event()

        async def frozen(*_: Any, **__: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(jobs, "find", frozen)
        running = asyncio.ensure_future(showing.run())
        await asked.wait()
        await showing.end()
        assert (await asyncio.gather(running, return_exceptions=True))[0] is not None

    asyncio.run(asyncio.wait_for(story(), 20))


def test_it_speaks_in_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a right for the output is missing, for one."""
    said = asyncio.Event()

    class Mute(Inside):
        async def lines(self, path: str, query: Any) -> Any:
            """Not with these rights."""
            raise of_answer(Request("GET", path), 403, {"message": "no", "reason": "Forbidden"}, {})
            yield

    async def story() -> None:
        api = Mute()
        secret = await api.ask("POST", "/api/v1/namespaces/ml/secrets", body={"metadata": {"name": "s"}})
        run = secret["metadata"]["uid"]
        showing = await attached(api, run)
        owner = {"apiVersion": "v1", "kind": "Secret", "name": "s", "uid": run}
        labels = names.labels("digits", run)
        pod = {"metadata": {"name": "p", "labels": labels, "ownerReferences": [owner]}}
        pod["spec"] = {"containers": [{"name": "node", "image": "i"}]}
        await api.ask("POST", PODS, body={"apiVersion": "v1", "kind": "Pod", **pod})
        status = {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]}
        await api.ask("PATCH", f"{PODS}/p/status", body={"status": status})
        running = asyncio.ensure_future(showing.run())
        await said.wait()
        await showing.end()
        await asyncio.gather(running, return_exceptions=True)

    written = bytearray()

    def write(line: bytes) -> None:
        written.extend(line)
        said.set()

    stdout = SimpleNamespace(buffer=SimpleNamespace(write=write), flush=lambda: None)
    monkeypatch.setattr(k8s_attach, "sys", SimpleNamespace(stdout=stdout, stderr=sys.stderr))
    asyncio.run(asyncio.wait_for(story(), 20))
    assert written.startswith(b"dlrover attach: ")
