"""The Linux launcher: how one agent starts, watches and stops the workers of its node.

Who is who, as `ps` shows them:

* **agent**: the asyncio process that owns a `LinuxLauncher`. It never imports torch. It is a child subreaper, so that it is
  the real parent of every worker and alone reaps them.
* **zygote** (`zygote.py`): has imported torch and the preloads; forks everything below. May die and be replaced.
* **keeper** (`keeper.py`): holds the TCPStores; forked first, because store servers are threads and the zygote has none.
* **spare**: a worker forked ahead of need that waits for its *seat* (`seat.py`): rank, world, store, streams.
* **worker**: a spare that took its seat and runs the script (`worker.py`, `main_module.py`).

Processes talk over socket pairs with msgpack frames (`wire.py`); the end of such a socket is the death of the peer. What is
particular to torch lies behind the `Framework` port (`framework.py`), so that this package needs none.
"""
