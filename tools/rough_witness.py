"""The outside witness of a rough world: judges a job by files, by /proc and by what commands print. It imports nothing of ours.

    python tools/rough_witness.py FOLDER      judge the job of FOLDER; exit status 1 where a promise is broken

It reads FOLDER/world.json (what ran), diary.jsonl (every strike), exit.json (how the launchers ended), events.jsonl (every
event, and when it was seen), curve-* of every life of every rank, control/curve-* of an undisturbed run of plain torch, and
what the job printed. It asks `dlrover events`, `dlrover replay`, `dlrover status` and `dlrover ckpt verify`. All times are of
CLOCK_MONOTONIC, as wall clocks jump in a rough world. The verdict is one JSON object on standard output: ``broken`` lists what
was not as promised, ``figures`` what was counted.
"""

import itertools
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COMMAND_S = 300.0
LEFT_S = 15.0
HUNG_S = 5.0
SLACK_S = 1.0
OUTAGE_S = 3.0
"""A pause between two steps of more than this needs an explanation; a step takes a fraction of a second."""

TOLD_MAX = 5
OURS = "dlrover"


STORE_DIED = re.compile(r"^the store \S+ died before the world had formed")


class Allowed(NamedTuple):
    """What a strike explains: so many new worlds and relaunches, seen at most ``within_s`` after its end."""

    worlds: int
    relaunches: int
    within_s: float


class Strike(NamedTuple):
    """A row of the diary. ``end`` is when the strike was taken back; ``start`` for what is done in a moment."""

    number: int
    kind: str
    target: str
    start: float
    end: float

    def __str__(self) -> str:
        lasted = f" for {self.end - self.start:.1f} s" if self.end > self.start else ""
        return f"{self.kind} {self.target}{lasted}"


class Point(NamedTuple):
    """One step of one life: what the rank wrote down, and when."""

    value: str
    at: float


class Life(NamedTuple):
    """What one process of a rank wrote down: where it began, the newest step on storage before that, and its steps."""

    name: str
    rank: int
    restored: int
    stored: int
    began: float
    steps: dict[int, Point]


def allowed(strike: Strike) -> Allowed:
    """The restarts that a strike explains. A kind that is not named here explains none."""
    lasted, what = strike.end - strike.start, (strike.kind, strike.target)
    if what == ("kill", "worker") or strike.kind == "oom":
        return Allowed(1, 0, 30.0)
    if what == ("kill", "dlrover-agent") or (what == ("stop", "dlrover-agent") and lasted > HUNG_S - SLACK_S):
        return Allowed(2, 1, 90.0)
    if strike.kind == "host":
        return Allowed(3, 2, 120.0)
    if strike.kind == "cut" and lasted > 10.0:
        return Allowed(2, 2, 120.0)
    if strike.kind == "pids":
        return Allowed(1, 1, 60.0)
    return Allowed(0, 0, 0.0)


def halts_s(strike: Strike) -> float:
    """For how long after its end a strike may keep a job from making steps by itself; -1: it must not at all."""
    lasted, what = strike.end - strike.start, (strike.kind, strike.target)
    if what == ("stop", "worker"):
        return 2.0
    if what in {("kill", "dlrover-keeper"), ("stop", "dlrover-keeper")}:
        return 8.0  # ranks ask its store until they know that it is gone
    if what == ("kill", "worker") or strike.kind == "oom":
        return 10.0
    if what in {("kill", "dlrover-agent"), ("stop", "dlrover-agent")}:
        return 30.0
    if strike.kind == "host":
        return 60.0
    if strike.kind in {"cut", "loss", "delay"}:
        return 10.0 + 1.5 * lasted  # TCP's own back-off doubles its pauses
    if strike.kind == "pids":
        return 20.0
    if strike.kind == "machine":
        return 1.0
    return -1.0


