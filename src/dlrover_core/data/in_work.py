"""What a worker has in work of its data: notes in the page of memory that it shares with its agent, so that no death loses them.

The worker notes the samples of each micro-batch before its step, and each sample before it is fetched; so do its loader
processes, each in a place of its own. Nothing is sent and nothing is locked: whoever reads after a death finds the last note. The
page's other places are described in `dlrover_core.diagnosis.slots`.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from dlrover_core.data.ranges import POSITION_MAX

NOTES_AT, NOTES = 128, 14
"""Where the notes begin, and how many there are: the step's, the fetch's, and those of loader processes."""
_NOTE = struct.Struct("=qq8sqqqqq")  # state, process, digest of the dataset's name, epoch, first, to, index, most
NAMES_AT, NAMES_END = 1040, 1536
"""The names of datasets, each ended by a NUL."""
STEP, FETCH, LOADERS = 0, 1, 2
_IDLE, _WORKS, _FAILED = 0, 1, 2
_BY_PROCESS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]{1,400})\)")
_BY_NUMBER = re.compile(r"in DataLoader worker process (\d{1,6})")
TEXT_MAX = 256

assert NOTES_AT + NOTES * _NOTE.size <= 1024


class InWork(NamedTuple):
    """Samples that were in work when a worker ended.

    dataset: its name
    epoch:   of the positions; the first is 0
    first:   of the epoch's order, the positions from here
    to:      up to here, exclusive
    sample:   the index of the sample, where it is only one; -1: several
    most:    so many samples of the dataset may be quarantined; 0: none, the job is to fail
    fetched: they were being fetched or collated; else they were in a step
    """

    dataset: str
    epoch: int
    first: int
    to: int
    sample: int
    most: int
    fetched: bool

    @property
    def text(self) -> str:
        """As a record has it; `parsed` reads it."""
        what = "fetch" if self.fetched else "step"
        return f"{what} {self.epoch} {self.first} {self.to} {self.sample} {self.most} {self.dataset}"

    @property
    def words(self) -> str:
        """For people: 'sample 17 of dataset 'train' (epoch 1, position 512)'."""
        epoch = self.epoch + 1
        if self.sample >= 0:
            return f"sample {self.sample} of dataset {self.dataset!r} (epoch {epoch}, position {self.first})"
        return f"positions {self.first} to {self.to} exclusive of epoch {epoch} of dataset {self.dataset!r}"


def parsed(text: str) -> InWork | None:
    """What `InWork.text` says; None: it says nothing, or makes no sense."""
    words = text.split(" ", 6)
    if len(text) > TEXT_MAX or len(words) < 7 or words[0] not in ("fetch", "step") or not words[6]:
        return None
    try:
        epoch, first, to, index, most = map(int, words[1:6])
    except ValueError:
        return None
    sane = 0 <= epoch <= POSITION_MAX and 0 <= first < to <= POSITION_MAX
    if not sane or not -1 <= index <= POSITION_MAX or not 0 <= most <= POSITION_MAX:
        return None
    return InWork(words[6], epoch, first, to, index, most, words[0] == "fetch")


def blank(write: Callable[[bytes, int], object]) -> None:
    """Have the page say that nothing is in work. ``write``: bytes, and where."""
    write(bytes(NOTES * _NOTE.size), NOTES_AT)
    write(bytes(NAMES_END - NAMES_AT), NAMES_AT)


class Notes:
    """The writer's half. ``memory``: the page; ``process``: the number of this one; ``at``: its place for what it fetches."""

    def __init__(self, memory: Any, process: int, at: int = FETCH) -> None:
        self._memory, self._process, self._fetch = memory, process, at
        self._digests: dict[str, bytes] = {}

    def of_loader(self, number: int, process: int) -> Notes | None:
        """The notes of loader ``number``, the process ``process``, which shares the page. None: it has no room."""
        at = LOADERS + number
        return Notes(self._memory, process, at) if at < NOTES else None

    def step(self, work: InWork) -> None:
        """These samples are in a step from now on."""
        self._note(STEP, work)

    def stepped(self) -> None:
        """No samples are in a step."""
        _put_state(self._memory, STEP, _IDLE)

    def fetch(self, work: InWork) -> None:
        """This process fetches these samples from now on."""
        self._note(self._fetch, work)

    def fetched(self) -> None:
        """This process fetches no samples."""
        _put_state(self._memory, self._fetch, _IDLE)

    def failed(self) -> None:
        """What this process was fetching last has failed."""
        _put_state(self._memory, self._fetch, _FAILED)

    def _note(self, at: int, work: InWork) -> None:
        digest = self._digests.get(work.dataset) or self._named(work.dataset)
        _NOTE.pack_into(
            self._memory, NOTES_AT + at * _NOTE.size, _WORKS, self._process, digest, work.epoch, work.first, work.to,
            work.sample, work.most,
        )  # fmt: skip

    def _named(self, dataset: str) -> bytes:
        """Have the page know the name, where there is room; without it, its notes say nothing."""
        digest = self._digests[dataset] = _digest(dataset)
        if dataset not in _names(self._memory):
            table = bytes(self._memory[NAMES_AT:NAMES_END]).rstrip(b"\0")
            more = (table + b"\0" if table else b"") + dataset.encode(errors="replace")
            if len(more) < NAMES_END - NAMES_AT:
                self._memory[NAMES_AT : NAMES_AT + len(more)] = more
        return digest


def found(memory: Any, error: str) -> InWork | None:
    """What a dead worker had in work; None: nothing, or it cannot be told. ``error``: the message of its exception.

    What it was fetching comes before what was in a step. A loader process counts only if the error names that process.
    """
    processes, number = _BY_PROCESS.search(error), _BY_NUMBER.search(error)
    if processes is not None:
        pids = {int(one) for one in processes[1].split(",") if one.strip().isdecimal()}
        dead = [at for at in range(LOADERS, NOTES) if _state(memory, at)[0] == _WORKS and _state(memory, at)[1] in pids]
        return _read(memory, dead[0]) if len(dead) == 1 else None
    if number is not None:
        at = LOADERS + int(number[1]) % (NOTES - LOADERS)
        return _read(memory, at) if _state(memory, at)[0] == _FAILED else None
    fetch = _state(memory, FETCH)[0]
    if fetch == _WORKS or (fetch == _FAILED and error):
        return _read(memory, FETCH)
    return _read(memory, STEP) if _state(memory, STEP)[0] == _WORKS else None


def _read(memory: Any, at: int) -> InWork | None:
    _, _, digest, epoch, first, to, index, most = _NOTE.unpack_from(memory, NOTES_AT + at * _NOTE.size)
    name = next((one for one in _names(memory) if _digest(one) == digest), "")
    # Through the text, which bounds whatever a broken worker writes.
    return parsed(InWork(name, epoch, first, to, index, most, at != STEP).text) if name else None


def _names(memory: Any) -> list[str]:
    table = bytes(memory[NAMES_AT:NAMES_END]).rstrip(b"\0")
    return [one.decode(errors="replace") for one in table.split(b"\0") if one]


def _digest(dataset: str) -> bytes:
    return hashlib.blake2b(dataset.encode(errors="replace"), digest_size=8).digest()


def _state(memory: Any, at: int) -> tuple[int, int]:
    state, process = struct.unpack_from("=qq", memory, NOTES_AT + at * _NOTE.size)
    return int(state), int(process)


def _put_state(memory: Any, at: int, state: int) -> None:
    struct.pack_into("=q", memory, NOTES_AT + at * _NOTE.size, state)
