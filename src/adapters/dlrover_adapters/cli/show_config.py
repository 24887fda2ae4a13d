"""`dlrover-run --show-config`: every effective setting with its unit, its default, and where it came from. Starts nothing."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlrover_adapters.agent.config import TORCH
from dlrover_adapters.cli import groups, run_flags
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli.places import log_url, shown
from dlrover_adapters.cli.torchrun_flags import UNUSED, Options
from dlrover_core.spec import GroupSpec, JobSpec


class Row(NamedTuple):
    """One setting. ``origin``: a flag, a variable, 'default', or 'derived' from others."""

    section: str
    name: str
    value: Any
    unit: str
    default: Any
    origin: str
    doc: str = ""


_UNITS = {
    "nodes_min": "nodes",
    "nodes_max": "nodes",
    "nproc": "workers",
    "unit": "nodes",
    "relaunch_max": "relaunches",
    "standby": "agents",
}
_JOB_UNITS = {"max_restarts": "restarts"}

# Options of ours that are neither in the job's spec nor in how workers are started.
_HOST = {
    "backend": "name",
    "bind": "address",
    "masters": "addresses",
    "detect": "",
    "watch_grads": "",
    "check_script": "commands",
    "progress": "",
    "log_level": "",
    "token_file": "file",
    "tls_cert": "file",
    "tls_key": "file",
    "tls_ca": "file",
    "monitor_interval": "s",
    "start_method": "",
    "event_log_handler": "",
}


def rows(options: Options) -> list[Row]:
    """Every setting, by group where there are several. Raises `SpecError` where they would not make a job."""
    found = groups.plans(options)
    job = cli_options.job_name(options)
    spec = groups.spec(options, job, found)  # checks
    standard = cli_options.standard()
    job_set = cli_options.job_settings(options, job)
    return [
        *_fields("job", JobSpec, spec, job_set, _JOB_UNITS),
        *(row for plan in found for row in _group(plan, standard, several=groups.are_given(options))),
        *_meeting(options),
        *_host(options, job, standard),
    ]


def _group(plan: groups.Plan, standard: Options, *, several: bool) -> Iterator[Row]:
    """What is set of one group, and of how its workers are started."""
    name = f".{plan.name}" if several else ""
    yield from _fields(f"group{name}", GroupSpec, plan.made, plan.spec, _UNITS)
    yield from _workers(f"workers{name}", plan.options, plan.how, standard)
    if several:
        origin = plan.options.job_file or "default"
        env = [f"{key}={value}" for key, value in plan.how["env"].items()]
        yield Row(f"workers{name}", "env", env, "", [], origin if env else "default")
        framework = plan.how["framework"]
        yield Row(
            f"workers{name}", "framework", framework, "module", TORCH, origin if framework != TORCH else "default"
        )


def _fields(
    section: str, kind: Any, made: Any, told: Mapping[str, cli_options.Setting], units: Mapping[str, str]
) -> Iterator[Row]:
    for one in dataclasses.fields(kind):
        if one.name == "groups":
            continue
        default = None if one.default is dataclasses.MISSING else one.default
        unit = "s" if one.name.endswith("_s") else units.get(one.name, "")
        origin = told[one.name].origin if one.name in told else "default"
        yield Row(section, one.name, getattr(made, one.name), unit, default, origin, one.metadata.get("doc", ""))


# Settings of the workers' start as the command line says them, each with its unit.
_WORKERS = {
    "role": "",
    "module": "",
    "no_python": "",
    "run_path": "",
    "preload": "modules",
    "log_dir": "folder",
    "redirects": "1 stdout, 2 stderr",
    "tee": "1 stdout, 2 stderr",
    "local_ranks_filter": "local ranks",
    "duplicate_stdout_filters": "",
    "duplicate_stderr_filters": "",
    "log_bytes_max": "bytes",
    "log_attempts_max": "attempts",
    "numa_binding": "",
    "virtual_local_rank": "",
    "signals_to_handle": "",
}


def _workers(section: str, options: Options, how: Mapping[str, Any], standard: Options) -> Iterator[Row]:
    origin = options.job_file or "command line"
    yield Row(section, "argv", list(how["argv"]), "", None, origin, f"run as {how['mode']}")
    yield Row(section, "run_id", how["run_id"] or "the run's", "", "the run's", options.origin("rdzv_id"))
    yield from _plain(section, options, standard, _WORKERS)


def _plain(section: str, options: Options, standard: Options, units: Mapping[str, str]) -> Iterator[Row]:
    for name, unit in units.items():
        value, default = (_listed(getattr(one, name)) for one in (options, standard))
        doc = f"unused: {UNUSED[name]}" if name in UNUSED else ""
        yield Row(section, name, value, unit, default, options.origin(name), doc)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _meeting(options: Options) -> Iterator[Row]:
    met = cli_options.meeting(options)
    sources = {
        "backend": "rdzv_backend",
        "host": "rdzv_endpoint" if options.given("rdzv_endpoint") else "master_addr",
        "port": "rdzv_endpoint" if options.given("rdzv_endpoint") else "master_port",
        "hosts": "rdzv_conf" if options.given("rdzv_conf") else "node_rank",
        "place": "node_rank",
        "masters": "master",
        "local_addr": "local_addr",
        "store": "rdzv_endpoint" if options.given("rdzv_endpoint") else "master_port",
    }
    for one in dataclasses.fields(met):
        if one.name in sources:
            origin = options.origin(sources[one.name]) if met.joining or met.store else "default"
            yield Row("rendezvous", one.name, _listed(getattr(met, one.name)), "", _listed(one.default), origin)


def _host(options: Options, job: str, standard: Options) -> Iterator[Row]:
    from dlrover_core.logs.place import default_state_dir

    state = Path(options.state_dir).absolute() if options.state_dir else default_state_dir()
    yield Row("host", "state_dir", str(state), "folder", str(default_state_dir()), options.origin("state_dir"))
    yield Row("host", "directory", str(state / "jobs" / job), "folder", None, "derived", "control log, settings")
    yield Row("host", "log", shown(log_url(options.log, state)), "url", log_url(None, state), options.origin("log"))
    named = options.origin("owner") if options.given("owner") else run_flags.VARIABLE
    owner = run_flags.owner(options.owner)
    yield Row("host", "run", owner or "a new one", "", "a new one", named if owner else "default")
    yield from _plain("host", options, standard, _HOST)
    source = "DLROVER_TOKEN" if os.environ.get("DLROVER_TOKEN") else "default"
    yield Row("host", "token", "made for this run" if source == "default" else "set", "", "made for this run", source)


def text(found: Sequence[Row], form: str) -> str:
    """As a table for people, or as JSON: one object per setting."""
    if form == "json":
        return json.dumps([row._asdict() for row in found], indent=1)
    header = ("SETTING", "VALUE", "UNIT", "DEFAULT", "ORIGIN")
    lines = [(f"{row.section}.{row.name}", _cell(row.value), row.unit, _cell(row.default), row.origin) for row in found]
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, *lines)
    )


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return " ".join(str(one) for one in value) or "-"
    return str(value)
