"""Drawing: the distribution, its log-probability, truncation, and uniforms that depend on the key alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlhf_host.engines.embedded_rows import BLOCK, uniform_block
from rlhf_host.engines.sampling import Sampler, inverse_cdf
from rlhf_host.records.episodes import Sampling

LARGEST = 1.0 - 2.0**-53


def draw(logits, uniforms, *samplings):
    sampler = Sampler(samplings * (len(logits) // len(samplings)), torch.device("cpu"))
    return sampler.draw(logits, uniforms)


def test_uniforms_are_fixed_for_all_time():
    assert uniform_block([(7, 0, 3)], 0)[0, :3].tolist() == [0.7484435286258158, 0.06298111928329009, 0.5621611422723995]


def test_uniforms_depend_on_key_and_block_only():
    keys = [(1, 2, i) for i in range(5)] + [(12, i) for i in range(5)] + [(-1,), (2**80,)]
    whole = uniform_block(keys, 3)
    assert whole.shape == (len(keys), BLOCK)
    assert np.array_equal(uniform_block(keys[::-1], 3), whole[::-1])
    assert np.array_equal(uniform_block(keys[4:5], 3), whole[4:5])
    assert len(np.unique(whole)) == whole.size
    assert not np.isin(uniform_block(keys, 4), whole).any()


def test_uniforms_are_uniform():
    values = uniform_block([(0, i) for i in range(1000)], 0).ravel()
    assert (values >= 0).all()
    assert (values < 1).all()
    counts = np.histogram(values, 64, (0, 1))[0]
    expected = len(values) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 110  # 99.97 % quantile of chi-square with 63 degrees


@pytest.mark.parametrize("size", [3, 60, 2048, 2049, 5000, 8192])
def test_a_token_without_probability_is_never_drawn(size):
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(64, size, generator=generator).pow(20)
    weights[torch.rand(64, size, generator=generator) < 0.9] = 0.0
    weights[:, size // 2] = 1e-30
    weights[:8] = 0.0
    weights[:8, -1] = 1.0
    weights[8:16] = 0.0
    weights[8:16, 0] = 1e-38
    for value in (0.0, 1e-300, 0.5, 1.0 - 1e-9, LARGEST):
        tokens, _ = inverse_cdf(weights, torch.full((64,), value, dtype=torch.float64))
        assert tokens.min() >= 0
        assert tokens.max() < size
        assert (weights.gather(1, tokens[:, None]) > 0).all()


def test_large_vocabularies_are_scanned_by_blocks_to_the_same_tokens():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(16, 5000, generator=generator).pow(8)
    uniforms = torch.rand(16, generator=generator, dtype=torch.float64)
    tokens, total = inverse_cdf(weights, uniforms)
    cumulated = weights.double().cumsum(-1)
    expected = torch.searchsorted(cumulated, (uniforms * cumulated[:, -1])[:, None], right=True)[:, 0]
    assert torch.equal(tokens, expected)
    assert torch.allclose(total, cumulated[:, -1], rtol=1e-6)


@pytest.mark.parametrize("size", [11, 3000])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1),
        Sampling(1, temperature=0.6),
        Sampling(1, top_k=4),
        Sampling(1, top_p=0.7),
        Sampling(1, temperature=1.7, top_p=0.97),
        Sampling(1, min_p=0.2),
        Sampling(1, temperature=1.3, top_k=6, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
def test_logprobs_are_of_the_distribution_that_is_sampled(sampling, size):
    """Against transformers' own warpers, renormalised."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(200, size, generator=generator)
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    sampler = Sampler([replace(sampling, support=True)] * len(logits), torch.device("cpu"))
    tokens, logprobs = sampler.draw(logits, uniforms)

    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    warped = warpers(torch.zeros(200, 1, dtype=torch.int64), logits.clone()).log_softmax(-1)
    assert torch.isfinite(warped.gather(1, tokens[:, None])).all()
    assert (warped.gather(1, tokens[:, None])[:, 0] - logprobs).abs().max() < 2e-6
    assert torch.equal(sampler.support, warped.isfinite())


def test_rows_with_their_own_parameters_do_not_disturb_each_other():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 40, generator=generator)
    uniforms = torch.rand(6, generator=generator, dtype=torch.float64)
    samplings = [
        Sampling(1),
        Sampling(1, temperature=0),
        Sampling(1, top_k=3),
        Sampling(1, top_p=0.5),
        Sampling(1, temperature=2.0, min_p=0.3),
        Sampling(1, top_k=5, top_p=0.6),
    ]
    tokens, logprobs = draw(logits, uniforms, *samplings)
    for row, sampling in enumerate(samplings):
        token, logprob = draw(logits[row : row + 1], uniforms[row : row + 1], sampling)
        assert (int(token), float(logprob)) == (int(tokens[row]), pytest.approx(float(logprobs[row]), abs=1e-6))


def test_temperature_zero_is_the_largest_logit_with_logprob_zero():
    logits = torch.tensor([[0.0, 3.0, 2.9], [5.0, 1.0, 1.0]])
    tokens, logprobs = draw(logits, torch.tensor([0.999, 0.999], dtype=torch.float64), Sampling(1, temperature=0.0))
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, temperature=0.5), Sampling(1, top_p=0.8)], ids=str)
def test_frequencies_follow_the_probabilities(sampling):
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5, -3.0]]).expand(20_000, -1)
    uniforms = torch.from_numpy(uniform_block([(5, i) for i in range(20_000)], 0)[:, 0])
    tokens, logprobs = draw(logits, uniforms, sampling)
    counts = torch.bincount(tokens, minlength=6).double()
    probabilities = torch.zeros(6, dtype=torch.float64)
    probabilities[tokens] = logprobs.double().exp()
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-6)
    kept = probabilities > 0
    expected = 20_000 * probabilities[kept]
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert chi_square < 20.5  # 99.9 % quantile at 5 degrees of freedom; the seed is fixed


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_distribution_are_seen_in_their_own_row_alone(bad, size, temperature):
    logits = torch.zeros(2, size)
    logits[0, 1] = bad
    tokens, logprobs = draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), Sampling(1, temperature))
    assert logprobs.isfinite().tolist() == [False, True]
    assert tokens.max() < size


def test_forbidden_tokens_may_have_minus_infinity():
    tokens, logprobs = draw(
        torch.tensor([[-torch.inf, 0.0, -torch.inf]]), torch.tensor([0.5], dtype=torch.float64), Sampling(1)
    )
    assert (int(tokens), float(logprobs)) == (1, 0.0)
