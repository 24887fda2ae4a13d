"""Decisions: rules read the whole state and change none of it. Reading a log needs no rule."""
