"""Jobs that belong to nobody's terminal: ``dlrover-run --detach``, ``dlrover attach``, ``dlrover-run --resume``.

Two processes in sessions of their own hold such a job. The *node host* is the parent of all agents; the *supervisor* keeps the
masters. Each watches the other and starts it again when it dies; both hold the masters' socket, the job's locks and the pipe
whose end lets the sweeper clean up. So the supervisor's death costs no step. The node host's death takes the nodes with it: the
masters plan them anew, and they resume from storage. Should both die at once, nothing of the run stays, and the job is resumed.
"""
