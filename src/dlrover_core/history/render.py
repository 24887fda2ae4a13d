"""Histories as text for a terminal: compact, aligned, plain ASCII, and without control characters from outside.

Every function takes values of this package and returns lines or text; the caller prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, tzinfo

from dlrover_core.history import leased, render_ledger, render_saves
from dlrover_core.history.explain import Explanation, Fact
from dlrover_core.history.headline import Headline
from dlrover_core.history.incidents import Story
from dlrover_core.history.phrases import duration, key_values, one_line, safe
from dlrover_core.history.plain import name_of
from dlrover_core.history.report import Report
from dlrover_core.history.status import Status
from dlrover_core.history.timeline import (
    CLASSES,
    DECIDING,
    DETECTING,
    FINISHING,
    FORMING,
    QUEUED,
    RESTARTING,
    REWORK,
    RUNNING,
    STARTING,
    STOPPING,
    SUSPENDED,
    TRAINING,
    WAITING,
    Timeline,
)
from dlrover_core.history.words import say
from dlrover_core.history.words.incidents import action, verdict
from dlrover_core.job import incidents, operations
from dlrover_core.job.waiting import OF_RUNNING, Wait
from dlrover_core.kernel.events import Record
from dlrover_core.words import count

TAIL_LINES_MAX = 20
NODE_ROWS_MAX = 64
HEADLINES_MAX = 5
IMPORTS_US, IMPORTS_SHARE = 500_000, 0.3
"""Imports are mentioned if they took at least so long, and this share of the down time."""

MEANINGS = {
    STARTING: "from creation to the first step",
    RUNNING: "workers run; their script tells no steps",
    TRAINING: "new steps: goodput",
    REWORK: "steps lost, made again (estimated)",
    DETECTING: "from a death until the master knew",
    DECIDING: "judging; waiting for evidence",
    FORMING: "from the decision to a new world; waiting for nodes",
    RESTARTING: "from a new world to its first step",
    WAITING: "no world, and nothing had failed",
    QUEUED: "no world, and the platform had no place for a node",
    FINISHING: "some workers done, others not yet",
    SUSPENDED: "suspended, as asked",
    STOPPING: "stopping, as asked",
}


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = (), indent: str = "  ") -> list[str]:
    """Rows as aligned columns; those in ``right`` are aligned to the right, the last is not padded."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    flush = set(right)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in flush else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def clock(at: int, zone: tzinfo | None = None) -> str:
    """Microseconds since the epoch as local date and time, to the millisecond. ``zone`` None: this host's."""
    seconds, rest = divmod(at, 1_000_000)
    return f"{datetime.fromtimestamp(seconds, zone):%Y-%m-%d %H:%M:%S}.{rest // 1000:03}"


def offset(at: int, began: int) -> str:
    """Seconds since the job began, signed, to the millisecond."""
    return f"{(at - began) / 1e6:+.3f}"


# ---- events


def event_line(record: Record, began: int, zone: tzinfo | None = None, news: Headline | None = None) -> str:
    """One record in one line: seq, local time, offset in seconds, name, fields, cause; and what it means for its incident."""
    cause = f"  <- #{record.cause}" if record.cause else ""
    cause += f"  = {news.text}" if news is not None else ""
    fields = key_values(record.event)
    name = name_of(record.event)
    return f"{record.seq:>6}  {clock(record.at, zone)}  {offset(record.at, began):>10}  {name:<15} {fields}{cause}".rstrip()


# ---- explain


def explanation(told: Explanation) -> str:
    """Why something happened: its causes, oldest first, then what followed, then how the job ended."""
    lines = [
        f"why #{told.target.seq} {name_of(told.target.event)} happened{f', job {told.job}' if told.job else ''}",
        "",
    ]
    for fact in told.before:
        lines += _fact(fact, told.began, ">" if fact.record.seq == told.target.seq else " ")
    if told.after:
        lines += ["", "what followed"]
        for fact in told.after:
            lines += _fact(fact, told.began, " ")
    if told.left_out:
        lines.append(f"  ... and {count(told.left_out, 'event')} more")
    lines += ["", _ending(told)]
    return "\n".join(lines)


def _fact(fact: Fact, began: int, mark: str) -> Iterator[str]:
    record = fact.record
    follows = " <- " + ", ".join(f"#{seq}" for seq in fact.follows) if fact.follows else ""
    place = f"{mark} {f'#{record.seq}':>7} {offset(record.at, began):>10} s"
    yield f"{place}  {name_of(record.event):<15} {say(record.event)}{follows}"
    if isinstance(record.event, incidents.WorkerExited) and not record.event.asked:
        yield from _last_words(record.event)


