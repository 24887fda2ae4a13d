"""Evidence: one observation about a failure, wherever it came from.

Classes are those of the field's failure studies: USER (the program), SOFT (transient software), HW, RES (a resource ran out),
NET, PLAT (the platform took it), DATA, and CASC: a consequence of somebody else's failure, never a root while any other
evidence exists.
"""

from __future__ import annotations

from typing import NamedTuple

USER, SOFT, HW, RES, NET, PLAT, DATA, CASC = "USER", "SOFT", "HW", "RES", "NET", "PLAT", "DATA", "CASC"
CLASSES = (USER, SOFT, HW, RES, NET, PLAT, DATA, CASC)

# Where it was seen.
EXIT = "exit"  # a worker's exit code or signal
ERROR = "error"  # torch's error file: an exception
LOG = "log"  # a line that a worker wrote
KERNEL = "kernel"  # a line of the kernel's log
CGROUP = "cgroup"  # memory.events of the node's cgroup
PLATFORM = "platform"  # a backend's reason for a node's end
PRINTED = (
    "; printed last: "  # in a backend's reason: what follows are the node's own words, which the platform does not say
)
NODE = "node"  # a node is gone, cause unknown
CHECK = "check"  # a node check failed
HANG = "hang"  # nobody makes steps
SLOW = "slow"  # one rank computes slower than it did
LOSS = "loss"  # the loss is no number, or jumps
SOURCES = (EXIT, ERROR, LOG, KERNEL, CGROUP, PLATFORM, NODE, CHECK, HANG, SLOW, LOSS)

# These open an incident by themselves; whatever else is seen waits for a death that it may explain.
OPENING = (CHECK, HANG, SLOW, LOSS)


class Evidence(NamedTuple):
    """One observation, as far as it is known.

    ``at``: when it happened, microseconds by the leader's clock; ``rank`` -1: of a node, not of one worker; ``text``: one line
    for people. ``place``: where in the user's program, so that a repetition is known again: exception and last user frame.
    ``subject``: what else it names: a GPU's PCI address, a network port, a process, lagging ranks ("3,7").
    ``generation`` 0: not of one generation, or a death, whose incident knows it.
    """

    seq: int
    at: int
    node: str
    rank: int
    exit_code: int
    step: int
    text: str
    verdict: str
    signature: str
    confidence: float
    source: str = EXIT
    host: str = ""
    place: str = ""
    subject: str = ""
    generation: int = 0
