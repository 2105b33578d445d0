"""Options of the policy losses: what is refused, what each loss asks of the run."""

import pytest
from pydantic import ValidationError

from rlhf_host import GROUP_MEAN_TOKEN_MEAN, Aggregation, AlgoNeeds, Forbid, Output, RoleNeed
from rlhf_host import functional as F


@pytest.mark.parametrize(
    ("loss", "own"),
    [
        ("clip", "token-mean"),
        ("cispo", "token-mean"),
        ("dppo_tv", "token-mean"),
        ("ratio", "token-mean"),
        ("pg", "token-mean"),
        ("gspo", "sequence-mean-token-mean"),
        ("sapo", "sequence-mean-token-mean"),
    ],
)
def test_every_loss_has_its_own_aggregation_until_one_is_given(loss, own):
    assert F.PolicyLossOptions(loss=loss).reduction == Aggregation.parse(own)
    if loss != "gspo":
        assert F.PolicyLossOptions(loss=loss, aggregation="group-mean-token-mean").reduction == GROUP_MEAN_TOKEN_MEAN


def test_every_loss_that_can_be_chosen_exists():
    assert set(F.PolicyLossOptions.model_json_schema()["properties"]["loss"]["enum"]) == set(F.policy_losses)


def test_every_option_is_described():
    assert all(field.description for field in F.PolicyLossOptions.model_fields.values())


def test_gspo_takes_its_own_aggregation_only():
    F.PolicyLossOptions(loss="gspo", aggregation="sequence-mean-token-mean")
    for other in ("token-mean", "sequence-mean-token-sum-over(64)"):
        with pytest.raises(ValidationError, match=r"gspo needs aggregation sequence-mean-token-mean.*leave aggregation out"):
            F.PolicyLossOptions(loss="gspo", aggregation=other)


@pytest.mark.parametrize("aggregation", ["mean", "sequence-mean-token-sum-over(0)", "sequence-mean-token-sum-over()"])
def test_unknown_aggregations_are_refused_with_the_list(aggregation):
    with pytest.raises(ValidationError, match="sequence-mean-token-mean"):
        F.PolicyLossOptions(aggregation=aggregation)


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": "ppo"},
        {"clip_eps": -0.1},
        {"clip_eps": 1.0},
        {"clip_eps_high": -0.1},
        {"dual_clip": 1.0},
        {"gspo_eps": 1.0},
        {"gspo_eps_high": -1e-4},
        {"cispo_max": 0.0},
        {"sapo_tau": 0.0},
        {"sapo_tau_negative": -1.0},
        {"dppo_delta": 1.5},
        {"dppo_max": 0.0},
        {"entropy_coef": -0.1},
        {"clip_epsilon": 0.2},
    ],
    ids=str,
)
def test_options_out_of_range_or_unknown_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        F.PolicyLossOptions(**wrong)


def test_needs_of_a_plain_policy_loss():
    actor = RoleNeed("actor", trainable=True, source=None)
    assert F.policy_needs(F.PolicyLossOptions()) == AlgoNeeds(data="prompts", roles=(actor,))


def test_needs_join_the_loss_and_the_algorithm():
    critic = RoleNeed("critic", head="scalar", trainable=True)
    found = F.policy_needs(
        F.PolicyLossOptions(loss="gspo", entropy_coef=0.01),
        min_group_size=2,
        roles=[critic],
        outputs=[Output("values"), Output("values", role="critic")],
        forbids=[Forbid("kl.estimator", "k2", "it is biased")],
    )
    assert found.roles == (RoleNeed("actor", trainable=True, source=None), critic)
    assert found.min_group_size == 2
    assert found.outputs == (Output("entropy"), Output("values"), Output("values", role="critic"))
    assert [(one.setting, one.value) for one in found.forbids] == [("train.old_logprobs", "sampler"), ("kl.estimator", "k2")]
