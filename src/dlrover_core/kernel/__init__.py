"""Event sourcing, knowing nothing of training: events, codec, lifecycles, engine, and the port of the log."""
