"""Advantages and returns against TRL, verl and OpenRLHF: the plugins' own classes on one side, the published code on the other."""

from types import SimpleNamespace

import pytest
import torch
from rlhf_plugin_grpo import GDPO, GRPO, DrGRPO
from rlhf_plugin_ppo import PPO
from rlhf_plugin_reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rlhf_plugin_rloo import RLOO

from rlhf_host import functional as F

RAGGED = {"lengths": (5, 7, 3, 6, 4, 7, 2), "groups": (4, 1, 4, 1, 1, 4, 1)}
"""Two groups of three and four, not adjacent: what only verl takes."""


def ours(plugin, case, **options):
    return plugin(plugin.Options(**options)).compute_advantages(case.batch).advantages


def verls(function, case, **arguments):
    """``[B, T]`` by an estimator of outcome rewards; the reward lies on the last token."""
    arguments = {"index": case.batch.group_id.numpy(), **arguments}
    return function(token_level_rewards=case.token_rewards + case.kl, response_mask=case.mask.double(), **arguments)[0]


def trls(trl, case, rewards=None, trainer="grpo", **settings):
    """``[B]`` by the statements of ``GRPOTrainer`` or ``RLOOTrainer``; groups must be equal and adjacent."""
    rewards = case.batch.rewards.double().unsqueeze(-1) if rewards is None else rewards
    weights = torch.tensor(settings.pop("weights", [1.0] * rewards.shape[1]), dtype=rewards.dtype)
    settings = {
        "reward_weights": weights,
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
        **settings,
    }
    names = {
        "self": SimpleNamespace(reward_funcs=[None] * rewards.shape[1], **settings),
        "rewards_per_func": rewards,
        "num_generations": int((case.batch.group_id == case.batch.group_id[0]).sum()),
        "device": torch.device("cpu"),
        "unscorable_mask": rewards.isnan().all(dim=1),
    }
    if trainer == "rloo":
        names |= {"old_per_token_logps": case.old, "ref_per_token_logps": case.reference, "completion_mask": case.mask.double()}
        names |= {"gather": lambda x: x}
        found = trl.statements(trl.rloo.RLOOTrainer, "# Apply weights to each reward", "is_std_zero", **names)
    else:
        first = "if self.multi_objective_aggregation"
        found = trl.statements(trl.grpo.GRPOTrainer, first, "# Unscorable completions (", **names)
    return found.advantages


@pytest.fixture
def with_kl(make_case):
    """A batch whose rewards hold a KL penalty of 0.1 per nat, on our side as ``shaped``."""

    def make(*arguments, coef=0.1, **options):
        case = make_case(*arguments, **options)
        case.kl = -coef * (case.old - case.reference) * case.mask
        if coef:
            case.batch.shaped = case.kl.masked_fill(~case.mask, float("nan"))
        return case

    return make


def on_tokens(values, case):
    return values.unsqueeze(-1) * case.mask


def close(mine, other, rtol=1e-5, atol=1e-6):
    assert mine.abs().max() > 0.01, "nothing was compared"
    torch.testing.assert_close(mine.double(), other.double(), rtol=rtol, atol=atol)


# --- GAE ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0)])
def test_ppo_is_that_of_verl_and_openrlhf(with_kl, verl, openrlhf, gamma, lam):
    case = with_kl()
    found = PPO(PPO.Options(gamma=gamma, lam=lam)).compute_advantages(case.batch)
    mask = case.mask.double()
    advantages, returns = verl.core.compute_gae_advantage_return(case.token_rewards + case.kl, case.values, mask, gamma, lam)
    close(found.returns, returns * mask)
    close(found.advantages, unbiased_to_population(advantages, case) * mask)
    kl = case.old - case.reference
    advantages, returns = openrlhf.advantages(case, "gae", kl=kl, kl_coef=0.1, gamma=gamma, lambd=lam)
    close(found.returns, returns * mask)
    close(found.advantages, advantages * mask)


def unbiased_to_population(whitened, case):
    """verl divides by the unbiased standard deviation of ``N`` tokens, we and OpenRLHF by that of the population."""
    count = case.mask.sum()
    return whitened * (count / (count - 1)).sqrt()