def _last_words(fact: incidents.WorkerExited) -> Iterator[str]:
    """What the worker wrote last: its error file's message, else its last lines."""
    said = [line.rstrip() for line in safe(fact.error or fact.tail).splitlines() if line.strip()]
    if len(said) > TAIL_LINES_MAX:
        yield f"{'':24}| ... {count(len(said) - TAIL_LINES_MAX, 'line')} before"
    for line in said[-TAIL_LINES_MAX:]:
        yield f"{'':24}| {line}"


def _ending(told: Explanation) -> str:
    if told.end is None:
        return "the job has not ended"
    return f"the job ended with #{told.end.seq} {name_of(told.end.event)}: {say(told.end.event)}"


# ---- report


def report(told: Report, zone: tzinfo | None = None) -> str:
    """The whole report. The cause of a failed job stands first."""
    lines = _headline(told, zone)
    lines += ["", *_incidents(told)]
    lines += ["", *_goodput(told)]
    if told.saves.any:
        lines += ["", *render_saves.lines(told.saves)]
    if told.data or told.leased:
        over = bool(told.ended_at)
        lines += ["", *render_ledger.row(told.data, over=over), *leased.rows(told.leased, over=over)]
    if told.given_up:
        lines += ["", "given up, the job went on without"]
        lines += table(
            [(f"#{one.seq}", offset(one.at, told.created_at) + " s", say(one.event)) for one in told.given_up],
            right=(0, 1),
        )
    if told.asked:
        lines += ["", "asked for while it ran"]
        lines += table(
            [(f"#{one.seq}", offset(one.at, told.created_at) + " s", say(one.event)) for one in told.asked],
            right=(0, 1),
        )
    if told.take_overs:
        lines += ["", f"master taken over {count(len(told.take_overs), 'time')}; training does not wait for that"]
        lines += table(
            [
                (
                    f"#{one.seq}",
                    offset(one.at, told.created_at) + " s",
                    f"after {duration(one.silent_us)} without a record",
                    "by " + one.holder,
                )
                for one in told.take_overs
            ],
            right=(0, 1),
        )
    if told.alarms:
        lines += [
            "",
            f"ALARM: {count(told.alarms, 'command')} could not be decided, a bug of ours: look for CommandFailed in the events",
        ]
    return "\n".join(lines)


def _headline(told: Report, zone: tzinfo | None) -> list[str]:
    lines = []
    if told.failed:
        lines += [f"FAILED: {one_line(told.root, 1000)}", f"  because {one_line(told.reason, 1000)}", ""]
    steps = _steps(told.timeline)
    earlier = f", {count(told.earlier_runs, 'earlier run')} in this log" if told.earlier_runs else ""
    lines.append(
        f"job {told.job} (run {told.run}{earlier}): {told.state}, {steps}, after {duration(told.goodput.wall_us)}"
    )
    began = f"  began {clock(told.created_at, zone)}"
    ended = (
        f", ended {clock(told.ended_at, zone)}"
        if told.over
        else f", still alive; as of {clock(told.timeline.end, zone)}"
    )
    lines.append(began + ended)
    lines.append(
        f"  {count(len(told.incidents), 'incident')}, {count(told.restarts, 'restart')} of the processes, "
        f"{count(told.relaunches, 'relaunch')}{'es' if told.relaunches != 1 else ''} of nodes, "
        f"{count(told.generations, 'generation')}, {count(told.steps_lost, 'step')} lost".replace(
            "relaunchs", "relaunch"
        )
    )
    return lines


def _steps(line: Timeline) -> str:
    if line.last_step < 0:
        return "no step reported"
    return f"step {line.last_step}" if line.told else f"{count(line.last_step, 'step')} since the last start"


def _incidents(told: Report) -> list[str]:
    if not told.incidents:
        return ["no incidents"]
    lines = ["incidents (down: from the death to the next step)"]
    head = ("no.", "at", "down", "lost", "verdict", "action", "cause")
    rows = [head, *(_incident_row(story, told) for story in told.incidents)]
    lines += table(rows, right=(0, 1, 2, 3))
    if told.mean_down_us is not None and len(told.incidents) > 1:
        lines.append(f"  mean time from a death to the next step: {duration(told.mean_down_us)}")
    lines += _imports(told)
    for story in told.incidents:
        if len(story.judgements) > 1 or len(story.measures) > 1:
            lines += _turns(story, told.created_at)
    return lines


