"""Datasets of files, of mixtures and of packed rows, made in one call: ``ElasticDataset.lines("/data/*.txt", epochs=3, seed=7)``.

Each makes a source of `dlrover_adapters.data` and trains on it. Options that are not the source's go to `ElasticDataset`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlrover_adapters.data.index_file import Paths
from dlrover_adapters.data.mixing import mixed_of
from dlrover_adapters.data.packing import REFUSE as REFUSE_LONG
from dlrover_adapters.data.packing import packed
from dlrover_adapters.data.parquet import WINDOW, Parquet
from dlrover_adapters.data.source import Items, Source
from dlrover_adapters.data.tar_files import tar
from dlrover_adapters.data.text import JsonLines, Lines
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from typing_extensions import Self
TRAIN = "train"
"""A dataset's name where a script has one dataset and does not name it."""


class Constructors:
    """The constructors by kind of source. ``name``: of the dataset, its own in the job. ``more``: as of `ElasticDataset`.

    All raise `SpecError` for what cannot be right.
    """

    @classmethod
    def of(cls, name: str, source: Any, **more: Any) -> Any:
        """The samples of a source. The dataset has it."""
        raise NotImplementedError

    def as_source(self) -> Source:
        """The samples, by index, for a mixture or packed rows. The dataset has it."""
        raise NotImplementedError

    @classmethod
    def lines(
        cls,
        urls: Paths,
        *,
        name: str = TRAIN,
        cache: str | os.PathLike[str] = "",
        encoding: str = "utf-8",
        **more: Any,
    ) -> Self:
        """Each line of text files is a sample, a str. ``urls``: paths, patterns or ``file://``; ``cache``: where indices lie."""
        made: Self = cls.of(name, Lines(urls, cache=cache, encoding=encoding), **more)
        return made

    @classmethod
    def jsonl(cls, urls: Paths, *, name: str = TRAIN, cache: str | os.PathLike[str] = "", **more: Any) -> Self:
        """Each line of JSONL files that is not blank is a sample: what its JSON says. ``urls`` and ``cache`` as of `lines`."""
        made: Self = cls.of(name, JsonLines(urls, cache=cache), **more)
        return made

    @classmethod
    def tar(
        cls,
        urls: Paths,
        *,
        name: str = TRAIN,
        grouped: bool = False,
        cache: str | os.PathLike[str] = "",
        **more: Any,
    ) -> Self:
        """Each member of tar files is a sample; ``grouped``: all members of one key, as WebDataset has them."""
        made: Self = cls.of(name, tar(urls, grouped=grouped, cache=cache), **more)
        return made

    @classmethod
    def parquet(
        cls,
        urls: Paths,
        *,
        name: str = TRAIN,
        columns: Sequence[str] | None = None,
        window: int = WINDOW,
        **more: Any,
    ) -> Self:
        """Each row of Parquet files is a sample, a dict. ``columns``: which to read; ``window``: row groups mixed at a time."""
        made: Self = cls.of(name, Parquet(urls, columns=columns, window=window), **more)
        return made

    @classmethod
    def mixed(cls, weights: Mapping[Any, float], *, name: str = TRAIN, samples: int = 0, **more: Any) -> Self:
        """A mixture of sources by weight, ``{a: 0.7, b: 0.3}``; the weights sum to 1.

        A dataset among them stands for its samples: its own epochs, seed and order do not count here. ``samples``: of an epoch;
        0: until each source has come once at least. ``seed`` and ``order`` are the mixture's.
        """
        seed, order = more.get("seed", 0), more.pop("order", "shuffled")
        sources = [_samples_of(one) for one in _mapping(weights)]
        made: Self = cls.of(
            name, mixed_of(sources, list(weights.values()), size=samples, seed=seed, order=order), **more
        )
        return made

    @classmethod
    def packed(
        cls,
        data: Any,
        length: int,
        *,
        name: str = TRAIN,
        lengths: Iterable[int] | None = None,
        join: Callable[[list[Any]], Any] | None = None,
        long: str = REFUSE_LONG,
        **more: Any,
    ) -> Self:
        """Rows of whole samples of ``data``, of ``length`` tokens at most: a row is a sample with an index of its own.

        ``data``: a source, or a dataset, which stands for its samples. ``lengths``: tokens of each sample; None: each is read
        once. ``join``: makes a row of the list of its samples; None: the list. ``long``: "refuse", "cut" or "split".
        """
        given: dict[str, Any] = {"long": long, "lengths": lengths} | ({"join": join} if join is not None else {})
        made: Self = cls.of(name, packed(_samples_of(data), length, **given), **more)
        return made


class Fetched(Items):
    """The samples that a function gives by index, as a source. ``fingerprint``: which data they are; empty: unknown."""

    def __init__(self, size: int, fetch: Callable[[int], Any], fingerprint: str) -> None:
        super().__init__(_ByIndex(size, fetch), name=fingerprint)


class _ByIndex:
    def __init__(self, size: int, fetch: Callable[[int], Any]) -> None:
        self._size, self._fetch = size, fetch

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._fetch(index)


def _samples_of(given: Any) -> Any:
    """A source; of a dataset, its samples."""
    return given.as_source() if isinstance(given, Constructors) else given


def _mapping(weights: Any) -> Mapping[Any, float]:
    if not isinstance(weights, Mapping):
        raise SpecError("weights", f"a dict from sources to their weights, got {type(weights).__name__}")
    return weights


def check_terms(name: str, size: Any, fetch: Any, epochs: Any, ahead: Any) -> None:
    """Raises `SpecError` for what cannot be."""
    if not isinstance(name, str):
        raise SpecError("name", f"a text that names the dataset in the job, got {type(name).__name__}")
    for field, value, least in (("size", size, 1), ("epochs", epochs, 0), ("ahead", ahead, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SpecError(field, f"{value!r} of dataset {name!r}: give {least} or more")
    if not callable(fetch):
        raise SpecError("fetch", f"a function from an index to a sample, got {type(fetch).__name__}")
