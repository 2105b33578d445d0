"""Results of a layer whose tokens go through the exchange, in one process: the arithmetic without other ranks."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_backend_fsdp.experts import _exchanged

HIDDEN = 3


@pytest.fixture(scope="module")
def alone():
    if dist.is_initialized():  # by tests before these
        assert dist.get_world_size() == 1
        yield dist.group.WORLD
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 6), st.integers(0, 99))
def test_exchanged_tokens_have_the_results_and_gradients_of_a_plain_sum(alone, experts, chosen, tokens, seed):
    draw = torch.Generator().manual_seed(seed)
    matrices = torch.randn(experts, HIDDEN, HIDDEN, generator=draw, dtype=torch.float64)
    states = torch.randn(tokens, HIDDEN, generator=draw, dtype=torch.float64)
    index = torch.randint(0, experts, (tokens, chosen), generator=draw)
    weights = torch.rand(tokens, chosen, generator=draw, dtype=torch.float64)

    def compute(rows, numbers, ones):
        return torch.einsum("nij,nj->ni", matrices[numbers[:, 0]], rows).tanh() * ones

    found = []
    for exchanged in (True, False):
        own = [states.clone().requires_grad_(), weights.clone().requires_grad_()]
        if exchanged:
            out = _exchanged(compute, experts, alone, own[0], index, own[1])
        else:
            results = torch.einsum("nkij,nj->nki", matrices[index], own[0]).tanh()
            out = (results * own[1].unsqueeze(-1)).sum(1)
        grads = torch.autograd.grad((out**2).sum(), own) if tokens else [torch.zeros(0)]
        found.append([out.detach(), *grads])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
