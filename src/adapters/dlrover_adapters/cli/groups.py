"""The groups of a job as the command line describes them: one (`worker`), those of `--role-groups`, or those of a job file.

A *plan* is one group with everything that its nodes are started with. Options of a group are the command line's own with what the
group says of itself put over them, so that one group of many is read and checked exactly as a job of one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrover_adapters.agent.config import PLAIN, TORCH
from dlrover_adapters.cli import before, values, workers
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli.backend_flags import apart, in_images
from dlrover_adapters.cli.meeting import Meeting
from dlrover_adapters.cli.options import Setting
from dlrover_adapters.cli.torchrun_flags import Options
from dlrover_core.errors import SpecError
from dlrover_core.spec import GroupSpec, JobSpec

if TYPE_CHECKING:
    from dlrover_adapters.cli.job_file import GroupFile, JobFile

WORKER = GroupSpec().name
_ROLES = re.compile(r"([a-z][a-z0-9]*):([0-9]{1,6})(?::([0-9]{1,6}))?")

# Flags that say of one group what a job file says of each, and flags of jobs whose hosts come by themselves.
_OF_A_GROUP = ("nnodes", "local_nodes", "role")
_OF_A_PROGRAM = ("nproc_per_node", "module", "no_python", "run_path", "relaunch_max")
_OF_HOSTS = ("master", "rdzv_endpoint", "master_addr", "master_port", "node_rank")
_FRAMEWORKS = {"torch": TORCH, "none": PLAIN}


class Plan(NamedTuple):
    """One group. ``options``: as if the job were this group alone; ``spec``: what is set of its spec; ``how``: of `Settings`."""

    name: str
    options: Options
    spec: Mapping[str, Setting]
    how: dict[str, Any]

    @property
    def made(self) -> GroupSpec:
        """Its spec. Raises `SpecError`."""
        return GroupSpec(self.name, **{name: one.value for name, one in self.spec.items()})


def are_given(options: Options) -> bool:
    """Does the command line describe groups, and not one group of its own?"""
    return bool(options.job_file or options.role_groups)


def taken_in(options: Options) -> Options:
    """The options, with the job file's put where the command line says nothing. Raises `SpecError`."""
    options.groups = ()
    if not are_given(options):
        return options
    if options.job_file and options.role_groups:
        raise SpecError(
            "role-groups", f"{options.role_groups!r}, but --job names its groups itself; leave one of them out"
        )
    flag = "--job" if options.job_file else "--role-groups"
    _refuse(options, flag, (*_OF_A_GROUP, *_OF_HOSTS))
    if options.job_file:
        _refuse(options, flag, _OF_A_PROGRAM)
        if options.script is not None:
            raise SpecError(
                "script",
                f"{options.script!r}, but --job names the program of each group; leave it out, or write it there",
            )
        from dlrover_adapters.cli import job_file  # a job without one does not pay for it

        _take(options, job_file.read(options.job_file))
    elif options.role_groups:
        options.groups = _of_roles(options.role_groups)
    # All of their nodes are on this host, or a scheduler's.
    options.local_nodes, options.nnodes = sum(one.spec["nodes_max"] for one in options.groups), None
    return options


def _refuse(options: Options, flag: str, names: Sequence[str]) -> None:
    """What a platform has put into the environment contradicts nobody; what somebody typed does."""
    why = {
        "--job": "but --job says that for each group; write it there",
        "--role-groups": "but --role-groups says how many nodes each group has",
    }
    for name in names:
        if name in _OF_HOSTS and options.origin(name).startswith("-"):
            raise SpecError(name.replace("_", "-"), f"groups of {flag} run on this host alone; leave it out")
        if options.origin(name).startswith("-"):
            raise SpecError(name.replace("_", "-"), f"{getattr(options, name)!s}, {why[flag]}")


def _take(options: Options, found: JobFile) -> None:
    options.groups, options.job_durations = found.groups, found.durations
    for name, value in found.options.items():
        if not options.origin(name).startswith("-"):
            setattr(options, name, value)
            options.note(name, found.path)
    options.script = found.path  # what the job is named by, where nobody names it


def _of_roles(text: str) -> tuple[GroupFile, ...]:
    """``trainer:2,rollout:4:6``. Raises `SpecError`."""
    from dlrover_adapters.cli.job_file import GroupFile

    found: dict[str, GroupFile] = {}
    for part in (one.strip() for one in text.split(",")):
        told = _ROLES.fullmatch(part)
        if told is None:
            raise SpecError(
                "role-groups",
                f"{part!r} is not NAME:NODES or NAME:MIN:MAX; say for example trainer:2,rollout:4:6,evaluator:1",
            )
        name, low, high = told[1], int(told[2]), int(told[3] or told[2])
        if name in found:
            raise SpecError("role-groups", f"{name!r} stands there twice; give each group a name of its own")
        if not 1 <= low <= high:
            raise SpecError("role-groups", f"{part!r}: need 1 <= MIN <= MAX")
        found[name] = GroupFile(name, {"nodes_min": low, "nodes_max": high}, {"role": name})
    return tuple(found.values())


