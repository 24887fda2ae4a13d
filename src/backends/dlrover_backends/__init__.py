"""Schedulers that run nodes: each translates the core's `Backend` port and decides nothing."""
