"""The trainer's end: writes the steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_host import RunError, UserError
from rlhf_host.distributed import Wire, bits_of, kept_bits, note_bits, note_sent
from rlhf_host.protocols import Buckets, Weights
from rlhf_sync_delta.files import (
    DELTA,
    WHOLE,
    delta_record,
    files_of,
    path_of,
    read,
    remove,
    steps_of,
    whole_record,
)
from rlhf_sync_delta.files import write as write_file
from rlhf_sync_delta.states import State, digest_of, kind_of

LAST = "rlhf_sync_delta"
"""Key in ``Weights.state``: the weights of the last step."""
OWNER = "run"
"""File in a shared directory: the run that writes there."""


def write(
    weights: Weights,
    directory: str,
    step: int,
    wire: Mapping[str, Any],
    bucket_bytes: int,
    keep: bool,
    whole: bool,
    whole_every: int,
    compress: bool,
    model: str | None,
    owner: str | None,
) -> None:
    """Writes the weights' changes since the last step; the first time in a process, or if ``whole``, all weights. All ranks
    gather, and rank 0 writes. The remaining arguments are the sync's options.

    Raises:
        RunError: the files cannot be written.
        UserError: another run writes there.
    """
    started, folder = time.perf_counter(), Path(directory)
    buckets = weights.buckets(bucket_bytes)
    try:
        if weights.rank:
            return
        before: State | None = weights.state.pop(LAST, None)
        if before is not None and before.step >= step:
            before = None
        try:
            if before is None:
                _begin(folder, step, owner, keep=keep)
            state = _gathered(buckets, Wire.from_plain(wire), before, step)
            alike = before is not None and _kinds(before) == _kinds(state)
            size = 0
            if alike and not whole:
                assert before is not None
                size += write_file(path_of(folder, step, DELTA), *delta_record(before, state, compress=compress))
                if keep and whole_every and step % whole_every == 0:
                    write_file(path_of(folder, step, WHOLE), *whole_record(state))
            elif whole or not _has(folder, state):
                path_of(folder, step, DELTA).unlink(missing_ok=True)
                first = Path(model) if model is not None and before is None else None
                size += write_file(path_of(folder, step, WHOLE), *whole_record(state, first))
            if not keep:
                remove(folder, [number for number, _, _ in files_of(folder) if number != step])
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written: {error.strerror}; make room there, or set --sync.keep false"
            ) from error
        weights.state[LAST] = state
        note_sent(weights, size, time.perf_counter() - started)
        if kept_bits(weights) is not None:
            note_bits(weights.state, {name: bits_of(tensor) for name, tensor in state.tensors.items()})
    finally:
        for _ in buckets:  # gathering is collective
            pass


def _begin(folder: Path, step: int, owner: str | None, *, keep: bool) -> None:
    """Removes what a killed process left half-written, and steps that this run will train again."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / OWNER
    if owner is not None:
        if mark.exists() and (other := mark.read_text("utf-8")) != owner and Path(other).is_dir():
            raise UserError(f"{folder} has the steps of {other}: give this run another --sync.directory")
        mark.write_text(owner, "utf-8")
    for left in folder.glob(".step-*.partial"):
        left.unlink(missing_ok=True)
    remove(folder, [number for number, _, _ in files_of(folder) if number > step or not keep])


def _gathered(buckets: Buckets, wire: Wire, before: State | None, step: int) -> State:
    """Returns a copy of all weights in their types on the way. Those that did not change share the memory of ``before``."""
    state, seen = State(step), dict[tuple[Any, ...], str]()
    for bucket in buckets:
        for name, tensor in bucket:
            copied = tensor.detach().to("cpu", wire.type_of(name, tensor.dtype), copy=True).contiguous()
            digest = digest_of(copied)
            kind = copied.dtype, copied.shape, digest
            if before is not None and before.digests.get(name) == digest and before.tensors[name].shape == copied.shape:
                copied = before.tensors[name]
            # Tied weights, which have several names, are kept once.
            other = seen.setdefault(kind, name)
            state.put(name, copied if other == name else state.tensors[other], digest)
    return state


def _kinds(state: State) -> dict[str, Any]:
    return {name: kind_of(tensor) for name, tensor in state.tensors.items()}


def _has(folder: Path, state: State) -> bool:
    """Returns True if the step is there, as a resumed run finds it, with these weights."""
    if state.step not in steps_of(folder):
        return False
    kinds = (path_of(folder, state.step, kind) for kind in (DELTA, WHOLE))
    try:
        return all(read(path).hash == state.hash for path in kinds if path.exists())
    except UserError:  # damaged
        return False
