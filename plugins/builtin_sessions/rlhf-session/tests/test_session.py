"""Trainable sessions: what they compute, next to ``rlhf_host.train`` and to gradients by hand; what they refuse."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf_session import TrainingRow
from rlhf_session.losses import Losses
from rlhf_session.session import _nothing_moved
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rlhf_host
from rlhf_host import LossTerm, Metric, Needs, Reward, RoleNeed, RunError, UserError, hookimpl
from rlhf_host.internals import Metrics
from rlhf_host.protocols import Update


@pytest.fixture(scope="module", autouse=True)
def algorithms():
    for package in ("rlhf_plugin_rloo", "rlhf_plugin_grpo", "rlhf_plugin_ppo", "rlhf_plugin_averages", "rlhf_plugin_sft"):
        pytest.importorskip(package)


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


ADAPTIVE = {"name": "kl", "coef": 0.1, "controller": "adaptive", "target": 0.001, "horizon": 100}
WAYS = {
    "rloo": {"algo": "rloo", "rewards": vowels},
    "lora": {"algo": "grpo", "rewards": vowels, "actor": {"lora": {"rank": 4}, "warmup_steps": 0}},
    "ppo": {"algo": "ppo", "rewards": vowels, "extensions": {"kl": ADAPTIVE}},
    "averages and a second data set": {
        "algo": "rloo",
        "rewards": vowels,
        "extensions": {"ema": "ema", "ptx": {"name": "ptx", "data": "beside.jsonl", "coef": 1.0}},
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_gives_the_weights_of_a_run(small, way):
    Path("beside.jsonl").write_text('{"prompt": "a", "completion": "bc"}\n' * 4)
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


def test_an_algorithm_that_chooses_rows_gets_them(small):
    pytest.importorskip("rlhf_plugin_raft")
    with rlhf_host.trainable_session(**small) as session:
        rows = [TrainingRow(prompt_ids=[5, 6], completion_ids=[7, 8 + i], reward=float(i == 1), group="one") for i in range(3)]
        best = session.batch(rows, loss="raft")
        assert best.completion_ids.tolist() == [[7, 9]]
        chosen, alone = (session.gradient(each, loss="raft") for each in (best, [rows[1]]))
        assert torch.equal(whole(chosen), whole(alone))
        with pytest.raises(UserError, match="row 1 has no reward, and the loss chooses rows by their rewards"):
            session.batch([rows[0], TrainingRow(prompt_ids=[5], completion_ids=[7], group="one")], loss="raft")


def test_rewards_have_the_weights_that_made_them(small):
    pytest.importorskip("rlhf_plugin_grpo")
    with rlhf_host.trainable_session(**small) as session:
        rows = [row.trajectory(number) for number, row in enumerate(rows_for(session))]
        for number, row in enumerate(rows):
            row.rewards, row.reward = {"one": Reward(float(number)), "two": Reward(1.0)}, number + 0.5
        batch = session.batch(rows, loss="gdpo", reward_weights={"two": 0.5})
        assert dict(zip(batch.reward_names, batch.reward_weights, strict=True)) == {"one": 1.0, "two": 0.5}


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


def test_a_state_of_another_session_changes_nothing(small):
    with rlhf_host.trainable_session(**small) as session:
        step_of(session)
        session.save("plain")
    fewer = {**small, **WAYS["rloo"], "data": small["data"][:4]}
    with rlhf_host.trainable_session(**{**fewer, "backend": {"name": "torch", "optimizer": "SGD"}}) as session:
        session.forward_backward(session.draw())
        session.optim_step()
        session.save("fewer")
        with pytest.raises(UserError, match="it has 8 rows of data, and this one 4 rows"):
            session.load("plain")
        assert session.step == 1
    for settings, wrong in (
        (fewer, "backend.optimizer is SGD in it, and AdamW here"),
        ({**fewer, "data": small["data"]}, "4 rows"),
    ):
        with rlhf_host.trainable_session(**settings) as session:
            with pytest.raises(UserError, match=wrong):
                session.load("fewer")
            assert len(session.draw()) == 8


def test_a_named_loss_is_the_same_plugin_in_every_call():
    losses = Losses({"actor": True})
    seen = []
    for loss in ("grpo", {"name": "grpo"}, {"name": "grpo", "loss": "pg"}, "grpo"):
        with losses.plugins(loss) as manager:
            seen.append(manager)
    assert seen[0] is seen[1] is seen[3] is not seen[2]
    losses.close()


def test_sessions_closed_in_another_order_leave_signals_as_they_were(small, interruptible):
    before = signal.getsignal(signal.SIGINT)
    first, second = (rlhf_host.trainable_session(**small) for _ in range(2))
    one, other = first.__enter__(), second.__enter__()
    one.forward_backward(rows_for(one), loss="grpo")
    other.forward_backward(rows_for(other)[:1], loss="grpo")
    assert one.optim_step()["grad_norm"] != other.optim_step()["grad_norm"]
    for session in (first, second):
        session.__exit__(None, None, None)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


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


def test_calls_of_generate_differ_and_their_groups_too(small):
    with rlhf_host.trainable_session(**small) as session:
        first, again = (session.generate(["1+1="], n=2)[0] for _ in range(2))
        assert [row.completion_ids for row in first] != [row.completion_ids for row in again]
        assert {row.group for row in first}.isdisjoint(row.group for row in again)
        for number, row in enumerate([*first, *again]):
            row.reward, row.columns = float(number), {"number": float(number)}
        (batch,) = [session.batch([first[0], again[0], first[1], again[1]], loss="rloo")]
        assert batch.columns["number"].tolist() == [0.0, 2.0, 1.0, 3.0]
        assert batch.advantages[:, 0].tolist() == [-1.0, -1.0, 1.0, 1.0]
        short = session.generate(["1+1="], max_new_tokens=1, seed=3)[0][0]
        assert short.truncated
        assert session.batch([short], loss=likelihood).truncated.tolist() == [True]


def test_the_temperature_of_rows_is_that_of_their_samples(small):
    with rlhf_host.trainable_session(**small) as session:
        cold, usual = (session.generate(["1+1="], temperature=each, seed=1)[0][0] for each in (0.5, None))
        for row in (cold, usual):
            row.advantages = 1.0
            metrics = session.forward_backward([row], loss="grpo")
            assert metrics["mismatch/max"] < 1e-4
        with pytest.raises(UserError, match="and row 1 1: give each its own call"):
            session.forward_backward([cold, usual], loss="grpo")
        greedy = session.generate(["1+1="], temperature=0.0)[0][0]
        with pytest.raises(UserError, match="row 0 was sampled greedily"):
            session.batch([greedy])


def test_rows_may_hold_arrays_and_tensors(small):
    numbers = [1.0, 2.0, 3.0]
    with rlhf_host.trainable_session(**small) as session:
        batch = session.batch(
            [
                TrainingRow(
                    prompt_ids=torch.tensor([1, 2]),
                    completion_ids=np.array([3, 4, 5]),
                    logprobs=-torch.tensor(numbers),
                    mask=np.array([1, 0, 1]),
                    advantages=torch.tensor(numbers),
                    columns={"mine": np.array(numbers), "one": torch.tensor(4.0)},
                )
            ]
        )
        assert batch.advantages.tolist() == batch.token_columns["mine"].tolist() == [numbers]
        unknown = TrainingRow(prompt_ids=[1], completion_ids=[2, 3], mask=[1, 0], columns={"mine": [4.0, None]})
        assert session.batch([unknown]).token_columns["mine"].tolist() == [[4.0, 0.0]]
        assert batch.loss_mask.tolist() == [[True, False, True]]
        assert batch.columns["one"].tolist() == [4.0]


def test_trajectories_keep_their_rewards_and_stay_as_they_are(small):
    with rlhf_host.trainable_session(**small) as session:
        rows = [row.trajectory(number) for number, row in enumerate(rows_for(session, 2))]
        for number, row in enumerate(rows):
            row.group_id, row.reward = "one", 2.0 + number
            row.rewards = {"a": rlhf_host.Reward(2.0), "b": rlhf_host.Reward(2.0 * number)}  # weights 1 and 0.5
        batches = [session.batch(rows, loss="rloo") for _ in range(2)]
        for batch in batches:
            assert batch.token_rewards.sum(-1).tolist() == batch.rewards.tolist() == [2.0, 3.0]
            assert batch.advantages[:, 0].tolist() == [-1.0, 1.0]
        assert [row.advantage for row in rows] == [None, None]
        rows[0].advantages, rows[1].advantages = [3.0, 4.0], [5.0, 6.0, 7.0]
        rows[0].advantage = rows[1].advantage = 1.0
        assert session.batch(rows, loss="grpo").advantages[1].tolist() == [5.0, 6.0, 7.0]


def test_a_second_step_on_the_same_rows_compares_with_their_sampler(small):
    with rlhf_host.trainable_session(**small) as session:
        rows = session.generate(["1+1="], n=2)[0]
        for number, row in enumerate(rows):
            row.advantages = 1.0 - 2.0 * number
        seen = []

        def ratios(outputs, batch):
            seen.append(batch.old_logprobs)
            return -outputs.logprobs

        whole_batch = session.batch(rows, loss=ratios)
        for given in (rows, rows, whole_batch):
            session.forward_backward(given, loss=ratios)
            session.optim_step()
        known = torch.tensor(rows[0].logprobs)
        assert seen[0] is None
        for later in seen[1:]:
            assert torch.equal(later[0, : len(known)], known)
        with pytest.raises(UserError, match="call sync first"):
            session.generate(["1+1="])
        session.sync()
        session.generate(["1+1="])


def test_what_waits_is_dropped_by_gradients_and_failures(small):
    def broken(outputs, batch):
        raise ZeroDivisionError

    with rlhf_host.trainable_session(**small) as session:
        rows = rows_for(session)
        expected = session.gradient(rows[1:], loss="grpo")
        session.forward_backward(rows[:1], loss="grpo")
        assert torch.equal(whole(session.gradient(rows[1:], loss="grpo")), whole(expected))
        with pytest.raises(UserError, match="no gradient waits"):
            session.optim_step()
        session.forward_backward(rows[:1], loss="grpo")
        with pytest.raises(RunError, match="ZeroDivisionError"):
            session.forward_backward(rows, loss=broken)
        with pytest.raises(UserError, match="no gradient waits"):
            session.optim_step()
        session.forward_backward(rows[1:], loss="grpo")
        with pytest.raises(UserError, match="lr is nan"):
            session.optim_step(lr=math.nan)
        with pytest.raises(UserError, match="'critic' is not trained here"):
            session.optim_step(lr=1.0, role="critic")
        assert session.step == 0
        assert session.optim_step()["grad_norm"] == pytest.approx(float(whole(expected).norm()), rel=1e-5)


@pytest.fixture
def interruptible():
    """SIGINT as in the foreground: a shell starts what runs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_soon(after_s):
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_an_interrupt_ends_what_runs_and_not_the_session(small, interruptible):
    def slow(outputs, batch):
        time.sleep(0.5)
        return -outputs.logprobs

    before = signal.getsignal(signal.SIGINT)
    with rlhf_host.trainable_session(**small) as session:
        rows = rows_for(session)
        interrupt_soon(0.1)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(5)
        interrupt_soon(0.1)
        with pytest.raises(KeyboardInterrupt):
            session.generate(["1+1="] * 8, n=32, max_new_tokens=400)
        interrupt_soon(0.1)
        with pytest.raises(KeyboardInterrupt):
            session.forward_backward(rows, loss=slow)
        with pytest.raises(UserError, match="no gradient waits"):
            session.optim_step()
        interrupt_soon(0.1)
        with pytest.raises(KeyboardInterrupt):
            session.gradient(rows, loss=slow)
        assert len(session.generate(["1+1="], n=2)[0]) == 2
        session.forward_backward(rows, loss="grpo")
        session.optim_step()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_session_ends_with_its_block_which_may_fail(small):
    with pytest.raises(ZeroDivisionError), rlhf_host.trainable_session(run_dir="own", **small) as session:
        raise ZeroDivisionError("mine")
    told = json.loads(Path("own", "run.json").read_text())
    assert (told["status"], told["error"]) == ("failed", "mine")
    for late in (lambda: session.generate(["a"]), lambda: session.optim_step(), lambda: session.save("late")):
        with pytest.raises(UserError, match="the session has ended"):
            late()
    assert not Path("late").exists()


