"""The command line of `dlrover-run`, against torchrun's own parser and without starting anything."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from dlrover_adapters.agent.config import LaunchConfig
from dlrover_adapters.cli import dlrover_flags, main, ray_flags, run, serve, show_config, values, workers
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli.meeting import Meeting
from dlrover_adapters.cli.torchrun_flags import Options
from dlrover_core.errors import SpecError
from dlrover_core.spec import GroupSpec, JobSpec

C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST")


def parsed(*arguments: str, script: str = "train.py") -> Options:
    """What a command line says."""
    return cli_options.parse([*arguments, script])


def spec_of(*arguments: str) -> JobSpec:
    """The job that a command line describes."""
    options = parsed(*arguments)
    return cli_options.spec(options, cli_options.job_name(options), 1)


# ---- DLRover's flags


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["--network-check"], {"precheck": "full"}),
        (["--comm-perf-test"], {"precheck": "full"}),
        (["--network-check", "--precheck", "basic"], {"precheck": "basic"}),
        (["--precheck=1"], {"precheck": "full"}),
        (["--precheck", "0"], {"precheck": "off"}),
        (["--exclude-straggler"], {"check_slow": "replace"}),
        (["--numa-affinity"], {"numa_binding": "node"}),
        (["--node_unit", "2"], {"node_unit": 2}),
        (
            ["--rdzv_conf", "node_unit=2,lastcall_timeout=9,pend_timeout=5"],
            {"node_unit": 2, "rdzv_conf": "last_call_timeout=9"},
        ),
        (["--auto_config"], {"nproc_per_node": "auto", "nnodes": cli_options.Nodes(4, 4), "precheck": "full"}),
        (["--auto-config", "--nnodes", "2", "--nproc_per_node", "3"], {"nproc_per_node": "3", "precheck": "off"}),
    ],
)
def test_dlrovers_flags_set_what_they_mean(
    line: list[str], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each flag of DLRover's own `dlrover-run` has its effect, unless a flag of ours says otherwise."""
    monkeypatch.setenv("NODE_NUM", "4")
    options = parsed(*line, "x.py")
    assert {name: getattr(options, name) for name in expected} == expected


def test_dlrovers_flags_without_an_effect_are_told() -> None:
    """What does nothing here is named, with the reason, and takes its value from the line all the same."""
    line = [
        "--auto_tunning",
        "--save-at-breakpoint",
        "--accelerator",
        "ascend-npu",
        "--training_port=6000",
        "--membind-policy",
    ]
    options = parsed(*line, "none", "--ucp_device_type", "cpu", "--rdzv_conf", "pend_timeout=600", "x.py")
    assert options.script == "x.py"
    told = cli_options.notes(options)
    assert {f"--{one}" for one in dlrover_flags.UNUSED} | {"--rdzv-conf pend_timeout"} == set(told)
    assert all(told.values())


def test_wrong_values_of_dlrovers_flags_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number of nodes that is none is one line with its variable, or its key, and what to say."""
    monkeypatch.setenv("NODE_NUM", "four")
    assert run.main(["--auto_config", "x.py"]) == 2
    assert "NODE_NUM: 'four' is not a number of nodes" in capsys.readouterr().err
    assert run.main(["--rdzv_conf", "node_unit=x", "x.py"]) == 2
    assert "node_unit=x: not a number of nodes" in capsys.readouterr().err


def test_worlds_of_whole_units() -> None:
    """``--node_unit`` is the group's unit."""
    assert spec_of("--local-nodes", "4", "--node_unit", "2", "x.py").groups[0].unit == 2


# ---- torchrun's flags


def test_every_flag_of_torchrun_is_known() -> None:
    """Whatever the installed torchrun's parser accepts, ours does, in both spellings, with or without a value alike."""
    from torch.distributed.run import get_args_parser

    ours = cli_options.parser()._option_string_actions
    for spelling, theirs in get_args_parser()._option_string_actions.items():
        assert spelling in ours, f"{spelling} is not known"
        assert (ours[spelling].nargs == 0) == (theirs.nargs == 0), spelling
        assert ours[spelling].dest == theirs.dest, spelling


