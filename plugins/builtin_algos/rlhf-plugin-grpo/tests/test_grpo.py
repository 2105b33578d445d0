"""GRPO and Dr. GRPO against hand-worked cases and float64 loops."""

import importlib.metadata
import inspect
import statistics

import pytest
import rlhf_plugin_grpo.dr_grpo
import rlhf_plugin_grpo.gdpo
import rlhf_plugin_grpo.group
import rlhf_plugin_grpo.grpo
import torch
from pydantic import ValidationError
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_grpo import GDPO, GRPO, DrGRPO

from rlhf_host import TOKEN_MEAN, Aggregation, LossTerm, Output, Outputs
from rlhf_host import functional as F


def advantages(batch, algorithm=GRPO, **options):
    return algorithm(algorithm.Options(**options)).compute_advantages(batch).advantages


def mixed_batch():
    """Unequal, scattered groups, one of them a single sample; two trajectories of one episode; observations; KL."""
    batch = make_batch([7, 4, 9, 1, 6, 5, 8, 2, 3], groups=[0, 1, 0, 2, 1, 0, 1, 1, 3], seed=5, observations=True)
    batch.episode_id = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 7])
    batch.shaped = 0.1 * torch.randn(batch.action_mask.shape, generator=torch.Generator().manual_seed(2))
    return batch


def sequence_rewards(batch):
    """Per row, the reward and its KL."""
    kl = [float(row[mask].double().sum()) for row, mask in zip(batch.shaped, batch.action_mask, strict=True)]
    return [reward + sums for reward, sums in zip(batch.rewards.tolist(), kl, strict=True)]


def episodes(batch, values):
    """group → episode → the mean of its rows' values."""
    rows: dict[int, dict[int, list[float]]] = {}
    for group, episode, value in zip(batch.group_id.tolist(), batch.episode_id.tolist(), values, strict=True):
        rows.setdefault(group, {}).setdefault(episode, []).append(value)
    return {group: {e: sum(v) / len(v) for e, v in members.items()} for group, members in rows.items()}


def by_loop(batch, std, eps=1e-6):
    """The formula, row by row."""
    rewards = sequence_rewards(batch)
    grouped = episodes(batch, rewards)
    everyone = [value for members in grouped.values() for value in members.values()]
    found = []
    for group, reward in zip(batch.group_id.tolist(), rewards, strict=True):
        members = list(grouped[group].values())
        if len(members) == 1:
            found.append(0.0)
            continue
        scale = {"group": statistics.stdev(members) + eps, "batch": statistics.stdev(everyone) + eps, "none": 1.0}[std]
        found.append((reward - sum(members) / len(members)) / scale)
    return found


def on_every_action(batch, values):
    return torch.tensor(values).unsqueeze(-1) * batch.action_mask