def _imports(told: Report) -> Iterator[str]:
    """The part of the down time that imports took, if it is worth mentioning, and what to do about it."""
    slow = [one for one in told.incidents if one.down_us and IMPORTS_US <= one.imports_us <= one.down_us]
    slow = [one for one in slow if one.imports_us >= IMPORTS_SHARE * (one.down_us or 0)]
    if slow:
        worst = max(slow, key=lambda one: one.imports_us)
        yield f"  {worst.imports_us / 1e6:.1f} of {(worst.down_us or 0) / 1e6:.1f} s of incident {worst.number} were imports"
        yield "  the next run of this script imports these modules before a failure: --preload auto, the default, with the same"
        yield "  --state-dir; where modules read what the script sets, --preload NAME,... names those that do not"


def _incident_row(story: Story, told: Report) -> tuple[str, ...]:
    down = duration(story.down_us) if story.down_us is not None else "ended" if told.over else "open"
    down = "given up" if story.given_up and story.down_us is None else down
    return (
        str(story.number),
        offset(story.died_at, told.created_at) + " s",
        down,
        str(story.steps_lost) if story.steps_lost >= 0 else "?",
        f"{story.verdict} {story.signature}",
        story.action,
        one_line(story.cause, 160),
    )


def _turns(story: Story, began: int) -> list[str]:
    """How the verdict on an incident changed."""
    lines = [f"  incident {story.number} in turns:"]
    rows = [
        (
            judged.seq,
            judged.at,
            "taken for",
            f"{judged.signature}: {verdict(judged.verdict)}{f' (revises #{judged.revises})' if judged.revises else ''}",
        )
        for judged in story.judgements
    ]
    rows += [
        (
            measure.seq,
            measure.at,
            "done",
            f"{action(measure.action, story.without)} ({measure.rule}; budget left {measure.budget_left})",
        )
        for measure in story.measures
    ]
    return lines + table(
        [(f"#{seq}", offset(at, began) + " s", what, text) for seq, at, what, text in sorted(rows)],
        right=(0, 1),
        indent="    ",
    )


def _goodput(told: Report) -> list[str]:
    sums = told.goodput
    rows = [
        (kind, f"{sums.by_class[kind] / 1e6:.3f} s", f"{sums.share(kind) * 100:.2f} %", MEANINGS[kind])
        for kind in CLASSES
        if sums.by_class[kind] or kind == TRAINING
    ]
    rows.append(
        (
            "sum",
            f"{sums.wall_us / 1e6:.3f} s",
            "100.00 %" if sums.wall_us else "",
            "wall-clock time since the job was created",
        )
    )
    if told.timeline.last_step < 0:
        return ["goodput unknown: no step was reported", *table(rows, right=(1, 2))]
    lines = [f"goodput {sums.ratio * 100:.2f} % of wall-clock time", *table(rows, right=(1, 2))]
    if not told.timeline.told and told.incidents:
        # Unknown lost steps are mentioned, because a goodput without them would be too good.
        lines.append("  the script does not tell its step numbers, so steps made again are counted as training;")
        lines.append("  dlrover_adapters.torch.step(n) in its loop would tell them")
    return lines


# ---- status


def status(
    told: Status, now: int | None = None, zone: tzinfo | None = None, live: Mapping[str, int] | None = None
) -> str:
    """The job's status. ``live``: the steps by its leader, from heartbeats (`runtime.stalls.Stalls.live`)."""
    lines = []
    if told.failed:
        lines += [f"FAILED: {one_line(told.root, 1000)}", f"  because {one_line(told.reason, 1000)}"]
    reason = f" ({one_line(told.reason)})" if told.reason and not told.failed else ""
    lines.append(f"job {told.job}  {told.state}{reason}  run {told.run}")
    end = told.ended_at or now or (told.last.at if told.last else told.created_at)
    step = f"step {told.step} at {clock(told.step_at, zone)}" if told.step >= 0 else "no step yet"
    step = progress(live) if live is not None and live["step"] >= 0 else step
    lines.append(f"  {step}; {'lasted' if told.over else 'for'} {duration(max(0, end - told.created_at))}")
    lines += [f"  {one}" for one in _worlds(told)]
    lines += [f"  {name} is given up, the job goes on without it: {one_line(why)}" for name, why in told.given_up]
    lines += [f"  {one}" for one in waiting(told.waits, end)]
    data = (*render_ledger.row(told.data, over=told.over), *leased.rows(told.leased, over=told.over))
    lines += [f"  {one}" for one in (*_kept(told), *data)]
    lines += ["", *_nodes(told)]
    if told.incidents:
        lines += ["", "unmended incidents"]
        lines += table(
            [(str(one.number), one.signature, one.action, one_line(one.cause)) for one in told.incidents], right=(0,)
        )
    if told.headlines:
        lines += ["", "incidents"]
        lines += table([(str(one.incident), one.text) for one in told.headlines[-HEADLINES_MAX:]], right=(0,))
    lines += ["", _budgets(told)]
    if told.last is not None:
        lines.append(
            f"last event #{told.last.seq} at {clock(told.last.at, zone)}: {name_of(told.last.event)}: {say(told.last.event)}"
        )
    return "\n".join(lines)


