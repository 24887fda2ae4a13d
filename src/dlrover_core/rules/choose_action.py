"""From a verdict to an action: what the ladder is told of the job, and what it, or a user's hook, answers."""

from __future__ import annotations

from dlrover_core.diagnosis import ladder, policy
from dlrover_core.diagnosis.choices import Case, Choice, Context
from dlrover_core.diagnosis.policy import Hook, Policy
from dlrover_core.job.incidents import ActionChosen, Incident
from dlrover_core.job.names import group_of
from dlrover_core.job.node_lifecycle import ALIVE
from dlrover_core.job.poison import AGAIN, ENDS, NARROWED, QUARANTINED
from dlrover_core.job.state import JobState
from dlrover_core.rules import coupling, hosts, poison, slots
from dlrover_core.spec import us

# Words in a rule that say that a hook failed.
UNHEARD = "the policy's hook failed and was not heard"
# So many cycles in a row without a new step end a job, or as many as restarts were granted, if that is more.
CYCLES = 3
# From weak to strong: an action in force gives way to stronger ones only.
_RUNGS = (
    ladder.RETRY, ladder.RESTART_PROCESSES, ladder.RELAUNCH_NODE, ladder.RELAUNCH_MORE_MEMORY, ladder.ISOLATE_HOST,
    ladder.GO_ON_SMALLER,
)  # fmt: skip


def action(
    state: JobState, incident: Incident, node: str, hook: Hook | None = None, *, dead: bool = False
) -> ActionChosen:
    """The action for this node's part in an incident. ``dead``: the action answers the node's end."""
    choice = choice_of(state, incident, node, hook=hook, dead=dead)
    isolates = choice.action == ladder.ISOLATE_HOST
    if not dead and choice.action not in ladder.FOR_NODES:
        node = incident.node
    return ActionChosen(
        incident.number,
        choice.action,
        node,
        choice.rule,
        choice.budget_left,
        choice.budget,
        choice.budget_before,
        (incident.host or state.hosts.host_of(node)) if isolates else "",
        choice.memory_mib,
        choice.pause_us,
    )


def choice_of(
    state: JobState,
    incident: Incident,
    node: str,
    *,
    by: Policy | None = None,
    hook: Hook | None = None,
    dead: bool = False,
) -> Choice:
    """The rung for an incident's verdict. ``by``: a policy to ask in place of the job's own."""
    rules = by or policy.parsed(state.job.spec.policy)
    here = dead or (alive(state, node) and node in (incident.blamed, incident.cause.node))
    case = case_of(incident, node if here else "", dead=dead)
    context = context_of(state, incident, node, rules, dead=dead)
    choice = ladder.choose(case, context, rules)
    return choice if hook is None else _heard(hook, case, choice, context, rules)


def case_of(incident: Incident, node: str, *, dead: bool = False) -> Case:
    """The verdict as input of the ladder. It speaks of the node where it began; another node that ends meanwhile is replaced."""
    hint = "relaunch" if dead and node != incident.cause.node else incident.hint
    return Case(incident.verdict, incident.signature, incident.confidence, hint, incident.place, node, incident.host)


def context_of(state: JobState, incident: Incident, node: str, rules: Policy, *, dead: bool = False) -> Context:
    """What the ladder is told of the job."""
    spec, known, place = state.job.spec, state.incidents, node.rsplit("-", 1)[0]
    group, name = spec.group(group_of(node)), state.set_of(node)
    granted, charged = state.job.policy(name).max_restarts, known.charged(name)
    cycles, spent = known.of(name), not {node, incident.node}.isdisjoint(state.budgets.spent)
    if dead:
        spent = node in state.budgets.spent
    return Context(
        restarts=0 if spent else granted - charged.restarts,
        software=rules.software_per_hour - known.software_used(name, state.at),
        relaunches=0 if spent else group.relaunch_max - known.relaunched(place, state.at),
        others=slots.wanted(state, group.name) - 1,
        floor=group.floor,
        alive=not dead,
        joining=spec.joining,
        granted=not spent and (granted > 0 or dead),
        stepped=cycles.perhaps,
        repeats=cycles.failure.repeats if cycles.failure.incident == incident.number else 0,
        tried=cycles.tried.get(incident.cause.node, 0),
        relaunched=place in cycles.renewed,
        stale=cycles.stale,
        stale_max=rules.no_progress_cycles if rules.no_progress_cycles > 0 else max(CYCLES, granted),
        retries=cycles.retries,
        memory_mib=known.memory.get(group.name, group.memory_mib),
        group=group.name,
        serves=coupling.serves(state, group),
        leave=hosts.leave(state, node, incident.number),
        samples="" if dead else _samples(state, incident),
        poison="" if dead else _poison(state, incident),
    )


def _samples(state: JobState, incident: Incident) -> str:
    """What is done about the samples that the failure had in work; empty: nothing."""
    group = state.set_of(incident.node)
    hit = state.poison.hit(group, incident.number)
    if poison.fresh(state, group, hit):
        return "another sample than the one that was quarantined before"
    done = {
        NARROWED: "the range is halved", AGAIN: "once more at the same sample is needed", QUARANTINED: "it is quarantined",
    }.get(hit.finding if hit is not None else "")  # fmt: skip
    return f"{poison.where(state, group, hit)}: {done}" if hit is not None and done else ""


def _poison(state: JobState, incident: Incident) -> str:
    """Why a sample ends the job; empty: it does not."""
    group = state.set_of(incident.node)
    hit = state.poison.hit(group, incident.number)
    return f"{poison.where(state, group, hit)}: {hit.why}" if hit is not None and hit.finding == ENDS else ""


