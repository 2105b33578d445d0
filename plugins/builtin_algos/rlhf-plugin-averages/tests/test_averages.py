"""Real runs whose weights are compared with averages computed from their checkpoints."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
import torch
from peft import PeftModel
from rlhf_authoring.learner import SUMS, Learner, right_answer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rlhf_host
from rlhf_host import UserError

QUICKSTART = str(files("rlhf_host") / "models" / "quickstart")


def train(run, **more):
    settings = {"steps": 4, "batch_size": 4, "n": 4, "lr": 1e-3, "max_new_tokens": 4}
    fixed = {"train.threads": 1, "checkpoint.every": 1, "checkpoint.keep": 0, "actor.model": "quickstart"}
    return rlhf_host.train(
        algo=Learner(), reward=right_answer, data=SUMS, run_dir=str(run), trackers=["jsonl"], **{**settings, **fixed, **more}
    )


def weights(run, step, role):
    path = run / f"checkpoints/step-{step:06d}" / ("model" if role == "actor" else f"roles/{role}")
    return load_file(path / "model.safetensors")


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_average_is_that_of_the_policys_weights_after_every_step(tmp_path):
    train(tmp_path / "run", extensions=["ema"], **{"ema.decay": 0.75})
    average = weights(tmp_path / "run", 1, "ema")
    for step in (2, 3, 4):
        policy = weights(tmp_path / "run", step, "actor")
        average = {name: 0.75 * value + 0.25 * policy[name] for name, value in average.items()}
        found = weights(tmp_path / "run", step, "ema")
        for name, value in found.items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, average[name], rtol=1e-6, atol=1e-7)
    assert not same(found, policy)


def test_a_resumed_run_goes_on_with_the_average(tmp_path):
    train(tmp_path / "whole", extensions=["ema"], **{"ema.decay": 0.5})
    train(tmp_path / "run", extensions=["ema"], **{"ema.decay": 0.5, "steps": 2})
    rlhf_host.train(resume=str(tmp_path / "run"), algo=Learner(), reward=right_answer, data=SUMS, steps=4)
    assert same(weights(tmp_path / "run", 4, "ema"), weights(tmp_path / "whole", 4, "ema"))


def merged(adapter):
    """Whole weights, by peft alone."""
    base = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()


def test_the_average_of_a_policy_that_trains_an_adapter_is_that_of_its_whole_weights(tmp_path):
    """Also if it begins with one, and in a run that resumes."""
    options = {"extensions": ["ema"], "ema.decay": 0.5, "lr": 1e-2, "steps": 3}
    train(tmp_path / "first", **options, **{"actor.lora.rank": 4})
    start = str(tmp_path / "first" / "model")
    train(tmp_path / "whole", **options, **{"actor.adapter": start})
    train(tmp_path / "run", **{**options, "steps": 2}, **{"actor.adapter": start})
    rlhf_host.train(resume=str(tmp_path / "run"), algo=Learner(), reward=right_answer, data=SUMS, steps=3)
    plain = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32).state_dict()
    for run, average in (("first", plain), ("whole", merged(start))):
        for step in (1, 2, 3):
            policy = merged(tmp_path / run / f"checkpoints/step-{step:06d}/model")
            average = {name: 0.5 * value + 0.5 * policy[name] for name, value in average.items()}
            for name, value in weights(tmp_path / run, step, "ema").items():
                torch.testing.assert_close(value, average[name], rtol=1e-6, atol=1e-7)
    assert same(weights(tmp_path / "run", 3, "ema"), weights(tmp_path / "whole", 3, "ema"))


def test_the_reference_becomes_the_policy_every_second_step(tmp_path):
    run = tmp_path / "run"
    train(run, extensions=["moving_reference"], **{"moving_reference.share": 1.0, "moving_reference.every": 2, "kl.coef": 0.1})
    assert same(weights(run, 2, "reference"), weights(run, 2, "actor"))
    assert same(weights(run, 3, "reference"), weights(run, 2, "actor"))
    assert same(weights(run, 4, "reference"), weights(run, 4, "actor"))
    kl = [row["kl"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "kl" in row]
    # Steps 1 and 3 begin where the reference is.
    assert [abs(value) < 1e-6 for value in kl] == [True, False, True, False]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"roles.ema.dtype": "bfloat16"}, "the role ema follows actor in small steps, which only 32 bits hold"),
        ({"ema.decay": 1.0}, "decay"),
    ],
)
def test_what_cannot_follow_is_refused_before_the_run(tmp_path, more, said):
    with pytest.raises(UserError, match=said):
        train(tmp_path / "run", extensions=["ema"], **more)
    assert not (tmp_path / "run").exists()
