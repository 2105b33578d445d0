"""Sequence parallelism: slices of a line in two processes give one process's outputs and gradients, and half the memory."""

from __future__ import annotations

import pytest

from . import sliced
from .group import Group

GROUPED = [(20, 9), (20, 5), (20, 1), (7, 6), (7, 12)]
OWNERS = [0, 0, 0, 1, 1]


@pytest.fixture(scope="module")
def two(fork, environment, tmp_path_factory):
    group = Group(fork, environment, tmp_path_factory.mktemp("slices"), 2, 2, sliced.__file__, sliced=True)
    yield group
    group.close()


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (6, 3)])
def test_slices_compute_what_one_process_does(two, heads):
    for found in two(sliced.compared, "qwen2", heads, GROUPED, OWNERS, ["logprobs", "entropy"]):
        assert found["outputs"] <= 1e-5
        assert found["gradients"] <= 1e-5


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [
        ("window", ["logprobs"]),
        ("qwen3", ["logprobs", "logits"]),
        ("critic", ["values", "scores", "bootstrap", "token_scores"]),
    ],
)
@pytest.mark.parametrize("shared_prefix", ["auto", "off"])
def test_windows_norms_and_scalar_heads_are_right(two, kind, outputs, shared_prefix):
    for found in two(sliced.compared, kind, (8, 4), GROUPED, OWNERS, outputs, shared_prefix):
        assert found["outputs"] <= 1e-5
        assert found["gradients"] <= 1e-5


def test_replayed_support_is_that_of_each_process_s_tokens(two):
    for found in two(sliced.compared, "qwen2", (8, 8), GROUPED, OWNERS, ["logprobs", "entropy"], "auto", True):
        assert found["outputs"] <= 1e-5
        assert found["gradients"] <= 1e-5


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
def test_each_process_keeps_about_half(two, heads):
    for found in two(sliced.compared, "qwen2", heads, [(1, 4095)], [0], ["logprobs"]):
        assert found["gradients"] <= 1e-5
        assert found["kept"] <= 0.6
        assert found["cost"] == 2048


def test_a_process_without_anything_to_read_takes_part(two):
    for found in two(sliced.compared, "qwen2", (8, 8), [(60, 2)], [0], ["logprobs"]):
        assert found["gradients"] <= 1e-5


def test_heads_that_cannot_be_dealt_are_refused(two):
    for said in two(sliced.refused, "qwen2", (3, 3)):
        assert said == (
            "UserError: sequence_parallel 2 deals attention heads to processes, and the model has 3: choose a divisor"
        )
