"""From a verdict to an action: what the ladder is told of the job, and what it and a user's hook answer."""

from __future__ import annotations

from dlrover_core.diagnosis import ladder, policy
from dlrover_core.diagnosis.choices import Case, Choice, Context
from dlrover_core.diagnosis.policy import Hook, Policy
from dlrover_core.job.incidents import ActionChosen, Incident
from dlrover_core.job.names import group_of
from dlrover_core.job.node_lifecycle import ALIVE
from dlrover_core.job.state import JobState
from dlrover_core.rules import hosts, slots
from dlrover_core.spec import us

# How the rule says that a hook broke.
UNHEARD = "the policy's hook failed and was not heard"
# Three cycles without a new step end a job, or as many as restarts were granted.
CYCLES = 3
# From weak to strong: an action in force gives way to stronger ones only.
_RUNGS = (
    ladder.RETRY, ladder.RESTART_PROCESSES, ladder.RELAUNCH_NODE, ladder.RELAUNCH_MORE_MEMORY, ladder.ISOLATE_HOST,
    ladder.GO_ON_SMALLER,
)  # fmt: skip


def action(
    state: JobState, incident: Incident, node: str, hook: Hook | None = None, *, dead: bool = False
) -> ActionChosen:
    """What is done about this node's part in an incident. ``dead``: about its end."""
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
    """The rung for an incident's verdict. ``by``: another policy than the job's own: what it would have chosen."""
    rules = by or policy.parsed(state.job.spec.policy)
    here = dead or (alive(state, node) and node in (incident.blamed, incident.cause.node))
    case = case_of(incident, node if here else "", dead=dead)
    context = context_of(state, incident, node, rules, dead=dead)
    choice = ladder.choose(case, context, rules)
    return choice if hook is None else _heard(hook, case, choice, context, rules)


def case_of(incident: Incident, node: str, *, dead: bool = False) -> Case:
    """The verdict, as the ladder takes it. It speaks of the node where it began: another one that ends meanwhile is replaced."""
    hint = "relaunch" if dead and node != incident.cause.node else incident.hint
    return Case(incident.verdict, incident.signature, incident.confidence, hint, incident.place, node, incident.host)


def context_of(state: JobState, incident: Incident, node: str, rules: Policy, *, dead: bool = False) -> Context:
    """What the ladder knows of the job."""
    spec, known, place = state.job.spec, state.incidents, node.rsplit("-", 1)[0]
    group = spec.group(group_of(node))
    cycles, spent = known.of(group.name), not {node, incident.node}.isdisjoint(state.budget.spent)
    if dead:
        spent = node in state.budget.spent
    return Context(
        restarts=0 if spent else spec.max_restarts - known.restarts,
        software=rules.software_per_hour - known.software_used(state.at),
        relaunches=0 if spent else group.relaunch_max - known.relaunched(place, state.at),
        others=slots.wanted(state, group.name) - 1,
        floor=group.floor,
        alive=not dead,
        joining=spec.joining,
        granted=not spent and (spec.max_restarts > 0 or dead),
        stepped=cycles.perhaps,
        repeats=cycles.failure.repeats if cycles.failure.incident == incident.number else 0,
        tried=cycles.tried.get(incident.cause.node, 0),
        relaunched=place in cycles.renewed,
        stale=cycles.stale,
        stale_max=rules.no_progress_cycles if rules.no_progress_cycles > 0 else max(CYCLES, spec.max_restarts),
        retries=cycles.retries,
        memory_mib=known.memory.get(group.name, group.memory_mib),
        group=group.name,
        leave=hosts.leave(state, node, incident.number),
    )


def _heard(hook: Hook, case: Case, choice: Choice, context: Context, rules: Policy) -> Choice:
    """The hook's own choice, or the ladder's, with a word on why. A hook that breaks has no say."""
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
    """A user's text as the log can take it."""
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
    """What goes into the log, and from there into plans and clocks, must be what they can take."""
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
    """On the budget that such an action draws on: a hook chooses the rung, not the price. What no rung takes is left out."""
    if other.action in ladder.IN_PLACE:
        left = context.restarts
        return other._replace(budget=ladder.RESTARTS, budget_before=left, budget_left=left - 1, memory_mib=0)
    if other.action in ladder.RELAUNCHES:
        left = context.relaunches
        return other._replace(budget=ladder.PLACE, budget_before=left, budget_left=left - 1, pause_us=0)
    return other._replace(budget="", budget_before=-1, budget_left=0, memory_mib=0, pause_us=0)


# ---- who, and whether at all


def alive(state: JobState, name: str) -> bool:
    """Does the node run, and do we want it to?"""
    node = state.nodes.nodes.get(name)
    return node is not None and node.state in ALIVE and not node.released


def target(state: JobState, incident: Incident, blamed: str) -> str:
    """Which living node a verdict is about: the one at fault, or the one where it began."""
    return next((one for one in (blamed, incident.cause.node) if one and alive(state, one)), incident.node)


def settled(incident: Incident, node: str) -> bool:
    """Has this incident replaced that node, or done without it, already?"""
    return any(one.node == node and one.action in ladder.FOR_NODES for one in incident.actions)


def overdrawn(state: JobState) -> bool:
    """Has a revised verdict charged a restart to the program that had none left?"""
    return state.incidents.restarts > state.job.spec.max_restarts


def stronger(state: JobState, incident: Incident, chosen: ActionChosen) -> bool:
    """Does a revised verdict ask for more than what is in force? What is held is let go where anything else may help."""
    if incident.held:
        return chosen.action != ladder.AWAIT_EVIDENCE
    if chosen.action == ladder.AWAIT_EVIDENCE:
        # The program's own end is told by whoever speaks last; what was started again meanwhile would end alike.
        ends = chosen.rule.startswith(ladder.ENDS) or overdrawn(state)
        return ends and incident.action in ladder.IN_PLACE
    if settled(incident, chosen.node) or chosen.action not in _RUNGS or incident.action not in _RUNGS:
        return False
    return chosen.action in ladder.FOR_NODES and _RUNGS.index(chosen.action) > _RUNGS.index(incident.action)


def doomed(state: JobState, incident: Incident, blamed: str) -> bool:
    """Does the end wait because of another node that is dead and cannot be replaced? Nothing done for this one would help."""
    waiting = next((one.node for one in incident.actions if one.state == "waiting"), blamed)
    node = state.nodes.nodes.get(waiting)
    return waiting != blamed and (node is None or node.state not in ALIVE)
