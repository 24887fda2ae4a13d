"""Job files: what they say, and what is said of wrong ones."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.agent.config import PLAIN, TORCH
from dlrover_adapters.cli import groups, job_file, run
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli.settings import Settings
from dlrover_core.errors import SpecError
from dlrover_core.spec import JobSpec


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs to name."""
    for name in ("train.py", "rollout.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLROVER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def written(text: str, name: str = "job.toml") -> str:
    """A file with this text."""
    Path(name).write_text(textwrap.dedent(text))
    return name


def options_of(text: str, *flags: str) -> cli_options.Options:
    """What a command line with this job file comes to."""
    return groups.taken_in(cli_options.parse(["--job", written(text), *flags]))


def spec_of(text: str, *flags: str) -> JobSpec:
    """The job's spec."""
    options = options_of(text, *flags)
    return groups.spec(options, cli_options.job_name(options), groups.plans(options))


RL = """
    job = "rl"
    max_restarts = 5
    stop_grace_s = 7
    preload = "none"
    env = { COMMON = "yes", WHO = "all" }

    [groups.trainer]
    program = "train.py"
    args = ["--lr", "0.1"]
    nodes = 2
    processes = 4
    uses = ["rollout"]

    [groups.rollout]
    program = "rollout.py"
    minReplicas = 2
    maxReplicas = 6
    coupling = "each"
    framework = "none"
    ends = false
    uses = ["trainer"]
    hang_s = 0
    finish_s = 9
    relaunches = 10
    resources = { cpu = "500m", memory = "8Gi", gpu = 1 }
    env = { WHO = "rollout" }

    [groups.evaluator]
    command = ["sh", "-c"]
    args = ["true"]
    critical = false
    role = "judge"
    max_restarts = 1
"""


def test_a_job_of_three_groups(folder: Path) -> None:
    """Each group has a spec of its own, and the job what is said at the top."""
    spec = spec_of(RL)
    trainer, rollout, evaluator = spec.groups
    assert (spec.job, spec.max_restarts, spec.stop_grace_s, spec.joining) == ("rl", 5, 7.0, False)
    assert (trainer.name, trainer.nodes_min, trainer.nodes_max, trainer.nproc) == ("trainer", 2, 2, 4)
    assert (trainer.store, trainer.ends, trainer.uses) == (True, True, ("rollout",))
    assert (rollout.nodes_min, rollout.nodes_max, rollout.coupling, rollout.store) == (2, 6, "each", False)
    assert (rollout.cpu_m, rollout.memory_mib, rollout.gpus, rollout.relaunch_max) == (500, 8192, 1, 10)
    assert (rollout.hang_s, rollout.finish_s, rollout.ends) == (0.0, 9.0, False)
    assert (evaluator.critical, evaluator.max_restarts) == (False, 1)
    assert spec.in_force("trainer").max_restarts == 5


def test_each_group_is_started_with_its_own(folder: Path) -> None:
    """Program, arguments, environment, framework, role: an agent gets those of its group, and nothing of the others."""
    found = groups.plans(options_of(RL))
    trainer, rollout, evaluator = (one.how for one in found)
    assert trainer["argv"] == (str(folder / "train.py"), "--lr", "0.1")
    assert trainer["env"] == {"COMMON": "yes", "WHO": "all"}
    assert (trainer["framework"], trainer["stores"], trainer["role"]) == (TORCH, True, "trainer")
    assert rollout["argv"] == (str(folder / "rollout.py"),)
    assert rollout["env"] == {"COMMON": "yes", "WHO": "rollout"}
    assert (rollout["framework"], rollout["stores"]) == (PLAIN, False)
    assert (evaluator["argv"], evaluator["mode"], evaluator["role"]) == (("sh", "-c", "true"), "command", "judge")
    assert all(one["preload"] is None for one in (trainer, rollout, evaluator))
    assert groups.nodes(found) == {"trainer": 2, "rollout": 6, "evaluator": 1}


def test_settings_of_a_group_survive_being_written_down(folder: Path) -> None:
    """What masters and agents read is what was prepared."""
    options = options_of(RL)
    settings = run.prepare(options, groups.plans(options))
    read = Settings.read(str(settings.write()))
    assert read.of_group("rollout") == settings.of_group("rollout")
    assert read.of_group("rollout").group == "rollout"
    assert read.of_group("evaluator").argv == ("sh", "-c", "true")
    with pytest.raises(SpecError, match="no group 'nobody'"):
        read.of_group("nobody")


def test_flags_go_before_the_file(folder: Path) -> None:
    """A flag for the whole job overrides what the file says, and a group's own policy stays."""
    spec = spec_of(RL, "--max-restarts", "9", "--set", "stop_grace_s=1", "--job-id", "other")
    assert (spec.job, spec.max_restarts, spec.stop_grace_s) == ("other", 9, 1.0)
    assert spec.in_force("evaluator").max_restarts == 1


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--nnodes", "2"), "nnodes"),
        (("--nproc-per-node", "2"), "nproc-per-node"),
        (("--local-nodes", "2"), "local-nodes"),
        (("--relaunch-max", "2"), "relaunch-max"),
        (("--role", "x"), "role"),
        (("-m",), "module"),
        (("--no-python",), "no-python"),
        (("--run-path",), "run-path"),
        (("--master", "host"), "master"),
        (("--rdzv-endpoint", "host:1"), "rdzv-endpoint"),
        (("--master-port", "1234"), "master-port"),
        (("--node-rank", "1"), "node-rank"),
        (("--role-groups", "a:1"), "role-groups"),
        (("train.py",), "script"),
    ],
)
def test_flags_that_contradict_are_refused_by_name(flags: tuple[str, ...], field: str) -> None:
    """What a group says cannot be said for all of them."""
    with pytest.raises(SpecError, match=r"leave it out|write it there|leave one of them out") as refused:
        options_of(RL, *flags)
    assert refused.value.field == field


