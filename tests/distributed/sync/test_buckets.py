"""Weights as bytes and back; names on the way."""

from __future__ import annotations

import pytest
import torch

from rlhf_host.distributed.sync.buckets import BucketLayout, Wire, renamed
from rlhf_host.errors import RunError

BUCKET = [
    ("matrix", torch.arange(15.0).view(3, 5).t()),
    ("half", torch.tensor([1.5, -2.25], dtype=torch.bfloat16)),
    ("flag", torch.tensor([True, False, True])),
    ("count", torch.tensor(7)),
    ("nothing", torch.empty(0, 4)),
]


def test_a_packed_bucket_comes_out_as_it_went_in():
    layout = BucketLayout.of(BUCKET)
    buffer = torch.full((layout.bytes + 100,), 255, dtype=torch.uint8)
    layout.pack(BUCKET, buffer)
    assert set(buffer[layout.bytes :].tolist()) == {255}
    for (name, tensor), (found_name, found) in zip(
        BUCKET, BucketLayout.from_plain(layout.to_plain()).views(buffer), strict=True
    ):
        assert (found_name, found.dtype, found.shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)


def test_tensors_do_not_overlap_and_are_aligned():
    entries = BucketLayout.of(BUCKET).entries
    ends = [offset + size for *_, offset, size in entries]
    assert all(offset % 64 == 0 for *_, offset, _ in entries)
    assert all(end <= later[3] for end, later in zip(ends, entries[1:], strict=False))


def test_only_floating_point_is_cast():
    layout = BucketLayout.of(BUCKET, Wire(torch.float16))
    buffer = torch.zeros(layout.bytes, dtype=torch.uint8)
    layout.pack(BUCKET, buffer)
    found = dict(layout.views(buffer))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "matrix": torch.float16, "half": torch.float16, "flag": torch.bool, "count": torch.int64, "nothing": torch.float16,
    }  # fmt: skip
    assert torch.equal(found["half"], torch.tensor([1.5, -2.25], dtype=torch.float16))


def names(given, *weights):
    return [name for bucket in renamed([[(name, torch.zeros(1)) for name in weights]], given) for name, _ in bucket]


def test_the_longest_fitting_prefix_renames_and_whole_names_go_first():
    given = {"a.": "x.", "a.b.": "y.", "a.b.c": "z"}
    assert names(given, "a.d", "a.b.d", "a.b.c", "ab.c") == ["x.d", "y.d", "z", "ab.c"]


def test_two_weights_cannot_get_one_name():
    with pytest.raises(RunError, match=r"rename gives a.w and b.w the same name, w"):
        names({"a.": "", "b.": ""}, "a.w", "b.w")
