"""How long does it take to say what 16,384 nodes should be doing, after each of a few events? For `tools.before_after`.

It runs with the packages of whatever tree ``PYTHONPATH`` names, and so asks for nothing but what older trees have. All agents
have joined, one world trains. Then workers start, one node after another, and after each what is desired is worked out anew. The
figure is processor time of one such round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from dlrover_core.job import job, nodes, world
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.engine import Engine
from dlrover_core.spec import GroupSpec, JobSpec

try:
    from dlrover_core.rules.desired import desired
    from dlrover_core.rules.model import MODEL
except ImportError:
    from dlrover_core.job.state import MODEL, desired  # type: ignore[attr-defined,no-redef]

ROUNDS = 20


def main() -> int:
    """Measure, and write the one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=16_384)
    args = parser.parse_args()
    spec = JobSpec("j", (GroupSpec(nodes_min=args.nodes, nodes_max=args.nodes),))
    engine = Engine(MODEL, CODEC, MODEL.new(), token=1)
    engine.handle(job.CreateJob("run-1", spec.to_json()), 1)
    for one in range(args.nodes):
        engine.handle(nodes.ReportJoined(f"worker-{one}-0", f"h{one}", f"h{one}", 1), 2)
    engine.handle(world.OfferStore("worker-0-0", "h0:1"), 3)
    engine.take()
    assert engine.state.world.worlds["worker"].active
    desired(engine.state)
    found = []
    for _ in range(args.trials):
        began = time.process_time()
        for one in range(ROUNDS):
            engine.handle(world.ReportStarted(f"worker-{one}-0", 1), 4)
            engine.take()
            desired(engine.state)
        found.append((time.process_time() - began) / ROUNDS)
    args.json.write_text(json.dumps({"rows": [{"what": "levelled", "ours": found}]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
