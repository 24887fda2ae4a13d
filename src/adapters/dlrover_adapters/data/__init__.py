"""Where samples come from, and in which order. Works in plain Python: nothing of torch is imported.

``lines(paths)``, ``jsonl(paths)``, ``tar(paths)`` and ``parquet(paths)`` make sources of files, ``mixed({a: 0.7, b: 0.3})`` and
``packed(source, length)`` sources of sources, and `Followed` one of a stream, as `FolderStream` and
`KafkaStream` are. `LeasedIndices` are drawn by workers that keep their own pace. Lists, arrays and datasets of
a known size are sources as they are.
"""

from __future__ import annotations

from dlrover_adapters.data.folder_stream import FolderStream
from dlrover_adapters.data.following import Followed
from dlrover_adapters.data.kafka import KafkaStream
from dlrover_adapters.data.leases import LeasedIndices
from dlrover_adapters.data.mixing import mixed, mixed_of
from dlrover_adapters.data.packing import packed
from dlrover_adapters.data.parquet import Parquet as parquet  # noqa: N813
from dlrover_adapters.data.reading import Reader
from dlrover_adapters.data.source import Items, Source, as_source, fingerprint_of, resumed_size
from dlrover_adapters.data.tar_files import tar
from dlrover_adapters.data.text import JsonLines as jsonl  # noqa: N813
from dlrover_adapters.data.text import Lines as lines  # noqa: N813

__all__ = [
    "FolderStream",
    "Followed",
    "Items",
    "KafkaStream",
    "LeasedIndices",
    "Reader",
    "Source",
    "as_source",
    "fingerprint_of",
    "jsonl",
    "lines",
    "mixed",
    "mixed_of",
    "packed",
    "parquet",
    "resumed_size",
    "tar",
]
