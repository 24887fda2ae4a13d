"""An evaluator that cannot go on."""

raise SystemExit("no such policy")
