"""A task of TensorFlow's: a server listens where TF_CONFIG says, as TensorFlow's own does, and workers call all servers."""

from __future__ import annotations

import json
import os
import socket
import sys
import time

import diary

told = json.loads(os.environ["TF_CONFIG"])
kind, index = told["task"]["type"], told["task"]["index"]
diary.tell(told=told)
host, _, port = told["cluster"][kind][index].rpartition(":")
# TensorFlow's server turns SO_REUSEPORT off.
with socket.create_server((host, int(port)), reuse_port=False) as server:
    while kind == "ps":
        with server.accept()[0] as line:
            line.sendall(str(os.getpid()).encode())
    waiting = set(told["cluster"]["ps"])
    while waiting:
        for address in sorted(waiting):
            host, _, port = address.rpartition(":")
            try:
                with socket.create_connection((host, int(port)), timeout=10) as line:
                    diary.tell(met=int(line.recv(32) or b"0"))
                    waiting.discard(address)
            except OSError:
                time.sleep(diary.PAUSE_S)
    while not diary.over():
        time.sleep(diary.PAUSE_S)
sys.exit(0)
