"""The peers of `bench_data.py` that restore a position in an epoch, each with packages of its own, and their milliseconds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from _bench import HERE, say
from _jobs import peer_python

LIMIT_S = 600.0


class Peer(NamedTuple):
    """One library.

    name:     as people know it
    package:  and its version, on the package index
    script:   in ``benchmarks/scripts``; it takes a size, a batch and a number of trials
    needs:    what it imports, beside torch and numpy
    settings: what it restores
    """

    name: str
    package: str
    script: str
    needs: tuple[str, ...]
    settings: str


COMMON = ("packaging", "requests", "urllib3", "certifi", "idna", "charset-normalizer")
TORCHDATA = Peer(
    "torchdata", "torchdata==0.11.0", "torchdata_restore.py", COMMON,
    "torchdata 0.11.0, StatefulDataLoader over RandomSampler; the same world size, it knows no other",
)  # fmt: skip
MOSAIC = Peer(
    "mosaicml-streaming", "mosaicml-streaming==0.13.0", "mosaic_restore.py",
    (*COMMON, "Brotli", "python-snappy", "cramjam", "xxhash", "zstd<2", "tqdm", "catalogue", "pyyaml", "regex", "pillow",
     "filelock", "transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2", "safetensors"),
    "mosaicml-streaming 0.13.0, MDS shards on a local disk, from 2 nodes to 1",
)  # fmt: skip
LITDATA = Peer(
    "LitData", "litdata==0.2.76", "litdata_restore.py",
    (*COMMON, "lightning-utilities", "tifffile", "obstore", "boto3", "botocore", "jmespath", "s3transfer",
     "python-dateutil", "six"),
    "LitData 0.2.76, chunks on a local disk, from 2 ranks to 1",
)  # fmt: skip
PEERS = (TORCHDATA, MOSAIC, LITDATA)


def folder_of(peer: Peer) -> Path:
    """A folder for ``PYTHONPATH`` with a peer and what it needs, filled where it is missing. Torch is `peer_python`'s."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "dlrover-bench" / peer.package.replace("==", "-")
    done = home / "installed"
    if not done.exists():
        say(f"installing {peer.package} in {home}, once")
        command = [peer_python(), "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", home]
        subprocess.run([*map(str, command), peer.package, *peer.needs], check=True, capture_output=True, text=True)
        done.touch()
    return home


def restores_ms(peer: Peer, size: int, batch: int, trials: int) -> list[float]:
    """Milliseconds from a state at 90 % of an epoch to its first batch. Raises RuntimeError where the peer does not work."""
    try:
        env = {**os.environ, "PYTHONPATH": str(folder_of(peer)), "PYTHONWARNINGS": "ignore"}
        line = [str(peer_python()), str(HERE / "scripts" / peer.script), str(size), str(batch), str(trials)]
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{peer.name} is not measured: {getattr(error, 'stderr', '') or error}") from error
    if done.returncode:
        raise RuntimeError(f"{peer.name} is not measured: it ended with {done.returncode}: {done.stderr[-400:]}")
    return [float(one) for one in json.loads(done.stdout.splitlines()[-1])]