@pytest.mark.parametrize(("gamma", "lam"), [(0.97, 0.9), (1.0, 1.0)])
def test_observations_are_no_steps_of_gae_as_in_verl(with_kl, verl, gamma, lam):
    case = with_kl(observations=True)
    found = PPO(PPO.Options(gamma=gamma, lam=lam)).compute_advantages(case.batch)
    mask = case.mask.double()
    # verl multiplies values in masked places by 0; NaN would stay NaN.
    advantages, returns = verl.core.compute_gae_advantage_return(case.token_rewards + case.kl, case.values, mask, gamma, lam)
    close(found.returns, returns * mask)
    close(found.advantages, unbiased_to_population(advantages, case) * mask)


def test_openrlhf_counts_observations_as_steps_of_value_zero(with_kl, openrlhf):
    case = with_kl(observations=True, coef=0.0)
    found = PPO(PPO.Options(gamma=1.0, lam=0.95)).compute_advantages(case.batch)
    _, returns = openrlhf.advantages(case, "gae", lambd=0.95)
    differs = ~torch.isclose(found.returns.double(), returns * case.mask, atol=1e-5)
    for row in range(len(case.batch)):
        actions = case.mask[row].nonzero().flatten().tolist()
        # Up to the last observation the chain is another; after it, the same.
        last_observation = max((t for t in range(actions[-1]) if not case.mask[row, t]), default=-1)
        assert all(bool(differs[row, t]) == (t < last_observation) for t in actions)


def test_with_lambda_one_and_no_discount_zero_value_steps_cancel(with_kl, openrlhf):
    case = with_kl(observations=True, coef=0.0)
    found = PPO(PPO.Options(gamma=1.0, lam=1.0)).compute_advantages(case.batch)
    close(found.returns, openrlhf.advantages(case, "gae")[1] * case.mask)


# --- REINFORCE++ --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_is_that_of_verl_and_openrlhf(with_kl, verl, openrlhf, gamma):
    case = with_kl()
    found = ours(ReinforcePP, case, gamma=gamma)
    config = SimpleNamespace(gamma=gamma)
    other = verls(verl.core.compute_reinforce_plus_plus_outcome_advantage, case, config=config)
    close(found, unbiased_to_population(other, case))
    other, _ = openrlhf.advantages(case, "reinforce", kl=case.old - case.reference, kl_coef=0.1, gamma=gamma)
    close(found, other * case.mask)


def test_reinforce_pp_discounts_over_action_tokens_as_verl_does_and_openrlhf_does_not(with_kl, verl, openrlhf):
    case = with_kl(observations=True)
    found = ours(ReinforcePP, case, gamma=0.9)
    config = SimpleNamespace(gamma=0.9)
    other = verls(verl.core.compute_reinforce_plus_plus_outcome_advantage, case, config=config)
    close(found, unbiased_to_population(other, case))
    other, _ = openrlhf.advantages(case, "reinforce", kl=case.old - case.reference, kl_coef=0.1, gamma=0.9)
    assert (found - other * case.mask).abs().max() > 0.05


def test_reinforce_pp_baseline_is_openrlhfs_with_the_kl_to_the_right_of_each_token(with_kl, openrlhf):
    case = with_kl()
    other, _ = openrlhf.advantages(case, "reinforce_baseline", kl=case.old - case.reference, kl_coef=0.1)
    close(ours(ReinforcePPBaseline, case), other * case.mask)


def test_verls_reinforce_pp_baseline_puts_the_kl_into_the_baseline(with_kl, verl):
    function = verl.core.compute_reinforce_plus_plus_baseline_outcome_advantage
    without = with_kl(coef=0.0, **RAGGED)
    close(ours(ReinforcePPBaseline, without), unbiased_to_population(verls(function, without), without))
    case = with_kl(**RAGGED)
    found, other = ours(ReinforcePPBaseline, case), unbiased_to_population(verls(function, case), case)
    assert (found - other).abs().max() > 0.01
    # theirs: one number per row
    assert all(torch.unique(other[row][case.mask[row]].float()).numel() == 1 for row in range(7))


# --- RLOO ---------------------------------------------------------------------------------------------


def test_rloo_is_that_of_verl_and_trl_with_the_kl_in_the_sequences_reward(with_kl, verl, trl):
    case = with_kl(**RAGGED)
    close(ours(RLOO, case), verls(verl.core.compute_rloo_outcome_advantage, case))
    case = with_kl()
    close(ours(RLOO, case), verls(verl.core.compute_rloo_vectorized_outcome_advantage, case))
    theirs = trls(trl, case, trainer="rloo", beta=0.1, reward_clip_range=None, normalize_advantages=False)
    close(ours(RLOO, case), on_tokens(theirs, case))


