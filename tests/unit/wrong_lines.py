"""Wrong command lines of `dlrover-run`: a table of kinds, each with its values, and the words that must be in the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Wrong(NamedTuple):
    """One command line, in a folder that `lay` has made. ``names``: what the answer must show, mostly the wrong value.

    ``env`` is beside the usual environment.
    """

    kind: str
    arguments: tuple[str, ...]
    names: str
    env: tuple[tuple[str, str], ...] = ()


DIGITS = "9" * 5000
SEVERAL = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h")

# Kind, the options before the value, values. A value that is shown in part stands with that part, as VALUE -> PART.
_VALUES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "nproc",
        ("--nproc-per-node",),
        ("0", "-1", "1.5", "two", "99999999", "600000", DIGITS, "gpu", "xpu", "GPU", "2x", "\u0663", "1e9"),
    ),
    ("local nodes", ("--local-nodes",), ("0", "-3", "x", "99999999", "1.0")),
    ("standby", ("--standby",), ("-1", "x", "99999999")),
    ("nodes", ("--nnodes",), ("0", "-1", "x", "2:1", "0:1", ":", "1:", "1:2:3", "1:99999999", "99999999", DIGITS)),
    ("max restarts", ("--max-restarts",), ("-1", "x", "1.5")),
    ("relaunches", ("--relaunch-max",), ("-1", "x")),
    ("backend", ("--rdzv-backend",), ("zeus", "etcd", "etcd-v2")),
    (
        "conf",
        ("--rdzv-backend", "c10d", "--rdzv-conf"),
        (
            "nope=1 -> nope",
            "jointimeout=5 -> did you mean join_timeout?",
            "'join_timeout=5,timeout=5' -> take off the quotation mark",
            "join_timeout",
            "=5",
            "join_timeout=",
            "join_timeout=x",
            "join_timeout=-1",
            "join_timeout=nan",
            "is_host=maybe",
            "close_timeout=x",
            "rank=x",
            "keep_alive_interval=0",
        ),
    ),
    ("conf of static", ("--rdzv-conf",), ("timeout=inf", "timeout=x", "nope=1 -> nope")),
    (
        "conf of hosts",
        (*SEVERAL, "--rdzv-conf"),
        ("nope=1 -> nope", "is_host=2", "store_type=file -> store_type", "last_call_timeout=soon"),
    ),
    (
        "endpoint",
        ("--rdzv-endpoint",),
        ("localhost:99999", "localhost:-1", "localhost:port", "a b:1", "a b", f"h:{DIGITS}", "h:65536", "[::1]:x"),
    ),
    (
        "endpoint of hosts",
        ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"),
        ("h:99999", "h:x", "a b:1", "h:0"),
    ),
    ("master port", ("--master-port",), ("-1", "65536", "99999", "x", "1.5")),
    ("master of another host", ("--master-port", "29555", "--master-addr"), ("192.0.2.1", "2001:db8::1")),
    ("master port of hosts", ("--nnodes", "2", "--master-addr", "h", "--master-port"), ("0", "70000", "-5")),
    ("master address", ("--master-addr",), ("a b", "h;x")),
    ("local address", ("--local-addr",), ("a b", "h/24")),
    ("master", ("--master",), ("", "h:99999", "a b", "h:x", "h,i:0 -> i:0", ", -> names no master")),
    ("node rank", ("--nnodes", "2", "--master-addr", "h", "--node-rank"), ("-1", "x")),
    ("signals", ("--signals-to-handle",), ("SIGKILL", "TERM", "SIGTERM,SIGNONE -> SIGNONE", "15")),
    ("shutdown", ("--shutdown-timeout",), ("-1", "x", "1.5")),
    ("ranks shown", ("--local-ranks-filter",), ("x", "0;1", "-1", "0,,1", "7", DIGITS)),
    ("redirects", ("--redirects",), ("4", "x", "0:9 -> 9", "1:3 -> local rank 1", f"{DIGITS}:1", "0-1", "0:1, -> ''")),
    ("tee", ("--tee",), ("5", "a:1", "3:3 -> local rank 3", "0: -> ''")),
    (
        "durations",
        ("--set",),
        (
            "stop_grace=5 -> did you mean stop_grace_s?",
            "nope=1 -> nope",
            "stop_grace_s=x",
            "x",
            "=1 -> ''",
            "stop_grace_s=-1 -> -1",
            "hang_s=nan -> nan",
            "finish_s=inf -> inf",
            "silence_s=1 -> 1.0",
            "heartbeat_s=0 -> 0",
            "check_s=0 -> 0",
            "ready_s=0 -> ready_s",
            "probe_s=-1 -> -1",
            "start_s=0 -> start_s",
            "refill_s=x",
        ),
    ),
    ("hang timeout", ("--hang-timeout",), ("-1", "soon", "nan")),
    ("room for logs", ("--log-bytes-max",), ("1 -> 64K", "x", "-5", "5Q", DIGITS)),
    ("attempts", ("--log-attempts-max",), ("-1", "x")),
    (
        "log",
        ("--log",),
        (
            "nonsense",
            "nolog://here -> nolog",
            "memory: -> sqlite",
            "sqlite://host/x",
            "sqlite:///x?y=1",
            "etcd://",
            "sqlite:///proc/nobody/log.db -> /proc/nobody/log.db",
            "sqlite:///proc -> /proc",
            "etcd://h:99999",
            f"etcd://h:{DIGITS} -> is not HOST:PORT",
            "etcd://h/p?x=1 -> ?x",
            "etcd://a b",
            "http://h -> http",
        ),
    ),
    ("state", ("--state-dir",), ("ok.py", "/proc/nobody", "/dev/null/x -> /dev/null")),
    ("log folder", ("--log-dir",), ("ok.py", "ok.py/x", "/proc/nobody")),
    ("token file", ("--token-file",), ("missing", "folder", "empty", "words")),
    ("certificate", ("--tls-cert",), ("/nonexistent", "folder")),
    ("key", ("--tls-key",), ("/nonexistent", "folder")),
    ("authority", ("--tls-ca",), ("/nonexistent", "folder")),
    ("certificate of hosts", (*SEVERAL, "--tls-cert"), ("words -> tls-ca",)),
    ("authority of hosts", (*SEVERAL, "--tls-cert", "words", "--tls-ca"), ("words",)),
    ("policy", ("--policy",), ("missing", "folder", "words", "unknown.toml -> nope", "negative.toml -> -1", "latin")),
    ("signatures", ("--signatures",), ("missing", "folder", "words", "unknown.toml")),
    ("own check", ("--check-script",), ("no-such-command", "'", " -> its value is empty")),
    (
        "preload",
        ("--preload",),
        ("no.such.module", "json,nosuch -> nosuch", "json.nosuch", "a/b", ".x", "none,x -> none", "import"),
    ),
    ("logs specs", ("--logs-specs",), ("mine",)),
    ("job", ("--job-id",), ("Upper", "a b", "", "x" * 64, "../x", "-a")),
    ("rendezvous", ("--rdzv-id",), ("***", "///")),
    ("choices", ("--on-join",), ("x",)),
    ("choices", ("--precheck",), ("x",)),
    ("choices", ("--hang-action",), ("kill",)),
    ("choices", ("--numa-binding",), ("x",)),
    ("choices", ("--start-method",), ("x",)),
    ("choices", ("--log-level",), ("loud",)),
    ("choices", ("--detect",), ("maybe",)),
)

# Programs: the whole command line.
_PROGRAMS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((), "name the script"),
    (("missing.py",), "missing.py"),
    (("",), "''"),
    (("folder",), "__main__.py"),
    (("/nonexistent/train.py", "--lr", "1"), "/nonexistent/train.py"),
    (("-m", "no.such.mod"), "no.such.mod"),
    (("-m", "nosuch"), "nosuch"),
    (("-m", "json.nosuch"), "json.nosuch"),
    (("-m", "package"), "__main__.py"),
    (("-m", "package.inner.nosuch"), "package.inner.nosuch"),
    (("-m", "namespace.nosuch"), "namespace.nosuch"),
    (("-m", "ok.py"), "leave -m out"),
    (("-m", "folder/x"), "folder/x"),
    (("-m", ""), "''"),
    (("-m", "a..b"), "a..b"),
    (("-m", "json.tool.deeper"), "json.tool.deeper"),
    (("--no-python", "/nonexistent"), "/nonexistent"),
    (("--no-python", "no-such-program"), "PATH"),
    (("--no-python", "ok.py"), "ok.py"),
    (("--no-python", "./ok.py"), "chmod +x"),
    (("--no-python", "./folder"), "./folder"),
    (("--run-path", "missing.py"), "missing.py"),
    (("--run-path", "folder"), "__main__.py"),
    (("--nope", "ok.py"), "--nope"),
    (("--nproc-per-nod", "2", "ok.py"), "did you mean --nproc-per-node?"),
    (("--nprocs", "2", "ok.py"), "did you mean --nproc-per-node?"),
    (("--precheck", "ful", "ok.py"), "did you mean full?"),
    (("--set", "hung_s=soon", "ok.py"), "is not NAME=SECONDS, as in hung_s=5"),
    (("--nproc-per-node",), "expected one argument"),
    (("--role",), "expected one argument"),
    (("--module=1", "ok.py"), "--module"),
)

_CONTRADICTIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("-m", "--no-python"), "exclude one another"),
    (("--run-path", "--no-python"), "exclude one another"),
    (("--run-path", "-m"), "exclude one another"),
    (("--nnodes", "2"), "--rdzv-endpoint HOST:PORT"),
    (("--nnodes", "2", "--standalone"), "--local-nodes 2"),
    (("--nnodes", "3", "--local-nodes", "2"), "must be as many"),
    (("--rdzv-id", "a", "--job-id", "b"), "give one of them"),
    ((*SEVERAL, "--standby", "1"), "start more of them"),
    (SEVERAL, "job token"),
    (("--master", "h", "--standalone"), "--standalone"),
    (("--master", "h", "--local-nodes", "2"), "local-nodes: 2"),
    (("--master", "h", "--rdzv-endpoint", "h"), "--rdzv-endpoint"),
    (("--local-nodes", "200", "--nproc-per-node", "200"), "200"),
)

_VARIABLES: tuple[tuple[str, str], ...] = (
    ("PET_NNODES", "x"),
    ("PET_NPROC_PER_NODE", "many"),
    ("PET_MAX_RESTARTS", "x"),
    ("PET_MODULE", "yes"),
    ("PET_MASTER_PORT", "99999"),
    ("PET_RDZV_CONF", "nope=1"),
    ("PET_START_METHOD", "q"),
    ("PET_SIGNALS_TO_HANDLE", "SIGSTOP"),
    ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon"),
    ("DLROVER_TOKEN", "short"),
    ("DLROVER_WARM", "hot"),
    ("PYTHON_EXEC", "/nonexistent/python"),
)


def lay(folder: Path) -> None:
    """Make the files that the lines name."""
    (folder / "ok.py").write_text("print('it ran')\n")
    for name, text in (
        ("empty", ""),
        ("words", "no token, and nothing else"),
        ("unknown.toml", "nope = 1\n"),
        ("negative.toml", "isolate_confidence = -1\n"),
        ("package/__init__.py", ""),
        ("package/inner/__init__.py", ""),
        ("namespace/there.py", ""),
        ("folder/train.py", ""),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "latin").write_bytes(b"caf\xe9 = 1\n")


def lines() -> Iterator[Wrong]:
    """All of them."""
    for kind, options, values in _VALUES:
        for told in values:
            value, arrow, part = told.partition(" -> ")
            # Joined, so that a value that begins with a hyphen is one.
            said = (*options[:-1], f"{options[-1]}={value}") if value[:1] in ("-", "") else (*options, value)
            yield Wrong(kind, (*said, "ok.py"), part if arrow else value[:64])
    for line, names in _PROGRAMS:
        yield Wrong("program", line, names)
    for line, names in _CONTRADICTIONS:
        yield Wrong("contradiction", (*line, "ok.py"), names)
    yield Wrong("contradiction", ("--no-python", "--preload", "json", "true"), "--no-python")
    for name, value in _VARIABLES:
        named = {"DLROVER_TOKEN": name, "PET_RDZV_CONF": "nope"}.get(name, value)
        yield Wrong("variable", ("ok.py",), named, ((name, value),))
