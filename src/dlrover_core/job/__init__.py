"""What is known: events, commands, the slices of the state, and how events change them. What is decided: `rules`."""
