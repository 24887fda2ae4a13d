"""The fields of a job file: one table for the parser, for the JSON schema, and for docs/jobs.md.

A field that has the name of an option sets that option; one that has the name of a field of `GroupSpec` or `JobSpec` sets that.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dlrover_adapters.cli.job_kinds import (
    GROUP,
    MODULE,
    Arguments,
    Choice,
    Command,
    Count,
    Cpus,
    Flag,
    Kind,
    Memory,
    Nodes,
    Preload,
    Processes,
    Seconds,
    Streams,
    Text,
    Texts,
    Variables,
)
from dlrover_core.spec import NODES_MAX, ON_JOIN, JobSpec

POSITIVE = frozenset(("check_s", "heartbeat_s", "ready_s", "probe_s", "start_s"))


@dataclass(frozen=True)
class Field:
    """One field.

    name:     as it stands in the file
    kind:     its values
    doc:      what it does, for the table of fields
    default:  in words; empty: nothing, or nobody needs to know
    option:   the option of `dlrover-run` that it sets; empty: none
    spec:     the field of the job's or the group's spec that it sets; empty: none
    also:     its name in an ElasticJob's `replicaSpecs`, where that differs
    path:     does it name a file or a folder? Relative ones are looked for beside the job file
    """

    name: str
    kind: Kind
    doc: str
    default: str = ""
    option: str = ""
    spec: str = ""
    also: str = ""
    path: bool = False


_FILE, _FOLDER = Text("file"), Text("folder")
_LOOKS = Choice(("report", "replace"))

# What starts workers: for one group, or at the top for all groups that do not say otherwise.
_STARTING = (
    Field(
        "preload",
        Preload(),
        "modules to import once for all workers of a node, before they are forked; `auto` for those that workers were seen "
        "to import, `none` for no forking",
        "auto",
        option="preload",
    ),
    Field("redirects", Streams(), "output streams that go into files", "0", option="redirects"),
    Field("tee", Streams(), "output streams that go into files and to the console", "0", option="tee"),
    Field(
        "local_ranks_filter",
        Text("list of local ranks", "[0-9]+(,[0-9]+)*", '"0,1"'),
        "show only the output of these local ranks",
        "all",
        option="local_ranks_filter",
    ),
    Field("log_dir", _FOLDER, "where output in files lies", "a new folder", option="log_dir", path=True),
    Field(
        "numa_binding",
        Choice(("node", "socket", "exclusive", "core-complex")),
        "bind each worker to the CPUs near its GPU",
        option="numa_binding",
    ),
    Field(
        "virtual_local_rank",
        Flag(),
        "every worker has LOCAL_RANK 0 and sees one GPU",
        "false",
        option="virtual_local_rank",
    ),
    Field("standby", Count(0, NODES_MAX), "agents kept warm to take a dead node's place", "0", option="standby"),
    Field("env", Variables(), "environment variables of the workers", "", also="envs"),
)

# What is done about failures: for one group, or at the top for all groups that do not say otherwise.
_POLICY = (
    Field(
        "max_restarts",
        Count(),
        "restarts of the processes before this is given up",
        "3",
        option="max_restarts",
        spec="max_restarts",
    ),
    Field(
        "on_join",
        Choice(ON_JOIN),
        "what a late node does to a running smaller world",
        "restart",
        option="on_join",
        spec="on_join",
    ),
    Field(
        "precheck",
        Choice(("off", "basic", "full")),
        "check nodes before they train",
        "off",
        option="precheck",
        spec="precheck",
    ),
    Field(
        "slow_action",
        _LOOKS,
        "what is done about a rank that computes slower than it did",
        "report",
        option="slow_action",
        spec="slow_action",
    ),
)
_GROUP_DURATIONS = (
    Field("hang_s", Seconds(), "no step for this long, at least: look for a hang; 0: never", "60", spec="hang_s"),
    Field(
        "finish_s",
        Seconds(),
        "ranks may run on this long after the first one has ended well; 0: as long as they need",
        "3600",
        spec="finish_s",
    ),
)

GROUP_FIELDS = (
    Field("program", Text("script"), "the Python script that every worker runs", path=True),
    Field("module", MODULE, "a Python module instead, run as `python -m` does"),
    Field(
        "command",
        Command(),
        "any other program instead, with its first arguments; one with a `/` lies beside the job file",
    ),
    Field("args", Arguments(), "arguments of the program", "[]"),
    Field("nodes", Nodes(), "nodes of this group, or the fewest to work with and the most to run", "1"),
    Field("replicas", Count(1, NODES_MAX), "the same as `nodes`: so many, no fewer"),
    Field("minReplicas", Count(1, NODES_MAX), "the fewest; needs `maxReplicas`"),
    Field("maxReplicas", Count(1, NODES_MAX), "the most; needs `minReplicas`"),
    Field("processes", Processes(), "workers per node; `gpu`, `xpu`, `cpu`, `auto`: as many as devices", "1"),
    Field("unit", Count(1, NODES_MAX), "the number of nodes in a world is a multiple of this", "1", spec="unit"),
    Field(
        "relaunches",
        Count(),
        "relaunches of one node before it is given up",
        "3",
        spec="relaunch_max",
        also="restartCount",
    ),
    Field("role", Text("role"), "ROLE_NAME of the workers", "the group's name", option="role"),
    Field(
        "framework",
        Text(
            "framework",
            "torch|none|[A-Za-z_][A-Za-z0-9_]*(\\.[A-Za-z_][A-Za-z0-9_]*)+",
            '"torch", "none" or "my.framework"',
        ),
        "`torch`; `none`: no process of this group imports torch or gets its variables; or a module of your own",
        "torch",
    ),
    Field(
        "coupling",
        Choice(("group", "each")),
        "`group`: the nodes form one world, a failure restarts all of its workers; `each`: every node is a world of its own",
        "group",
        spec="coupling",
    ),
    Field("set", GROUP, "groups that name the same set form one world together", "the group alone", spec="set"),
    Field("uses", Texts(GROUP), "groups whose addresses the workers are told", "[]", spec="uses"),
    Field("ends", Flag(), "the job ends well when all groups that say so have ended well", "true", spec="ends"),
    Field("critical", Flag(), "the job fails when this group is given up", "true", spec="critical"),
    Field("store", Flag(), "its workers meet over a TCPStore", "true; false without torch", spec="store"),
    *_POLICY,
    *_GROUP_DURATIONS,
    *_STARTING,
)

RESOURCE_FIELDS = (
    Field("cpu", Cpus(), "CPUs of a node", "what there is", spec="cpu_m"),
    Field("memory", Memory(), "memory of a node", "what there is", spec="memory_mib"),
    Field("gpu", Count(), "GPUs of a node", "0", spec="gpus", also="nvidia.com/gpu"),
)


def _durations() -> tuple[Field, ...]:
    """Every duration of the job's spec."""
    return tuple(
        Field(one.name, Seconds(one.name in POSITIVE), one.metadata["doc"], f"{one.default:g}", spec=one.name)
        for one in dataclasses.fields(JobSpec)
        if one.name.endswith("_s")
    )


