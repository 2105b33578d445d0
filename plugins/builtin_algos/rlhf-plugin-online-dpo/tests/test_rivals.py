"""XPO and Nash-MD: who answers what, which rows are trained, the losses by hand, and what is refused."""

from __future__ import annotations

import importlib.metadata
import json
import math
from importlib.resources import files

import pytest
import torch
from click.testing import CliRunner
from rlhf_plugin_online_dpo import OnlineDPO, rivals
from rlhf_plugin_online_dpo.rivals import XPO, BesideMixture, BesideReference, NashMD
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_host import Drop, Group, LossTerm, Metric, Outputs, RunError, Segment, Task, Trajectory, UserError
from rlhf_host.cli.main import main
from rlhf_host.rollouts.experience import make_experience

QUICKSTART = str(files("rlhf_host") / "models" / "quickstart")


def group(*rewards, name="a"):
    """Answers of one token, their samples numbered from 0."""

    def row(sample, reward):
        segments = [Segment("prompt", [1]), Segment("action", [10 + sample], [-1.0], [0])]
        return Trajectory(f"{name}-{sample}", name, Task(""), segments, sample=sample, reward=reward)

    return Group(name, Task(""), [row(sample, reward) for sample, reward in enumerate(rewards)])


def terms(plugin, made, logprobs, reference):
    """Terms and metrics by name."""
    batch = make_experience([made], {}, step=1, max_new_tokens=1, temperature=1.0)
    batch.logprobs["reference"] = torch.tensor(reference).unsqueeze(-1)
    items = plugin.compute_loss(Outputs(logprobs=torch.tensor(logprobs).unsqueeze(-1)), batch)
    found = {item.name: item for item in items if isinstance(item, LossTerm)}
    return found, {item.name: item.values.tolist() for item in items if isinstance(item, Metric)}


# --- rows and losses --------------------------------------------------------------------------------------------------


def test_a_pair_of_xpo_is_an_answer_of_the_policy_and_the_next_of_the_reference():
    rows = XPO(XPO.Options()).make_rows([group(1.0, 0.0, 0.5, 2.0, 3.0, 3.0)])
    assert [(row.sample, row.columns["label"], row.columns["rival"], row.episode_id) for row in rows] == [
        (0, 1.0, 0.0, "a/0"),
        (1, 0.0, 1.0, "a/0"),
        (2, 0.0, 0.0, "a/1"),
        (3, 1.0, 1.0, "a/1"),
    ]
    # What the policy did not sample is not compared with its probabilities.
    assert [row.sampled for row in rows] == [True, False, True, False]


def test_xpo_drops_a_group_without_a_pair_and_passes_over_unjudged_answers():
    plugin = XPO(XPO.Options())
    for rewards in ((1.0, 1.0), (1.0, None), (0.3, 0.1 + 0.2, None, 2.0)):
        assert plugin.keep_group(group(*rewards)) == Drop("equal_rewards")
    assert plugin.keep_group(group(1.0, 1.0, 0.0, 1.0)) is True


def test_rewards_that_a_limit_made_equal_are_told():
    for plugin in (XPO(XPO.Options()), OnlineDPO(OnlineDPO.Options())):
        with pytest.raises(RunError, match="no pair is left in this batch"):
            plugin.make_rows([group(-1.0, -1.0)])


def test_the_bonus_of_xpo_is_the_likelihood_of_the_references_answers():
    plugin, made = XPO(XPO.Options(beta=0.5, alpha=0.25)), group(2.0, 0.0, 0.0, 1.0)
    made.trajectories = plugin.make_rows([made])
    found, metrics = terms(plugin, made, [-1.0, -3.5, -2.0, -4.0], [-2.0, -3.0, -1.0, -4.0])
    first, second = math.log1p(math.exp(-0.75)), math.log1p(math.exp(-0.5))
    assert found["preference"].values.tolist() == pytest.approx([first, first, second, second])
    assert found["exploration"].coefficient == 0.25
    assert found["exploration"].values.tolist() == [-3.5, -3.5, -4.0, -4.0]
    assert metrics["wins"] == [1.0, 0.0]


