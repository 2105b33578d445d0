"""What can be asked of the sampling, and what cannot."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_host import Sampling
from rlhf_host.records.sampling import misfit

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", [0, -1, 2.5, "4", True, None, 2**40, NAN]),
        ("temperature", [1e-39, 5e-324, 0.009, -1.0, -0.5, NAN, INFINITE, 101.0, 1e39, "1", True, None, 1j]),
        ("top_p", [0, 0.0, 1e-300, -0.1, 1.01, NAN, INFINITE, "1", None, True]),
        ("top_k", [-1, 2.0, 2**31, 2**70, NAN, "3", None, True]),
        ("min_p", [-0.1, 1.1, NAN, INFINITE, "0", None]),
        ("stop", [("",), ("a", ""), (3,), "abc", None, (None,), ({},)]),
        ("stop_token_ids", [(-1,), (2**31,), (10**12,), ("a",), (1.5,), (True,), None, 3]),
    ],
)
def test_what_no_engine_can_sample_with(name, values):
    for value in values:
        asked = Sampling(**{"max_new_tokens": 4, name: value})
        assert (misfit(asked) or "").startswith(f"{name} should be "), value


@pytest.mark.parametrize(
    "asked",
    [
        Sampling(1),
        Sampling(np.int64(4), np.float32(0.01), np.float64(1.0), np.int32(3), np.float16(0.5)),
        Sampling(4, 0, 1, 0, 0, ("é",), (0, 5)),
        Sampling(2**31 - 1, 100.0, 1e-6, 2**31 - 1, 1.0, ["a"], [np.int64(3)]),
    ],
)
def test_what_can(asked):
    assert misfit(asked) is None