def step_of(session):
    session.forward_backward(rows_for(session), loss="grpo")
    return session.optim_step()


def test_states_stay_and_are_found(small):
    Path("run").mkdir()
    Path("run", "config.yaml").write_text("{}")
    with rlhf_host.trainable_session(**small) as session:
        session.forward_backward(rows_for(session), loss="grpo")
        session.optim_step(lr=0.5)
        first, *others = session.save("states"), *(step_of(session) and session.save("states") for _ in range(3))
        with pytest.raises(UserError, match="run is the directory of a run"):
            session.save("run")
        assert [each.is_dir() for each in (first, *others)] == [True] * 4
        session.load(first)
        assert (session.step, step_of(session)["lr"]) == (1, 0.5)
        session.save("states")
        session.load("states")  # saved last, though not the highest
        assert session.step == 2
        damaged = next(others[-1].rglob("*.safetensors"))
        damaged.chmod(0o644)
        damaged.write_bytes(b"-")
        with pytest.raises(UserError, match="states/checkpoints/step-000004 is damaged"):
            session.load(others[-1])
        assert [each.is_dir() for each in (first, *others)] == [True] * 4
        assert session.step == 2
        step_of(session)
    with rlhf_host.trainable_session(**{**small, "actor": {"lora": {"rank": 4}}}) as session:
        with pytest.raises(UserError, match="rank is 0 in it, and 4 here"):
            session.load("states")
        step_of(session)


