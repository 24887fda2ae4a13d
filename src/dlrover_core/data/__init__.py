"""Which samples were consumed, in which order they come, and who takes which: sets of positions, cuts, orders, quotas. Pure."""
