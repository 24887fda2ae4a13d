"""The domain: one module per concern, each with its events, its slice of the state, and its decisions."""
