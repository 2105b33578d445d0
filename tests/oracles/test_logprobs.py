"""Log-probabilities and entropy of the chunked head against TRL, verl and OpenRLHF, at a sampling temperature."""

import pytest
import torch

from rlhf_host import LossTerm, Outputs
from rlhf_host import functional as F
from rlhf_host.models.logprobs import token_logprobs

TEMPERATURE = 0.7


@pytest.fixture
def head():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return normal(11, 8), normal(50, 8), torch.randint(50, (11,), generator=generator)


def test_logprobs_are_those_of_all_three(head, trl, verl, openrlhf):
    hidden, weight, targets = head
    mine, _ = token_logprobs(hidden, weight, None, targets, TEMPERATURE, chunk_tokens=4)
    logits = hidden @ weight.T
    torch.testing.assert_close(mine, trl.utils.selective_log_softmax(logits / TEMPERATURE, targets))
    torch.testing.assert_close(mine, verl.functional.logprobs_from_logits(logits / TEMPERATURE, targets))
    torch.testing.assert_close(mine, openrlhf.utils.log_probs_from_logits(logits, targets, TEMPERATURE))


def test_entropy_and_its_gradient_are_those_of_trl_and_verl(head, trl, verl):
    hidden, weight, targets = head

    def gradient(entropy_of):
        leaf = hidden.clone().requires_grad_()
        entropy = entropy_of(leaf)
        entropy.square().sum().backward()
        return entropy.detach(), leaf.grad

    options = {"chunk_tokens": 4, "with_entropy": True, "entropy_grad": True}
    mine = gradient(lambda x: token_logprobs(x, weight, None, targets, TEMPERATURE, **options)[1])
    for oracle in (trl.utils.entropy_from_logits, verl.functional.entropy_from_logits):
        torch.testing.assert_close(mine, gradient(lambda x, of=oracle: of(x @ weight.T / TEMPERATURE)))


def bonus(case, aggregation):
    """The entropy term alone, as a function of the entropies."""
    options = F.PolicyLossOptions(loss="pg", entropy_coef=0.01, aggregation=aggregation)

    def items(entropy):
        found = F.policy_loss(Outputs(logprobs=case.batch.old_logprobs, entropy=entropy), case.batch, options)
        return [item for item in found if isinstance(item, LossTerm) and item.name == "entropy"]

    return case.reduced(items)


def test_the_bonus_is_reduced_as_the_policy_loss_is_as_in_verl(make_case, same, verl):
    case = make_case()
    mask, entropies = case.mask.double(), case.values.abs() + 1
    for mine, theirs in (("token-mean", "token-mean"), ("sequence-mean-token-mean", "seq-mean-token-mean")):
        same(bonus(case, mine), lambda x, how=theirs: -0.01 * verl.core.agg_loss(x, mask, how), entropies)


def test_trls_bonus_is_a_token_mean_whatever_the_loss(make_case, same, trl):
    case = make_case()
    case.advantages = torch.zeros_like(case.advantages)
    entropies = case.values.abs() + 1

    def theirs(x):
        return trl.loss(case, loss_type="grpo", entropies=x, entropy_coef=0.01)(case.logprobs)

    same(bonus(case, "token-mean"), theirs, entropies)
    assert abs(float(bonus(case, "sequence-mean-token-mean")(entropies) - theirs(entropies))) > 1e-5