def test_rlooss_suffix_placement_is_openrlhfs(with_kl, openrlhf):
    case = with_kl()
    theirs, _ = openrlhf.advantages(case, "rloo", kl=case.old - case.reference, kl_coef=0.1)
    close(ours(RLOO, case, kl_placement="suffix"), theirs * case.mask)
    assert (ours(RLOO, case) - theirs * case.mask).abs().max() > 0.01


# --- GRPO ---------------------------------------------------------------------------------------------


def test_grpo_is_that_of_trl_verl_and_openrlhf_but_for_epsilon(with_kl, trl, verl, openrlhf):
    case = with_kl(coef=0.0)
    close(ours(GRPO, case, std_eps=1e-4), on_tokens(trls(trl, case), case))
    close(ours(GRPO, case, std_eps=1e-6), verls(verl.core.compute_grpo_outcome_advantage, case))
    close(ours(GRPO, case, std_eps=1e-9), openrlhf.advantages(case, "group_norm")[0] * case.mask)


@pytest.mark.parametrize(("plugin", "name", "options"), [(GRPO, "group_norm", {"std_eps": 1e-9}), (DrGRPO, "dr_grpo", {})])
def test_openrlhf_adds_the_kl_after_the_groups_statistics(with_kl, openrlhf, plugin, name, options):
    case = with_kl()
    theirs = openrlhf.advantages(case, name, kl=case.old - case.reference, kl_coef=0.1)[0] * case.mask
    to_the_end = case.kl.flip(-1).cumsum(-1).flip(-1) * case.mask
    close(ours(plugin, with_kl(coef=0.0), **options) + to_the_end, theirs)
    assert (ours(plugin, case, **options) - theirs).abs().max() > 0.01


def test_grpo_with_unequal_groups_and_kl_in_the_reward_is_verls(with_kl, verl):
    case = with_kl(**RAGGED)
    close(ours(GRPO, case), verls(verl.core.compute_grpo_outcome_advantage, case))
    close(ours(GRPO, case), verls(verl.core.compute_grpo_vectorized_outcome_advantage, case))
    without = {"norm_adv_by_std_in_grpo": False}
    close(ours(GRPO, case, std="none"), verls(verl.core.compute_grpo_outcome_advantage, case, **without))


def test_grpos_standard_deviation_over_the_batch_is_trls(with_kl, trl):
    case = with_kl(coef=0.0)
    close(ours(GRPO, case, std="batch", std_eps=1e-4), on_tokens(trls(trl, case, scale_rewards="batch"), case))
    close(ours(GRPO, case, std="none"), on_tokens(trls(trl, case, scale_rewards="none"), case))


def test_dr_grpo_is_that_of_all_three(with_kl, trl, verl, openrlhf):
    case = with_kl(coef=0.0)
    found = ours(DrGRPO, case)
    close(found, on_tokens(trls(trl, case, scale_rewards="none"), case))
    close(found, verls(verl.core.compute_grpo_outcome_advantage, case, norm_adv_by_std_in_grpo=False))
    close(found, openrlhf.advantages(case, "dr_grpo")[0] * case.mask)


def test_eight_equal_rewards_are_noise_elsewhere_and_exactly_zero_here(with_kl, trl, verl, openrlhf):
    """0.1 eight times in float32: rounding leaves a mean of 0.10000001, and a small epsilon makes an advantage of that."""
    case = with_kl([3] * 8, [0] * 8, rewards=[0.1] * 8, coef=0.0)
    case.token_rewards, case.kl = case.token_rewards.float(), case.kl.float()
    for plugin, options in ((GRPO, {"std_eps": 1e-9}), (GRPO, {}), (RLOO, {}), (DrGRPO, {}), (GDPO, {})):
        assert ours(plugin, case, **options).eq(0).all()
    noise = {
        "openrlhf": openrlhf.advantages(case, "group_norm")[0],
        "verl": verls(verl.core.compute_grpo_outcome_advantage, case, epsilon=1e-6).float(),
        "trl": trls(trl, case, case.batch.rewards.unsqueeze(-1)),
    }
    largest = {name: float(value.abs().max()) for name, value in noise.items()}
    assert largest == pytest.approx({"openrlhf": 0.83, "verl": 7e-3, "trl": 7e-5}, rel=0.2)


