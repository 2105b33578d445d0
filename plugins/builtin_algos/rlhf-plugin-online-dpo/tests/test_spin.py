"""SPIN: whose answers make a pair, its loss in float64, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_plugin_online_dpo.spin import SPIN, AnswersOfData, answer_tokens
from transformers import AutoTokenizer

import rlhf_host
from rlhf_host import Drop, Group, LossTerm, Outputs, Segment, Task, Trajectory, UserError
from rlhf_host.rollouts.experience import make_experience

DATA = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in ((17, 35), (38, 26), (41, 29), (56, 17))]
FIXED = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 2, "batch_size": 4, "steps": 3}


def group(*lengths, name="a", unjudged=()):
    def row(sample, length):
        segments = [Segment("prompt", [1]), Segment("action", [10 + sample] * length, [-1.0] * length, [0] * length)]
        reward = None if sample in unjudged else 0.0
        return Trajectory(f"{name}-{sample}", name, Task(""), segments, sample=sample, reward=reward)

    return Group(name, Task(""), [row(*each) for each in enumerate(lengths)])


def test_a_pair_is_an_answer_of_the_data_and_the_next_of_the_reference():
    rows = SPIN(SPIN.Options()).make_rows([group(1, 2, 1, 3)])
    assert [(row.sample, row.columns["label"], row.episode_id, row.row, row.sampled) for row in rows] == [
        (0, 1.0, "a/0", 0, False),
        (1, 0.0, "a/0", 1, False),
        (2, 1.0, "a/1", 0, False),
        (3, 0.0, "a/1", 1, False),
    ]


def test_a_group_without_a_pair_is_dropped():
    plugin = SPIN(SPIN.Options())
    assert plugin.keep_group(group(1, 1, unjudged=[0])) == Drop("no_pair")
    assert plugin.keep_group(group(1, 1)) is True


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=8).filter(lambda sizes: len(sizes) % 2 == 0),
    beta=st.sampled_from([0.05, 0.1, 1.0]),
    loss=st.sampled_from(["sigmoid", "hinge"]),
    seed=st.integers(0, 99),
)
def test_losses_and_gradients_are_those_of_the_formula(lengths, beta, loss, seed):
    """``ℓ(λ·Σ(log π − log ref) of y − λ·Σ(log π − log ref) of y')``, ``ℓ(t) = log(1 + e^−t)``, or ``max(0, 1 − t)``."""
    plugin, made = SPIN(SPIN.Options(beta=beta, loss=loss)), group(*lengths)
    made.trajectories = plugin.make_rows([made])
    batch = make_experience([made], {}, step=1, max_new_tokens=8, temperature=1.0)
    random = torch.Generator().manual_seed(seed)
    own, reference = (torch.randn(batch.loss_mask.shape, generator=random, dtype=torch.float64) for _ in range(2))
    own.requires_grad_()
    batch.logprobs["reference"] = reference
    (term,) = [item for item in plugin.compute_loss(Outputs(logprobs=own), batch) if isinstance(item, LossTerm)]
    ratios = [(own[row, :length] - reference[row, :length]).sum() for row, length in enumerate(lengths)]
    gaps = [beta * (ratios[pair] - ratios[pair + 1]) for pair in range(0, len(lengths), 2)]
    each = [torch.log1p(torch.exp(-gap)) if loss == "sigmoid" else torch.relu(1 - gap) for gap in gaps]
    wanted = torch.stack([value for value in each for _ in range(2)])
    torch.testing.assert_close(term.values.double(), wanted, rtol=1e-6, atol=1e-8)
    found, expected = (torch.autograd.grad(of.sum(), own, retain_graph=True)[0] for of in (term.values, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_it_is_at_rest_where_data_and_opponent_say_the_same():
    """With the data's own distribution as the reference the expected gradient is 0 at the reference (theorem 5.2 of the paper)."""
    logits = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logs = logits.log_softmax(-1)
    data = logs.detach().exp()
    loss = torch.zeros((), dtype=torch.float64)
    for y in range(4):
        for other in range(4):
            gap = 0.1 * ((logs[y] - logs.detach()[y]) - (logs[other] - logs.detach()[other]))
            loss = loss + data[y] * data[other] * torch.log1p(torch.exp(-gap))
    assert torch.autograd.grad(loss, logits)[0].abs().max() < 1e-12
    assert math.isclose(float(loss.detach()), math.log(2))


class Words:
    eos_token_id: int | None = 2

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [len(word) for word in text.split()]}


def test_the_answer_of_the_data_ends_with_the_end_token():
    assert answer_tokens(Task("", "one two three"), Words()) == [3, 3, 5, 2]
    words = Words()
    words.eos_token_id = None
    with pytest.raises(UserError, match="no end token"):
        answer_tokens(Task("", "one"), words)
    for label in (None, 4, "", " "):
        with pytest.raises(UserError, match=r"--data\.label-key"):
            answer_tokens(Task("", label), Words())
    assert list(AnswersOfData().check_labels([Task("", "4"), Task("", 4), Task("", "")])) == [1, 2]


# --- runs -----------------------------------------------------------------------------------------------------------------------


def train(run, **more):
    settings = {"algo": "spin", "agent": "spin", "data": DATA, "lr": 1e-4, "trajectories.every": 1, "trajectories.tokens": True}
    rlhf_host.train(run_dir=str(run), **{**FIXED, **settings, **more})
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_makes_the_answers_of_the_data_likelier_than_its_own(tmp_path):
    metrics = train(tmp_path / "run")
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert all(row["grad_norm"] > 0 for row in metrics)
    rows = [json.loads(line) for line in (tmp_path / "run/trajectories/train-step-000001.jsonl").read_text().splitlines()]
    first = [row for row in rows if row["sample"] == 0]
    assert len(first) == 4
    tokenizer = AutoTokenizer.from_pretrained(rlhf_host.__path__[0] + "/models/quickstart")
    labels = {row["prompt"]: row["label"] for row in DATA}
    for row in first:
        _, answer = row["segments"]
        assert answer["kind"] == "observation"
        assert tokenizer.decode(answer["token_ids"]) == labels[row["prompt"]] + tokenizer.eos_token


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"agent": "single_turn", "reward": lambda text: 0.0}, "add agent spin"),
        ({"n": 3}, "take an even number"),
        ({"algo": {"name": "spin", "reference_free": True}}, "take algo sft"),
        ({"data": [{"prompt": "2+2=", "label": 4}]}, "data.label_key"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, more, said):
    with pytest.raises(UserError, match=said):
        train(tmp_path / "run", **more)
