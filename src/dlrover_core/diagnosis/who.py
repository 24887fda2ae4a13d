"""Who wrote a line, and where: launchers, collectors, schedulers and libraries say so in front of it or in it.

A line is peeled from its start: colours, the collector's time, a pod's or container's name, a launcher's rank, a logger's time
and level. What is left is what the program wrote, with its indentation, so that a traceback reads as it was printed. Whoever is
named in front (rank, local rank, host, pod, device, process) is noted on the way. Nothing is guessed: an empty field means that
the line does not say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

PEELS_MAX, JSON_BYTES_MAX, NODES_MAX = 8, 64 * 1024, 4096


class Who(NamedTuple):
    """The writer of a line.

    ``rank``: in the job, -1 where it is not said.
    ``local``: the rank on its host, -1 where it is not said.
    ``host``: the machine's name or address.
    ``pod``: a pod's, container's or actor's name.
    ``device``: the GPU's index on its host, -1 where it is not said.
    ``pid``: the process, 0 where it is not said.
    """

    rank: int = -1
    local: int = -1
    host: str = ""
    pod: str = ""
    device: int = -1
    pid: int = 0


class Peeled(NamedTuple):
    """A line without what was put before it. ``stamps``: times in front, the outermost first; ``level``: E, W, I or empty."""

    body: str
    who: Who
    stamps: tuple[str, ...] = ()
    level: str = ""


_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_DATE = r"\d{4}[-/]\d\d[-/]\d\d"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_ZONE = r"(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?"
_HOST = r"[A-Za-z0-9](?:[\w.-]{0,120}[A-Za-z0-9])?"
# A host's name where a word stands that may be anything else: it has a digit, or dots.
_MACHINE = (
    r"(?:[a-z][a-z0-9]*-[a-z0-9.-]*\d[a-z0-9.-]*|(?:node|gpu|host|dgx|cn|gn|nid|compute|worker|server|hgx|slurm|rack)[a-z0-9.-]*\d"
    r"|[a-z][a-z0-9-]*\d[a-z0-9-]*(?:\.[a-z][a-z0-9-]*)+|\d{1,3}(?:\.\d{1,3}){3})"
)
_FRONT = tuple(
    re.compile(one)
    for one in (
        # syslog: after its time comes the host, whatever it is called, and then a program.
        (
            r"(?P<stamp>(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d{1,2} \d\d:\d\d:\d\d(?:\.\d+)?) "
            rf"(?P<host>{_HOST}) [\w./()-]+(?:\[\d+\])?: "
        ),
        rf"(?P<stamp>{_DATE}T{_CLOCK}{_ZONE}) (?P<host>{_HOST}) (?:kernel|[\w./()-]+\[\d+\]): ",
        # Slurm's daemons, with their host.
        rf"(?:slurmstepd|slurmd)-(?P<host>{_HOST}): (?:error: )?",
        # A collector's or a logger's time, alone or in brackets; containerd's stream.
        rf"(?P<stamp>{_DATE}[T _]{_CLOCK}{_ZONE})(?: ?[|,:-]+ ?| |(?=\[)|$)(?:(?:stdout|stderr) [FP] ?)?",
        rf"\[(?P<stamp>(?:rank\d+\]?:? ?)?{_DATE}[T _]{_CLOCK}{_ZONE})(?:,\d+)?(?: (?:DP\d+ )?TP(?P<rank>\d+))?\][: ]{{0,2}}",
        r"(?P<host>\d{1,3}(?:\.\d{1,3}){3}) \[(?P<local>\d{1,2})\] ?",
        rf"\[?(?P<stamp>{_CLOCK})\]?(?: - |[ |]+)",
        (
            r"(?P<stamp>(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[ ,]+)?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov"
            r"|Dec) +\d{1,2} \d\d:\d\d:\d\d(?:\.\d+)?(?: \d{4})?) "
        ),
        (
            r"\[(?P<stamp>(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) +)(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov"
            r"|Dec) +\d{1,2} \d\d:\d\d:\d\d \d{4})\] ?"
        ),
        r"(?:<\d+>)?\[ *(?P<boot>\d{1,9}\.\d{1,9})\] ?",
        # glog, torch's own logger: level, time, thread, place.
        r"\[?(?P<level>[IWEF])(?P<glog>\d{4} \d\d:\d\d:\d\d(?:\.\d+)?)(?: +\d+)? [\w./<>-]+:\d+\]{1,2} ?",
        r"\[(?P<level>[IWEF]) [\w./]+\.(?:cpp|cc|cu|h):\d+\] ?",
        # Kubernetes, compose, stern.
        r"\[(?:pod/)?(?P<pod>[a-z0-9][a-z0-9.-]*-[a-z0-9.-]+)(?:/[\w-]+)?\]:? ",
        (
            r"(?P<pod>[a-z0-9][a-z0-9-]*-\d+(?:-[a-z0-9]{5})?) (?:pytorch|tensorflow|main|trainer|worker|master|launcher|mpi|app"
            r"|train(?:er|ing)?)(?: [>|])? "
        ),
        r"(?P<pod>(?:worker|rank|trainer)[-_]\d{1,6}) *[|:] ?",
        r"(?P<pod>[a-zA-Z][\w.-]*?[-_]?\d*) *\| ?",
        # Ranks, as launchers write them.
        r"\[(?:rank|Rank|RANK)[ :=]?(?P<rank>\d{1,6})\](?::|(?= )| |$) ?",
        r"(?:rank|Rank|RANK)[ :=]?(?P<rank>\d{1,6})(?:\]?: |\] ?)",
        r"\[(?:PE )?(?:[\w.-]+@)?\d+,(?P<rank>\d{1,6})\](?:<std\w+>:|:? ?)",
        r"\[(?:default|trainer|worker|main|train)(?P<role>\d{1,6})\]: ?",
        r" {0,5}(?P<rank>\d{1,5}): ",
        # vLLM: a worker, by its place in the tensor-parallel group.
        r"\((?:Vllm)?Worker(?:Proc)?[ _](?:DP\d+[ _])?(?:PP\d+[ _])?TP(?P<rank>\d+)(?:[ _]\w+)? pid=(?P<pid>\d+)\) ",
        # Ray: an actor or a task, its process and its address.
        r"\((?P<actor>[\w.:<>-]+(?:\(\w+\))?)(?: \w+=[^,)]{1,40})*? ?(?:pid=(?P<pid>\d+))?(?:, )?(?:ip=(?P<ip>[\d.]+))?\) ",
        # MPICH's own, Cray's among them.
        (
            r"MPICH (?:ERROR|WARNING|Notice) \[Rank (?P<rank>\d+)\] \[job id [^\]]{1,60}\] \[[^\]]{1,60}\] "
            rf"\[(?P<host>{_HOST})\] - "
        ),
        # UCX, and the providers of libfabric.
        rf"\[(?P<host>{_HOST}):(?P<pid>\d{{2,7}}):\d+:\d+\] ",
        rf"(?P<host>{_HOST}):rank(?P<rank>\d{{1,6}})\.[\w.-]+: ",
        # MPI, syslog, pdsh.
        rf"\[(?P<host>{_HOST}):(?P<pid>\d{{2,7}})\](?: \*\*\*)? ?",
        rf"\[[a-z][a-z-]{{1,15}}\] (?=(?:{_MACHINE}): )",
        rf"(?P<host>{_MACHINE}) (?P<proc>[\w./()-]+(?:\[\d+\])?): ",
        rf"(?P<host>{_MACHINE}): ",
        # A level in words, with a logger's name or a time of its own.
        r"[\w.]+ - (?=(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b)",
        r"(?P<word>INFO|WARNING|ERROR) (?P<glog>\d\d-\d\d \d\d:\d\d:\d\d) \[?[\w./]+:\d+\] ?",
        rf"\[[a-z]\w{{1,20}}\] ?(?=\[?{_DATE}[T ])",
        r"\[?(?P<word>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\]?(?: *[-|:]+ *| +(?=Traceback|\[))(?:[\w.]+:(?=\S))?",
    )
)
_LEVELS = {"DEBUG": "I", "INFO": "I", "WARNING": "W", "WARN": "W", "ERROR": "E", "CRITICAL": "E", "FATAL": "E"}
_JSON_TEXT = ("message", "msg", "log", "MESSAGE", "text", "textPayload", "body", "event")
_JSON_TIME = ("time", "timestamp", "ts", "@timestamp", "asctime", "__REALTIME_TIMESTAMP", "t")
_JSON_HOST = ("host", "hostname", "_HOSTNAME", "node", "node_name", "nodeName")
_JSON_POD = ("pod", "pod_name", "podName", "container_name")

# Who is meant, anywhere in a line.
_NCCL = re.compile(rf"^(?P<host>{_HOST}):(?P<pid>\d+):(?P<tid>\d+) \[(?P<device>\d{{1,2}})\]")
_RANKED = re.compile(
    r"\[(?:rank|Rank|RANK)[ :=]?(\d{1,6})\]|\brank[ =:](\d{1,6})\b.{0,40}\]|\[PG(?: ID)? [^\]]{0,60}Rank (\d{1,6})\]"
    r"|^Rank (\d{1,6})\b"
)
_NAMES_RANK = re.compile(
    r"\b(?:device=TPU:|VllmWorker-|job:jax_worker/replica:\d+/task:"
    r"|process rank|global[_ ]rank|worker rank|on rank|in rank|of rank|at rank|from rank"
    r"|rank:?) ?[=:#]? ?\[?(\d{1,6})\b",
    re.IGNORECASE,
)
_DEVICE = re.compile(r"\b(?:GPU|cuda|device)[ :#=]{1,2}(\d{1,2})\b")
_HOST_NAMED = tuple(
    re.compile(one)
    for one in (
        rf"\bNode failure on ({_HOST})",
        rf"\b[Nn]odes? ((?=[\w.-]*\d){_HOST}) (?:not responding|is not responding|has failed|was lost|went down|state set to)",
        r"\b[Nn]ode with (?:node |client )?id\b.{0,160}\b(?:ip|address): (\d{1,3}(?:\.\d{1,3}){3})",
        rf"\bRemote daemon *: \[\[[\d,]+\],\d+\] on node ({_HOST})",
        r"\b(?:Owner|Worker) I[Pp] address: (\d{1,3}(?:\.\d{1,3}){3})",
        rf"\b(?:STEP|JOB) [\d.]+ ON ({_HOST}) CANCELLED",
        rf"\bkubelet[ ,]+((?=[\w.-]*\d){_HOST})\b",
        r"\bIP(?: address)?[:=] ?(\d{1,3}(?:\.\d{1,3}){3})",
        rf"\b(?:[Hh]ost|[Hh]ostname|[Nn]ode[_ ]?[Nn]ame|NodeList|[Nn]ode)[:=] *\"?((?=[\w.-]*\d){_HOST})\b",
        r"\b[Nn]ode[ /]\"?((?=[\w.-]*\d)[a-zA-Z][\w.-]*[\w])\"?",
        rf"\bon (?:node|host) \"?({_HOST})",
        rf"\bkernel-monitor, ((?=[\w.-]*\d){_HOST})\b",
        rf"\bfor host: ({_HOST})\b",
        rf"\b[Ee]xec(?:ution)?[ _][Hh]osts? ?[:=] ?({_HOST})",
        rf"\bSuccessfully assigned \S+ to ({_HOST})",
        r"\bon ((?=[\w-]*\d)[a-z][\w-]*-\d[\w-]*)(?=[:.,;)]|$)",
        rf"\bRUNNING AT ({_HOST})",
        rf"\b({_MACHINE})\b(?=:? (?:kernel|kubelet|NVRM|systemd))",
    )
)
_NO_HOST = re.compile(
    r"(?i)\d{1,3}|localhost|none|null|unknown|is|was|id|ip|with|and|the|controller|not|affinity|selector"
)
_POD_NAMED = re.compile(r"\bpods?[/ ]\"?(?:[a-z0-9-]+/)?([a-z0-9][a-z0-9.-]*-[a-z0-9.-]*\w)\b")
_NODES = re.compile(r"([A-Za-z][\w.-]*?)\[([\d,\-]+)\]([\w.-]*)")


def peel(line: str) -> Peeled:
    """A line without its prefixes, and who they say wrote it."""
    if "\x1b" in line:
        line = _COLOUR.sub("", line)
    if line[:1] == "{" and line.rstrip()[-1:] == "}" and len(line) < JSON_BYTES_MAX:
        told = _of_json(line)
        if told is not None:
            return told
    who, stamps, level = Who(), [], ""
    for _ in range(PEELS_MAX):
        for pattern in _FRONT:
            found = pattern.match(line)
            if found is not None and found.end():
                break
        else:
            break
        said = found.groupdict()
        stamp = said.get("stamp") or said.get("boot") or said.get("glog")
        if stamp:
            stamps.append(f"boot {stamp}" if said.get("boot") else f"glog {stamp}" if said.get("glog") else stamp)
        level = said.get("level") or _LEVELS.get(said.get("word") or "", level)
        who = _joined(who, said)
        line = line[found.end() :]
    nccl = _NCCL.match(line)
    if nccl is not None:
        who = who._replace(host=who.host or nccl["host"], pid=who.pid or int(nccl["pid"]), device=int(nccl["device"]))
    if who.rank < 0:
        ranked = _RANKED.search(line[:200])
        if ranked is not None:
            who = who._replace(rank=int(next(group for group in ranked.groups() if group)))
    return Peeled(line, who, tuple(stamps), level)


def plain(text: str) -> str:
    """A line, or lines, as the program wrote them."""
    return "\n".join(peel(line).body for line in text.splitlines())


def rank_named(line: str) -> int:
    """The one rank that a line speaks of, or -1: of none, or of several."""
    named = {int(found) for found in _NAMES_RANK.findall(line[:2000])}
    return named.pop() if len(named) == 1 else -1


def device_named(line: str) -> int:
    """The one GPU that a line speaks of, by its index on the host, or -1."""
    named = {int(found) for found in _DEVICE.findall(line[:2000])}
    return named.pop() if len(named) == 1 else -1


def host_named(line: str) -> str:
    """The machine that a scheduler's or platform's line speaks of, or empty."""
    for pattern in _HOST_NAMED:
        found = pattern.search(line[:2000])
        if found is not None and not _NO_HOST.fullmatch(found[1]):
            return found[1].rstrip(".,:;")
    return ""


def pod_named(line: str) -> str:
    """The pod that a line speaks of, without its namespace, or empty."""
    found = _POD_NAMED.search(line[:2000])
    return found[1] if found is not None else ""


def nodes(text: str) -> list[str]:
    """The hosts of a Slurm node list: ``gpu[12-14,19],login1`` are gpu12, gpu13, gpu14, gpu19 and login1."""
    made: list[str] = []
    for part in _NODES.split(text) if "[" not in text else _parts(text):
        made += _spread(part)
        if len(made) >= NODES_MAX:
            break
    return made[:NODES_MAX]


def _parts(text: str) -> Iterator[str]:
    """Commas part hosts, but not within brackets."""
    depth, begin = 0, 0
    for at, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and not depth:
            yield text[begin:at].strip()
            begin = at + 1
    yield text[begin:].strip()


def _spread(part: str) -> list[str]:
    found = _NODES.fullmatch(part)
    if found is None:
        return [one.strip() for one in part.split(",") if one.strip()]
    made = []
    for span in found[2].split(","):
        first, _, last = span.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            continue
        numbers = range(int(first), min(int(last or first), int(first) + NODES_MAX) + 1)
        made += [f"{found[1]}{number:0{len(first)}d}{found[3]}" for number in numbers]
    return made


def ranks(text: str) -> list[int]:
    """The numbers of ``0-3,7``."""
    made: list[int] = []
    for span in re.split(r"[,\s]+", text.strip("[] ")):
        first, _, last = span.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            made += range(int(first), min(int(last or first), int(first) + NODES_MAX) + 1)
    return made


def _joined(who: Who, said: dict[str, str | None]) -> Who:
    """What was known and what this prefix adds."""
    host = said.get("host") or said.get("ip") or who.host
    rank = int(said.get("rank") or who.rank)
    local = int(said.get("local") or who.local)
    if said.get("role"):
        # torchrun's own prefix numbers the processes of one host.
        local = int(said["role"] or 0)
        rank = local if rank < 0 else rank
    return Who(
        rank,
        local,
        host,
        said.get("pod") or who.pod,
        who.device,
        int(said.get("pid") or 0) or who.pid,
    )


def _within(told: dict[str, object]) -> dict[str, object]:
    """What collectors and Kubernetes' events say of the writer one level down: where it runs, and which object is meant."""
    found: dict[str, object] = {}
    for name in ("labels", "resource", "source", "kubernetes"):
        inner = told.get(name)
        if isinstance(inner, dict):
            labels = inner.get("labels")
            found |= {**(labels if isinstance(labels, dict) else {}), **inner}
    meant = told.get("involvedObject", told.get("regarding"))
    if isinstance(meant, dict) and isinstance(meant.get("name"), str):
        kind = str(meant.get("kind", "")).lower()
        found |= {"pod": meant["name"]} if kind == "pod" else {"host": meant["name"]} if kind == "node" else {}
    return found


