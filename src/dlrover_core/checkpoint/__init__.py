"""What is known of checkpoints without any bytes of theirs: where they lie in memory, which are whole, how often, which go."""
