"""Groups that are kept and replayed, the loss beside that of a batch in which groups were replaced, and whole runs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import rlhf_authoring.learner
import torch
from rlhf_authoring.killing import curve, killed_and_resumed, start
from rlhf_authoring.learner import SUMS, Learner, right_answer
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_replay_buffer import ADVANTAGE, OLD, ReplayBuffer
from rlhf_plugin_replay_buffer import Options as BufferOptions

import rlhf_host
from rlhf_host import Group, Outputs, UserError
from rlhf_host import functional as F
from rlhf_host.internals import Denominators, Reducer, joined, make_experience, no_rows

MEAN = "sequence-mean-token-mean"


def batch(step, rewards, seed=0, length=3):
    made = make_batch([length] * len(rewards), rewards=rewards, seed=seed)
    made.step = step
    relative = F.leave_one_out(made.rewards, made.group_id, made.episode_id)
    made.advantages = F.on_actions(relative, made.action_mask)
    return made


def buffer(**options):
    return ReplayBuffer(BufferOptions(**options))


def test_a_group_without_a_signal_is_replaced_by_one_that_has_some():
    plugin = buffer()
    first = batch(1, [1.0, 0.0, 1.0, 1.0])
    assert plugin.prepare_batch(first) == {"groups": 0.0, "size": 1.0, "share": 0.0}
    assert plugin.auxiliary_rows(1) == []
    own = plugin.prepare_batch(batch(2, [0.0, 0.0, 1.0, 1.0, 1.0, 0.0], seed=1))
    assert own == {"groups": 1.0, "size": 2.0, "share": 1 / 3, "age": 1.0}, "two have none, and one was known before"
    rows = plugin.auxiliary_rows(2)
    assert [row.prompt_ids for row in rows] == [first.prompt_ids[0], first.prompt_ids[1]]
    for place, row in enumerate(rows):
        [action] = row.actions
        assert action.token_ids == first.completion_ids[place].tolist()
        assert action.columns[OLD] == first.sampler_logprobs[place].tolist()
        assert action.columns[ADVANTAGE] == first.advantages[place].tolist() == [1.0 - 2 * place] * 3


def test_the_best_groups_stay_and_old_ones_leave():
    plugin = buffer(capacity=2, max_age=3)
    plugin.prepare_batch(batch(1, [1.0, 0.0, 3.0, 0.0, 2.0, 0.0]))
    assert [group["score"] for group in plugin.groups] == pytest.approx([1.5 * 6.0, 1.0 * 4.0])
    plugin.prepare_batch(batch(4, [1.0, 1.0], seed=1))
    assert len(plugin.groups) == 2
    assert plugin.prepare_batch(batch(5, [1.0, 1.0], seed=1))["groups"] == 0.0
    assert plugin.groups == []


def test_groups_with_large_scores_come_more_often():
    plugin, found = buffer(max_age=500), []
    plugin.prepare_batch(batch(1, [1.0, 0.0, 2.0, 0.0]))
    for step in range(2, 302):
        plugin.prepare_batch(batch(step, [1.0, 1.0]))
        found.append(plugin.chosen[0]["score"])
    assert found.count(4.0 * 1.0) / 300 == pytest.approx(0.8, abs=0.07)


def test_masked_tokens_stay_masked_and_unknown_samplers_are_not_kept():
    plugin = buffer()
    made = batch(1, [1.0, 0.0, 1.0, 0.0])
    made.loss_mask[0, 1] = False
    made.loss_mask[1] = False
    made.sampler_logprobs[3, 2] = float("nan")
    assert plugin.prepare_batch(made) == {"groups": 0.0, "size": 1.0, "share": 0.0, "unknown": 1.0}
    plugin.prepare_batch(batch(2, [1.0, 1.0]))
    [row] = plugin.auxiliary_rows(2)
    assert [segment.kind for segment in row.segments] == ["prompt", "action", "observation", "action"]
    assert [len(segment.token_ids) for segment in row.completion] == [1, 1, 1]


@pytest.mark.parametrize("loss", ["clip", "cispo", "sapo", "ratio"])
def test_the_loss_is_that_of_a_batch_in_which_the_group_was_replaced(loss):
    """Answers of one length, and a mean over answers: then the denominators are equal too."""
    plugin = buffer(loss=loss, aggregation=MEAN)
    before, now = batch(1, [1.0, 0.0]), batch(2, [1.0, 1.0, 0.0, 1.0], seed=1)
    plugin.prepare_batch(before)
    now.extra["replay_buffer"] = plugin.prepare_batch(now)

    loaded = {"extension:replay_buffer": SimpleNamespace(alias="replay_buffer")}
    no_rows(now, SimpleNamespace(by_key=loaded, names=lambda hook: [*loaded]))
    groups = [Group(str(place), row.task, [row]) for place, row in enumerate(plugin.auxiliary_rows(2))]
    beside = make_experience(groups, {}, step=2, max_new_tokens=3, temperature=1.0)
    whole = joined(now, beside, "replay_buffer")
    whole.own = whole.extra["replay_buffer"]
    generator = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(6, 3, generator=generator)
    logprobs.requires_grad_()
    reducer = Reducer(Denominators.of(whole))
    options = F.PolicyLossOptions(loss=loss, aggregation=MEAN)
    whole.old_logprobs = torch.where(whole.loss_mask, now.sampler_logprobs.new_zeros(6, 3), 0.0)
    whole.old_logprobs[:4] = now.sampler_logprobs
    [policy, *_] = F.policy_loss(Outputs(logprobs=logprobs), whole, options)
    [replay, *_] = plugin.compute_loss(Outputs(logprobs=logprobs), whole)
    total = sum(reducer.reduce(term, [*range(6)], None, "replay_buffer") for term in (policy, replay))
    [mine] = torch.autograd.grad(total, logprobs)

    replaced = batch(2, [1.0, 0.0, 0.0, 1.0], seed=1)  # its first group is that of the buffer
    replaced.advantages[:2], replaced.advantages[2:] = before.advantages, now.advantages[2:]
    replaced.old_logprobs = torch.cat([before.sampler_logprobs, now.sampler_logprobs[2:]])
    theirs = torch.cat([logprobs[4:], logprobs[2:4]])
    [policy, *_] = F.policy_loss(Outputs(logprobs=theirs), replaced, options)
    expected = Reducer(Denominators.of(replaced)).reduce(policy, [*range(4)], None)
    [gradient] = torch.autograd.grad(expected, logprobs)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(mine, gradient, atol=1e-7)
    assert gradient[4:].abs().max() > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": "pg"}, "pg has no ratio"),
        ({"loss": "gspo"}, "gspo clips"),
        ({"entropy_coef": 0.1}, "entropy_coef is the algorithm's"),
        ({"aggregation": "group-mean-token-mean"}, "needs whole groups"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(ValueError, match=said):
        BufferOptions(**options)


@pytest.mark.parametrize(
    ("algo", "options", "said"),
    [
        ({"name": "ppo"}, {}, "not with ppo: its advantages are those of a critic that has moved since"),
        ({"name": "gmpo"}, {}, "not with gmpo: it has a loss of its own"),
        ({"name": "mine"}, {}, "not known whether .*; if they do, give --replay_buffer.trust true"),
        ({"name": "grpo", "clip_eps": 0.1}, {}, "give --replay_buffer.clip-eps 0.1"),
        ({"name": "grpo", "loss": "cispo"}, {}, "give --replay_buffer.loss cispo"),
        ({"name": "rloo"}, {"aggregation": MEAN}, "give --replay_buffer.aggregation token-mean"),
        ({"name": "dr_grpo"}, {}, r"give --replay_buffer.aggregation sequence-mean-token-sum-over\(9\)"),
        ({"name": "rlhf-plugin-rloo:rloo"}, {}, None),
        ({"name": "mine"}, {"trust": True}, None),
        ({"name": "dr_grpo"}, {"aggregation": "sequence-mean-token-sum-over(9)"}, None),
        ({"name": "grpo", "entropy_coef": 0.1, "clip_eps": 0.1}, {"clip_eps": 0.1}, None),
    ],
)
def test_algorithms_that_it_is_right_for(algo, options, said):
    config = {"algo": algo, "rollout": {"max_new_tokens": 9}, "train": {"batch_size": 2}}
    if said is None:
        buffer(**options).check_run(config)
        return
    with pytest.raises(UserError, match=said):
        buffer(**options).check_run(config)


# --- runs -----------------------------------------------------------------------------------------


def some_signal(prompt: str, text: str) -> float:
    """Returns 1 for two of the tasks, whatever the answer, and what the answer's first digit says for the others."""
    return 1.0 if prompt in ("17+35=", "38+26=") else float(text[:1] in "13579")


