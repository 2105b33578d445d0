"""Sums of weights' bits, at both ends of a sync."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_host.distributed.bits import bits_of, compare_bits
from rlhf_host.errors import RunError

TYPES = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
SUMS = st.dictionaries(st.sampled_from("abcd"), st.integers(-3, 3))


@settings(deadline=None)
@given(st.sampled_from([*TYPES]), st.integers(1, 40), st.data())
def test_one_bit_of_any_weight_changes_its_sum(dtype, size, data):
    whole = TYPES[dtype]
    weight = torch.randint(0, 100, (size,), dtype=whole).view(dtype)
    other = weight.clone()
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 8 * weight.itemsize - 2))
    other.view(whole)[place] ^= 1 << bit
    assert bits_of(weight) == bits_of(weight.clone()) != bits_of(other)
    assert bits_of(weight) == bits_of(weight.view(1, -1).expand(1, size))


@settings(deadline=None)
@given(SUMS, SUMS)
def test_weights_that_differ_or_are_at_one_end_alone_are_named(sent, came):
    wrong = sorted(name for name in "abcd" if (name in sent, sent.get(name)) != (name in came, came.get(name)))
    if not wrong:
        compare_bits(sent, came, "vllm", 3)
        return
    rest = f", and {len(wrong) - 1} more" if wrong[1:] else ""
    with pytest.raises(RunError, match=rf"vllm did not receive .* version 3 .*: {wrong[0]} differs{rest}$"):
        compare_bits(sent, came, "vllm", 3)