RECOVERS = {
    "kill",
    "stop",
    "disk-stall",
    "disk-full",
    "pids",
    "files",
    "etcd-kill",
    "etcd-stop",
    "etcd-full",
    "etcd-wipe",
}
"""Where training stands already, a strike of these kinds may lengthen its recovery."""

LENGTHENS_S = 15.0
HIDES = {
    "disk-stall",
    "disk-full",
    "etcd-kill",
    "etcd-stop",
    "etcd-full",
    "etcd-wipe",
    "cut",
    "loss",
    "delay",
    "machine",
}
"""While a strike of these kinds lasts, nobody may see what is in the log."""


# ---- what there is to read


def rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines; empty where there is none."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def diary(folder: Path) -> list[Strike]:
    """Every strike that was done, the oldest first. One that was never taken back lasts until now."""
    found: dict[int, Strike] = {}
    for row in rows(folder / "diary.jsonl"):
        number = int(row["id"])
        if "kind" in row:
            end = time.monotonic() if row.get("lasts") else float(row["start"])
            found[number] = Strike(number, row["kind"], row.get("target", ""), float(row["start"]), end)
        else:
            found[number] = found[number]._replace(end=float(row["end"]))
    return sorted(found.values(), key=lambda one: one.start)


def lives(paths: Iterable[Path]) -> list[Life]:
    """What the ranks wrote down, the oldest life first. A line that a kill cut short is left out."""
    found = []
    for path in paths:
        text = path.read_text()
        lines = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        rank, restored, stored, began = int(path.name.split("-")[1]), 0, 0, 0.0
        if lines and lines[0][0] == "begin":
            restored, stored, began = int(lines[0][1]), int(lines[0][3]), int(lines[0][4]) / 1e9
        made = [words for words in lines if words[0] != "begin"]
        steps = {int(words[0]): Point(" ".join(words[1:-1]), int(words[-1]) / 1e9) for words in made}
        if lines:
            found.append(Life(path.name, rank, restored, stored, began, steps))
    return sorted(found, key=lambda one: one.began)


def curves(folder: Path) -> list[Path]:
    """The files of the struck job, on whatever host."""
    return [*folder.glob("curve-*"), *folder.glob("hosts/*/curve-*")]


# ---- the curve


def curve_flaws(found: Sequence[Life], control: Sequence[Life]) -> list[str]:
    """Values that are not the control's bit for bit, steps left out, a beginning anew though storage had a step."""
    meant = {one.rank: one.steps for one in control}
    wrong = [] if meant else ["there is no control to compare with"]
    wrong += [] if any(one.steps for one in found) else ["no rank made a step"]
    for one in found:
        if one.stored and not one.restored:
            wrong.append(f"{one.name}: it began anew, though storage had step {one.stored}")
        if list(one.steps) != list(range(one.restored + 1, one.restored + 1 + len(one.steps))):
            wrong.append(f"{one.name}: steps are missing after {one.restored}")
        for step, point in one.steps.items():
            undisturbed = meant.get(one.rank, {}).get(step)
            if undisturbed is None or point.value != undisturbed.value:
                told = undisturbed.value if undisturbed is not None else "nothing"
                wrong.append(f"{one.name}: step {step} has {point.value}; the control has {told}")
    return wrong


# ---- restarts


class Restart(NamedTuple):
    """A new world or a relaunched node. ``seen``: when a reader of the log was told of it. ``storeless``: the world before has
    made no step, and lost the store that it needed until then.
    """

    what: str
    seq: int
    seen: float
    is_world: bool
    storeless: bool = False


def restarts(events: Sequence[dict[str, Any]]) -> list[Restart]:
    """Every world but the first, and every node that took the place of another."""
    found, storeless = [], set()
    for row in events:
        event, fields = row["event"], row["event"]["fields"]
        if event["event"] == "WorkerExited" and fields["step"] < 0 and STORE_DIED.search(fields["error"]):
            storeless.add(fields["generation"])
        if event["event"] == "WorldFormed" and fields["generation"] > 1:
            what = f"generation {fields['generation']} ({fields['reason']})"
            found.append(Restart(what, event["seq"], row["seen"], True, fields["generation"] - 1 in storeless))
        elif event["event"] == "NodePlanned" and fields["incarnation"] > 0:
            found.append(Restart(f"relaunch as {fields['node']}", event["seq"], row["seen"], False))
    return found