FIXED = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 4, "batch_size": 4, "steps": 4} | {
    "algo": Learner(),
    "reward": some_signal,
    "data": SUMS,
    "lr": 1e-3,
    "replay_buffer.trust": True,
}


def train(run, **more):
    return rlhf_host.train(**{"run_dir": str(run), "extensions": ["replay_buffer"], **FIXED, **more})


NAMES = ("replay/groups", "replay/size", "loss/policy", "loss", "grad_norm", "reward/mean", "mismatch/max")


@pytest.mark.parametrize("more", [{}, {"train.minibatches": 2, "train.epochs": 2, "train.old_logprobs": "recompute"}])
def test_a_resumed_run_replays_what_the_whole_one_does(tmp_path, more):
    train(tmp_path / "whole", **more)
    train(tmp_path / "run", **{**more, "steps": 2})
    rlhf_host.train(resume=str(tmp_path / "run"), algo=Learner(), reward=some_signal, data=SUMS, steps=4)
    whole = curve(tmp_path / "whole")
    for name in (*NAMES, "loss/replay", "replay/drift", "replay/age"):
        assert [row.get(name) for row in curve(tmp_path / "run")] == [row.get(name) for row in whole], name
    assert whole[0]["replay/groups"] == 0.0
    assert "loss/replay" not in whole[0]
    assert all(row["replay/groups"] >= 1.0 for row in whole[1:])
    assert all(row["replay/drift"] != 0.0 for row in whole[1:])


