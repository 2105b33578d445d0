"""Log-probabilities on disk, found by the tokens they belong to."""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_host import Batch, RunError
from rlhf_host.internals import Rows, cache_directory, content_hash
from rlhf_rows.cache import fill_cache

VERSION = 2
"""Version of the format; part of every key."""


class StoredLogprobs:
    """Log-probabilities of every row's completion tokens, memory-mapped.

    ``index.npy`` is ``[3, N]`` uint64: the two halves of each row's digest, sorted by the first, and the offset of its numbers
    in ``values``, float32. ``hashes.json`` has the sha256 of both.

    Raises ``OSError`` or ``ValueError`` if a file is missing or not as it was written.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        if json.loads((directory / "hashes.json").read_bytes()) != _hashes(directory):
            raise ValueError(f"{directory} is not as it was written")
        self._firsts, self._seconds, self._begins = np.load(directory / "index.npy", mmap_mode="r")
        self._values = np.memmap(directory / "values", dtype=np.float32, mode="r")

    def of(self, batch: Batch) -> Tensor:
        """Returns ``[B, T]`` float32, 0 at padding. Raises ``RunError`` for a row that was not in the data when they were
        computed.
        """
        out = Rows.of(batch.completion_mask).zeros()
        for number, (prompt, completion, images) in enumerate(_rows(batch)):
            begin = self._find(*_digest(prompt, completion, images))
            if begin is None:
                raise RunError(
                    f"a row of step {batch.step} was not there when log-probabilities were computed before the run: remove"
                    f" {self._directory} and start again"
                )
            out.put_rows([number], torch.from_numpy(np.array(self._values[begin : begin + len(completion)])))
        return out

    def _find(self, first: int, second: int) -> int | None:
        place = int(np.searchsorted(self._firsts, np.uint64(first)))
        while place < len(self._firsts) and int(self._firsts[place]) == first:
            if int(self._seconds[place]) == second:
                return int(self._begins[place])
            place += 1
        return None


def find_logprobs(key: str) -> StoredLogprobs | None:
    """Finds what an earlier start stored under this key."""
    try:
        return StoredLogprobs(_root() / key)
    except (OSError, ValueError):  # there is nothing, or it is damaged
        return None


def store_logprobs(key: str, computed: Iterable[tuple[Batch, Tensor]]) -> StoredLogprobs:
    """Writes the log-probabilities ``[B, T]`` of all batches. Raises ``UserError`` if they cannot be written."""

    def fill(directory: Path) -> None:
        columns, written = (array("Q"), array("Q"), array("Q")), 0
        with (directory / "values").open("wb") as file:
            for batch, logprobs in computed:
                for values, (prompt, completion, images) in zip(
                    Rows.of(batch.completion_mask).each(logprobs), _rows(batch), strict=True
                ):
                    for column, number in zip(columns, (*_digest(prompt, completion, images), written), strict=True):
                        column.append(number)
                    file.write(values.to(torch.float32).numpy().tobytes())
                    written += len(completion)
        index = np.array([np.frombuffer(column, dtype=np.uint64) for column in columns])
        np.save(directory / "index.npy", index[:, np.argsort(index[0], kind="stable")])
        (directory / "hashes.json").write_text(json.dumps(_hashes(directory)))

    fill_cache(_root() / key, fill, lambda: find_logprobs(key) is not None)
    return StoredLogprobs(_root() / key)


def _root() -> Path:
    return cache_directory() / f"logprobs-{VERSION}"


def _hashes(directory: Path) -> dict[str, str]:
    return {name: content_hash([directory / name]) for name in ("index.npy", "values")}


def _rows(batch: Batch) -> Iterator[tuple[Sequence[int], list[int], Sequence[Any]]]:
    """Yields prompt and completion of each row, as ids, and its pictures."""
    completions = Rows.of(batch.completion_mask).each(batch.completion_ids)
    for row, (prompt, ids) in enumerate(zip(batch.prompt_ids, completions, strict=True)):
        yield prompt, ids.tolist(), batch.images[row] if batch.images is not None else ()


def _digest(prompt: Sequence[int], completion: Sequence[int], images: Sequence[Any]) -> tuple[int, int]:
    digest = hashlib.blake2b(struct.pack("<q", len(prompt)), digest_size=16)
    digest.update(array("i", prompt).tobytes())
    digest.update(array("i", completion).tobytes())
    digest.update("".join(picture.key for _, picture in images).encode())
    first, second = struct.unpack("<QQ", digest.digest())
    return first, second