def needless(found: Sequence[Restart], strikes: Sequence[Strike]) -> list[str]:
    """Restarts that no strike explains. A strike explains no more of them than `allowed` says, and none that came before it."""
    left = {one.number: list(allowed(one)[:2]) for one in strikes}
    told = []
    for restart in sorted(found, key=lambda one: one.seen):
        column = 0 if restart.is_world else 1
        fitting = [
            (one.end + _window_s(one, restart, strikes), one.number)
            for one in strikes
            if (left[one.number][column] > 0 or _took_store(one, restart)) and one.start <= restart.seen + SLACK_S
        ]
        fitting = [one for one in fitting if restart.seen <= one[0]]
        if fitting:
            left[min(fitting)[1]][column] -= 1
        else:
            before = [one for one in strikes if one.start <= restart.seen][-2:]
            last = ", ".join(f"{one} {restart.seen - one.start:.1f} s before" for one in before)
            told.append(f"needless restart, event {restart.seq}: {restart.what}; the last strikes: {last or 'none'}")
    return told


def _window_s(strike: Strike, restart: Restart, strikes: Sequence[Strike]) -> float:
    hidden = sum(
        min(one.end, restart.seen) - max(one.start, strike.start)
        for one in strikes
        if one.kind in HIDES and one.end > strike.start and one.start < restart.seen
    )
    return (HUNG_S + SLACK_S if _took_store(strike, restart) else allowed(strike).within_s) + hidden


def _took_store(strike: Strike, restart: Restart) -> bool:
    return restart.storeless and strike.target == "dlrover-keeper" and strike.kind in {"kill", "stop"}


# ---- outages


def outages(found: Sequence[Life], strikes: Sequence[Strike]) -> tuple[list[str], dict[str, float]]:
    """Pauses without a step of any rank that strikes do not explain, and the longest of all."""
    moments = sorted(point.at for one in found for point in one.steps.values())
    told, longest, unexplained = [], 0.0, 0.0
    for before, after in itertools.pairwise(moments):
        longest = max(longest, after - before)
        if after - before <= OUTAGE_S:
            continue
        rest = uncovered_s(before, after, strikes)
        unexplained = max(unexplained, rest)
        if rest > SLACK_S:
            near = ", ".join(
                f"{one} at {one.start - before:+.1f} s" for one in strikes if before - 30 < one.start < after
            )
            told.append(
                f"no step for {after - before:.1f} s, {rest:.1f} s of it unexplained; strikes near: {near or 'none'}"
            )
    return told, {"longest_s": round(longest, 3), "unexplained_s": round(unexplained, 3)}


def uncovered_s(before: float, after: float, strikes: Sequence[Strike]) -> float:
    """How much of a pause no strike explains. The first `OUTAGE_S` need no explanation where nothing halts training."""
    spans = [(one.start, one.end + halts_s(one)) for one in strikes if halts_s(one) >= 0]
    spans = [one for one in spans if one[1] > before - SLACK_S and one[0] < after]
    if not spans:
        return after - before - OUTAGE_S
    spans += [
        (one.start, one.end + LENGTHENS_S)
        for one in strikes
        if halts_s(one) < 0 and one.kind in RECOVERS and one.end + LENGTHENS_S > before and one.start < after
    ]
    rest, at = 0.0, before
    for start, end in sorted(spans):
        rest += max(0.0, min(start, after) - at)
        at = max(at, min(end, after))
    return rest + max(0.0, after - at)


# ---- what the job and the commands say


PREFIX = re.compile(r"^\s*(\[[^\]]*\]:?\s?)")