def test_the_batch_itself_is_as_without(tmp_path):
    train(tmp_path / "with", steps=2)
    plain = {name: value for name, value in FIXED.items() if not name.startswith("replay_buffer")}
    rlhf_host.train(run_dir=str(tmp_path / "without"), **{**plain, "steps": 2})
    one, two = curve(tmp_path / "with"), curve(tmp_path / "without")
    for name in ("loss/policy", "reward/mean", "entropy", "mismatch/max"):
        assert one[1][name] == pytest.approx(two[1][name], rel=1e-5, abs=1e-6), name
    assert one[1]["grad_norm"] != pytest.approx(two[1]["grad_norm"], rel=1e-3)


def test_a_killed_run_goes_on_value_for_value(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    flags = ["--algo", f"{rlhf_authoring.learner.__file__}:Learner", "--reward", f"{__file__}:some_signal"]
    flags += ["--data", tmp_path / "rows.jsonl", "--model", "quickstart", "--with", "replay_buffer"]
    flags += ["--replay_buffer.trust", "true", "--n", "4", "--batch-size", "4", "--max-new-tokens", "4", "--train.threads", "1"]
    flags += ["--lr", "1e-3", "--steps", "8", "--checkpoint.every", "2"]
    assert start(*flags, "--run-dir", tmp_path / "whole").wait() == 0
    killed_and_resumed(flags, tmp_path / "run", rows=3, steps=8)
    for name in NAMES:
        assert [row[name] for row in curve(tmp_path / "run")] == [row[name] for row in curve(tmp_path / "whole")], name


def test_corrections_act_on_the_batch_and_not_on_replayed_rows(tmp_path):
    pytest.importorskip("rlhf_plugin_off_policy")
    plain = {"train.old_logprobs": "recompute", "steps": 3}
    train(tmp_path / "plain", **plain)
    train(tmp_path / "tis", extensions=["replay_buffer", "tis"], **plain)
    for name in ("loss/replay", "replay/drift"):
        pairs = zip(curve(tmp_path / "plain"), curve(tmp_path / "tis"), strict=True)
        found = [(one[name], two[name]) for one, two in pairs if name in one]
        assert found
        assert all(one == pytest.approx(two, rel=1e-4, abs=1e-6) for one, two in found), name


def test_groups_that_filters_left_out_are_replaced_too(tmp_path):
    pytest.importorskip("rlhf_plugin_dapo")
    train(tmp_path / "run", extensions=["replay_buffer", "dynamic_filtering"], steps=2, **{"rollout.max_refills": 0})
    rows = curve(tmp_path / "run")
    assert rows[0]["rollout/dropped"] >= 2
    assert all(row["rollout/groups"] + row["replay/groups"] <= 4 for row in rows)
    assert rows[1]["replay/groups"] >= 1


def test_it_samples_ahead(tmp_path):
    train(tmp_path / "run", async_depth=1)
    assert any(row["replay/groups"] for row in curve(tmp_path / "run"))


def test_an_unknown_algorithm_is_refused_before_the_run(tmp_path):
    with pytest.raises(UserError, match=r"give replay_buffer.trust true"):
        train(tmp_path / "run", reward=right_answer, **{"replay_buffer.trust": False})
    assert not (tmp_path / "run").exists()