JOB_FIELDS = (
    Field(
        "job",
        Text("job's name", r"[a-z0-9]([a-z0-9_.]*[a-z0-9])?(-[a-z0-9_.]+)*", '"pretrain"'),
        "the job's name",
        "made from the file's",
        option="job_id",
    ),
    Field("log", Text("URL"), "the event log", "sqlite in `state_dir`", option="log"),
    Field("state_dir", _FOLDER, "where logs and sockets live", "~/.local/state/dlrover", option="state_dir", path=True),
    Field("token_file", _FILE, "file with the job's secret", option="token_file", path=True),
    Field("policy", _FILE, "your own numbers for what is done about failures", option="policy", path=True),
    Field("signatures", _FILE, "signatures of your own failures", option="signatures", path=True),
    Field("check_scripts", Texts(Text("command")), "checks of your own", "[]", option="check_script"),
    Field("check_slow", _LOOKS, "what is done about a node whose check was slow", "report", option="check_slow"),
    Field(
        "hang_action",
        Choice(("restart", "report")),
        "what is done about a rank that hangs",
        "restart",
        option="hang_action",
    ),
    Field("detect", Flag(), "look for signs of failures", "true", option="detect"),
    Field("watch_grads", Flag(), "look at the norm of the gradients now and again", "false", option="watch_grads"),
    Field(
        "log_level",
        Choice(("debug", "info", "warning", "error")),
        "detail of the control log",
        "info",
        option="log_level",
    ),
    Field("log_bytes_max", Count(), "room of one log file, in bytes; 0: no bound", "134217728", option="log_bytes_max"),
    Field("log_attempts_max", Count(), "attempts whose logs are kept; 0: all", "10", option="log_attempts_max"),
    *_POLICY,
    *_STARTING,
    *_durations(),
)

HINTS = {
    "name": "job",
    "job_id": "job",
    "replicaSpecs": "groups",
    "group": "groups",
    "roles": "groups",
    "script": "program",
    "entrypoint": "program",
    "cmd": "command",
    "arguments": "args",
    "nnodes": "nodes",
    "workers": "processes",
    "nproc": "processes",
    "nproc_per_node": "processes",
    "relaunch_max": "relaunches",
    "restarts": "max_restarts",
    "cpu": "resources.cpu",
    "memory": "resources.memory",
    "memory_mib": "resources.memory",
    "gpu": "resources.gpu",
    "gpus": "resources.gpu",
    "requests": "resources",
    "limits": "resources",
    "environment": "env",
    "hang_timeout": "hang_s",
    "template": "program, resources and env",
}
"""What somebody may have meant by a name that the table does not have, where spelling alone would not tell."""


def named(fields: tuple[Field, ...]) -> dict[str, Field]:
    """The fields by each of their names."""
    return {name: one for one in fields for name in (one.name, one.also) if name}


GROUP_NAMES = {
    **{one.option: one.name for one in GROUP_FIELDS if one.option},
    **{one.spec: one.name for one in GROUP_FIELDS if one.spec},
    **{one.spec: f"resources.{one.name}" for one in RESOURCE_FIELDS},
    "nproc_per_node": "processes",
    "nproc": "processes",
    "local_nodes": "nodes",
    "nnodes": "nodes",
    "script": "program",
}
"""What a group's table calls an option, or a field of the group's spec."""

JOB_NAMES = {one.option: one.name for one in JOB_FIELDS if one.option}
"""What a job file calls an option."""