def test_hand_worked_group_on_every_action_token():
    batch = make_batch([2, 3, 1, 2], groups=[0, 0, 0, 0], rewards=[1.0, 0.0, 0.0, 1.0])
    # Mean 1/2; unbiased variance 4·(1/4)/3 = 1/3; so ±(1/2)·√3.
    expected = on_every_action(batch, [0.8660254, -0.8660254, -0.8660254, 0.8660254])
    torch.testing.assert_close(advantages(batch), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_every_std_agrees_with_a_float64_loop(std):
    batch = mixed_batch()
    torch.testing.assert_close(advantages(batch, std=std), on_every_action(batch, by_loop(batch, std)))


def test_dr_grpo_agrees_with_a_float64_loop():
    batch = mixed_batch()
    torch.testing.assert_close(advantages(batch, DrGRPO), on_every_action(batch, by_loop(batch, "none")))


def test_std_eps_is_added_to_the_standard_deviation():
    batch = make_batch([1, 1], groups=[0, 0], rewards=[1.0, 0.0])
    assert advantages(batch, std_eps=1.0)[:, 0].tolist() == pytest.approx([0.5 / (0.5**0.5 + 1), -0.5 / (0.5**0.5 + 1)])


@pytest.mark.parametrize("algorithm", [GRPO, DrGRPO, GDPO])
@pytest.mark.parametrize("reward", [0.0, 0.1, -3.3, 1e6])
def test_a_group_without_variance_gets_exactly_nothing(algorithm, reward):
    batch = make_batch([3] * 10, groups=[0] * 8 + [1] * 2, rewards=[reward] * 8 + [0.0, 1.0])
    assert advantages(batch, algorithm)[:8].eq(0).all()
    assert advantages(batch, algorithm)[8:].ne(0).all()


@pytest.mark.parametrize("algorithm", [GRPO, DrGRPO, GDPO])
def test_a_sample_without_siblings_gets_nothing(algorithm):
    batch = make_batch([2, 2, 2, 2], groups=[0, 0, 1, 2], rewards=[1.0, 0.0, 5.0, -5.0])
    batch.shaped = torch.full(batch.action_mask.shape, 0.3)
    assert advantages(batch, algorithm)[2:].eq(0).all()
    assert algorithm(algorithm.Options()).needs().min_group_size == 2


@pytest.mark.parametrize("algorithm", [GRPO, DrGRPO, GDPO])
def test_two_trajectories_of_one_episode_are_not_siblings(algorithm):
    batch = make_batch([2, 2], groups=[0, 0], rewards=[1.0, 0.0])
    batch.episode_id = torch.tensor([4, 4])
    assert advantages(batch, algorithm).eq(0).all()


@pytest.mark.parametrize("algorithm", [GRPO, DrGRPO, GDPO])
def test_huge_rewards_stay_finite(algorithm):
    batch = make_batch([2, 3, 2, 2], groups=[0, 0, 1, 1], rewards=[1e6, -1e6, 1e6, 0.0])
    found = advantages(batch, algorithm)
    assert found.isfinite().all()
    assert found[:, 0].sign().tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize(
    ("algorithm", "options"), [(GRPO, {}), (GRPO, {"std": "batch"}), (GRPO, {"credit": "turn"}), (DrGRPO, {}), (GDPO, {})]
)
def test_permuting_the_rows_permutes_the_advantages(algorithm, options):
    batch = mixed_batch()
    order = [4, 2, 8, 0, 7, 5, 1, 3, 6]
    moved = advantages(batch.select(order, trim=False), algorithm, **options)
    torch.testing.assert_close(moved, advantages(batch, algorithm, **options)[order], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("algorithm", "options"), [(GRPO, {}), (GRPO, {"std": "batch"}), (GRPO, {"credit": "turn"}), (DrGRPO, {}), (GDPO, {})]
)
def test_what_is_masked_changes_nothing(algorithm, options):
    batch = mixed_batch()
    clean = advantages(batch, algorithm, **options)
    assert clean[~batch.action_mask].eq(0).all()
    for tensor in (batch.shaped, batch.token_rewards):
        tensor[~batch.action_mask] = float("nan")
    assert torch.equal(advantages(batch, algorithm, **options), clean)


# --- credit per turn ------------------------------------------------------------------------------


def two_turns():
    """Three samples of one task: two with turns of two tokens (columns 0-1 and 3-4), one that ends after its first turn."""
    batch = make_batch([5, 5, 2], groups=[0, 0, 0], observations=True)
    batch.token_rewards = torch.zeros(3, 5)
    batch.token_rewards[0, 1], batch.token_rewards[0, 4], batch.token_rewards[2, 1] = 1.0, 2.0, 3.0
    return batch


def test_credit_per_turn_is_the_return_to_go_minus_its_mean_over_those_who_had_the_turn():
    # Turn 0: returns 3, 0 and 3, mean 2. Turn 1, where the third never came: returns 2 and 0, mean 1.
    expected = [[1, 1, 0, 1, 1], [-2, -2, 0, -1, -1], [1, 1, 0, 0, 0]]
    assert advantages(two_turns(), credit="turn").tolist() == expected


def test_credit_per_turn_counts_the_kl_of_the_turn_and_those_after_it():
    batch = two_turns()
    batch.shaped = torch.zeros(3, 5)
    batch.shaped[0, 0], batch.shaped[0, 3] = -0.6, -0.4
    # Turn 0: returns 2, 0 and 3, mean 5/3. Turn 1: returns 1.6 and 0, mean 0.8.
    found = advantages(batch, credit="turn")
    assert found[:, 0].tolist() == pytest.approx([1 / 3, -5 / 3, 4 / 3])
    assert found[:, 4].tolist() == pytest.approx([0.8, -0.8, 0.0])


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_credit_per_turn_is_divided_by_nothing(std):
    batch = mixed_batch()
    assert torch.equal(advantages(batch, credit="turn", std=std), advantages(batch, credit="turn"))


# --- the loss -------------------------------------------------------------------------------------


def loss_term(algorithm, batch, **options):
    """The policy's term, for outputs that equal the sampler's."""
    plugin = algorithm(algorithm.Options(**options))
    batch.advantages = plugin.compute_advantages(batch).advantages
    outputs = Outputs(logprobs=batch.sampler_logprobs.clone())
    (term,) = [item for item in plugin.compute_loss(outputs, batch) if isinstance(item, LossTerm)]
    return term


@pytest.mark.parametrize("algorithm", [GRPO, DrGRPO, GDPO])
def test_the_loss_pulls_towards_what_beat_its_group(algorithm):
    batch = make_batch([2, 3], groups=[0, 0], rewards=[1.0, 0.0])
    term = loss_term(algorithm, batch)
    assert term.values[0, :2].lt(0).all()
    assert term.values[1].gt(0).all()
    assert term.corrected


def test_dr_grpo_sums_over_the_runs_longest_completion_or_the_length_it_is_told():
    batch = make_batch([2, 3], groups=[0, 0])
    batch.max_new_tokens = 48
    assert loss_term(DrGRPO, batch).aggregation == Aggregation("sequence-mean-token-sum", 48)
    assert loss_term(DrGRPO, batch, max_length=100).aggregation == Aggregation("sequence-mean-token-sum", 100)
    F.PolicyLossOptions(aggregation=str(loss_term(DrGRPO, batch).aggregation))  # the host knows it
    assert loss_term(GRPO, batch).aggregation == TOKEN_MEAN
    assert loss_term(DrGRPO, batch, loss="sapo").aggregation == Aggregation("sequence-mean-token-sum", 48)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"aggregation": "token-mean"}, "leave aggregation out, or take algo grpo with std none"),
        ({"loss": "gspo"}, "take algo grpo with std none"),
        ({"max_length": 0}, "greater than 0"),
    ],
)
def test_dr_grpo_refuses_what_would_not_be_dr_grpo(options, why):
    with pytest.raises(ValidationError, match=why):
        DrGRPO.Options(**options)


