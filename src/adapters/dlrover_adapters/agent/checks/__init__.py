"""Checks of one node: what it has (`basic`), what its site wants to know (`scripts`), what it can do (`workload`)."""
