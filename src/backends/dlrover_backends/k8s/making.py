"""Makes a job's masters in a cluster: all objects of a plan, or none of them.

Several commands may make a job of one name at a time, and an operator too. So each object that a call makes has the call's own
mark in an annotation. A call that fails deletes the objects with its mark, each by its uid, and nothing else. The mark also says
whether a create whose answer was lost has been done.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import secrets
import time
from collections.abc import Sequence
from typing import Any

from dlrover_backends.k8s import masters, names, refusals
from dlrover_backends.k8s.api import Api, Json
from dlrover_backends.k8s.errors import Busy, Conflict, Forbidden, Invalid, NotFound, Unreachable
from dlrover_backends.k8s.jobs import deletion
from dlrover_backends.k8s.masters import MasterPlan
from dlrover_backends.k8s.paths import collection, path_of
from dlrover_core.errors import CoreError, SpecError

NOTE_CALL = "dlrover-core/made-by"
"""The mark of the call that has made an object."""
TRIES, PAUSE_S, ASKED_MAX_S = 4, 0.5, 10.0
"""Tries of a write, the pause after the first one, and the longest pause that the server's Retry-After is given."""
YOUNG_S = 60.0
"""A Secret without a Job that is younger than this may be of a command that is still at work."""


async def make(api: Api, plan: MasterPlan) -> MasterPlan:
    """Make everything that the plan says; the plan with the uid of what owns it. All of it, or nothing is left.

    Raises `SpecError` where the job is there already, a right is missing, or the API server does not take an object; `ApiError`.
    """
    made = masters.objects(plan)
    await _make_room(api, plan, made)
    mark = secrets.token_hex(8)
    try:
        owner = await _made(api, made[0], mark)
        if plan.owner is None:
            plan = dataclasses.replace(plan, uid=str(owner["metadata"]["uid"]))
            made = masters.objects(plan)
        answers = [await _made(api, one, mark) for one in made[1:]]
        if plan.owner is None:
            await _own(api, owner, answers[-1])
    except BaseException:
        await asyncio.shield(_remove_marked(api, made, mark))
        raise
    return plan


async def _made(api: Api, one: Json, mark: str) -> Json:
    """Create an object with our mark; where the answer is lost, look whether it is there. Raises `SpecError`, `ApiError`."""
    notes = {**(one["metadata"].get("annotations") or {}), NOTE_CALL: mark}
    marked = {**one, "metadata": {**one["metadata"], "annotations": notes}}
    try:
        return await _until_told(api, "POST", collection(one), marked)
    except Forbidden as error:
        raise SpecError("backend", refusals.missing_right(error)) from error
    except NotFound as error:
        raise SpecError("backend", f"{error.message}: create it, or say --backend k8s:namespace=NAME") from error
    except Conflict as error:
        found = await _found(api, one)
        if found is not None and _mark_of(found) == mark:  # an earlier try has made it, and its answer was lost
            return found
        raise _taken(one, found) from error


async def _until_told(api: Api, method: str, path: str, body: Json) -> Json:
    """Ask again a few times where no answer comes. A create that was done already is a `Conflict` then."""
    for attempt in range(1, TRIES):
        try:
            return await api.ask(method, path, body=body)
        except (Unreachable, Busy) as error:
            pause_s = PAUSE_S * attempt if error.retry_after_s is None else min(error.retry_after_s, ASKED_MAX_S)
        await asyncio.sleep(pause_s)
    return await api.ask(method, path, body=body)


async def _own(api: Api, owner: Json, job: Json) -> None:
    """Let the Secret go with the Job, and with the Secret all else. Raises `SpecError` where the Secret is another one now."""
    reference = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }
    ours = owner["metadata"]
    path = f"/api/v1/namespaces/{ours['namespace']}/secrets/{ours['name']}"
    try:
        # The uid is a precondition: a Secret of another call is left as it is.
        body = {"metadata": {"uid": ours["uid"], "ownerReferences": [reference]}}
        await _until_told(api, "PATCH", path, body)
    except (NotFound, Conflict, Invalid) as error:  # Invalid: a uid cannot be changed
        raise SpecError(
            "job-id", f"secret {ours['name']} was deleted while the job was made: start it again"
        ) from error


async def _remove_marked(api: Api, made: Sequence[Json], mark: str) -> None:
    """Delete what this call has made. The Job first, which would make pods meanwhile, and last: its create may come late."""
    for one in [*reversed(made), made[-1]]:
        with contextlib.suppress(CoreError):
            found = await _found(api, one)
            if found is not None and _mark_of(found) == mark:
                await _until_told(api, "DELETE", path_of(one), deletion(found))


# ---- what is there before


async def _make_room(api: Api, plan: MasterPlan, made: Sequence[Json]) -> None:
    """Remove what a command that was killed half way has left. Raises `SpecError` where it may be somebody else's."""
    called = plan.job or plan.name
    if await _found(api, made[-1]) is not None:
        where = f"k8s:{plan.namespace}/{called}"
        raise SpecError(
            "job-id", f"{called!r} is there already; dlrover stop {where} ends and removes it, or name another"
        )
    there = [(one, found) for one in reversed(made) if (found := await _found(api, one)) is not None]
    for one, found in there:
        if not _is_left(found):
            raise _taken(one, found)
    for one, found in there:
        age_s = _age_s(found)
        if one["kind"] == "Secret" and not found["metadata"].get("ownerReferences") and age_s < YOUNG_S:
            raise SpecError(
                "job-id",
                f"another command may be making {called!r} now: secret {plan.called} was made {age_s:.0f} s ago, and the Job "
                f"is not there yet. Try again in {YOUNG_S - age_s:.0f} s, or name another",
            )
    for one, found in there:
        with contextlib.suppress(NotFound, Conflict):
            await api.ask("DELETE", path_of(one), body=deletion(found))


def _is_left(found: Json) -> bool:
    """Is this of a command like ours? What has a controller is an operator's."""
    meta = found["metadata"]
    owners = meta.get("ownerReferences") or ()
    return (meta.get("labels") or {}).get(names.LABEL_BY) == names.BY and not any(
        one.get("controller") for one in owners
    )


def _taken(one: Json, found: Json | None) -> SpecError:
    """Somebody else has an object of this name."""
    what = f"{one['kind']} {one['metadata']['name']}"
    meta: dict[str, Any] = (found or {}).get("metadata") or {}
    controller = next((ref for ref in meta.get("ownerReferences") or () if ref.get("controller")), None)
    if controller is not None:
        return SpecError("job-id", f"{what} belongs to {controller['kind']} {controller['name']}: name another job")
    if (meta.get("labels") or {}).get(names.LABEL_BY) == names.BY:
        return SpecError(
            "job-id", f"another command is making a job of this name now: it has made {what}. Name another"
        )
    return SpecError("job-id", f"{what} is not of this job: delete it, or name another")


def _age_s(found: Json) -> float:
    """Seconds since an object was made, by this host's clock; a skewed clock only makes the caller wait, or not wait."""
    text = str(found["metadata"].get("creationTimestamp") or "")
    try:
        made = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return YOUNG_S
    return max(0.0, time.time() - made.timestamp())


async def _found(api: Api, one: Json) -> Json | None:
    """The object of that name that is there. Raises `SpecError` for a missing right, `ApiError`."""
    try:
        return await api.ask("GET", path_of(one))
    except NotFound:
        return None
    except Forbidden as error:
        raise SpecError("backend", refusals.missing_right(error)) from error


def _mark_of(found: Json) -> str:
    return str((found["metadata"].get("annotations") or {}).get(NOTE_CALL, ""))
