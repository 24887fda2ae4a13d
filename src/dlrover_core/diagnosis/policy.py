"""The policy: every number of the ladder, as a user may set it, and a hook that may choose another rung.

A policy is data, written as TOML and carried in the job's spec as JSON, so that the log knows by which one was decided. A hook
is a class of the user's, pure as the ladder itself. It is asked when something is decided and never when a log is read: what
it answered is in the log.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, cast

from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_core.diagnosis.choices import Case, Choice, Context

# Texts that a hook may return are cut: they go into the log.
RULE_MAX = 300
_HOOK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Policy:
    """The ladder's numbers. Durations are seconds, memory MiB; 0 switches a rule off where that is possible."""

    software_per_hour: int = field(
        default=10, metadata={"doc": "restarts in an hour for transient failures of the system, beside --max-restarts"}
    )
    user_repeats: int = field(
        default=1,
        metadata={"doc": "an error of the program may repeat so often at the same place; 0: as --max-restarts says"},
    )
    fail_at_once: tuple[str, ...] = field(
        default=("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "NameError"),
        metadata={"doc": "exceptions that end the job at once if they come before its first step ever"},
    )
    fail_signatures: tuple[str, ...] = field(
        default=(
            "auth.refused",
            "hub.denied",
            "hub.missing",
            "storage.denied",
            "net.tls",
            "net.proxy",
            "checkpoint.mismatch",
            "compile.failed",
            "native.python_setup",
            "slurm.config",
            "mpi.setup",
            "cuda.fork",
            "rocm.binary",
        ),
        metadata={
            "doc": "signatures that no time cures: they end the job at once if they come before its first step ever"
        },
    )
    fail_nodes: tuple[str, ...] = field(
        default=("k8s.config", "k8s.image_pull", "launcher.usage"),
        metadata={
            "doc": "signatures of nodes that never started, for a reason that every node of the job shares: they end the job at "
            "once if they come before its first step ever"
        },
    )
    no_progress_cycles: int = field(
        default=0,
        metadata={
            "doc": "cycles in a row without a new step that end the job (exit code 93); 0: 3, or --max-restarts if more"
        },
    )
    escalate_after: int = field(
        default=2, metadata={"doc": "restarts in place without a step after which a node is replaced; 0: never"}
    )
    isolate_confidence: float = field(default=0.8, metadata={"doc": "how sure a verdict must be to leave a host alone"})
    twice_s: float = field(
        default=86_400.0, metadata={"doc": "the same twice on one host within this speaks against the host"}
    )
    retry_pause_s: float = field(
        default=1.0, metadata={"doc": "first pause before what passes by itself is tried again"}
    )
    retry_pause_max_s: float = field(
        default=600.0, metadata={"doc": "longest such pause; each is twice the one before"}
    )
    memory_factor: float = field(
        default=1.2, metadata={"doc": "memory of a worker's node that ran out of it, times this"}
    )
    memory_step_mib: int = field(default=100, metadata={"doc": "and at least so much more, in MiB"})
    ps_memory_first: float = field(default=2.0, metadata={"doc": "memory of a parameter server's node, the first time"})
    ps_memory_then: float = field(default=1.2, metadata={"doc": "and every further time"})
    memory_max_mib: int = field(default=1_048_576, metadata={"doc": "no node is asked for with more than this, in MiB"})
    hook: str = field(
        default="", metadata={"doc": "a user's class that may veto or choose another rung, as module:Class"}
    )

    def __post_init__(self) -> None:
        """Refuse what could never be meant."""
        for spot in fields(self):
            _check(spot.name, getattr(self, spot.name), spot.default)
        for name in ("memory_factor", "ps_memory_first", "ps_memory_then"):
            if getattr(self, name) < 1:
                raise SpecError(f"policy.{name}", f"memory never shrinks: at least 1, got {getattr(self, name)}")
        if self.isolate_confidence > 1:
            raise SpecError("policy.isolate_confidence", f"between 0 and 1, got {self.isolate_confidence}")
        if self.hook and not _HOOK.fullmatch(self.hook):
            raise SpecError("policy.hook", f"{self.hook!r} is not of the form module:Class")

    def to_json(self) -> str:
        """As `JobSpec.policy` holds it: what differs from the defaults, so that empty means the defaults."""
        own = {spot.name: getattr(self, spot.name) for spot in fields(self) if getattr(self, spot.name) != spot.default}
        return json.dumps(own, sort_keys=True) if own else ""


def _check(name: str, value: Any, default: Any) -> None:
    if isinstance(default, tuple):
        if not isinstance(value, tuple) or not all(isinstance(one, str) for one in value):
            raise SpecError(f"policy.{name}", f"a list of names, got {value!r}")
    elif isinstance(default, str):
        if not isinstance(value, str):
            raise SpecError(f"policy.{name}", f"a text, got {value!r}")
    else:
        whole = isinstance(default, int)
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < 10**9:
            raise SpecError(f"policy.{name}", f"not a {'whole number' if whole else 'number'} from 0 on: {value!r}")


def of_settings(settings: Mapping[str, Any]) -> Policy:
    """A policy from what a file says. Raises `SpecError` for a name that there is not, and for values that cannot be."""
    names = {spot.name for spot in fields(Policy)}
    for name in settings:
        if name not in names:
            raise SpecError(f"policy.{name}", f"there is no such setting; there are {', '.join(sorted(names))}")
    values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in settings.items()}
    return Policy(**values)


@functools.lru_cache(maxsize=16)
def parsed(text: str) -> Policy:
    """The policy in a job's spec; empty: the defaults. Settings that this version does not know are left out."""
    if not text:
        return Policy()
    raw = cast("dict[str, Any]", json.loads(text))
    names = {spot.name for spot in fields(Policy)}
    return of_settings({name: value for name, value in raw.items() if name in names})


def table(policy: Policy) -> dict[str, tuple[Any, str]]:
    """Every setting with its value and what it means, for people."""
    return {spot.name: (getattr(policy, spot.name), str(spot.metadata["doc"])) for spot in dataclasses.fields(policy)}


class Hook(Protocol):
    """A user's own say. Pure: the same question, the same answer; no clock, no files, no network."""

    def choose(self, judgement: Case, choice: Choice, context: Context) -> Choice | None:
        """Another choice; None: the ladder's stands."""
