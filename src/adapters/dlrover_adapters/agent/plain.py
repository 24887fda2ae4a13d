"""A worker that is executed instead of forked: without preloads, for commands that are not Python, without a usable zygote."""

from __future__ import annotations

import argparse
import os
import sys

from . import wire
from .framework import load
from .process import die_with_parent, own_link, set_name
from .seat import from_wire
from .worker import run_seat


def main(arguments: list[str]) -> int:
    """Belong to the agent, wait for the seat, be the worker."""
    parser = argparse.ArgumentParser(prog="plain")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--agent", type=int, required=True)
    parser.add_argument("--framework", required=True)
    told, _ = parser.parse_known_args(arguments)
    if not die_with_parent(told.agent):
        return 0
    if os.getsid(0) != os.getpid():  # a worker that begins again leads its session already
        os.setsid()
    set_name("dlrover-spare")
    link = own_link(told.fd)
    frame = wire.receive(link)
    if frame is None:
        return 0
    link.close()
    return run_seat(from_wire(frame.body), frame.fds, load(told.framework))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