def test_what_a_platform_puts_into_the_environment_contradicts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the size of its allocation."""
    for name, value in (("NNODES", "7"), ("NPROC_PER_NODE", "3"), ("MASTER_PORT", "1234"), ("ROLE", "x")):
        monkeypatch.setenv(f"PET_{name}", value)
    options = options_of(RL)
    assert [one.nproc for one in spec_of(RL).groups] == [4, 1, 1]
    assert not cli_options.meeting(options).joining
    assert groups.store_at(options, cli_options.meeting(options)) == ""


# ---- wrong files

PLAIN_GROUP = '[groups.a]\nprogram = "train.py"\n'

WRONG: list[tuple[str, str, str]] = [
    # (the file, the field that is named, what is said of it)
    ("job = [", "job", "is not TOML"),
    ("", "groups", "missing: a job has at least one"),
    ("[group.a]\nprogram = 'train.py'", "group", "did you mean groups"),
    ("[groups]", "groups", "is empty"),
    ("groups = 3", "groups", "3 is not a table; write [groups.trainer]"),
    ("[groups]\na = 3", "groups.a", "3 is not a table; write [groups.a]"),
    ("[groups.Trainer]\nprogram = 'train.py'", "groups.Trainer", "cannot name a group"),
    ("[groups.roll-out]\nprogram = 'train.py'", "groups.roll-out", "lower-case letters and digits"),
    (f"nmae = 'x'\n{PLAIN_GROUP}", "nmae", "there are: "),
    (f"max_restart = 3\n{PLAIN_GROUP}", "max_restart", "did you mean max_restarts?"),
    (f"name = 'x'\n{PLAIN_GROUP}", "name", "did you mean job?"),
    ("[replicaSpecs.worker]\nreplicas = 2", "replicaSpecs", "did you mean groups?"),
    (f"job = 'No Name'\n{PLAIN_GROUP}", "job", "'No Name' is not a job's name; say for example \"pretrain\""),
    (f"job = 3\n{PLAIN_GROUP}", "job", "3 is not a job's name"),
    (f"max_restarts = -1\n{PLAIN_GROUP}", "max_restarts", "-1 is not a whole number from 0 on"),
    (f"max_restarts = '3'\n{PLAIN_GROUP}", "max_restarts", "write it without quotes"),
    (f"max_restarts = true\n{PLAIN_GROUP}", "max_restarts", "true is not a whole number"),
    (f"stop_grace_s = -2\n{PLAIN_GROUP}", "stop_grace_s", "-2 is not a number of seconds, 0 or more"),
    (f"check_s = 0\n{PLAIN_GROUP}", "check_s", "0 is not a number of seconds, more than 0"),
    (f"heartbeat_s = 10\n{PLAIN_GROUP}", "silence_s", "at least 3 heartbeats of 10"),
    (f"on_join = 'later'\n{PLAIN_GROUP}", "on_join", "'later' is none of 'restart', 'planned', 'never'"),
    (f"log_level = 'inof'\n{PLAIN_GROUP}", "log_level", "did you mean info?"),
    (f"detect = 'on'\n{PLAIN_GROUP}", "detect", "neither true nor false"),
    (f"env = 3\n{PLAIN_GROUP}", "env", '3 is not a table; write { NAME = "value" }'),
    (f"env = {{ RANK = '3' }}\n{PLAIN_GROUP}", "env.RANK", "is set for every worker"),
    (f"policy = 'none.toml'\n{PLAIN_GROUP}", "policy", "cannot be read"),
    (f"check_scripts = 'x'\n{PLAIN_GROUP}", "check_scripts", "is not a list"),
    ("[groups.a]", "groups.a", 'names no program; write program = "train.py"'),
    (
        "[groups.a]\nprogram = 'none.py'",
        "groups.a.program",
        "none.py' is not a file; paths begin where the job file lies",
    ),
    ("[groups.a]\nprogram = ''", "groups.a.program", "'' is not a script"),
    ("[groups.a]\nprogram = '.'", "groups.a.program", "is a folder without __main__.py"),
    ("[groups.a]\nmodule = 'no.such'", "groups.a.module", "no module 'no.such'"),
    ("[groups.a]\nmodule = 'train.py'", "groups.a.module", "or program for a file"),
    ("[groups.a]\ncommand = 'no-such-program'", "groups.a.command", "not on the PATH"),
    ("[groups.a]\ncommand = []", "groups.a.command", "name a program"),
    ("[groups.a]\nscript = 'train.py'", "groups.a.script", "did you mean program?"),
    (f"{PLAIN_GROUP}module = 'x'", "groups.a.module", "program is given too"),
    (f"{PLAIN_GROUP}args = '--lr 0.1'", "groups.a.args", "is not a list"),
    (f"{PLAIN_GROUP}args = ['--lr', 0.1]", "groups.a.args[1]", "0.1 is not a text; put it into quotes"),
    (f"{PLAIN_GROUP}nodes = 0", "groups.a.nodes", "0: need 1 <= MIN <= MAX"),
    (f"{PLAIN_GROUP}nodes = '3:2'", "groups.a.nodes", "'3:2': need 1 <= MIN <= MAX"),
    (f"{PLAIN_GROUP}nodes = '2-4'", "groups.a.nodes", 'neither a whole number nor "MIN:MAX"'),
    (f"{PLAIN_GROUP}nnodes = 2", "groups.a.nnodes", "did you mean nodes?"),
    (f"{PLAIN_GROUP}nodes = 2\nreplicas = 2", "groups.a.replicas", "nodes is given too"),
    (f"{PLAIN_GROUP}minReplicas = 2", "groups.a.minReplicas", "needs maxReplicas beside it"),
    (f"{PLAIN_GROUP}minReplicas = 3\nmaxReplicas = 2", "groups.a.minReplicas", "3 is more than maxReplicas, 2"),
    (f"{PLAIN_GROUP}unit = 2\nnodes = 3", "groups.a.unit", "3 is not a multiple of 2"),
    (f"{PLAIN_GROUP}processes = 0", "groups.a.processes", "0 is neither a whole number from 1 on"),
    (f"{PLAIN_GROUP}processes = 'many'", "groups.a.processes", "'many' is neither"),
    (f"{PLAIN_GROUP}processes = 100000", "groups.a.processes", "is too many"),
    (f"{PLAIN_GROUP}relaunches = 1\nrestartCount = 1", "groups.a.restartCount", "another name of relaunches"),
    (f"{PLAIN_GROUP}resources = 3", "groups.a.resources", "3 is not a table"),
    (f"{PLAIN_GROUP}resources = {{ cpus = 1 }}", "groups.a.resources.cpus", "did you mean cpu?"),
    (f"{PLAIN_GROUP}resources = {{ cpu = 'lots' }}", "groups.a.resources.cpu", "is not a number of CPUs"),
    (f"{PLAIN_GROUP}resources = {{ memory = 8 }}", "groups.a.resources.memory", 'write for example "8Gi"'),
    (f"{PLAIN_GROUP}resources = {{ gpu = -1 }}", "groups.a.resources.gpu", "-1 is not a whole number"),
    (f"{PLAIN_GROUP}memory = '8Gi'", "groups.a.memory", "did you mean resources.memory?"),
    (f"{PLAIN_GROUP}preload = 'numpy'", "groups.a.preload", "write modules as a list, ['numpy']"),
    (f"{PLAIN_GROUP}preload = ['no_such_module']", "groups.a.preload", "there is no module 'no_such_module'"),
    (f"{PLAIN_GROUP}preload = ['a b']", "groups.a.preload[0]", "'a b' is not a module"),
    ("[groups.a]\ncommand = 'sh'\npreload = ['json']", "groups.a.preload", "nothing is imported for a command"),
    (f"{PLAIN_GROUP}env = {{ LR = 1 }}", "groups.a.env.LR", "1 is not a text; put it into quotes"),
    (f"{PLAIN_GROUP}env = {{ 'A-B' = '1' }}", "groups.a.env.A-B", "is not the name of an environment variable"),
    (f"{PLAIN_GROUP}env = {{ MASTER_ADDR = '1' }}", "groups.a.env.MASTER_ADDR", "is set for every worker"),
    (f"{PLAIN_GROUP}tee = 4", "groups.a.tee", "4 is none of 0 (none)"),
    (f"{PLAIN_GROUP}tee = '7:3'", "groups.a.tee", "local rank 7 does not exist"),
    (f"{PLAIN_GROUP}numa_binding = 'cores'", "groups.a.numa_binding", "is none of 'node'"),
    (f"{PLAIN_GROUP}framework = 'jax'", "groups.a.framework", "'jax' is not a framework"),
    (f"{PLAIN_GROUP}framework = 'my.jax'", "groups.a.framework", "there is no module 'my.jax'"),
    (f"{PLAIN_GROUP}framework = 'none'\nstore = true", "groups.a.store", "the store is torch's"),
    (f"{PLAIN_GROUP}framework = 'none'\nnuma_binding = 'node'", "groups.a.numa_binding", "torch is asked for it"),
    (f"{PLAIN_GROUP}coupling = 'all'", "groups.a.coupling", "'all' is none of 'group', 'each'"),
    (f"{PLAIN_GROUP}coupling = 'each'\nset = 'b'", "groups.a.set", "every node is a set"),
    (f"{PLAIN_GROUP}coupling = 'each'\nunit = 2\nnodes = 2", "groups.a.unit", "unit must be 1"),
    (f"{PLAIN_GROUP}uses = ['b']", "groups.a.uses", "'b' is not a group of this job"),
    (f"{PLAIN_GROUP}uses = ['a']", "groups.a.uses", "is this group itself"),
    (f"{PLAIN_GROUP}uses = 'b'", "groups.a.uses", "is not a list"),
    (f"{PLAIN_GROUP}ends = false", "groups", "all say ends = false or critical = false"),
    (f"{PLAIN_GROUP}critical = false", "groups", "all say ends = false or critical = false"),
    (f"{PLAIN_GROUP}critical = 0", "groups.a.critical", "neither true nor false"),
    (f"{PLAIN_GROUP}hang_s = 'never'", "groups.a.hang_s", "is not a number of seconds"),
    (f"{PLAIN_GROUP}precheck = 'half'", "groups.a.precheck", "'half' is none of"),
    (f"{PLAIN_GROUP}store = false\nprecheck = 'full'", "groups.a.precheck", "checks pairs of nodes over a store"),
    (
        f"{PLAIN_GROUP}set = 'c'\nmax_restarts = 1\n[groups.b]\nprogram = 'train.py'\nset = 'c'\nmax_restarts = 2",
        "groups.a.max_restarts",
        "share the set 'c' and must agree",
    ),
]


@pytest.mark.parametrize(("text", "field", "said"), WRONG, ids=[f"{n}-{one[1]}" for n, one in enumerate(WRONG)])
def test_wrong_files(text: str, field: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the field, its value and what to write, and exit status 2; nothing is started."""
    assert run.main(["--job", written(text)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"dlrover-run: error: {field}: "), told
    assert said in told
    assert told.count("\n") == 1


def test_files_that_are_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Absent, a folder, not text, far too long."""
    Path("bytes.toml").write_bytes(b"\xff\xfe")
    Path("long.toml").write_text("#" * (2**20 + 1))
    for name, said in (
        ("none.toml", "cannot be read: No such file"),
        (".", "is a folder; name the file in it"),
        ("bytes.toml", "is not text in UTF-8"),
        ("long.toml", "that is no job file"),
    ):
        assert run.main(["--job", name]) == 2
        assert said in capsys.readouterr().err


def test_paths_begin_where_the_file_lies(folder: Path) -> None:
    """Wherever the command is typed: programs, commands with a folder, files of settings."""
    (folder / "jobs").mkdir()
    (folder / "jobs" / "mine.py").write_text("")
    (folder / "jobs" / "tool").write_text("#!/bin/sh\n")
    (folder / "jobs" / "tool").chmod(0o755)
    text = (
        "log_dir = 'logs'\n[groups.a]\nprogram = 'mine.py'\n[groups.b]\ncommand = './tool'\n[groups.c]\ncommand = 'sh'"
    )
    options = groups.taken_in(cli_options.parse(["--job", written(text, "jobs/job.toml")]))
    argv = [one.how["argv"][0] for one in groups.plans(options)]
    assert argv == [str(folder / "jobs" / "mine.py"), str(folder / "jobs" / "tool"), "sh"]
    assert options.log_dir == str(folder / "jobs" / "logs")


# ---- the short form


def roles(text: str, *flags: str) -> JobSpec:
    """The job of ``--role-groups``."""
    options = groups.taken_in(cli_options.parse(["--role-groups", text, *flags, "train.py"]))
    return groups.spec(options, cli_options.job_name(options), groups.plans(options))


def test_role_groups_run_one_script() -> None:
    """Each group has its size; processes and policy are the command line's."""
    spec = roles("trainer:2, rollout:4:6,evaluator:1", "--nproc-per-node", "2", "--relaunch-max", "7")
    assert [(one.name, one.nodes_min, one.nodes_max) for one in spec.groups] == [
        ("trainer", 2, 2),
        ("rollout", 4, 6),
        ("evaluator", 1, 1),
    ]
    assert {(one.nproc, one.relaunch_max) for one in spec.groups} == {(2, 7)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer", "is not NAME:NODES"),
        ("trainer:0", "need 1 <= MIN <= MAX"),
        ("trainer:3:2", "need 1 <= MIN <= MAX"),
        ("Trainer:1", "is not NAME:NODES"),
        ("a:1,a:2", "stands there twice"),
        ("a:1,,b:2", "is not NAME:NODES"),
    ],
)
def test_wrong_role_groups(text: str, said: str) -> None:
    """The part that is wrong is named."""
    with pytest.raises(SpecError, match=said) as refused:
        roles(text)
    assert refused.value.field == "role-groups"