def _of_json(line: str) -> Peeled | None:
    """A line that a collector wrote as JSON."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    if not isinstance(told, dict):
        return None
    text = next((told[name] for name in _JSON_TEXT if isinstance(told.get(name), str)), None)
    if text is None:
        return None
    words = {**told, **_within(told)}
    trace = next(
        (
            told[name]
            for name in ("exc_info", "exception", "stack_info", "traceback")
            if isinstance(told.get(name), str)
        ),
        "",
    )
    lines = text.rstrip("\n").split("\n")
    rest = peel(lines[0]) if len(lines) == 1 else Peeled(text.rstrip("\n"), Who())
    rank = told.get("rank", told.get("global_rank", told.get("RANK")))
    who = rest.who._replace(
        rank=int(str(rank)) if str(rank).isdigit() else rest.who.rank,
        host=next((str(words[name]) for name in _JSON_HOST if isinstance(words.get(name), str)), rest.who.host),
        pod=next((str(words[name]) for name in _JSON_POD if isinstance(words.get(name), str)), rest.who.pod),
    )
    stamp = next((str(told[name]) for name in _JSON_TIME if told.get(name)), "")
    level = str(told.get("level", told.get("levelname", told.get("severity", "")))).upper()
    body = f"{rest.body}\n{trace.rstrip()}" if trace else rest.body
    return Peeled(body, who, ((stamp,) if stamp else ()) + rest.stamps, _LEVELS.get(level, rest.level))
