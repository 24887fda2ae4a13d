"""Where a log may live: on a file system of this host, in files only its owner can read.

A lock that the kernel frees at the death of its holder, and a WAL in shared memory, mean nothing across hosts: over NFS
two masters would lead at once. So such places are refused by name before anything is written, and the default place
avoids them.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from urllib.parse import quote

from dlrover_core.errors import SpecError

REMOTE_TYPES = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "fuse", "fuseblk"}
    | {"lustre", "ceph", "gpfs", "beegfs", "glusterfs", "orangefs", "pvfs2", "ocfs2", "gfs2", "panfs", "wekafs"}
)
NAME_BYTES_MAX = 120
Inode = tuple[int, int]
NO_INODE: Inode = (0, 0)
SHARED = Path("/var/tmp")  # noqa: S108  # everyone's, so `private_dir` looks whose the directory in it is


def file_system(path: Path, mountinfo: str | None = None) -> str:
    """The type of the file system that holds ``path`` (which need not exist yet); '' where the kernel does not say.

    ``mountinfo`` is the text of /proc/self/mountinfo, for tests.
    """
    if mountinfo is None:
        try:
            mountinfo = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
        except OSError:  # no Linux: no mount table, and no way to tell
            return ""
    where = os.path.realpath(path)
    best, found = -1, ""
    for line in mountinfo.splitlines():
        mount, separator, rest = line.partition(" - ")
        fields = mount.split()
        if not separator or len(fields) < 5:
            continue
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        inside = point in {"/", where} or where.startswith(point + "/")
        # Of two mounts on one point the later line hides the earlier.
        if inside and len(point) >= best:
            best, found = len(point), rest.split()[0]
    return found


def is_remote(kind: str) -> bool:
    """May the file system be shared with other hosts, or be served by a process?"""
    return kind in REMOTE_TYPES or kind.startswith("fuse.")


def refuse_remote(path: Path, mountinfo: str | None = None) -> None:
    """Raises `SpecError` for a path on a network or FUSE file system."""
    kind = file_system(path, mountinfo)
    if is_remote(kind):
        raise SpecError(
            "log",
            f"{path} is on a {kind} file system, where locks do not fence other hosts; "
            "use a host-local path (--log sqlite:///var/tmp/… or --state-dir), or an etcd log for several hosts",
        )


def host_local(path: str | Path) -> Path:
    """The absolute path. Raises `SpecError` on a network or FUSE file system."""
    where = Path(os.path.abspath(path))
    refuse_remote(where)
    return where


def free_bytes(path: Path) -> int:
    """Room on the file system of ``path`` for this user; 0 where it cannot be asked."""
    try:
        room = os.statvfs(path)
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize


def default_state_dir(mountinfo: str | None = None, *, shared: Path = SHARED) -> Path:
    """The host-local directory for logs of this user, made if need be (0700).

    ``$XDG_STATE_HOME/dlrover``, else ``~/.local/state/dlrover``, else (home on a network file system, or none)
    ``/var/tmp/dlrover-<uid>`` (``shared`` is for tests).
    """
    stated = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    wanted = Path(stated) / "dlrover"
    if os.path.isabs(stated) and not is_remote(file_system(wanted, mountinfo)):
        try:
            return private_dir(wanted)
        except OSError:  # a home that cannot be written to: the fallback below is for exactly this
            pass
    return private_dir(shared / f"dlrover-{os.getuid()}")


def private_dir(path: Path) -> Path:
    """Make a directory 0700 where it is missing. Raises `SpecError` where it is somebody else's (/var/tmp is everyone's)."""
    make_dirs(path)
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid():
        raise SpecError("state_dir", f"{path} is not a directory of user {os.getuid()}; name another with --state-dir")
    return path


def make_dirs(path: Path) -> None:
    """Make a directory and those above it, each that was missing 0700."""
    missing = [above for above in (path, *path.parents) if not above.exists()]
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)


def private_file(path: Path, flags: int) -> int:
    """Open a file as 0600, closed on exec, never through a link. Returns the descriptor."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def file_name(job: str) -> str:
    """A job's name as part of a file name. Raises `SpecError` for one that is empty or too long."""
    name = quote(job, safe="", errors="surrogatepass").replace(".", "%2E")
    if not 0 < len(name) <= NAME_BYTES_MAX:
        raise SpecError("job_id", f"{job!r} must have 1 to {NAME_BYTES_MAX} bytes as a file name")
    return name


def inode_of(path: Path) -> Inode:
    """Which file is at a path now; `NO_INODE` for none."""
    try:
        found = os.stat(path)
    except OSError:
        return NO_INODE
    return (found.st_dev, found.st_ino)


class Seen:
    """Which file a connection has open: the one at the path, and beside it its newest pages, SQLite's write-ahead log."""

    def __init__(self, path: Path) -> None:
        self._path, self._pages_path = path, path.with_name(f"{path.name}-wal")
        self.inode = self._pages = NO_INODE

    def opened(self) -> None:
        """The file at the path has just been opened."""
        self.inode, self._pages = inode_of(self._path), NO_INODE

    def is_gone(self) -> bool:
        """Was either deleted or replaced since?"""
        pages = inode_of(self._pages_path)
        if self._pages == NO_INODE:
            self._pages = pages  # SQLite makes it when it is needed, and keeps it while somebody has the file open
        return pages != self._pages or inode_of(self._path) != self.inode


class Reserve:
    """Space set aside, so that the decision to say that the disk is full still fits on it."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path, self.size_bytes = path, size_bytes

    def keep(self) -> bool:
        """Have the reserve, if it leaves as much again for others. Returns whether it is there; size 0 is none."""
        if not self.size_bytes:
            return False
        try:
            if self.path.exists():
                return True
            room = os.statvfs(self.path.parent)
            if room.f_bavail * room.f_frsize < 2 * self.size_bytes:
                return False
            fd = private_file(self.path, os.O_WRONLY)
            try:
                os.posix_fallocate(fd, 0, self.size_bytes)
            finally:
                os.close(fd)
        except OSError:  # it filled up meanwhile: without a reserve the log still works
            self.drop()
            return False
        return True

    def drop(self) -> bool:
        """Give the space back. Returns whether there was any to give."""
        try:
            self.path.unlink()
        except OSError:  # there is none, or the disk lets nothing go
            return False
        return True
