"""Runs over pictures: every kind of algorithm trains the tower, agents bring pictures, and engines sample what is trained."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from .. import seeing
from ..conftest import read_jsonl

REWARD = '''"""Rewards an answer by its letters."""
def reward(completion, label):
    return sum(ord(letter) % 5 for letter in completion) / 20
'''
AGENT = '''"""Shows another picture after the first answer, as a tool would."""
from PIL import Image
from pydantic import BaseModel
from rlhf_host import Needs, Step, hookimpl


class Shows:
    class Options(BaseModel):
        pass

    def __init__(self, options):
        pass

    @hookimpl
    def agent_reset(self, episode):
        return Step(None)

    @hookimpl
    def agent_step(self, episode, action):
        if episode.turn == 1:
            return Step(reward=float(len(action.text)), done=True)
        image = Image.new("RGB", (28 + 14 * episode.sample, 28), (40 * episode.sample, 90, 200))
        parts = [{"type": "text", "text": "and "}, {"type": "image", "image": image}, {"type": "text", "text": "?"}]
        return Step([{"role": "user", "content": parts}])
'''
TOKENS = '''"""Asks with tokens, as a program that knows nothing of pictures."""
from pydantic import BaseModel
from rlhf_host import hookimpl


class Asks:
    class Options(BaseModel):
        pass

    def __init__(self, options):
        pass

    @hookimpl
    async def agent_run(self, episode, policy):
        ids = list(episode.task.prompt_ids)
        answer = await policy.generate(ids)
        await policy.generate([*ids, *answer.token_ids, 20, 21])
        return policy.trajectories()
'''
MACHINE = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Models, rows with no picture, one and two, and Python files."""
    root = tmp_path_factory.mktemp("seeing")
    seeing.qwen(root / "qwen")
    seeing.idefics(root / "idefics")
    for number in range(8):
        seeing.noise(root / f"{number}.png", ((56, 42), (28, 56), (42, 42))[number % 3], number)
    prompts, answers, pairs = [], [], []
    for number in range(24):
        own = [f"{number % 8}.png", f"{(number + 3) % 8}.png"][: number % 3]
        text = "".join("<image>" for _ in own) + "which?"
        seen = {"images": own} if own else {}
        prompts.append({"prompt": text, "label": "abc"[number % 3], **seen})
        answers.append({"prompt": text, "completion": "abc"[number % 3], **seen})
        pairs.append({"prompt": text, "chosen": "abc"[number % 3], "rejected": "x", **seen})
    for name, rows in (("prompts", prompts), ("answers", answers), ("pairs", pairs)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rewards.py").write_text(REWARD)
    (root / "agents.py").write_text(AGENT)
    (root / "tokens.py").write_text(TOKENS)
    return root


def flags(place: Path, algo: str, data: str, model: str = "qwen") -> list[str | Path]:
    asks = ["--reward", f"{place / 'rewards.py'}:reward", "--rollout.n", "4", "--rollout.max-new-tokens", "5"]
    return [
        *("train", "--algo", algo, "--actor.model", place / model, "--data", place / f"{data}.jsonl", "--actor.lr", "1e-2"),
        *("--train.steps", "2", "--train.batch-size", "6", "--train.threads", "1", "--seed", "3"),
        *(asks if data == "prompts" else ()),
    ]


@pytest.fixture
def run(rlhf_here, place, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))

    def train(name, *arguments):
        result = rlhf_here(*arguments, "--run-dir", tmp_path / name)
        assert result.exit_code == 0, result.output
        return read_jsonl(tmp_path / name / "metrics.jsonl")

    return train


def tower(directory: Path) -> torch.Tensor:
    weights = load_file(directory / "model.safetensors")
    return torch.cat([weight.flatten() for name, weight in sorted(weights.items()) if "visual" in name or "vision" in name])


def comparable(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.startswith(MACHINE)}


@pytest.mark.parametrize("model", ["qwen", "idefics"])
def test_sampled_actions_have_the_trainers_logprobs_while_the_tower_learns(run, place, tmp_path, model):
    rows = run("run", *flags(place, "grpo", "prompts", model))
    assert max(row["mismatch/max"] for row in rows) < 1e-5
    assert not torch.equal(tower(place / model), tower(tmp_path / "run" / "model"))
    assert (
        tmp_path / "run" / "model" / ("processor_config.json" if model == "idefics" else "preprocessor_config.json")
    ).exists()


def test_rows_with_answers_train_the_tower(run, place, tmp_path):
    rows = run("run", *flags(place, "sft", "answers"), "--train.steps", "12", "--train.batch-size", "24")
    assert rows[-1]["loss"] < rows[0]["loss"] / 2
    assert not torch.equal(tower(place / "qwen"), tower(tmp_path / "run" / "model"))


def test_a_frozen_tower_stays(run, place, tmp_path):
    rows = run("run", *flags(place, "grpo", "prompts"), "--actor.freeze", "*visual*")
    assert max(row["mismatch/max"] for row in rows) < 1e-5
    assert torch.equal(tower(place / "qwen"), tower(tmp_path / "run" / "model"))


def test_an_agent_brings_pictures_in_later_turns(run, place, tmp_path):
    agent = f"{place / 'agents.py'}:Shows"
    rows = run("run", *flags(place, "grpo", "prompts"), "--agent", agent, "--trajectories.tokens")
    assert max(row["mismatch/max"] for row in rows) < 1e-5
    lines = read_jsonl(tmp_path / "run" / "trajectories" / "train-step-000001.jsonl")
    kinds = [[segment["kind"] for segment in line["segments"]] for line in lines]
    assert all(row == ["prompt", "action", "observation", "action"] for row in kinds)