def waiting(waits: Iterable[Wait], now: int) -> Iterator[str]:
    """Why groups have no world, and what running worlds wait for: a line each, with the end of the wait, if it has one."""
    for wait in waits:
        left = f", {duration(wait.until - now)} left" if wait.until > now else ""
        what = wait.group if wait.why in OF_RUNNING else f"{wait.group} has no world"
        yield f"{what}: {one_line(wait.words, 500)}{left}"


def progress(live: Mapping[str, int]) -> str:
    """The step, the rate, the time left, and the age of these figures."""
    words = [f"step {live['step']} {duration(live['age_us'])} ago"]
    if live["step_us"]:
        words.append(f"{1e6 / live['step_us']:.3g} steps/s")
    left = live["total"] - live["step"]
    if live["step_us"] and live["total"] and left >= 0:
        words.append(f"{duration(left * live['step_us'])} left of {count(live['total'], 'step')}")
    return f"{', '.join(words)} (heard {duration(live['heard_us'])} ago)"


def _worlds(told: Status) -> Iterator[str]:
    given_up = dict(told.given_up)
    for world in told.worlds:
        if world.group in given_up:  # a line of its own says so
            continue
        if world.generation == 0:
            yield f"{world.group}: no world yet"
            continue
        waits = "suspended" if told.state == "suspended" else "dissolved, the next one is awaited"
        over = "over" if told.over else waits
        how = f"{world.started} of {count(world.nodes, 'node')} started" if world.active and not told.over else over
        few = world.nodes != world.nodes_max and not told.over
        wanted = f" (wanted: {operations.sizes(world.nodes_min, world.nodes_max)})" if few else ""
        nodes, ranks = count(world.nodes, "node"), count(world.ranks, "rank")
        yield f"{world.group}: generation {world.generation}, {nodes}{wanted}, {ranks}, {how}"


def _kept(told: Status) -> Iterator[str]:
    for one in told.kept:
        stored = f"step {one.committed} is the newest on storage" if one.committed >= 0 else "no step is on storage yet"
        memory = f"; step {one.whole} is whole in memory" if one.whole >= 0 else ""
        if not one.url:
            yield f"{one.group}: saves into memory alone{memory}"
            continue
        ordered = f"; step {one.ordered} is being written, since its generation has ended" if one.ordered >= 0 else ""
        failing = f"; {count(len(one.failing), 'node')} cannot write now" if one.failing else ""
        yield f"{one.group}: saves to {one_line(one.url, 100)}: {stored}{memory}{ordered}{failing}"


def _nodes(told: Status) -> list[str]:
    if not told.nodes:
        return ["no nodes"]
    rows = [("node", "state", "incarnation", "host", "place", "")]
    rows += [
        (
            one.node,
            one.state,
            str(one.incarnation),
            one_line(one.host, 64) or "-",
            str(one.place) if one.place >= 0 else "-",
            one.note,
        )
        for one in told.nodes[:NODE_ROWS_MAX]
    ]
    more = len(told.nodes) - NODE_ROWS_MAX
    return table(rows, right=(2, 4)) + ([f"  ... and {count(more, 'node')} more; --json has all"] if more > 0 else [])


def _budgets(told: Status) -> str:
    places = "".join(f", {left} relaunches of {place}" for place, left in told.relaunches_left.items())
    sets = "".join(f", {count(left, 'restart')} of {name}" for name, left in told.restarts_left_of)
    return f"budgets left: {count(told.restarts_left, 'restart')} of the processes{sets}{places}"
