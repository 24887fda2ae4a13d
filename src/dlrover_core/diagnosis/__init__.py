"""From evidence to a verdict, and from a verdict to the cheapest sufficient action. Pure functions over plain values."""