def test_tokens_of_the_tasks_prompt_keep_its_pictures(run, place, tmp_path):
    agent = f"{place / 'tokens.py'}:Asks"
    rows = run("run", *flags(place, "grpo", "prompts"), "--agent", agent, "--trajectories.tokens", "--train.steps", "1")
    assert rows[0]["mismatch/max"] < 1e-5
    [task_of] = {len(line["segments"][0].get("images", ())) == line["task"] % 3 for line in read_jsonl(
        tmp_path / "run" / "trajectories" / "train-step-000001.jsonl"
    )}  # fmt: skip
    assert task_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "data", "more"),
    [
        ("ppo", "prompts", ()),
        ("rloo", "prompts", ("--kl.coef", "0.1")),
        ("rloo", "prompts", ("--kl.coef", "0.1", "--actor.lora.rank", "4")),
        ("reinforce_pp", "prompts", ("--async-depth", "1")),
        ("grpo", "prompts", ("--train.shared-prefix", "off", "--train.minibatches", "2")),
        ("dpo", "pairs", ("--reference.precompute", "true")),
        ("rm", "pairs", ()),
        ("kto", "pairs", ()),
    ],
)
def test_every_kind_of_algorithm_trains_with_pictures(run, place, algo, data, more):
    rows = run("run", *flags(place, algo, data), *more)
    assert len(rows) == 2
    assert all(row.get("mismatch/max", 0) < 1e-5 for row in rows)
    assert rows[-1]["grad_norm"] > 0 if "grad_norm" in rows[-1] else True


@pytest.mark.slow
def test_a_killed_run_goes_on_value_for_value(rlhf_process, place, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    more = ("--train.steps", "8", "--checkpoint.every", "2")
    rlhf_process.run(*flags(place, "grpo", "prompts"), *more, "--run-dir", tmp_path / "whole")
    process = rlhf_process.start(*flags(place, "grpo", "prompts"), *more, "--run-dir", tmp_path / "killed")
    log = tmp_path / "killed" / "metrics.jsonl"
    until = time.monotonic() + 200
    while not (log.exists() and len(log.read_text().splitlines()) >= 5):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    rlhf_process.run("train", "--resume", tmp_path / "killed")
    whole, killed = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed"))
    assert [comparable(row) for row in killed] == [comparable(row) for row in whole]
    assert torch.equal(*(torch.cat([w.flatten() for w in load_file(tmp_path / name / "model" / "model.safetensors").values()])
                         for name in ("whole", "killed")))  # fmt: skip


@pytest.mark.slow
def test_vllm_samples_what_the_trainer_computes(rlhf_process, place, tmp_path):
    for name, more in (("wait", ()), ("keep", ("--engine.kv-after-sync", "keep", "--async-depth", "1"))):
        run_dir = tmp_path / name
        rlhf_process.run(
            *flags(place, "grpo", "prompts", "idefics"), "--engine", "vllm", "--train.steps", "4", *more, "--run-dir", run_dir
        )
        first = read_jsonl(run_dir / "metrics.jsonl")[0]
        assert first["mismatch/max"] < 1e-4
    assert max(row["mismatch/max"] for row in read_jsonl(tmp_path / "wait" / "metrics.jsonl")) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("qwen", ("--placement", "actor=2", "--backend", "fsdp")),
        ("idefics", ("--placement", "actor=2", "--backend", "deepspeed", "--backend.zero-stage", "3", "--engine", "vllm")),
    ],
    ids=["fsdp", "zero-vllm"],
)
def test_ranks_without_pictures_keep_in_step(rlhf_process, place, tmp_path, model, more):
    """Two of three rows have a picture, so some passes of a rank have none while another rank's tower runs."""
    ray = ("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")
    size = ("--train.steps", "3", "--train.max-tokens-per-microbatch", "90")
    rlhf_process.run(*flags(place, "grpo", "prompts", model), *size, "--run-dir", tmp_path / "one")
    rlhf_process.run(*flags(place, "grpo", "prompts", model), *size, *ray, *more, "--run-dir", tmp_path / "two")
    one, two = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert max(row["mismatch/max"] for row in two) < 1e-4
    names = ("reward/mean", "loss", "grad_norm", "entropy")
    if "vllm" not in more:
        for here, there in zip(one, two, strict=True):
            assert [there[name] for name in names if name in here] == pytest.approx(
                [here[name] for name in names if name in here], rel=1e-3, abs=1e-5
            )


def test_a_model_that_sees_refuses_what_it_cannot_do_here(rlhf_here, place, tmp_path):
    shutil.copytree(place / "qwen", tmp_path / "blind")
    (tmp_path / "blind" / "preprocessor_config.json").unlink()
    arguments = flags(place, "grpo", "prompts")
    arguments[arguments.index(place / "qwen")] = tmp_path / "blind"
    result = rlhf_here(*arguments, "--run-dir", tmp_path / "run")
    assert result.exit_code == 2
    assert "prompts.jsonl:2" in result.output
    assert "processor" in result.output


def test_a_family_that_sees_nothing_here_is_refused_before_it_is_loaded(rlhf_here, place, tiny_model, tmp_path):
    shutil.copytree(place / "qwen", tmp_path / "blind")
    settings = json.loads((tiny_model / "config.json").read_text())
    settings |= {"vocab_size": 74, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(**{name: value for name, value in settings.items() if name != "architectures"})
    ).save_pretrained(tmp_path / "language")
    arguments = [*flags(place, "grpo", "prompts"), "--critic.model", tmp_path / "language"]
    arguments[2] = "ppo"
    result = rlhf_here(*arguments, "--run-dir", tmp_path / "run")
    assert result.exit_code == 2, result.output
    assert "LlamaForSequenceClassification takes no pictures here" in result.output
    assert "Loading actor" not in result.output
