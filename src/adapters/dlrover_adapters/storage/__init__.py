"""Archives on any file system that fsspec reaches: object stores, HDFS, SFTP, and what others register."""

from dlrover_adapters.storage.store import FsspecStore

__all__ = ["FsspecStore"]
