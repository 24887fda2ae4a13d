"""An incident's story as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.evidence import OPENING
from dlrover_core.history.incidents import Judgement, Measure, Story
from dlrover_core.history.phrases import duration, one_line
from dlrover_core.history.plain import name_of
from dlrover_core.history.render import clock, offset, table
from dlrover_core.history.story import IncidentTold, Seen
from dlrover_core.history.words import say
from dlrover_core.history.words.incidents import action, verdict
from dlrover_core.job import job
from dlrover_core.job.incidents import ASIDE
from dlrover_core.words import count

EVIDENCE_MAX = 40
TEXT_MAX = 300


def story(told: IncidentTold, zone: tzinfo | None = None) -> str:
    """The whole story, in the order of a reader's questions."""
    lines = [*_headline(told, zone), "", *_evidence(told), "", *_verdicts(told), "", *_actions(told), "", *_cost(told)]
    lines += ["", _ending(told)]
    return "\n".join(lines)


def _headline(told: IncidentTold, zone: tzinfo | None) -> Iterator[str]:
    one = told.story
    yield f"incident {one.number} of job {told.job}, {clock(one.died_at, zone)} ({_at(one.died_at, told)})"
    yield f"  {told.headline or one_line(one.cause, TEXT_MAX)}"
    where = "outside of any world" if one.generation == ASIDE else f"in generation {one.generation}"
    yield f"  {_who(told)}, {where}"


def _who(told: IncidentTold) -> str:
    """The node or rank that died; or the observation, if none had."""
    one = told.story
    seen = next((piece for piece in told.evidence if piece.seq == one.cause_seq), None)
    if seen is not None and seen.source in OPENING:
        return f"seen on {f'rank {seen.rank}' if seen.rank >= 0 else seen.node}, where nothing had died"
    if one.ranks:
        return f"rank{'s' if len(one.ranks) > 1 else ''} {', '.join(map(str, sorted(one.ranks)[:16]))} died unasked"
    return f"node {one.node} ended"


def _at(at: int, told: IncidentTold) -> str:
    return f"{offset(at, told.began)} s"


# ---- what was seen


def _evidence(told: IncidentTold) -> Iterator[str]:
    yield "evidence, in the order in which it happened (* the cause, - set aside, + came after the verdict and left it as it was)"
    shown = [one for one in told.evidence if not one.aside or one.seq == told.story.cause_seq]
    shown += [one for one in told.evidence if one not in shown][: max(0, EVIDENCE_MAX - len(shown))]
    for one in sorted(shown, key=lambda one: (one.at, one.seq)):
        yield from _piece(one, told)
    left = len(told.evidence) - len(shown)
    if left > 0:
        yield f"    ... and {count(left, 'piece')} more, set aside"


def _piece(one: Seen, told: IncidentTold) -> Iterator[str]:
    late = one.seq > max((judged.seq for judged in told.story.judgements), default=one.seq)
    mark = "*" if one.seq == told.story.cause_seq else "-" if one.aside else "+" if late else " "
    where = f"{one.node}{f' ({one_line(one.host, 48)})' if one.host else ''}"
    who = f"rank {one.rank} on {where}" if one.rank >= 0 else f"node {where}"
    title = told.titles.get(one.signature)
    what = f" [{one.signature}{f': {title}' if title else ''}]" if one.signature else ""
    place = f"  {mark} {f'#{one.seq}':>6} {_at(one.at, told):>12}  {one.source:<8}"
    yield f"{place} {who}: {one_line(one.text, TEXT_MAX)}{what}"
    if one.aside:
        yield f"{'':36}set aside: {one.aside}"
    elif one.seq == told.story.cause_seq:
        yield from (f"{'':36}| {one_line(line, TEXT_MAX)}" for line in one.words)


# ---- what it was taken for


def _verdicts(told: IncidentTold) -> Iterator[str]:
    yield "verdict"
    for one in told.story.judgements:
        yield from _verdict(one, told)