@pytest.mark.parametrize("algorithm", [GRPO, DrGRPO, GDPO])
def test_needs_groups_and_what_the_loss_wants(algorithm):
    needs = algorithm(algorithm.Options()).needs()
    assert (needs.data, needs.min_group_size, needs.outputs) == ("prompts", 2, ())
    assert [(role.name, role.trainable) for role in needs.roles] == [("actor", True)]
    assert Output("entropy") in algorithm(algorithm.Options(entropy_coef=0.01)).needs().outputs


# --- the package ----------------------------------------------------------------------------------


def test_the_entry_points_name_the_algorithms():
    entries = {e.name: e for e in importlib.metadata.entry_points(group="rlhf.algos") if e.module == "rlhf_plugin_grpo"}
    assert {name: entry.load() for name, entry in entries.items()} == {"grpo": GRPO, "dr_grpo": DrGRPO, "gdpo": GDPO}


def test_the_package_is_small():
    modules = (rlhf_plugin_grpo.grpo, rlhf_plugin_grpo.group, rlhf_plugin_grpo.dr_grpo, rlhf_plugin_grpo.gdpo)
    lines = {m.__name__: sum(bool(line.strip()) for line in inspect.getsource(m).splitlines()) for m in modules}
    assert lines["rlhf_plugin_grpo.grpo"] < 60
    assert sum(lines.values()) <= 150