# ---- plans


def plans(options: Options, only: str = "") -> tuple[Plan, ...]:
    """The groups, each with all that its nodes are started with. Raises `SpecError`.

    ``only``: this process is a node of that group, on a host of its own. Of the others no more is looked at than their specs.
    """
    if not are_given(options):
        how = workers.settings(options)
        spec = {**cli_options.group_settings(options, how["nproc"]), "standby": _standby(options)}
        return (Plan(WORKER, options, spec, how),)
    found = tuple(_plan(options, group, only) for group in options.groups)
    if not (only or apart(options)):
        before.check_total(
            sum(one.spec["nodes_max"].value * one.how["nproc"] for one in found),
            sum(one.spec["nodes_max"].value + one.options.standby for one in found),
        )
    return found


def _standby(options: Options) -> Setting:
    return Setting(options.standby, options.origin("standby"))


def _plan(options: Options, group: GroupFile, only: str) -> Plan:
    origin = options.job_file or "--role-groups"
    own = options_of(options, group, origin)
    if only:
        own.local_nodes = 1
    with _named(options, group.name, own):
        _check_devices(options, own, group)
        how = _how(options, own, group) if only in {"", group.name} else {"nproc": _number(own.nproc_per_node)}
        spec = {name: Setting(value, origin) for name, value in group.spec.items()}
        spec["nproc"] = Setting(how["nproc"], origin if options.job_file else options.origin("nproc_per_node"))
        spec["standby"] = _standby(own)
        if not options.job_file:
            spec["relaunch_max"] = Setting(options.relaunch_max, options.origin("relaunch_max"))
        plan = Plan(group.name, own, spec, how)
        plan.made  # noqa: B018  # checks
    return plan


def _how(options: Options, own: Options, group: GroupFile) -> dict[str, Any]:
    """How the workers of one group are started, as `Settings` has it. Raises `SpecError`."""
    if options.job_file and not in_images(options):
        _check_program(own)
    own_parts = {"group": group.name, "env": dict(group.env), "framework": _framework(group.framework)}
    return {**workers.settings(own), **own_parts, "stores": group.spec.get("store", True)}


def _check_devices(options: Options, own: Options, group: GroupFile) -> None:
    """As many workers as a node has GPUs, where that is said. Raises `SpecError` where only another host could tell."""
    asked = own.nproc_per_node
    if asked not in {"auto", "gpu", "xpu", "cpu"}:
        return
    if asked in {"auto", "gpu"} and group.spec.get("gpus"):
        own.nproc_per_node = str(group.spec["gpus"])
    elif apart(options):
        raise SpecError(
            "nproc-per-node", f'{asked!r}, but nodes are on other hosts: write a number, or resources.gpu beside "gpu"'
        )


def _number(text: str) -> int:
    """Workers per node of a group on other hosts: a number, or whatever they find there."""
    return values.whole(text) or 1


def options_of(options: Options, group: GroupFile, origin: str) -> Options:
    """The options as if the job were this group alone."""
    own = copy.copy(options)
    own._origins = dict(options._origins)
    own.local_nodes, own.nnodes = group.spec["nodes_max"], None
    for name, value in group.options.items():
        setattr(own, name, value)
        own.note(name, origin)
    own.note("local_nodes", origin)
    return own


def _check_program(own: Options) -> None:
    """What is wrong with a module or a command, in a job file's words. Raises `SpecError`."""
    from dlrover_adapters.cli import programs

    if own.module and (fault := programs.missing(own.script, os.getcwd(), runs=True)):
        raise SpecError(
            "script",
            f'{fault}; write "PACKAGE.MODULE" as for python -m, in a folder where python finds it, or program for a file',
        )
    if own.no_python and shutil.which(own.script) is None:
        known = "it is there, and not executable: chmod +x it" if os.path.isfile(own.script) else "it is not there"
        where = known if "/" in own.script else "it is not on the PATH; write ./PROGRAM for one beside the job file"
        raise SpecError("script", f"{own.script!r} cannot be run: {where}")