def test_settings_of_a_loop_are_refused_or_named(small, capsys):
    for name, value in {"epochs": 2, "minibatches": 2, "on_nonfinite": "skip"}.items():
        with (
            pytest.raises(UserError, match=f"train.{name} is a setting of a run's loop"),
            rlhf_host.trainable_session(**{**small, "train": {name: value}}),
        ):
            pass
    more = {"checkpoint.every": 1, "eval.at_end": False, "actor": {"schedule": "linear"}, "steps": 1}
    with rlhf_host.trainable_session(**{**small, **more}) as session:
        step_of(session)
        assert "after the end" not in capsys.readouterr().err.partition("eval.at_end, checkpoint.every is for the loop")[2]
        step_of(session)
        assert "step 2 is after the end of actor.schedule linear, which train.steps sets to 1" in capsys.readouterr().err


def test_sampling_ahead_has_no_last_step(small):
    ahead = {**small, **WAYS["rloo"], "async_depth": 1, "steps": 1}
    with rlhf_host.trainable_session(**ahead) as session:
        for _ in range(3):
            session.forward_backward(session.draw())
            session.optim_step()
            session.sync()
        with pytest.raises(UserError, match="call sync"):
            [session.draw() for _ in range(3)]


class Counting:
    @rlhf_host.hookimpl
    def compute_loss(self, outputs, batch):
        return [rlhf_host.LossTerm("own", -outputs.logprobs)]

    @rlhf_host.hookimpl
    def state_dict(self):
        return {"calls": 1}

    @rlhf_host.hookimpl
    def load_state_dict(self, state):
        pass