def test_role_groups_and_sizes_exclude_one_another() -> None:
    """Both would say how many nodes there are."""
    with pytest.raises(SpecError, match="how many nodes each group has"):
        roles("a:1", "--nnodes", "2")


def test_a_plain_job_is_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings hold no other group's, and its group is the one it always was."""
    options = groups.taken_in(cli_options.parse(["--local-nodes", "2", "train.py"]))
    found = groups.plans(options)
    settings: Any = run.prepare(options, found)
    assert settings.launches == {}
    assert [one.name for one in settings.job.groups] == ["worker"]
    assert settings.of_group("worker") == settings


def test_the_page_says_what_is_so(folder: Path) -> None:
    """The job file of docs/jobs.md is right, and the errors that it shows are those that come."""
    page = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()
    text = page.partition("```toml\n")[2].partition("```")[0]
    found = job_file.read(written(text))
    assert [one.name for one in found.groups] == ["trainer", "rollout", "evaluator"]
    wrong = (('nodes = "4:6"', 'nodes = "6:4"'), ("processes = 8", "nproc_per_node = 8"))
    for right, other in wrong:
        with pytest.raises(SpecError) as refused:
            job_file.read(written(text.replace(right, other)))
        assert f"dlrover-run: error: {refused.value}\n" in page


