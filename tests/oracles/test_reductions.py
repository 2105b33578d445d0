"""How token losses become one number, against TRL, verl and OpenRLHF; the loss reduced is ``pg`` or ``clip``."""

import pytest
import torch
from rlhf_plugin_grpo import DrGRPO

from rlhf_host import Outputs
from rlhf_host.records.tensors import Aggregation
from rlhf_host.training.reduction import token_weights

# OpenRLHF has token means and means of sequence means only; no oracle averages per prompt.
VERL = {
    "token-mean": {"aggregation": "token-mean"},
    "sequence-mean-token-mean": {"aggregation": "seq-mean-token-mean"},
    "sequence-mean-token-sum": {"aggregation": "seq-mean-token-sum"},
    "sequence-mean-token-sum-over(64)": {
        "aggregation": "seq-mean-token-sum-norm",
        "global_batch_info": {"loss_scale_factor": 64},
    },
}
TRL = {
    "token-mean": {"loss_type": "dapo"},
    "sequence-mean-token-mean": {"loss_type": "grpo"},
    "sequence-mean-token-sum": {"loss_type": "luspo"},
    "sequence-mean-token-sum-over(64)": {"loss_type": "dr_grpo", "max_completion_length": 64},
}
OPENRLHF = {"token-mean": True, "sequence-mean-token-mean": False}


@pytest.mark.parametrize("observations", [False, True])
@pytest.mark.parametrize("aggregation", VERL)
def test_verl(make_case, same, verl, aggregation, observations):
    case = make_case(observations=observations)
    same(case.ours(loss="pg", aggregation=aggregation), verl.loss("gpg", case, **VERL[aggregation]), case.logprobs)


@pytest.mark.parametrize("observations", [False, True])
@pytest.mark.parametrize("aggregation", TRL)
def test_trl(make_case, same, trl, aggregation, observations):
    case = make_case(observations=observations)
    # TRL rescales its token count to one accumulation window; here the window is the batch.
    ours = case.ours(loss="clip", dual_clip=None, aggregation=aggregation)
    same(ours, trl.loss(case, steps_per_generation=1, **TRL[aggregation]), case.logprobs)


@pytest.mark.parametrize("aggregation", OPENRLHF)
def test_openrlhf(make_case, same, openrlhf, aggregation):
    case = make_case(observations=True)
    theirs = openrlhf.policy(case, clip_eps_high=0.28, token_level_loss=OPENRLHF[aggregation])
    same(case.ours(loss="clip", dual_clip=None, aggregation=aggregation), theirs, case.logprobs)


def test_dr_grpos_own_loss_is_that_of_trl_and_verl_and_openrlhf_has_no_constant(make_case, same, trl, verl, openrlhf):
    case = make_case(per_token=False)
    case.batch.max_new_tokens = 64
    plugin = DrGRPO(DrGRPO.Options(dual_clip=None))
    ours = case.reduced(lambda logprobs: plugin.compute_loss(Outputs(logprobs=logprobs), case.batch))
    same(ours, trl.loss(case, loss_type="dr_grpo", max_completion_length=64), case.logprobs)
    settings = VERL["sequence-mean-token-sum-over(64)"]
    same(ours, verl.loss("vanilla", case, clip_ratio_high=0.28, clip_ratio_c=1e9, **settings), case.logprobs)
    for token_level in (True, False):
        theirs = openrlhf.policy(case, clip_eps_high=0.28, token_level_loss=token_level)(case.logprobs)
        assert float(theirs) != pytest.approx(float(ours(case.logprobs)), rel=0.1)


@pytest.fixture
def masked_row(make_case):
    """A batch of six whose third row counts nowhere."""
    case = make_case()
    case.mask[2] = False
    case.batch.loss_mask = case.mask
    return case


@pytest.mark.parametrize("aggregation", ["sequence-mean-token-mean", "sequence-mean-token-sum-over(64)"])
def test_a_row_without_tokens_is_no_sequence_but_trl_counts_it(masked_row, same, trl, verl, openrlhf, aggregation):
    case = masked_row
    ours = case.ours(loss="clip", dual_clip=None, aggregation=aggregation)
    same(ours, verl.loss("vanilla", case, clip_ratio_high=0.28, clip_ratio_c=1e9, **VERL[aggregation]), case.logprobs)
    if aggregation in OPENRLHF:
        same(ours, openrlhf.policy(case, clip_eps_high=0.28, token_level_loss=False), case.logprobs)
    theirs = trl.loss(case, **TRL[aggregation])
    same(lambda x: ours(x) * 5 / 6, theirs, case.logprobs)


def test_micro_batches_sum_to_the_batchs_token_mean_but_trls_bnpo_averages_their_means(make_case, trl):
    case = make_case()
    whole = case.ours(loss="clip", dual_clip=None, aggregation="token-mean")(case.logprobs)
    split = (slice(0, 2), slice(2, 6))
    weights = token_weights(Aggregation.parse("token-mean"), case.mask, case.batch.group_id, case.batch.episode_id)
    losses = -torch.minimum(ratio(case) * case.advantages, ratio(case).clamp(0.8, 1.28) * case.advantages)
    torch.testing.assert_close(sum((weights[rows] * losses[rows]).sum() for rows in split), whole, rtol=1e-6, atol=1e-9)

    means = [trl.loss(part(case, rows), loss_type="bnpo")(case.logprobs[rows]) for rows in split]
    assert abs(float(sum(means) / 2 - whole)) > 1e-3


def ratio(case):
    return (case.logprobs - case.old).exp()


def part(case, rows):
    fields = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in vars(case).items()}
    return type(case)(**{**fields, "batch": case.batch.select(range(len(case.batch))[rows], trim=False)})