def _verdict(one: Judgement, told: IncidentTold) -> Iterator[str]:
    title = told.titles.get(one.signature)
    revised = f", revising #{one.revises}" if one.revises else ""
    yield (
        f"    {f'#{one.seq}':>6} {_at(one.at, told):>12}  {one.verdict}: {verdict(one.verdict)}; "
        f"{one.signature}{f', {title}' if title else ''}; confidence {one.confidence:g}{revised}"
    )
    blame = [f"rank {one.rank}"] if one.rank >= 0 else []
    blame += [f"node {one.blamed}"] if one.blamed else []
    blame += [f"host {one_line(one.host, 64)}"] if one.host else []
    if blame:
        yield f"{'':26}to blame: {', '.join(blame)}"
    if one.why:
        yield f"{'':26}because: {one_line(one.why, TEXT_MAX)}"
    kept = [seq for seq in one.evidence if seq not in one.discarded]
    aside = f"; {count(len(one.discarded), 'piece')} set aside" if one.discarded else ""
    yield f"{'':26}from {', '.join(f'#{seq}' for seq in kept[:16]) or 'nothing'}{aside}"


# ---- what was done


def _actions(told: IncidentTold) -> Iterator[str]:
    yield "what was done"
    if not told.story.measures:
        yield "    nothing was decided"
    rows = {one.seq: list(_action(one, told)) for one in told.story.measures}
    for record in told.follows:
        if not isinstance(record.event, job.JobFailed):
            what = f"{name_of(record.event)}: {say(record.event)}"
            rows[record.seq] = [f"    {f'#{record.seq}':>6} {_at(record.at, told):>12}  {what}"]
    for seq in sorted(rows):
        yield from rows[seq]


def _action(one: Measure, told: IncidentTold) -> Iterator[str]:
    where = f" of host {one_line(one.host, 64)}" if one.host else ""
    what = f"{one.action}: {action(one.action, told.story.without)}"
    yield f"    {f'#{one.seq}':>6} {_at(one.at, told):>12}  {what}, for {one.node}{where}"
    yield f"{'':26}rule: {one_line(one.rule, TEXT_MAX)}"
    if one.budget or one.action not in (*ladder.ENDINGS, ladder.AWAIT_EVIDENCE, ladder.SUSPECTS):
        yield f"{'':26}{_budget(one)}"
    later = [other for other in told.story.measures if other.seq > one.seq and other.action in ladder.FOR_NODES]
    if one.action in ladder.IN_PLACE and later:
        yield f"{'':26}given back when #{later[0].seq} took its place"


def _budget(one: Measure) -> str:
    if not one.budget:
        return f"budget: {one.budget_left} left"
    if one.budget_before < 0 or one.budget_before == one.budget_left:
        return f"budget {one.budget}: {one.budget_left} left, nothing charged"
    return f"budget {one.budget}: {one.budget_before} before, {one.budget_left} after"


# ---- what it cost


def _cost(told: IncidentTold) -> Iterator[str]:
    one = told.story
    never = "its set was given up" if one.given_up else "no step since"
    down = f"{duration(one.down_us)} down" if one.down_us is not None else never
    lost = "how many steps were lost is not known" if one.steps_lost < 0 else f"{count(one.steps_lost, 'step')} lost"
    yield f"cost: {down}; {lost}"
    rows = [(name, duration(us)) for name, us in _parts(one)]
    yield from table(rows, right=(1,), indent="    ")
    if one.restored is not None:
        yield f"resumed: {say(one.restored)}"


def _parts(one: Story) -> Iterator[tuple[str, int]]:
    """From the death to the next step, part by part, as far as it has come."""
    decided = one.measures[0].at if one.measures else 0
    marks = [
        ("until the master knew", one.opened_at),
        ("until it had decided", decided),
        ("until a new world had formed", one.formed_at),
        ("until its workers ran", one.started_at),
        ("until its first step", one.stepped_at),
    ]
    before = one.died_at
    for name, at in marks:
        if at:
            yield name, max(0, at - before)
            before = max(before, at)


def _ending(told: IncidentTold) -> str:
    if told.end is None:
        return f"the job has not ended; 'dlrover explain {told.job} SEQ' says why any of these events happened"
    return f"the job ended with #{told.end.seq} {name_of(told.end.event)}: {say(told.end.event)}"
