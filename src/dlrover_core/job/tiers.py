"""From where a state is restored: tiers, fastest first; and that there was nothing to restore."""

MEMORY, PEER, DISK, STORAGE, NOTHING = "memory", "peer", "disk", "storage", "nothing"
TIERS = (MEMORY, PEER, DISK, STORAGE, NOTHING)