@pytest.mark.parametrize(("kl", "penalty"), [("sequence", [-1.0, 6.0]), ("token", [-1.0, 6.0])])
def test_nash_md_trains_the_policys_answers_alone(kl, penalty):
    plugin, made = NashMD(NashMD.Options(beta=0.5, preference="order", kl=kl)), group(2.0, 0.0, 1.0, 1.0, 0.0, None)
    assert plugin.keep_group(made) is True
    assert plugin.keep_group(group(1.0, None)) == Drop("no_pair")
    made.trajectories = plugin.make_rows([made])
    assert [(row.sample, row.columns["preferred"]) for row in made.trajectories] == [(0, 1.0), (2, 0.5)]
    found, metrics = terms(plugin, made, [-1.0, -3.0], [-2.0, -1.0])
    assert found["preference"].values.tolist() == [0.5, 0.0]
    assert (found["kl"].coefficient, found["kl"].values.tolist()) == (0.5, penalty)
    assert metrics == {"preferred": [1.0, 0.5], "kl_reference": [1.0, -2.0]}


def test_the_expected_gradient_of_nash_md_is_that_of_the_preference_minus_the_kl():
    """Over all answers of two tokens out of three, weighted by their probabilities; the rival's distribution is fixed."""
    torch.manual_seed(0)
    first, then = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3,), (3, 3)))
    reference = [torch.randn(size, dtype=torch.float64) for size in ((3,), (3, 3))]
    answers = [(a, b) for a in range(3) for b in range(3)]

    def per_token(logits):
        start, after = (part.log_softmax(-1) for part in logits)
        return torch.stack([torch.stack([start[a], after[a, b]]) for a, b in answers])

    own, other = per_token((first, then)), per_token(reference)
    rewards, beta = torch.randn(9, dtype=torch.float64), 0.3
    rival = (0.75 * own + 0.25 * other).sum(-1).detach().softmax(-1)
    preferred = (rewards.unsqueeze(1) - rewards).sigmoid() @ rival
    likely = own.sum(-1).exp()
    exact = (likely * preferred).sum() - beta * (likely * (own - other).sum(-1)).sum()
    wanted = torch.autograd.grad(exact, (first, then), retain_graph=True)

    tokens = [Segment("action", [10, 11], [-1.0, -1.0], [0, 0])]
    rows = [
        Trajectory(f"{i}", "a", Task(""), [Segment("prompt", [1]), *tokens], sample=2 * i, reward=0.0, columns={"preferred": p})
        for i, p in enumerate(preferred.tolist())
    ]
    batch = make_experience([Group("a", Task(""), rows)], {}, step=1, max_new_tokens=2, temperature=1.0)
    batch.logprobs["reference"] = other
    items = NashMD(NashMD.Options(beta=beta)).compute_loss(Outputs(logprobs=own), batch)
    losses = sum(item.coefficient * item.values for item in items if isinstance(item, LossTerm))
    expected = torch.autograd.grad(-(likely.detach() * losses).sum(), (first, then))
    for one, each in zip(expected, wanted, strict=True):
        torch.testing.assert_close(one, each, rtol=1e-5, atol=1e-6)


def test_the_preference_of_nash_md_is_the_sigmoid_of_the_difference():
    (row,) = NashMD(NashMD.Options()).make_rows([group(2.0, 0.5)])
    assert row.columns["preferred"] == pytest.approx(1 / (1 + math.exp(-1.5)))


def test_needs_and_entry_points():
    needs = XPO(XPO.Options()).needs()
    assert (needs.data, needs.rewards, needs.min_group_size, needs.unit_rows) == ("prompts", True, 2, True)
    names = [[role.name for role in plugin.needs().roles] for plugin in (XPO(XPO.Options()), NashMD(NashMD.Options()))]
    assert names == [["actor", "reference"]] * 2
    (role,) = BesideReference().needs().roles
    assert (role.name, role.generates, role.mixes) == ("reference", True, None)
    (role,) = BesideMixture(BesideMixture.Options(mixture=0.25)).needs().roles
    assert (role.name, role.generates, role.mixes) == ("reference", True, 0.25)
    for kind, expected in (
        ("algos", {"xpo": XPO, "nash_md": NashMD}),
        ("agents", {"xpo": BesideReference, "nash_md": BesideMixture}),
    ):
        found = {entry.name: entry for entry in importlib.metadata.entry_points(group=f"rlhf.{kind}")}
        assert {name: found[name].load() for name in expected} == expected


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def flags(tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(15, 60, 4) for b in (28, 39)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def length(text):\n    return sum(map(ord, text)) / 100\n")
    fixed = [
        "train",
        "--actor.model",
        QUICKSTART,
        "--data",
        tmp_path / "data.jsonl",
        "--reward",
        f"{tmp_path / 'reward.py'}:length",
    ]
    size = ["--rollout.n", "4", "--rollout.max-new-tokens", "4", "--train.batch-size", "4", "--train.steps", "3"]
    return [
        *fixed,
        *size,
        "--rollout.temperature",
        "1.5",
        "--train.threads",
        "1",
        "--actor.lr",
        "3e-3",
        "--run-dir",
        tmp_path / "run",
        "--trajectories.every",
        "1",
    ]


def rlhf(*arguments, code=0):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("name", ["xpo", "nash_md"])
def test_a_run_trains_on_answers_of_two_models(flags, name, tmp_path):
    rlhf(*flags, "--algo", name, "--agent", name)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["grad_norm"] > 0 and row["mismatch/max"] < 1e-4 for row in rows)


