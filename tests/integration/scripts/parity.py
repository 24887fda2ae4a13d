"""Write down everything that a training script can see of its launcher, and exercise what scripts use, under any launcher.

``parity-RANK.json`` in FOLDER holds the facts. ``--end HOW`` says how rank 1 ends; ``--exercise`` also does what scripts do.
"""

import atexit
import faulthandler
import json
import os
import signal
import stat
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

FOLDER, RANK = Path(os.environ["FOLDER"]), int(os.environ["RANK"])
NAME = f"parity-{RANK}.json"


class Squares:
    """A data set that must be found as ``__main__.Squares`` in other processes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index * index


def child(queue: Any) -> None:
    """Runs in processes of multiprocessing's."""
    queue.put((__name__, Squares.__module__))


def status(field: str) -> str | None:
    """A line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return line.split(":")[1].strip()
    return None


def kind(fd: int) -> str:
    """What a descriptor is."""
    mode = os.fstat(fd).st_mode
    kinds = {"file": stat.S_ISREG, "pipe": stat.S_ISFIFO, "device": stat.S_ISCHR, "socket": stat.S_ISSOCK}
    return next((name for name, check in kinds.items() if check(mode)), "other")


def descriptors() -> list[int]:
    """Those open beyond the standard streams; not the listing's own."""
    found = [int(one.name) for one in Path("/proc/self/fd").iterdir()]
    return [fd for fd in found if fd > 2 and os.path.lexists(f"/proc/self/fd/{fd}")]


def stream(one: Any) -> list[Any]:
    """A text stream's settings."""
    return [
        one.encoding,
        one.errors,
        one.line_buffering,
        one.write_through,
        one.newlines,
        one.mode,
        one.name,
        one.fileno(),
    ]


def look() -> dict[str, Any]:
    """The facts."""
    main = sys.modules["__main__"]
    handled = [one for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)]
    return {
        "environment": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "flags": str(sys.flags),
        "cwd": str(Path.cwd()),
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "package": __package__,
        "spec": getattr(__spec__, "name", None),
        "cached": globals().get("__cached__", "absent"),
        "main": vars(main) is globals(),
        "loader": type(__loader__).__name__,
        "builtins": type(__builtins__).__name__,
        "dunders": sorted(name for name in globals() if name.startswith("__")),
        "stdin": kind(0),
        "stdout": [kind(1), *stream(sys.stdout)],
        "stderr": [kind(2), *stream(sys.stderr)],
        "originals": [sys.__stdout__ is sys.stdout, sys.__stderr__ is sys.stderr],
        "handlers": {
            one.name: str(getattr(signal.getsignal(one), "__name__", signal.getsignal(one))) for one in handled
        },
        "ignored": status("SigIgn"),
        "blocked": status("SigBlk"),
        "wakeup": signal.set_wakeup_fd(-1),
        "umask": status("Umask"),
        "nice": os.nice(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "leads_session": os.getsid(0) == os.getpid(),
        "leads_group": os.getpgid(0) == os.getpid(),
        "threads": threading.active_count(),
        "thread": threading.current_thread().name,
        "descriptors": descriptors(),
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "faulthandler": faulthandler.is_enabled(),
        "warnings": [str(one) for one in warnings.filters],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace() is None],
        "limits": Path("/proc/self/limits").read_text(),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
    }


def exercise() -> dict[str, Any]:
    """What training scripts do: collectives, data loaders, processes of their own."""
    import multiprocessing

    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    done = {"torch_threads": torch.get_num_threads()}
    dist.init_process_group("gloo")
    total = torch.tensor([RANK + 1.0])
    dist.all_reduce(total)
    done["sum"], done["ranks"] = float(total), [dist.get_rank(), dist.get_world_size()]
    store = dist.distributed_c10d._get_default_store()
    store.set(f"from-{RANK}", str(RANK))
    done["store"] = store.get(f"from-{1 - RANK}").decode()
    dist.barrier()
    dist.destroy_process_group()
    if RANK == 0:
        for method in ("fork", "spawn"):
            loader = DataLoader(Squares(), num_workers=1, multiprocessing_context=method)
            done[f"loader_{method}"] = [int(one) for one in loader]
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        done["child"] = queue.get()
        process.join()
    return done


def leave() -> None:
    """At the interpreter's end."""
    (FOLDER / f"atexit-{RANK}").write_text("done")


def end(how: str) -> None:
    """Rank 1 ends like this; rank 0 well, unless it is stopped before."""
    if RANK != 1:
        if how != "well":
            signal.pause()
        return
    if how == "raise":
        raise ValueError("bad batch 17")
    if how == "exit":
        sys.exit(3)
    if how == "words":
        sys.exit("no data found")
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "record":
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def failing() -> None:
            raise RuntimeError("cannot open shard 9")

        failing()


def main() -> None:
    """Look, exercise, say something, end."""
    atexit.register(leave)
    facts = look()
    if "--exercise" in sys.argv:
        facts["done"] = exercise()
    (FOLDER / NAME).write_text(json.dumps(facts))
    print(f"out of {RANK}")  # noqa: T201 - what scripts do
    print(f"apple of {RANK}", flush=True)  # noqa: T201 - as above
    sys.stderr.write(f"err of {RANK}\npear of {RANK}\n")
    os.write(1, f"raw of {RANK}\n".encode())
    if "--end" in sys.argv:
        end(sys.argv[sys.argv.index("--end") + 1])


if __name__ == "__main__":
    main()