def test_a_node_elsewhere_looks_at_its_own_group_alone(folder: Path) -> None:
    """How large the others are, and whether their programs lie here, is no matter of its host."""
    text = (
        "[groups.a]\nprogram = 'train.py'\nnodes = 900\n[groups.b]\nmodule = 'not.here'\nnodes = 5000\nprocesses = 'auto'\n"
        "resources = { gpu = 8 }"
    )
    options = options_of(text)
    found = groups.plans(options, only="a")
    assert [(one.made.nodes_max, one.made.nproc) for one in found] == [(900, 1), (5000, 8)]
    assert found[0].how["argv"] == (str(folder / "train.py"),)
    with pytest.raises(SpecError, match=r"groups.a.nodes: 900 is too many"):
        groups.plans(options)


def test_devices_of_other_hosts_are_not_counted_here() -> None:
    """``gpu`` is what the group's resources say, and else nobody knows."""
    text = "[groups.a]\nprogram = 'train.py'\nprocesses = 'gpu'\n"
    assert groups.plans(options_of(f"{text}resources = {{ gpu = 4 }}"))[0].how["nproc"] == 4
    with pytest.raises(SpecError, match="nodes are on other hosts") as refused:
        groups.plans(options_of(text, "--backend", "mine"))
    assert refused.value.field == "groups.a.processes"


def test_reading_needs_no_program_of_another_host(folder: Path) -> None:
    """What a file says can be read apart from what this host has."""
    found = job_file.parsed({"groups": {"a": {"command": "elsewhere"}}}, "job.toml")
    assert found.groups[0].options["script"] == "elsewhere"