@pytest.mark.parametrize(("name", "share"), [("xpo", 1.0), ("nash_md", 0.25)])
def test_every_second_answer_is_sampled_by_the_other_model(flags, name, share, tmp_path, monkeypatch):
    """Log-probabilities of its tokens, in the second step, are those of the reference, or of the mixture with the policy."""
    seen = []
    run = rivals.BesideReference.agent_run

    async def watched(self, episode, policy):
        rows = await run(self, episode, policy)
        seen.append((episode.sample, rows[0]))
        return rows

    for attribute, value in vars(run).items():
        setattr(watched, attribute, value)
    monkeypatch.setattr(rivals.BesideReference, "agent_run", watched)
    options = ["--agent.mixture", share] if name == "nash_md" else []
    flags[flags.index("--train.steps") + 1] = "1"
    rlhf(*flags, "--algo", name, "--agent", name, *options)
    reference, policy = (AutoModelForCausalLM.from_pretrained(path) for path in (QUICKSTART, tmp_path / "run/model"))
    seen.clear()
    rlhf("train", "--resume", tmp_path / "run", "--train.steps", "2")
    compared = 0
    for sample, row in seen:
        prompt, answer = list(row.segments[0].token_ids), list(row.segments[1].token_ids)
        with torch.no_grad():
            own, other = (model(torch.tensor([prompt + answer])).logits[0] for model in (policy, reference))
        mixed = own if sample % 2 == 0 else share * other + (1 - share) * own
        expected = (
            (mixed / 1.5).log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(answer).unsqueeze(-1)).squeeze(-1)
        )
        assert list(row.segments[1].logprobs) == pytest.approx(expected.tolist(), abs=1e-4)
        compared += sample % 2
    assert compared >= 4


def test_what_cannot_work_is_refused(flags, tmp_path):
    assert "add --agent xpo" in rlhf(*flags, "--algo", "xpo", code=2)
    assert "add --agent nash_md" in rlhf(*flags, "--algo", "nash_md", "--agent", "xpo", code=2)
    assert "rollout.n is 3: take an even number" in rlhf(*flags, "--algo", "xpo", "--agent", "xpo", "--rollout.n", "3", code=2)
    assert "take online_dpo" in rlhf(*flags, "--algo", "xpo", "--agent", "xpo", "--algo.reference-free", "true", code=2)
    assert "mixture" in rlhf(*flags, "--algo", "nash_md", "--agent", "nash_md", "--agent.mixture", "1", code=2)
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART)
    model.resize_token_embeddings(model.config.vocab_size + 4)
    model.save_pretrained(tmp_path / "more")
    AutoTokenizer.from_pretrained(QUICKSTART).save_pretrained(tmp_path / "more")
    other = rlhf(*flags, "--algo", "nash_md", "--agent", "nash_md", "--reference.model", tmp_path / "more", code=2)
    assert "their whole distributions cannot be mixed: give a model with the same tokens" in other
    assert not (tmp_path / "run").exists()


def test_the_agent_alone_says_who_wants_its_role():
    with pytest.raises(UserError, match="add --agent xpo"):
        XPO(XPO.Options()).check_run({"agent": {"name": "single_turn"}, "rollout": {"n": 2}})
    XPO(XPO.Options()).check_run({"agent": {"name": "single_turn"}, "rollout": {"n": 2}, "from_trajectories": "run"})
