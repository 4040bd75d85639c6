"""Records in tar files, read in any order by an index that says how many each holds."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from ..errors import ArgumentError, StateError

# WebDataset's rule: a record's name is what precedes the first dot of a file's own name
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")
_SOON = 2.0  # seconds after which it is shown how far the reading of headers is
_Starts = np.ndarray[Any, np.dtype[np.int64]]


class TarShards(Dataset[Any]):
    """Records in tar files as WebDataset writes them, read in any order, as private training needs.

    The files of one record follow one another and are named ``NAME.EXTENSION``. The index is JSON,
    ``{"shardlist": [{"url": "train-0000.tar", "nsamples": 1000}, ...]}``, as ``widsindex`` writes
    it; ``filesize``, in bytes, is checked where it is given. It is public: N is the sum of its
    ``nsamples``.

    All headers are read at the start, so that an index that is wrong is found before anything is
    charged. 8 bytes a record are kept. No file stays open, so workers need no care.

    Args:
        index: path of the index, in whose folder the shards are.
        decode: makes a record of its files' bytes by extension, such as ``{"png": ..., "cls":
            ...}``: tensors and numbers, in tuples, lists or dicts.

    Raises:
        ValueError: the index is none, names a shard twice or one that is elsewhere, or disagrees
            with a shard; a record has two files of one extension.
        FileNotFoundError: there is no such index or shard.
        tarfile.ReadError: a shard is not an uncompressed tar file.
        RuntimeError: a shard was written to since (when a pass begins, or a batch is read).

    **Privacy.** Nothing is released. A record is what has one name: whose records lie under
    several names has them protected one by one (see ``people=`` of ``make_private``).
    """

    def __init__(
        self, index: str | os.PathLike[str], decode: Callable[[dict[str, bytes]], Any]
    ) -> None:
        self._decode = decode
        counts = _counts_by_path(index)
        self._paths = list(counts)
        self._stamps = [_stamp(os.stat(path)) for path in self._paths]
        shown = tqdm(self._paths, "reading shards", delay=_SOON, disable=None, leave=False)
        self._starts = [_starts(path) for path in shown]
        for path, starts, count in zip(self._paths, self._starts, counts.values(), strict=True):
            if len(starts) - 1 != count:
                raise ArgumentError(
                    f"{path} holds {len(starts) - 1} records, and the index says {count}: write the"
                    " index anew for the shards that are there."
                )
        self._ends = np.cumsum([len(starts) - 1 for starts in self._starts], dtype=np.int64)

    def __len__(self) -> int:
        """N; asked when a pass begins."""
        for number, path in enumerate(self._paths):
            self._require_unchanged(number, os.stat(path))
        return int(self._ends[-1])

    def __getitem__(self, position: int) -> Any:
        """The record at a position from 0 to N - 1."""
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """The records at these positions. Each shard is opened once."""
        records: list[Any] = [None] * len(positions)
        shards = np.searchsorted(self._ends, positions, side="right")
        for number in map(int, np.unique(shards)):
            if number == len(self._paths) or min(positions) < 0:
                raise IndexError(f"positions go from 0 to {int(self._ends[-1]) - 1}")
            first = int(self._ends[number - 1]) if number else 0
            with open(self._paths[number], "rb") as stream:
                self._require_unchanged(number, os.fstat(stream.fileno()))
                for k in map(int, np.flatnonzero(shards == number)):
                    start, end = self._starts[number][positions[k] - first :][:2]
                    stream.seek(start)
                    records[k] = self._decode(_files(stream.read(end - start)))
        return records

    def _require_unchanged(self, number: int, found: os.stat_result) -> None:
        if _stamp(found) != self._stamps[number]:
            raise StateError(
                f"{self._paths[number]} was written to since training began: put the old file back,"
                " or make the records of today private with a new TarShards.",
                code="data-changed",
            )


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def _counts_by_path(index: str | os.PathLike[str]) -> dict[str, int]:
    """What the index says: how many records each shard holds."""
    with open(index, encoding="utf-8") as stream:
        try:
            listed = [
                (str(shard["url"]), shard["nsamples"], shard.get("filesize"))
                for shard in json.load(stream)["shardlist"]
            ]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArgumentError(
                f"{index} is no index of shards: write JSON of the form"
                ' {"shardlist": [{"url": "train-0000.tar", "nsamples": 1000}]}.'
            ) from error
    folder, counts = os.path.dirname(os.path.abspath(index)), dict[str, int]()
    for url, count, size in listed:
        if "://" in url or url.startswith("pipe:"):
            raise ArgumentError(
                f"{url} is elsewhere, and private training reads records in any order: copy the"
                " shards into the folder of the index, and name them there by file name."
            )
        path = os.path.realpath(os.path.join(folder, url))
        if path in counts:
            raise ArgumentError(f"the index names {url} twice: its records would count twice.")
        if type(count) is not int or count < 0:
            raise ArgumentError(f"nsamples of {url} must be a whole number from 0, got {count!r}.")
        if size is not None and size != (found := os.path.getsize(path)):
            raise ArgumentError(
                f"{url} has {found} bytes, and the index says {size}: write the index anew for the"
                " shards that are there."
            )
        counts[path] = count
    if not sum(counts.values()):
        raise ArgumentError(f"{index} lists no records: name shards whose nsamples are positive.")
    return counts


def _starts(path: str) -> _Starts:
    """Where each record begins, and where the last one ends."""
    starts, end = list[int](), 0
    name, extensions = "", set[str]()
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # kept otherwise
            found = _NAME.fullmatch(member.name)
            if not member.isfile() or found is None:
                continue
            if found[1] != name:
                name, extensions = found[1], set()
                starts.append(member.offset)
            if found[2] in extensions:
                raise ArgumentError(  # names are data
                    f"a record in {path} has two files of one extension: give each record a name of"
                    " its own."
                )
            extensions.add(found[2])
            end = tar.offset
    return np.array([*starts, end], dtype=np.int64)


def _files(data: bytes) -> dict[str, bytes]:
    """The files of one record by extension, from its part of a tar file."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        named = ((member, _NAME.fullmatch(member.name)) for member in tar if member.isfile())
        return {found[2]: _content(tar, member) for member, found in named if found is not None}


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    assert stream is not None  # a file
    return stream.read()