def test_a_group_of_one_has_no_advantage_here_and_its_raw_reward_in_verl(with_kl, verl):
    case = with_kl((3, 4, 5), (0, 0, 1), rewards=[1.0, 0.0, 5.0], coef=0.0)
    for plugin in (GRPO, RLOO, DrGRPO, ReinforcePPBaseline):
        assert ours(plugin, case)[2].eq(0).all()
        assert not plugin(plugin.Options()).loss_masks(case.batch)[2].any()
    for function in (verl.core.compute_grpo_outcome_advantage, verl.core.compute_rloo_outcome_advantage):
        assert verls(function, case)[2].unique().tolist() == pytest.approx([5.0], rel=1e-5)
    assert verls(verl.core.compute_rloo_vectorized_outcome_advantage, case)[2].eq(0).all()


def test_rewards_are_clipped_before_the_baseline_but_openrlhf_clips_the_advantage(with_kl, trl, openrlhf):
    case = with_kl([3] * 4, [0] * 4, rewards=[10.0, 1.0, 0.0, 0.0], coef=0.0)
    theirs, _ = openrlhf.advantages(case, "rloo", reward_clip=(-1.0, 1.0))
    assert theirs[:, 0].tolist() == pytest.approx([1.0, -1.0, -1.0, -1.0])
    case.batch.rewards = case.batch.rewards.clamp(-1, 1)  # what a transform_rewards hook does
    clipped = ours(RLOO, case)
    assert clipped[:, 0].tolist() == pytest.approx([2 / 3, 2 / 3, -2 / 3, -2 / 3])
    raw = torch.tensor([[10.0], [1.0], [0.0], [0.0]], dtype=torch.float64)
    first = trls(trl, case, raw, trainer="rloo", beta=0.0, reward_clip_range=(-1.0, 1.0), normalize_advantages=False)
    close(clipped, on_tokens(first, case))


# --- GDPO ---------------------------------------------------------------------------------------------


@pytest.fixture
def two_rewards(with_kl):
    def make(lengths=(5, 7, 3, 6, 4, 7)):
        case = with_kl(lengths, coef=0.0)
        generator = torch.Generator().manual_seed(5)
        parts = torch.stack([torch.randn(6, generator=generator), 30 * torch.rand(6, generator=generator)], dim=-1)
        case.batch.plugin_rewards, case.batch.reward_weights = parts, (1.0, 0.5)
        case.batch.reward_names = ("right", "short")
        case.batch.rewards = parts @ torch.tensor([1.0, 0.5])
        return case

    return make


def test_gdpo_is_trls_normalize_then_sum_but_for_epsilon(two_rewards, trl):
    case = two_rewards()
    parts = case.batch.plugin_rewards.double()
    theirs = trls(trl, case, parts, weights=[1.0, 0.5], multi_objective_aggregation="normalize_then_sum")
    close(ours(GDPO, case, std_eps=1e-4), on_tokens(theirs, case))


def test_gdpo_is_verls_where_all_answers_are_as_long_and_verl_weighs_them_by_length_elsewhere(two_rewards, verl):
    def gdpo(case):
        batch = {"prompts": torch.zeros(6, 1), "attention_mask": torch.cat([torch.ones(6, 1), case.mask], dim=1).long()}
        names = case.batch.reward_names
        rewards = {name: column.numpy() for name, column in zip(names, case.batch.plugin_rewards.T, strict=True)}
        config = {"gdpo_reward_keys": list(names), "gdpo_reward_weights": [1.0, 0.5]}
        return verls(verl.core.compute_gdpo_outcome_advantage, case, config=config, non_tensor_batch=rewards, batch=batch)

    case = two_rewards([4] * 6)
    # verl divides by the spread of 24 tokens, unbiased; we by that of 6 episodes.
    close(ours(GDPO, case), gdpo(case) * ((6 - 1) / 6 * 24 / (24 - 1)) ** 0.5, rtol=1e-4)
    case = two_rewards((1, 9, 2, 9, 1, 8))
    assert (ours(GDPO, case)[:, 0] - gdpo(case)[:, 0]).abs().max() > 0.1


# --- whitening ----------------------------------------------------------------------------------------


def test_whitening_over_two_tokens_differs_by_the_factor_of_the_unbiased_variance(verl):
    values, mask = torch.tensor([[1.0, 3.0]]), torch.ones(1, 2, dtype=torch.bool)
    assert F.whiten(values, mask).tolist() == [[-1.0, 1.0]]
    assert verl.functional.masked_whiten(values, mask.float())[0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