def without_data(session):
    with rlhf_host.trainable_session(model=session.config.roles["actor"].model, algo="rloo", rewards=vowels) as other:
        other.draw()


def row(**fields):
    return [TrainingRow(**{"prompt_ids": [1], "completion_ids": [2, 3], "advantages": 1.0, **fields})]


WRONG = {
    "no samples": (lambda s: s.generate(["a"], n=0), "n is 0"),
    "no new tokens": (lambda s: s.generate(["a"], max_new_tokens=0), "max_new_tokens is 0"),
    "a prompt that is none": (lambda s: s.generate([None]), "prompt 0 is a text, .* not None"),
    "one row": (lambda s: s.batch(row()[0]), "rows are a list of TrainingRow, not a TrainingRow"),
    "tokens that are no numbers": (lambda s: s.batch(row(completion_ids=[2.5, 3])), "row 0: completion_ids is a list of token"),
    "a mask of halves": (lambda s: s.batch(row(mask=[0.5, 1])), "row 0: mask has one of true and false"),
    "probabilities": (lambda s: s.batch(row(logprobs=[0.3, 0.9])), "row 0: 0.3 is no log-probability"),
    "text as a column": (lambda s: s.batch(row(columns={"x": "ab"})), "row 0: the column x is a number"),
    "a column that is not finite": (lambda s: s.batch(row(columns={"x": [1, math.nan]})), "row 0: the column x has nan"),
    "a number that float32 rounds": (lambda s: s.batch(row(columns={"x": 2**24 + 1})), "would make 16777216 of it"),
    "a column without a name": (lambda s: s.batch(row(columns={"": 1})), "row 0: a column is called ''"),
    "a limit that is a text": (lambda s: s.batch(row(truncated="no")), "row 0: truncated is 'no'"),
    "rewards without groups": (lambda s: s.batch(row(advantages=None, reward=1.0), loss="grpo"), "row 0 has no group, and"),
    "rewards of groups of one": (
        lambda s: s.batch(row(advantages=None, reward=1.0, group=7), loss="grpo"),
        "row 0 has a group of 1, and the loss compares 2",
    ),
    "tokens that nobody chose": (lambda s: s.forward_backward(row(mask=[0, 0]), loss="grpo"), "no token of the rows is in"),
    "a loss with a state": (lambda s: s.batch(row(), loss=Counting()), "has state_dict, .* start the session with it as algo"),
    "no names": (lambda s: s.gradient(row(), loss="grpo", names=[]), r"names is \[\]"),
    "an empty prompt to answer": (lambda s: s.generate(["a", ""]), "prompt 1 is empty"),
    "messages without a role": (lambda s: s.generate([[{"x": "a"}]]), "prompt 0 is a text, a list of messages"),
    "no path": (lambda s: s.load(3), "load takes a path, not 3"),
    "metrics that are no mapping": (lambda s: s.log(None), "log takes a mapping"),
    "columns of some": (lambda s: s.batch([*row(columns={"x": 1}), *row()]), "'x' is missing in row 1"),
    "columns of two forms": (
        lambda s: s.batch([*row(columns={"x": 1}), *row(columns={"x": [1, 2]})]),
        "'x' is a list in row 1",
    ),
    "a reward that is none": (lambda s: s.batch(row(reward=math.nan, advantages=None)), "row 0: reward is nan"),
    "rewards of some": (
        lambda s: s.batch([*row(reward=1.0, advantages=None), *row(advantages=None)], loss="rloo"),
        "row 1 has neither advantages nor a reward, and others have one",
    ),
    "metrics that are none": (lambda s: s.log({"a": "b"}), "log: 'a' is 'b'"),
    "no dimensions": (lambda s: s.gradient(rows_for(s), loss="grpo", project=0), "project is 0"),
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
        "row 0: advantages has nan",
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


def test_a_refused_step_needs_no_sync_unless_weights_moved(small):
    def steep(outputs, batch):
        return -outputs.logprobs * 1e30

    with rlhf_host.trainable_session(**small, async_depth=1) as session:
        rows = rows_for(session, 1)
        session.forward_backward(rows, loss=steep)
        with pytest.raises(RunError, match="step 1: actor: the gradient norm is inf"):
            session.optim_step()
        assert not session._loop.gate.closed
        session.generate(["1+1="], max_new_tokens=1)
        session.forward_backward(rows, loss=likelihood)
        session.optim_step()
        session.forward_backward(rows, loss=steep)
        with pytest.raises(RunError, match="step 2: actor: the gradient norm is inf"):
            session.optim_step()
        with pytest.raises(UserError, match="call sync first"):
            session.generate(["1+1="])


@pytest.mark.parametrize(("stepped", "moved"), [((), False), ("actor/grad_norm", True)])
def test_a_step_that_is_refused_for_a_later_role_has_moved_weights(stepped, moved):
    metrics = Metrics()
    metrics.add([Metric(name, 1.0) for name in ("loss", stepped) if name])
    assert _nothing_moved(Update(metrics, "critic: the gradient norm is inf")) is not moved
    assert not _nothing_moved(Update(metrics))


def test_a_directory_of_a_run_is_not_taken(small):
    Path("run").mkdir()
    Path("run", "config.yaml").write_text("{}")
    with pytest.raises(UserError, match="choose another run_dir"), rlhf_host.trainable_session(run_dir="run", **small):
        pass


@given(tokens=st.lists(st.tuples(st.booleans(), st.integers(-9, 9)), min_size=1, max_size=12))
def test_a_row_keeps_every_token_and_number_in_its_place(tokens):
    (mask, numbers), count = map(list, zip(*tokens, strict=True)), len(tokens)
    row = TrainingRow(
        prompt_ids=[1],
        completion_ids=list(range(count)),
        mask=mask,
        logprobs=[-abs(number) for number in numbers],
        columns={"mine": numbers, "one": 3.0},
    )
    segments = row.trajectory(0).completion
    assert [token for segment in segments for token in segment.token_ids] == list(range(count))
    assert [value for segment in segments for value in segment.columns["mine"]] == numbers
    chosen = [value for segment in segments if segment.kind == "action" for value in segment.logprobs]
    assert chosen == [-abs(value) for value, own in zip(numbers, mask, strict=True) if own]
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
            with pytest.raises(UserError, match="call sync first"):
                session.generate(["1+1="])
            session.sync()
            found[where].append(len(session.generate(["1+1="], n=2)[0]))
            if backend == "torch":
                gradients = session.gradient(rows, loss="grpo", names=["*norm*"])
                found[where] += [len(gradients), float(whole(gradients).norm())]
    assert found["ray"] == pytest.approx(found["here"], rel=1e-3)


def test_calls_have_settings_of_their_own(small: dict[str, Any], tmp_path: Path):
    """Sampling of one call, a loss without gradient, the optimizer's settings of one step, and weights without their optimizer."""
    small["algo"] = OwnLoss()
    with rlhf_host.trainable_session(**{name: value for name, value in small.items() if name != "data"}) as session:
        (stopped,) = session.generate([[5, 6, 7]], n=8, max_new_tokens=20, stop_token_ids=list(range(3, 40)), top_k=50)
        assert all(row.completion_ids[-1] < 40 or row.truncated for row in stopped)
        with pytest.raises(UserError, match="generate has no argument 'top'"):
            session.generate([[5]], top=1)
        with pytest.raises(UserError, match="generate: top_p: "):
            session.generate([[5]], top_p=2.0)
        rows = [TrainingRow(prompt_ids=[5, 6], completion_ids=[7, 8, 9])]
        loss = session.forward(rows)["loss/nll"]
        with pytest.raises(UserError, match="no gradient waits"):
            session.optim_step()
        session.forward_backward(rows)
        session.drop()
        with pytest.raises(UserError, match="no gradient waits"):
            session.optim_step()
        assert session.forward_backward(rows)["loss"] == pytest.approx(loss, abs=1e-6)
        for _ in range(2):
            session.forward_backward(rows)
            session.optim_step(lr=1e-2, betas=(0.5, 0.5), adam_eps=1e-3, weight_decay=0.1, max_grad_norm=0.0)
        session.forward_backward(rows)
        with pytest.raises(UserError, match="optim_step has no argument 'beta'"):
            session.optim_step(beta=0.5)
        optimizer = session._trainer.worker.roles["actor"].backend.optimizer
        decays = {group["params"][0].dim(): group["weight_decay"] for group in optimizer.param_groups}
        assert decays == {2: 0.1, 1: 0.0}
        assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.5, 0.5), 1e-3)}
        session.drop()
        state, trained = session.save(tmp_path / "state"), session.forward(rows)["loss/nll"]
        session.forward_backward(rows)
        session.load(state, optimizer=False)
        assert session.forward(rows)["loss/nll"] == trained
        assert not session._trainer.worker.roles["actor"].backend.optimizer.state


class OwnLoss:
    """A session's own loss."""

    @hookimpl
    def needs(self) -> Needs:
        return Needs(roles=(RoleNeed("actor", trainable=True),), rewards=False)

    @hookimpl
    def compute_loss(self, outputs: Any, batch: Any) -> list[LossTerm]:
        return [LossTerm("nll", -outputs.logprobs)]
