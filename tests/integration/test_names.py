"""A name server that loses datagrams delays nobody: torch asks it for the name of every address that it connects to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = "127.53.53.53"

# Counts what is asked, and answers that there is no such name.
ASKED = f"""
import json, socket, sys, threading
from dlrover_adapters.agent import keeper
from dlrover_adapters.torch import worker

asked = []
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(({SERVER!r}, 53))

def serve():
    while True:
        question, sender = server.recvfrom(4096)
        asked.append(question)
        server.sendto(question[:2] + b"\\x81\\x83" + question[4:], sender)

threading.Thread(target=serve, daemon=True).start()
if sys.argv[1] == "keeper":
    keeper.ask_nobody()
from torch._C._distributed_c10d import TCPStore
store, port = keeper.open_store("127.0.0.1", worker.serve_store)
client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
client.set("a", "b")
print(json.dumps([len(asked), client.get("a").decode(), socket.gethostbyname("localhost")]))
"""


def _asked(folder: Path, who: str) -> list[object]:
    """What became of a store and its client in a process whose name server counts."""
    (folder / "resolv.conf").write_text(f"nameserver {SERVER}\n")
    (folder / "asked.py").write_text(ASKED)
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    mounted = f"mount --bind {folder}/resolv.conf /etc/resolv.conf && {{ ip link set lo up || true; }}"
    if subprocess.run([*own, "sh", "-c", mounted], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody have a name server of one's own")
    line = f'{mounted} && exec "{sys.executable}" "{folder}/asked.py" {who}'
    done = subprocess.run([*own, "sh", "-c", line], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_a_keeper_asks_nobody(tmp_path: Path) -> None:
    """The process that serves stores knows names by its files: a thousand ranks that connect are no thousand questions."""
    assert _asked(tmp_path, "keeper") == [0, "b", "127.0.0.1"]
    asked, *_ = _asked(tmp_path, "anybody")
    assert asked, "torch asks nobody any more: the keeper need not mind"