def _heard(hook: Hook, case: Case, choice: Choice, context: Context, rules: Policy) -> Choice:
    """The hook's choice, or the ladder's if the hook has none. A hook that fails is ignored, and the rule says so."""
    try:
        other = hook.choose(case, choice, context)
        if other is None:
            return choice
        _check(other, context)
        _check_numbers(other, context, rules)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001  # a user's code may raise whatever it likes; recovery must not
        return choice._replace(rule=f"{choice.rule}; {UNHEARD}: {_clean(_words(error))}")
    rule = f"hook: {_clean(other.rule)}; instead of {choice.action} by {choice.rule}"
    return _afforded(other, context)._replace(rule=rule)


def _words(error: BaseException) -> str:
    """An exception as text; some have none."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # as above
        return type(error).__name__


def _clean(text: str) -> str:
    """A user's text, cut and cleaned for the log."""
    return text[: policy.RULE_MAX].encode(errors="replace").decode()


def _check(other: object, context: Context) -> None:
    if type(other) is not Choice or type(other.rule) is not str or type(other.action) is not str:
        raise TypeError(f"choose() gives a Choice or None, not {type(other).__name__}")
    allowed = (*_RUNGS, ladder.AWAIT_EVIDENCE) if context.alive else (*_RUNGS[2:], ladder.AWAIT_EVIDENCE)
    if other.action not in allowed:
        raise ValueError(f"{other.action} is not an answer to this; there are {', '.join(allowed)}")
    if context.alive and not context.granted and other.action != ladder.AWAIT_EVIDENCE:
        raise ValueError("no restarts are granted (--max-restarts), and workers of living nodes are not started again")
    if other.action == ladder.GO_ON_SMALLER and context.others < context.floor:
        raise ValueError(f"{context.others} nodes are too few to go on with")
    if other.action in ladder.RELAUNCHES and context.relaunches <= 0:
        raise ValueError("no relaunches are left for that place")
    if other.action in ladder.IN_PLACE and context.restarts <= 0:
        raise ValueError("no restarts are left")


def _check_numbers(other: Choice, context: Context, rules: Policy) -> None:
    """Raises if a number of the hook's choice does not fit into the log, or into plans and clocks."""
    for name in ("budget_left", "budget_before", "memory_mib", "pause_us"):
        value = getattr(other, name)
        if type(value) is not int:
            raise TypeError(f"{name} is a whole number, not {type(value).__name__}")
    if other.memory_mib and not context.memory_mib < other.memory_mib <= rules.memory_max_mib:
        raise ValueError(
            f"memory_mib is 0, or more than the {context.memory_mib} of now and at most {rules.memory_max_mib}"
        )
    if not 0 <= other.pause_us <= us(rules.retry_pause_max_s):
        raise ValueError(f"pause_us is at least 0 and at most {us(rules.retry_pause_max_s)}")


def _afforded(other: Choice, context: Context) -> Choice:
    """The hook's choice, charged to the budget of its action: a hook chooses the rung, not the price.

    Fields that the rung does not use are reset.
    """
    if other.action in ladder.IN_PLACE:
        left = context.restarts
        return other._replace(budget=ladder.RESTARTS, budget_before=left, budget_left=left - 1, memory_mib=0)
    if other.action in ladder.RELAUNCHES:
        left = context.relaunches
        return other._replace(budget=ladder.PLACE, budget_before=left, budget_left=left - 1, pause_us=0)
    return other._replace(budget="", budget_before=-1, budget_left=0, memory_mib=0, pause_us=0)


# ---- which node, and whether anything is done


def alive(state: JobState, name: str) -> bool:
    """Does the node run, and is it wanted?"""
    node = state.nodes.nodes.get(name)
    return node is not None and node.state in ALIVE and not node.released


def target(state: JobState, incident: Incident, blamed: str) -> str:
    """The living node that a verdict is about: the node at fault, else the node where it began."""
    return next((one for one in (blamed, incident.cause.node) if one and alive(state, one)), incident.node)


def settled(incident: Incident, node: str) -> bool:
    """Has this incident already replaced that node, or given its place up?"""
    return any(one.node == node and one.action in ladder.FOR_NODES for one in incident.actions)


def overdrawn(state: JobState, incident: Incident) -> bool:
    """Has a revised verdict charged a restart to the program's budget beyond its end?"""
    name = state.set_of(incident.node)
    return state.incidents.charged(name).restarts > state.job.policy(name).max_restarts


def stronger(state: JobState, incident: Incident, chosen: ActionChosen) -> bool:
    """Does a revised verdict ask for more than the action in force? A pending end of the job yields to any other action."""
    if incident.end_pending:
        return chosen.action != ladder.AWAIT_EVIDENCE
    if chosen.action == ladder.AWAIT_EVIDENCE:
        # The last evidence may show that the program itself ended the job; processes started meanwhile would end alike.
        ends = chosen.rule.startswith(ladder.ENDS) or overdrawn(state, incident)
        return ends and incident.action in ladder.IN_PLACE
    if settled(incident, chosen.node) or chosen.action not in _RUNGS or incident.action not in _RUNGS:
        return False
    return chosen.action in ladder.FOR_NODES and _RUNGS.index(chosen.action) > _RUNGS.index(incident.action)


def doomed(state: JobState, incident: Incident, blamed: str) -> bool:
    """Does the pending end come from another dead node without a replacement? Then no action for this node helps."""
    waiting = next((one.node for one in incident.actions if one.state == "waiting"), blamed)
    node = state.nodes.nodes.get(waiting)
    return waiting != blamed and (node is None or node.state not in ALIVE)
