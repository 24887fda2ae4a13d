"""What backends share that start processes on hosts of their own: nodes as process trees, their orphans, and a node host's wire.

Backends import this package, and never one another.

`process`: a node's first process with a death signal and a mark, and the end of all that bears the mark.
`orphans`, `strangers`: what dead nodes left to the launcher, and what is somebody else's.
`last_words`: what a node's program has printed last, behind its exit status.
`wire`: frames between a node host and the backend in the master.
`asking`, `conversations`: its two halves, the backend's and the host's.
"""
