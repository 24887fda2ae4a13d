"""What the launcher of a job writes down for its masters and agents: one JSON file in the job's private directory."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from dlrover_core.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Settings:
    """One run of one job on this host. Paths are absolute. The token is in none of it: it travels in the environment."""

    spec: str
    run: str
    log: str
    directory: str
    argv: tuple[str, ...]
    nproc: int
    mode: str
    node_host: str = ""
    masters: tuple[str, ...] = ()
    role: str = "default"
    preload: tuple[str, ...] | None = ()
    log_dir: str | None = None
    redirects: tuple[int, ...] = ()
    tee: tuple[int, ...] = ()
    run_dir: str | None = None
    address: str = "127.0.0.1"
    log_level: str = "info"
    control_log: str = field(default="")

    @property
    def job(self) -> JobSpec:
        """The job's spec."""
        return JobSpec.from_json(self.spec)

    def placed(self, folder: Path) -> Settings:
        """The same, with the run's sockets and streams in ``folder``."""
        return dataclasses.replace(self, node_host=str(folder / "nodes.sock"), run_dir=str(folder))

    def write(self) -> Path:
        """Write it down whole or not at all, readable by this user alone."""
        path = Path(self.directory) / "settings.json"
        part = path.with_suffix(".part")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=1)
        part.replace(path)
        return path

    @classmethod
    def read(cls, path: str) -> Settings:
        """Read what `write` wrote."""
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
        for name, value in raw.items():
            if isinstance(value, list):
                raw[name] = tuple(value)
        return cls(**raw)