@pytest.mark.parametrize(
    "line",
    [
        ["train.py"],
        ["train.py", "--lr", "0.1", "--nnodes", "7"],
        ["-m", "pkg.mod", "-x"],
        ["--nproc_per_node=2", "--", "train.py", "-r", "3"],
        ["-r3", "-t", "0:1,1:2", "train.py", "--", "--x"],
        ["--standalone", "--nproc-per-node", "gpu", "train.py", "a", "--help"],
        ["--role=trainer", "--log_dir=/x", "--no_python", "bash", "-c", "echo $RANK"],
        ["--duplicate_stdout_filters", "a,b,,c", "train.py"],
        ["--local_ranks_filter=0,1", "--max_restarts=4", "--monitor_interval=5", "train.py"],
        ["--node_rank=1", "--master_addr=h", "--master_port=1", "--local_addr=l", "train.py"],
        ["--rdzv_backend=c10d", "--rdzv_endpoint=h:1", "--rdzv_id=7", "--rdzv_conf=a=b", "train.py"],
        ["--signals_to_handle=SIGTERM", "--shutdown_timeout=5", "--virtual_local_rank", "train.py"],
        ["--numa_binding=node", "--start_method=fork", "--event_log_handler=console", "--run_path", "/t.py"],
    ],
)
def test_lines_are_read_as_torchrun_reads_them(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, the script and its own arguments are the same, given as flags."""
    from torch.distributed.run import get_args_parser

    theirs, ours = vars(get_args_parser().parse_args(line)), cli_options.parse(line)
    assert (ours.script, ours.arguments) == (theirs.pop("training_script"), theirs.pop("training_script_args"))
    differs = {"nnodes": "1:1", "max_restarts": 0}  # our defaults: unsaid, and 3
    for dest, value in theirs.items():
        mine = getattr(ours, dest)
        if dest in differs and value == differs[dest]:
            continue
        assert (list(mine) if isinstance(mine, tuple) else mine) == value, dest


@pytest.mark.parametrize(
    ("variable", "value", "dest", "expected"),
    [
        ("PET_NNODES", "2:4", "nnodes", (2, 4)),
        ("PET_NPROC_PER_NODE", "gpu", "nproc_per_node", "gpu"),
        ("PET_MODULE", "1", "module", True),
        ("PET_MODULE", "0", "module", False),
        ("PET_TEE", "3", "tee", "3"),
        ("PET_MAX_RESTARTS", "9", "max_restarts", 9),
        ("PET_MASTER_PORT", "77", "master_port", 77),
        ("PET_DUPLICATE_STDOUT_FILTERS", "a,b", "duplicate_stdout_filters", ("a", "b")),
    ],
)
def test_the_environment_gives_defaults(
    variable: str, value: str, dest: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``PET_<FLAG>`` is read as torchrun reads it, and says so as the value's origin."""
    monkeypatch.setenv(variable, value)
    options = parsed()
    assert getattr(options, dest) == expected
    assert options.origin(dest) == variable


def test_the_command_line_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an empty variable is none."""
    monkeypatch.setenv("PET_ROLE", "theirs")
    monkeypatch.setenv("PET_TEE", "")
    options = parsed("--role", "mine")
    assert (options.role, options.origin("role")) == ("mine", "--role")
    assert (options.tee, options.given("tee")) == ("0", False)


@pytest.mark.parametrize(("variable", "value"), [("PET_NNODES", "x"), ("PET_MODULE", "yes"), ("PET_START_METHOD", "q")])
def test_a_wrong_variable_is_named(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for a mistake on the command line that is in the environment."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(SpecError, match=variable):
        cli_options.parser()


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("--logs-specs", "mine"), "class of torch's agent"),
        (("--signals-to-handle", "SIGKILL"), "SIGTERM,SIGUSR1"),
        (("--signals-to-handle", "TERM"), "SIGTERM,SIGUSR1"),
        (("--local-ranks-filter", "0;1"), "list of local ranks"),
        (("--shutdown-timeout", "-1"), "cannot be negative"),
        (("--nnodes", "2"), "--rdzv-endpoint HOST:PORT"),
        (("--nnodes", "2", "--standalone"), "--local-nodes 2"),
        (("--nnodes", "3", "--local-nodes", "2"), "must be as many"),
        (("--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "h"), "say c10d"),
        (("--rdzv-backend", "etcd"), "say c10d"),
        (("--rdzv-backend", "zeus"), "there are: c10d"),
        (("--nnodes", "2", "--rdzv-backend", "zeus", "--rdzv-endpoint", "h"), "there are: c10d"),
        (("--nnodes", "2", *C10D, "--rdzv-conf", "store_type=file"), "over TCP"),
        (("--nnodes", "2", *C10D, "--rdzv-conf", "is_host=maybe"), "neither true nor false"),
        (("--nnodes", "2", *C10D, "--rdzv-conf", "join_timeout"), "KEY=VALUE"),
        (("--nnodes", "2", *C10D, "--rdzv-conf", "join_timeout=soon"), "not a number"),
        (("--nnodes", "2", "--master-addr", "h", "--rdzv-conf", "timeout=soon"), "not a number"),
        (("--nnodes", "2", *C10D, "--standby", "1"), "start more of them"),
        (("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:0"), "1 to 65535"),
        (("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a b:1"), "not HOST:PORT"),
        (("--nnodes", "2", "--master-addr", "h", "--node-rank", "-1"), "cannot be negative"),
        (("--master-port", "0"), "1 to 65535"),
        (("--rdzv-id", "a", "--job-id", "b"), "give one of them"),
        (("--rdzv-id", "***"), "no letter or digit"),
        (("--log-bytes-max", "1"), "at least 64K"),
        (("--standby", "-1"), "cannot be negative"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(arguments: tuple[str, ...], advice: str) -> None:
    """Before anything is started."""
    with pytest.raises(SpecError, match=advice):
        look_through(parsed(*arguments))


def may_be_empty(action: argparse.Action) -> bool:
    """Does an empty value mean something to this option?"""
    return getattr(action, "may_be_empty", False)


@pytest.mark.parametrize(
    "flag",
    [
        max(one.option_strings, key=len)
        for one in cli_options.parser()._actions
        if one.option_strings and one.nargs is None and not may_be_empty(one)
    ],
)
def test_an_empty_value_is_an_error_and_not_a_default(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``--job "$JOB"`` where nothing has set ``JOB``: nothing is started instead. Torchrun's flags are as torchrun's."""
    for arguments in ([flag, "", "train.py"], [f"{flag}=", "train.py"]):
        with pytest.raises(SystemExit) as left:
            cli_options.parse(arguments)
        assert left.value.code == 2
        said = capsys.readouterr().err
        assert re.search(rf"{flag}(/\S+)?: its value is empty; give one, or leave the option out", said)


def test_commands_refuse_empty_values_too(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty path would be the folder where the command runs."""
    with pytest.raises(SystemExit) as left:
        main.main(["status", "--state-dir", "", "J"])
    assert left.value.code == 2
    assert "--state-dir: its value is empty" in capsys.readouterr().err


def test_an_empty_preload_and_torchruns_empty_values_are_values() -> None:
    """No module beside torch, and what torchrun takes for its default."""
    options = parsed("--preload", "", "--rdzv-conf", "", "--local-ranks-filter=")
    assert (options.preload, options.rdzv_conf, options.local_ranks_filter) == ("", "", "")


def look_through(options: Options) -> None:
    """Everything that `dlrover-run` looks at before it starts something."""
    cli_options.check(options)
    cli_options.signals(options.signals_to_handle)
    values.ranks_filter(options.local_ranks_filter)
    cli_options.spec(options, cli_options.job_name(options), 1)


# ---- where hosts meet


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), Meeting()),
        (("--local-nodes", "2", "--nnodes", "1:2"), Meeting()),
        (("--nnodes", "1", *C10D), Meeting(unused=("--rdzv-backend", "--rdzv-endpoint"))),
        (("--master-port", "7"), Meeting(store=("127.0.0.1", 7))),
        (("--master-port", "7", "--standalone"), Meeting(unused=("--master-port",))),
        (("--master-addr", "h"), Meeting(unused=("--master-addr",))),
        (
            ("--node-rank", "0", "--master-addr", "h", "--master-port", "7"),
            Meeting(unused=("--node-rank",), store=("h", 7)),
        ),
        (("--rdzv-endpoint", "[::1]:7"), Meeting(store=("::1", 7))),
        (("--nnodes", "2", *C10D), Meeting(True, "c10d", "HOST", 29400)),
        (("--nnodes", "2", *C10D, "--rdzv-conf", "is_host=1"), Meeting(True, "c10d", "HOST", 29400, hosts=True)),
        (
            ("--nnodes", "2", "--rdzv-backend", "dlrover", "--rdzv-endpoint", "[::1]:9"),
            Meeting(True, "dlrover", "::1", 9),
        ),
        (
            ("--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--master-port", "7"),
            Meeting(True, "static", "h", 7, hosts=False, place=1),
        ),
        (("--nnodes", "2", "--master-addr", "::1"), Meeting(True, "static", "::1", 29500, hosts=True, place=0)),
        (
            ("--nnodes", "2", "--master", "a,b:5", "--local-addr", "me"),
            Meeting(True, "masters", hosts=False, masters=("a:29400", "b:5"), local_addr="me"),
        ),
        (
            ("--nnodes", "2", *C10D, "--node-rank", "1"),
            Meeting(True, "c10d", "HOST", 29400, unused=("--node-rank",)),
        ),
    ],
)
def test_meetings(arguments: tuple[str, ...], expected: Meeting) -> None:
    """One host meets nobody; several meet where torchrun's flags say, or ours."""
    assert cli_options.meeting(parsed(*arguments)) == expected


def test_a_named_port_of_one_host_is_the_stores() -> None:
    """On the address of this host that the name stands for; one that is taken is refused before anything is started."""
    assert workers.store_at(None) == ""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            SpecError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use; name another port"
        ):
            workers.store_at(("localhost", port))
    assert workers.store_at(("localhost", port)) == f"127.0.0.1:{port}"


def test_a_named_port_of_another_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing can listen there; a script that connects to it by number would wait for ever. A platform's is only said."""
    with pytest.raises(
        SpecError, match=r"'192\.0\.2\.1' is no address of this host, .*:29500 would wait for ever; name localhost"
    ):
        workers.store_at(("192.0.2.1", 29500))
    assert workers.store_at(("192.0.2.1", 29500), typed=False) == ""
    assert "a script that connects to 192.0.2.1:29500 waits for ever" in capsys.readouterr().err


def test_endpoints_of_ipv6_have_brackets() -> None:
    """And only those."""
    assert Meeting(host="::1", port=1).endpoint == "[::1]:1"
    assert Meeting(host="h", port=1).endpoint == "h:1"


def test_durations_come_from_the_most_particular_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--set`` before ``--shutdown-timeout`` before its variable; torchrun's rendezvous timeouts are the spec's."""
    conf = "join_timeout=50,last_call_timeout=7,keep_alive_interval=2,keep_alive_max_attempt=4"
    spec = spec_of("--nnodes", "2", *C10D, "--rdzv-conf", conf)
    assert (spec.launch_s, spec.last_call_s, spec.silence_s, spec.joining) == (50, 7, 8, True)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    assert spec_of().stop_grace_s == 5
    assert spec_of("--shutdown-timeout", "6").stop_grace_s == 6
    assert spec_of("--shutdown-timeout", "6", "--set", "stop_grace_s=7").stop_grace_s == 7


def test_a_key_that_torch_never_reads_is_no_error() -> None:
    """With c10d torch reads no ``timeout``, with static nothing else: nonsense in it does nothing, and a line says so."""
    for flags, key in (
        (C10D, "timeout"),
        (("--master-addr", "h"), "join_timeout"),
        (("--master-addr", "h"), "keep_alive_interval"),
    ):
        options = parsed("--nnodes", "2", *flags, "--rdzv-conf", f"{key}=5'")
        met = cli_options.meeting(options)
        assert (met.durations, met.unused) == ({}, (f"--rdzv-conf {key}",))
        assert cli_options.notes(options) == {f"--rdzv-conf {key}": f"not with {met.backend}"}


@pytest.mark.parametrize(
    "told", ["etcd_prefix=/x", "ssl_cert=a.pem", "protocol=https", "use_libuv=0", "read_timeout=9"]
)
def test_keys_of_torchs_other_backends_do_nothing(told: str) -> None:
    """Those of its etcd backends too, whose command lines people bring along; a line names them."""
    options = parsed("--nnodes", "2", *C10D, "--rdzv-conf", f"{told},join_timeout=50")
    met, flag = cli_options.meeting(options), f"--rdzv-conf {told.partition('=')[0]}"
    assert (met.durations, met.unused) == ({"launch_s": 50}, (flag,))
    assert cli_options.notes(options) == {flag: "not with c10d"}


def test_timeout_is_read_with_static_alone() -> None:
    """As by torch: with c10d the nodes have the whole ``join_timeout``, whatever ``timeout`` says."""
    assert cli_options.meeting(parsed("--nnodes", "2", "--master-addr", "h", "--rdzv-conf", "timeout=5")).durations == {
        "launch_s": 5
    }
    met = cli_options.meeting(parsed("--nnodes", "2", *C10D, "--rdzv-conf", "timeout=5"))
    assert (met.durations, met.unused) == ({}, ("--rdzv-conf timeout",))


@pytest.mark.parametrize("kind", ["gpu", "xpu"])
def test_as_many_workers_as_accelerators(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and by ``auto``: torch is asked how many there are."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(cli_options.before, "has_driver", lambda _kind: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr({"gpu": torch.cuda, "xpu": torch.xpu}[kind], "device_count", lambda: 3)
    assert [cli_options.workers(one) for one in (kind, "auto")] == [3, 3]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert cli_options.workers("auto") == len(os.sched_getaffinity(0))


def test_jobs_are_named_by_their_rendezvous() -> None:
    """Its id, made fit for a name; hosts that join agree without one; a job of one host alone has a new name each time."""
    assert cli_options.job_name(parsed("--rdzv-id", "My Job/7")) == "my-job-7"
    assert cli_options.job_name(parsed("--nnodes", "2", *C10D)) == "train"
    assert cli_options.job_name(parsed()) != cli_options.job_name(parsed())
    assert workers.run_id(parsed("--rdzv-id", "My Job/7")) == "My Job/7"
    assert workers.run_id(parsed("--rdzv-id", "x", "--standalone")) == ""


def test_signals_and_ranks_are_read() -> None:
    """By name, and by number."""
    assert cli_options.signals("SIGTERM, SIGUSR1") == (signal.SIGTERM, signal.SIGUSR1)
    assert values.ranks_filter("0,2") == (0, 2)
    assert values.ranks_filter("") is None


def test_what_is_not_needed_is_noted_only_when_given() -> None:
    """A default deserves no word."""
    assert cli_options.notes(parsed()) == {}
    assert "deaths are seen at once" in cli_options.notes(parsed("--monitor-interval", "5"))["--monitor-interval"]
    words = "several hosts only; the store is where MASTER_ADDR and MASTER_PORT say"
    assert cli_options.notes(parsed("--rdzv-endpoint", "h")) == {"--rdzv-endpoint": words}


def test_another_interpreter_is_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``PYTHON_EXEC`` names the workers' Python, as under torchrun; it is executed like any other program."""
    script = tmp_path / "x.py"
    script.touch()
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    mode, argv = workers.program(cli_options.parse([str(script), "a"]))
    assert (mode.value, argv) == ("command", ("/opt/python", "-u", str(script), "a"))


# ---- --show-config


def test_every_setting_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field of the job's spec and its group's, with value, unit, default and origin; durations are in seconds."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    line = ["--state-dir", "s", "--local-nodes", "2", "--set", "linger_s=9", "--rdzv-id", "n", "x.py", "--lr=1"]
    found = {f"{row.section}.{row.name}": row for row in show_config.rows(cli_options.parse(line))}
    wanted = {f"job.{one.name}" for one in dataclasses.fields(JobSpec)} - {"job.groups"}
    wanted |= {f"group.{one.name}" for one in dataclasses.fields(GroupSpec)}
    assert wanted <= set(found)
    assert all(row.unit == "s" for name, row in found.items() if name.endswith("_s"))
    shown = {name: (row.value, row.default, row.origin) for name, row in found.items()}
    assert shown["job.linger_s"] == (9.0, 5.0, "--set")
    assert shown["job.job"] == ("n", None, "--rdzv-id")
    assert shown["group.nproc"] == (3, 1, "PET_NPROC_PER_NODE")
    assert shown["group.nodes_max"] == (2, 1, "--local-nodes")
    assert shown["workers.tee"] == ("0", "0", "default")
    assert shown["workers.argv"][0] == ["x.py", "--lr=1"]
    assert not (tmp_path / "s").exists(), "nothing is made"


def test_every_option_is_shown() -> None:
    """Whatever the command line takes appears in the list, under its own name or that of what it sets."""
    own = {
        "help",
        "version",
        "show_config",
        "script",
        "arguments",
        "set",
        "logs_specs",
        "standalone",
        "job_id",
        "rdzv_id",
    }
    own |= {"nnodes", "nproc_per_node", "max_restarts", "on_join", "relaunch_max", "local_nodes", "shutdown_timeout"}
    own |= {"hang_action", "hang_timeout", "slow_action", "check_slow", "precheck", "signatures", "policy", "standby"}
    own |= {
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_conf",
        "node_rank",
        "master_addr",
        "master_port",
        "master",
        "log",
        "owner",
        "detach",
        "resume",
    }
    own |= set(dlrover_flags.DESTS)  # they set others, or nothing
    own |= {
        "job_file",
        "role_groups",
        "job_schema",
        "image",
        "gang",
        "queue",
        *ray_flags.FLAGS,
    }  # they stand for what they say
    shown = {*show_config._WORKERS, *show_config._HOST, "state_dir", "local_addr"}
    assert {action.dest for action in cli_options.parser()._actions} - own == shown


def test_the_forms_of_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table has a line for each setting, JSON an object; the script is not taken for the form."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    options = cli_options.parse(["--show-config", "--state-dir", "s", "x.py"])
    assert (options.show_config, options.script) == ("table", "x.py")
    assert cli_options.parse(["--show-config=json", "x.py"]).show_config == "json"
    rows = show_config.rows(options)
    table = show_config.text(rows, "table").splitlines()
    assert len(table) == len(rows) + 1
    assert table[0].split() == ["SETTING", "VALUE", "UNIT", "DEFAULT", "ORIGIN"]
    assert [one["name"] for one in json.loads(show_config.text(rows, "json"))] == [row.name for row in rows]


def test_hangs_are_looked_for_as_told() -> None:
    """``--hang-timeout`` is the floor of the rule, 0 turns it off, and ``--hang-action`` says what follows."""
    for words, expected in (
        ([], (60.0, "restart")),
        (["--hang-timeout", "0"], (0.0, "restart")),
        (["--hang-timeout", "2.5", "--hang-action", "report"], (2.5, "report")),
    ):
        spec = cli_options.spec(cli_options.parse([*words, "x.py"]), "j", 1)
        assert (spec.hang_s, spec.hang_action) == expected
    for wrong in ("-1", "soon", "nan"):
        with pytest.raises(SystemExit):
            cli_options.parse(["--hang-timeout", wrong, "x.py"])


def test_a_master_of_its_own_takes_what_a_job_needs() -> None:
    """`dlrover master` makes the same spec without a script: whatever the spec takes as given, its command line has."""
    made = argparse.ArgumentParser()
    serve.arguments(made)
    options = made.parse_args([], namespace=Options())
    assert cli_options.spec(options, "lm7", 1).job == "lm7"


def test_how_long_a_node_may_take_to_start_workers_can_be_set() -> None:
    """A slow file system and a busy host need more than the defaults; what is set reaches the agent's launcher."""
    line = [word for one in ("ready_s=900", "probe_s=30", "start_s=120", "refill_s=0") for word in ("--set", one)]
    spec = cli_options.spec(cli_options.parse([*line, "x.py"]), "j", 1)
    found = workers.launch_fields({"spec": spec.to_json()})
    config = LaunchConfig(("x.py",), **found)
    assert (config.ready_s, config.probe_s, config.start_s, config.refill_s) == (900, 30, 120, 0)
    usual = LaunchConfig(("x.py",), **workers.launch_fields({"spec": JobSpec("j").to_json()}))
    assert usual == LaunchConfig(("x.py",), finish_s=3600.0), "the defaults of both are the same"