def tracebacks(text: str) -> tuple[list[str], int]:
    """The tracebacks in what was printed that are ours, and how many are the script's: those that name its file."""
    ours, scripts, lines = [], 0, text.splitlines()
    at = 0
    while at < len(lines):
        if "Traceback (most recent call last)" not in lines[at]:
            at += 1
            continue
        block = _block(lines, at)
        at += len(block)
        if any("stormy.py" in line for line in block):
            scripts += 1
        else:
            ours.append("\n".join(block[-6:])[-600:])
    return ours, scripts


def _block(lines: Sequence[str], at: int) -> list[str]:
    """A traceback with those that it was raised from or while handling."""
    block = [lines[at]]
    for line in lines[at + 1 : at + 400]:
        bare = PREFIX.sub("", line)
        chained = bare.startswith(("During handling", "The above exception", "Traceback")) or not bare.strip()
        block.append(line)
        if not chained and not bare.startswith((" ", "\t")):
            following = lines[at + len(block) : at + len(block) + 3]
            if not any("During handling" in one or "The above exception" in one for one in following):
                break
    return block


def ask(world: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    """What a command of the product prints."""
    line = [*world["dlrover"], *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_S, check=False)


def log_flaws(world: dict[str, Any], seen: Sequence[dict[str, Any]]) -> list[str]:
    """The log can be read whole, a follower was told all of it once, it decides as recorded, and it says how the job ended."""
    job, where = world["job"], world["log"]
    done = ask(world, "events", job, "--json", *where)
    if done.returncode:
        return [f"dlrover events ended with {done.returncode}: {done.stderr[-300:]}"]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = []
    numbers = [one["seq"] for one in events]
    if numbers != list(range(1, len(events) + 1)):
        wrong.append("the log's records are not numbered one after the other")
    followed = [one["event"] for one in seen]
    if followed != events[: len(followed)] or len(followed) < len(events):
        wrong.append(f"a follower was told {len(followed)} events, and the log has {len(events)}, or others")
    kinds = [one["event"] for one in events]
    if world["status"] == 0 and kinds.count("JobSucceeded") != 1:
        wrong.append("the log does not say once that the job succeeded")
    for words, meant in ((("replay",), 0), (("status",), int(world["status"] != 0)), (("report",), 0)):
        done = ask(world, *words, job, *where)
        if done.returncode != meant:
            wrong.append(f"dlrover {words[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
        wrong += [f"traceback of dlrover {words[0]}: {one}" for one in tracebacks(done.stderr)[0]]
    return wrong


def stored_flaws(world: dict[str, Any]) -> list[str]:
    """What `dlrover ckpt verify` finds wrong with the complete steps on storage; that there is none is a flaw too."""
    complete = sorted(Path(world["stored"]).glob("step-*/manifest.json"))
    if not complete:
        return ["no step is on storage"]
    steps = [word for one in complete for word in ("--step", str(int(one.parent.name[5:])))]
    done = ask(world, "ckpt", "verify", world["stored"], *steps)
    return [] if done.returncode == 0 else [f"ckpt verify: {done.returncode}: {(done.stdout + done.stderr)[-400:]}"]


# ---- what is left


def left(folder: Path, world: dict[str, Any]) -> list[str]:
    """What there still is of the job though it has ended: processes, sockets, shared memory, files, mounts, control groups."""
    deadline = time.monotonic() + LEFT_S
    while (found := sorted(_left(folder, world))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _left(folder: Path, world: dict[str, Any]) -> Iterator[str]:
    harness = {*world.get("harness", ()), *_ancestors()}
    for pid in (int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal()):
        if pid not in harness and (name := _is_left(pid, world)):
            yield f"left behind: process {name}({pid})"
    for name in world.get("shared", ()) and sorted(os.listdir("/dev/shm")):  # noqa: S108, PTH208
        if name not in world["shared"] and not name.startswith("."):
            yield f"left behind: /dev/shm/{name}"
    for path in folder.glob("tmp/*"):
        if not _momentary(path):
            yield f"left behind: temporary {path.name}"
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
                yield f"left behind: socket {path.relative_to(folder)}"
    mounted = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    for one in sorted(mounted - set(world.get("mounts", ()))):
        if one.startswith(f"{folder}/"):
            yield f"left behind: mount {one}"
    for group in world.get("groups", ()):
        for one in Path(group).glob("*/"):
            yield f"left behind: control group {one}"


def _is_left(pid: int, world: dict[str, Any]) -> str:
    """The name of a process that lives and belongs to the job; empty otherwise. In namespaces of our own all do."""
    place = Path(f"/proc/{pid}")
    try:
        if (place / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X"):
            return ""
        words = (place / "environ").read_bytes().split(b"\0")
        name = (place / "comm").read_text().strip()
    except OSError:  # it has ended since, or is another user's
        return ""
    ours = world.get("own_processes") or any(one.encode() in words for one in world.get("marks", ()))
    return name if ours else ""


def _ancestors() -> set[int]:
    found, pid = set(), os.getpid()
    while pid > 0:
        found.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return found


def _momentary(path: Path) -> bool:
    """Is it torch's cache, or an empty file that Python's library makes for a moment? A SIGKILL in that moment leaves it."""
    if path.name.startswith("torchinductor_"):
        return True
    return path.is_file() and not path.stat().st_size and (path.name.startswith("tmp") or len(path.name) == 8)


# ---- all of it


def judge(folder: Path) -> dict[str, Any]:
    """The verdict about the job of a folder."""
    world = json.loads((folder / "world.json").read_text())
    strikes, events = diary(folder), rows(folder / "events.jsonl")
    control = lives((folder / "control").glob("curve-*"))
    found = lives(curves(folder))
    broken = [
        f"{one['what']} ended with {one['status']}, not {world['status']}"
        for one in json.loads((folder / "exit.json").read_text())
        if one["status"] != world["status"]
    ]
    wrong = curve_flaws(found, control)
    later = lives((folder / "again").glob("curve-*"))
    again = curve_flaws(later, control) if later else []
    pauses, longest = outages(found, strikes)
    restarted = restarts(events)
    unneeded = needless(restarted, strikes)
    ours, scripts = list[str](), 0
    for path in sorted({path for one in world["said"] for path in folder.glob(one)}):
        traced, others = tracebacks(path.read_text(errors="replace"))
        ours += [f"traceback in {path.relative_to(folder)}: {one}" for one in traced]
        scripts += others
    remaining = left(folder, world)
    broken += [*wrong[:TOLD_MAX], *(f"restored by a later job: {one}" for one in again[:TOLD_MAX])]
    broken += [*unneeded[:TOLD_MAX], *pauses[:TOLD_MAX], *ours[:TOLD_MAX], *remaining[:TOLD_MAX]]
    broken += [*log_flaws(world, events), *stored_flaws(world)]
    pairs = [(one.rank, step) for one in found for step in one.steps]
    figures = {
        "strikes": len([one for one in strikes if one.kind != "machine"]), "lives": len(found), "steps": len(pairs),
        "last_step": max((step for _, step in pairs), default=0), "steps_made_again": len(pairs) - len(set(pairs)),
        "flaws_in_the_curve": len(wrong) + len(again), "restarts": len(restarted), "needless_restarts": len(unneeded),
        "outages_unexplained": len(pauses), "outage": longest, "tracebacks": len(ours), "tracebacks_of_the_script": scripts,
        "left": len(remaining), "events": len(events),
        "struck": dict(sorted(Counter(f"{one.kind} {one.target}".removesuffix(" ") for one in strikes).items())),
    }  # fmt: skip
    return {"broken": broken, "figures": figures}


def main() -> int:
    """As the first lines say."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    verdict = judge(Path(sys.argv[1]).absolute())
    print(json.dumps(verdict, indent=1))
    return int(bool(verdict["broken"]))


if __name__ == "__main__":
    sys.exit(main())