def _framework(name: str) -> str:
    """The module. Raises `SpecError` where it is not there."""
    from dlrover_adapters.cli import programs

    module = _FRAMEWORKS.get(name, name)
    if name not in _FRAMEWORKS and (fault := programs.missing(module, "")):
        raise SpecError("framework", f'{name!r}: {fault}; "torch" and "none" are always there')
    return module


@contextlib.contextmanager
def _named(options: Options, group: str, own: Options) -> Iterator[None]:
    """While a group is looked at: what is wrong is named by its path in the job file, where there is one."""
    try:
        yield
    except SpecError as error:
        what = str(error).removeprefix(f"{error.field}: ")
        if options.job_file:
            field = _in_the_file(error.field)
            if field in {"program", "module"}:
                field = "command" if own.no_python else "module" if own.module else "program"
            raise SpecError(f"groups.{group}.{field}", what) from error
        raise SpecError(error.field, f"{what} (group {group})") from error


def _in_the_file(field: str) -> str:
    """The name that a job file has for an option, or for a field of a group's spec."""
    from dlrover_adapters.cli.job_fields import GROUP_NAMES

    name = field.removeprefix("group.").replace("-", "_")
    return GROUP_NAMES.get(name, name)


# ---- the job


def spec(options: Options, job: str, found: Sequence[Plan]) -> JobSpec:
    """The job of these groups. Raises `SpecError`."""
    job_set = cli_options.job_settings(options, job)
    groups = tuple(one.made for one in found)
    try:
        return JobSpec(**{name: one.value for name, one in job_set.items()}, groups=groups)
    except SpecError as error:
        raise _in_its_group(error, groups) if options.job_file else error from None


def _in_its_group(error: SpecError, groups: Sequence[GroupSpec]) -> SpecError:
    """An error of the job's spec, under its name in the file."""
    from dlrover_adapters.cli.job_fields import JOB_NAMES

    what = str(error).removeprefix(f"{error.field}: ")
    if not error.field.startswith("group."):
        field = error.field.replace("-", "_")
        return SpecError(JOB_NAMES.get(field, field), what)
    names = [one for one in re.findall(r"'([a-z0-9]+)'", what) if any(group.name == one for group in groups)]
    return SpecError(f"groups.{names[0]}.{_in_the_file(error.field)}" if names else "groups", what)


def placed(options: Options, error: SpecError) -> SpecError:
    """An error about an option, under the name that the job file has for it if the value is the file's."""
    name = error.field.replace("-", "_")
    if not options.job_file or options.origin(name) != options.job_file:
        return error
    from dlrover_adapters.cli.job_fields import JOB_NAMES

    return SpecError(JOB_NAMES.get(name, name), str(error).removeprefix(f"{error.field}: "))


def say(found: Sequence[Plan]) -> None:
    """Say on stderr what may be meant so, and mostly is a mistake."""
    for words in before.warnings(sum(_workers(found))):
        print(f"dlrover-run: {words}", file=sys.stderr)


def _workers(found: Sequence[Plan]) -> Iterator[int]:
    for one in found:
        yield (one.options.local_nodes or 1) * one.how["nproc"]


# ---- what is written down of them


def nodes(found: Sequence[Plan]) -> dict[str, int]:
    """How many nodes of each group this host runs."""
    return {one.name: one.options.local_nodes or 1 for one in found}


def standbys(found: Sequence[Plan]) -> dict[str, int]:
    """How many agents are kept warm for each group."""
    return {one.name: one.options.standby for one in found}


def make_log_dirs(found: Sequence[Plan]) -> None:
    """Make the folders for output that is kept; one for all groups that name none. Raises `SpecError`."""
    made = ""
    for one in found:
        named = one.how["log_dir"] is not None
        if named or not made:
            one.how["log_dir"] = workers.log_dir(one.how)
        elif any((*one.how["redirects"], *one.how["tee"])):
            one.how["log_dir"] = made
        if one.how["log_dir"] and not named and not made:
            made = one.how["log_dir"]
            print(f"dlrover-run: output is kept in {made}", file=sys.stderr)


def store_at(options: Options, met: Meeting) -> str:
    """Where every generation's store is to listen. Several groups have several stores: none of them at a port that is named."""
    if are_given(options):
        return ""
    return workers.store_at(met.store, typed=options.origin("master_addr").startswith("--"))


def launch(found: Sequence[Plan], imports: str) -> dict[str, Any]:
    """The fields of `Settings` that say how workers are started; ``imports``: the folder with lists of imports."""
    for one in found:
        one.how["imports"] = workers.imports(one.options.preload, imports)
    how = {one.name: one.how for one in found}
    first = found[0].how
    return first if len(found) == 1 else {**first, "launches": how}
