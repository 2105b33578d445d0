"""Trainable sessions: what they compute, next to ``rlhf_host.train`` and to gradients by hand; what they refuse."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_session import TrainingRow
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rlhf_host
from rlhf_host import RunError, UserError


def vowels(text, label):
    return sum(char in "aeiou" for char in text) / 8


def likelihood(outputs, batch):
    return -outputs.logprobs


def weights_of(directory):
    (file,) = [*directory.glob("adapter_model.safetensors"), *directory.glob("model.safetensors")]
    return load_file(file)


def whole(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def rows_for(session, count=3):
    vocabulary = len(session.tokenizer)
    return [
        TrainingRow(
            prompt_ids=[1 + i, 2, 3], completion_ids=[(7 * i + j) % vocabulary for j in range(2 + i)], advantages=1.0 - i
        )
        for i in range(count)
    ]


WAYS = {
    "rloo": {"algo": "rloo", "rewards": vowels},
    "lora": {"algo": "grpo", "rewards": vowels, "actor": {"lora": {"rank": 4}, "warmup_steps": 0}},
    "ppo": {"algo": "ppo", "rewards": vowels, "extensions": {"kl": {"name": "kl", "coef": 0.1}}},
    "averages": {"algo": "rloo", "rewards": vowels, "extensions": "ema"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_gives_the_weights_of_a_run(small, way):
    settings = {**small, **WAYS[way]}
    with rlhf_host.trainable_session(**settings) as session:
        for _ in range(3):
            session.forward_backward(session.draw())
            metrics = session.optim_step()
            session.sync()
        saved = session.save("states")
    run = rlhf_host.train(run_dir="run", **settings)
    ours, theirs = weights_of(saved / "model"), weights_of(run.model)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert metrics["grad_norm"] == run.metrics[-1]["grad_norm"]
    start = weights_of(Path(small["model"])) if way != "lora" else {}
    assert way == "lora" or any(not torch.equal(start[name], ours[name]) for name in ours)


def test_rows_of_a_data_set_are_drawn_as_in_a_run(small):
    data = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(8)]
    settings = {**small, "algo": "sft", "data": data}
    del settings["n"], settings["max_new_tokens"]
    with rlhf_host.trainable_session(**settings) as session:
        for _ in range(3):
            session.forward_backward(session.draw(), last=True)
            session.optim_step()
        saved = session.save("states")
    run = rlhf_host.train(run_dir="run", **settings)
    ours, theirs = weights_of(saved / "model"), weights_of(run.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_gradients_of_a_function_are_those_by_hand(small):
    def weighted(outputs, batch):
        assert torch.equal(batch.columns["of_row"], torch.tensor([2.0, -1.0]))
        return -outputs.logprobs * batch.token_columns["of_token"] * batch.columns["of_row"][:, None]

    with rlhf_host.trainable_session(**small) as session:
        rows = [
            TrainingRow(
                prompt_ids=[5, 6],
                completion_ids=[7, 8, 9],
                mask=[1, 0, 1],
                columns={"of_row": 2.0, "of_token": [1.0, 50.0, 3.0]},
            ),
            TrainingRow(prompt_ids=[4], completion_ids=[3, 2], columns={"of_row": -1.0, "of_token": [0.5, 2.0]}),
        ]
        found = session.gradient(rows, loss=weighted)
        part = session.gradient(rows, loss=weighted, names=["*layers.0*"])
        assert part.keys() == {name for name in found if "layers.0" in name}
        with pytest.raises(UserError, match=r"no trained weight is called \*nothing\*"):
            session.gradient(rows, loss=weighted, names=["*nothing*"])
        assert session.step == 0
    model = AutoModelForCausalLM.from_pretrained(small["model"], dtype=torch.float32)
    total = 0.0
    for ids, places, factors in (([5, 6, 7, 8, 9], [2, 4], [2.0, 6.0]), ([4, 3, 2], [1, 2], [-0.5, -2.0])):
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        total = total - sum(logprobs[place - 1, ids[place]] * factor for place, factor in zip(places, factors, strict=True))
    (total / 4).backward()  # the mean over the four tokens that the policy chose
    by_hand = {name: weight.grad for name, weight in model.named_parameters()}
    assert found.keys() <= by_hand.keys()
    assert all(torch.allclose(found[name], by_hand[name], atol=1e-6) for name in found)


def test_gradients_add_up_until_the_step(small):
    with rlhf_host.trainable_session(**small) as session:
        rows = rows_for(session)
        parts = [session.gradient([row], loss="grpo") for row in rows]
        together = session.gradient(rows, loss={"name": "grpo", "loss": "clip"})
        assert torch.allclose(whole(session.gradient(rows, loss="grpo")), whole(together))
        norms = []
        for last in (False, True):
            for row in rows:
                session.forward_backward([row], loss="grpo", last=last and row is rows[-1])
            norms.append(session.optim_step(lr=0.0)["grad_norm"])
        added = sum(whole(part) for part in parts)
        assert norms == pytest.approx([float(added.norm())] * 2, rel=1e-5)
        assert float(whole(session.gradient(rows, loss="grpo")).norm()) == pytest.approx(
            float(whole(together).norm()), rel=1e-5
        )


def test_projections_keep_inner_products(small):
    with rlhf_host.trainable_session(**small) as session:
        rows = rows_for(session)
        plain, short = (session.gradient(rows, loss="grpo", project=size) for size in (None, 4096))
        assert short["gradient"].shape == (4096,)
        assert float(short["gradient"].norm()) == pytest.approx(float(whole(plain).norm()), rel=0.2)
        assert torch.equal(short["gradient"], session.gradient(rows, loss="grpo", project=4096)["gradient"])


def test_a_saved_state_goes_on_as_if_nothing_had_been(small):
    def three(session):
        steps = []
        for _ in range(3):
            session.forward_backward(session.draw())
            steps.append(session.optim_step()["grad_norm"])
            session.sync()
        return steps

    settings = {**small, **WAYS["rloo"]}
    with rlhf_host.trainable_session(**settings) as session:
        three(session)
        session.save("states")
        first = three(session)
        session.load("states")
        assert session.step == 3
        assert three(session) == first
    with rlhf_host.trainable_session(**settings) as session:
        session.load("states")
        assert three(session) == first


def test_what_is_generated_can_be_trained_on(small):
    with rlhf_host.trainable_session(**small) as session:
        (group,) = session.generate(["1+1="], n=4, seed=3)
        again, other = (session.generate([list(group[0].prompt_ids)], n=4, seed=seed)[0] for seed in (3, 4))
        assert [row.completion_ids for row in again] == [row.completion_ids for row in group]
        assert [row.completion_ids for row in other] != [row.completion_ids for row in group]
        for row in group:
            row.reward = vowels(row.text, None)
        batch = session.batch(group, loss="rloo")
        rewards = torch.tensor([row.reward for row in group])
        expected = rewards - (rewards.sum() - rewards) / 3
        first = batch.advantages[:, 0]
        assert torch.allclose(first, expected)
        before = session.forward_backward(batch, loss="rloo")
        assert before["loss/policy"] == before["loss"]
        session.optim_step()
        session.sync()
        assert [row.version for row in session.generate(["1+1="])[0]] == [session.version]


def without_data(session):
    with rlhf_host.trainable_session(model=session.config.roles["actor"].model, algo="rloo", rewards=vowels) as other:
        other.draw()


WRONG = {
    "no rows": (lambda s: s.forward_backward([], loss=likelihood), "no rows to train on"),
    "no loss": (lambda s: s.forward_backward(rows_for(s)), "no plugin gave a loss term"),
    "an unknown loss": (lambda s: s.forward_backward(rows_for(s), loss="grpoo"), "did you mean 'grpo'"),
    "an unknown option": (lambda s: s.batch(rows_for(s), loss={"name": "grpo", "clip": 1}), "clip"),
    "a mapping without a name": (lambda s: s.batch(rows_for(s), loss={"loss": "clip"}), "has the name of an algorithm"),
    "no function": (lambda s: s.batch(rows_for(s), loss=3), "not int"),
    "a role": (lambda s: s.batch(rows_for(s), loss="ppo"), "needs the role critic to train"),
    "a shape": (lambda s: s.forward_backward(rows_for(s), loss=lambda o, b: o.logprobs.sum()), "expected"),
    "a prompt in place of prompts": (lambda s: s.generate("1+1="), "list of prompts"),
    "no algorithm": (lambda s: s.draw(), "give the session algo"),
    "no data": (without_data, "give the session algo, rewards and data"),
    "nothing held out": (lambda s: s.evaluate(), "give the session eval_data"),
    "no state": (lambda s: s.load("nowhere"), "nowhere has no saved state"),
    "an empty prompt": (lambda s: s.batch([TrainingRow(prompt_ids=[], completion_ids=[1])]), "row 0: prompt_ids is empty"),
    "nothing said": (lambda s: s.batch([TrainingRow(prompt_ids=[1], completion_ids=[])]), "row 0: completion_ids is empty"),
    "a foreign token": (lambda s: s.batch([TrainingRow(prompt_ids=[1], completion_ids=[10**6])]), "row 0: .* token 1000000"),
    "logprobs of another length": (
        lambda s: s.batch([TrainingRow(prompt_ids=[1], completion_ids=[2, 3], logprobs=[-0.1])]),
        "row 0: logprobs has 1 values, and the completion 2 tokens",
    ),
    "advantages of another length": (
        lambda s: s.batch([TrainingRow(prompt_ids=[1], completion_ids=[2, 3], advantages=[1.0])]),
        "row 0: advantages has 1 values",
    ),
    "advantages of some": (
        lambda s: s.batch([*rows_for(s), TrainingRow(prompt_ids=[1], completion_ids=[2])]),
        "row 3 has no advantages, and others have some",
    ),
    "advantages that are no numbers": (
        lambda s: s.batch([TrainingRow(prompt_ids=[1], completion_ids=[2], advantages=math.nan)]),
        "not all finite",
    ),
    "a row that is none": (lambda s: s.batch([{"prompt_ids": [1]}]), "row 0 is a dict, not a TrainingRow"),
    "too long a row": (
        lambda s: s.batch([TrainingRow(prompt_ids=[1], completion_ids=[2] * 5000)]),
        "row 0 has 5001 tokens, and the model room for",
    ),
}


def test_what_cannot_be_used_is_refused_and_changes_nothing(small):
    with rlhf_host.trainable_session(**small) as session:
        before = session.gradient(rows_for(session), loss="grpo")
        for call, message in WRONG.values():
            with pytest.raises((UserError, RunError), match=message):
                call(session)
        after = session.gradient(rows_for(session), loss="grpo")
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_loss_that_is_not_finite_takes_no_step(small):
    def broken(outputs, batch):
        return outputs.logprobs * math.inf

    with rlhf_host.trainable_session(**small) as session:
        rows = rows_for(session)
        before = whole(session.gradient(rows, loss="grpo"))
        with pytest.raises(RunError, match="step 1: actor: the loss is"):
            session.forward_backward(rows, loss=broken)
        session.forward_backward(rows, loss="grpo")
        assert session.optim_step(lr=0.0)["grad_norm"] == pytest.approx(float(before.norm()), rel=1e-5)


def test_a_directory_of_a_run_is_not_taken(small):
    Path("run").mkdir()
    Path("run", "config.yaml").write_text("{}")
    with pytest.raises(UserError, match="choose another run_dir"), rlhf_host.trainable_session(run_dir="run", **small):
        pass


@given(tokens=st.lists(st.tuples(st.booleans(), st.integers(-9, 9)), min_size=1, max_size=12))
def test_a_row_keeps_every_token_and_number_in_its_place(tokens):
    (mask, numbers), count = map(list, zip(*tokens, strict=True)), len(tokens)
    row = TrainingRow(
        prompt_ids=[1], completion_ids=list(range(count)), mask=mask, logprobs=numbers, columns={"mine": numbers, "one": 3.0}
    )
    segments = row.trajectory(0).completion
    assert [token for segment in segments for token in segment.token_ids] == list(range(count))
    assert [value for segment in segments for value in segment.columns["mine"]] == numbers
    chosen = [value for segment in segments if segment.kind == "action" for value in segment.logprobs]
    assert chosen == [value for value, own in zip(numbers, mask, strict=True) if own]
    assert row.trajectory(0).columns == {"one": 3.0}


DISTRIBUTED = {"torch": {}, "deepspeed": {"zero_stage": 2}, "fsdp": {}}


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_sessions_on_ray(small, backend):
    pytest.importorskip("ray")
    if backend == "deepspeed":
        pytest.importorskip("deepspeed")
    placed = {"runtime": "ray", "backend": {"name": backend, **DISTRIBUTED[backend]}, "placement": ["actor=2", "rollout=1"]}
    found = {}
    for where, settings in {"here": small, "ray": {**small, **placed, "ray.num_cpus": 4}}.items():
        with rlhf_host.trainable_session(**settings) as session:
            rows, found[where] = rows_for(session), []
            for last in (False, True, False):
                first = session.forward_backward(rows[:2], loss="grpo", last=False)
                session.forward_backward(rows[2:], loss=likelihood, last=last)
                step = session.optim_step()
                found[where] += [first["loss"], step["grad_norm"]]
            session.sync()
            found[where].append(len(session.generate(["1+1="], n=2)[0]))
    assert found["ray"] == pytest.approx(found["here"], rel=1e-3)
