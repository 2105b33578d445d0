"""``rlhf translate``: published commands of other projects become configurations that load, and none of their options is lost."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from rlhf_host.settings import plain, read_yaml

from .conftest import ORACLES
from .known import HERE, PLAUSIBLE, UNSET, flag, unset

OPENRLHF = ("openrlhf_ppo.sh", "openrlhf_prorlv2.sh", "openrlhf_reinforce_baseline.sh", "openrlhf_dpo.sh")
TRL = ("trl_grpo.sh", "trl_grpo.yaml", "trl_dpo.sh")
VERL = ("verl_grpo.sh",)
PUBLISHED = (*OPENRLHF, *TRL, *VERL)

MEANINGS = {
    "openrlhf_ppo.sh": {
        "algo": {"name": "ppo", "critic_from": "reward", "clip_eps_high": 0.2, "dual_clip": None},
        "train": {"batch_size": 1024, "minibatches": 8, "epochs": 1, "steps": UNSET},
        "placement": ["actor+critic+reference+reward+rollout=8"],
        "reward": {"reward_model": {"name": "reward_model", "normalize": "file", "clip": 10.0}},
        "kl": {"coef": 0.01},
        "checkpoint": {"every": 0, "keep": 3},
    },
    "openrlhf_prorlv2.sh": {
        "algo": {"name": "reinforce_pp_baseline", "clip_eps": 0.2, "clip_eps_high": 0.27, "dual_clip": None},
        "kl": {"coef": 1e-4, "place": "loss", "estimator": "k2"},
        "train": {"minibatches": 8, "batch_size": 512, "max_tokens_per_microbatch": 32768, "steps": UNSET},
        "with": {
            "dynamic_filtering": {"low": 0.0, "high": 1.0},
            "icepop": {"low": 0.5, "high": 5.0},
            "stop_properly": {"coef": 0.0},
            "reward_scaling": {"low": -10.0, "high": 10.0},
        },
        "reward": {"math_reward_func": {"name": "${WORK_DIR}/examples/python/math_reward_func.py"}},
    },
    "openrlhf_reinforce_baseline.sh": {
        "agent": {"name": "examples/python/agent_func.py"},
        "placement": ["actor+reference+rollout=4"],
        "tracker": {"tensorboard": {"name": "tensorboard"}},
    },
    "openrlhf_dpo.sh": {
        "algo": {"name": "dpo", "beta": 0.1},
        "data": {
            "epochs": 1.0,
            "max_tokens": 8192,
            "long_rows": "truncate",
            "sources": [{"path": "OpenRLHF/preference_dataset_mixture2_and_safe_pku"}],
        },
        "placement": UNSET,
        "train": {"batch_size": 256},
        "backend": {"name": "deepspeed", "precision": "bf16", "zero_stage": 3},
    },
    "trl_grpo.sh": {
        "train": {"steps": UNSET, "batch_size": UNSET, "autocast": "bfloat16"},
        "algo": {"name": "grpo", "std_eps": 1e-4, "clip_eps_high": 0.2, "dual_clip": None, "aggregation": "token-mean"},
        "placement": UNSET,
        "reward": {"accuracy_reward": {"name": "math_verifier"}},
    },
    "trl_grpo.yaml": {
        "train": {"batch_size": 4, "steps": UNSET, "autocast": "bfloat16"},
        "placement": ["actor=4"],
        "backend": {"name": "deepspeed", "zero_stage": 2},
    },
    "trl_dpo.sh": {
        "train": {"batch_size": 16, "steps": 1000, "autocast": "bfloat16"},
        "run_dir": "Qwen2-0.5B-DPO",
    },
    "verl_grpo.sh": {
        "train": {"batch_size": 1024, "minibatches": 4, "steps": UNSET},
        "kl": {"coef": 0.001, "place": "loss", "estimator": "k3"},
        "rollout": {"max_new_tokens": 1024, "n": 5},
        "placement": ["actor+rollout=8"],
        "reward": {"math_verifier": {"name": "math_verifier"}},
    },
}


def options_of(path):
    """The names that the file has, counted without the code that is tested."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    if path.suffix == ".yaml":
        return [line.partition(":")[0] for line in lines if re.match(r"\w+:", line)]
    if path.name.startswith("verl"):
        return re.findall(r"(?<![\w.])([a-z_][\w.]*)=", "\n".join(lines))
    return re.findall(r"(?<!\S)(--[a-z][\w.-]*)", "\n".join(lines))


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_option_is_named_with_what_it_became(translated, name):
    said, text, _ = translated(HERE / name)
    names = [option for option in options_of(HERE / name) if option != "--module"]
    in_files = 2 if name == "trl_grpo.yaml" else 0  # of TRL's own zero2.yaml, which it names
    assert len(names) + in_files == int(re.search(r": (\d+) options", said)[1])
    for option in names:
        assert re.search(rf"(?<![\w.]){re.escape(option)}(?![\w.]).*\(line \d+\)", text), option


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_meaning_is_the_same(translated, name):
    values = translated(HERE / name)[2]
    for section, expected in MEANINGS[name].items():
        assert values[section] == expected, section


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_configuration_is_accepted(translated, rlhf_here, tiny_model, scorer, tmp_path, monkeypatch, name):
    """Models and data sets of the scripts are not on this machine, and neither are 8 devices: a dry run asks for none of these."""
    monkeypatch.chdir(tmp_path)
    write_reward_and_agent(tmp_path)
    text = translated(HERE / name)[1].replace("${WORK_DIR}/", "")
    Path("ours.yaml").write_text(text)
    pairs = "dpo" in name
    row = (
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
        if pairs
        else {"prompt": "1+1=", "context_messages": "1+1=", "label": "2"}
    )
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    measured = tmp_path / "scorer"  # a reward model of OpenRLHF has these
    shutil.copytree(scorer, measured)
    config = json.loads((measured / "config.json").read_text())
    (measured / "config.json").write_text(json.dumps({**config, "mean": 0.5, "std": 2.0}))
    flags = ["--actor.model", tiny_model, "--data", "rows.jsonl", "--run-dir", "run"]
    flags += ["--actor.attn-implementation", "sdpa"] if "flash_attention_2" in text else []
    flags += [word for key in unset(plain(read_yaml(Path("ours.yaml")))) for word in (flag(key), PLAUSIBLE.get(key, "2"))]
    flags += ["--eval.data", "rows.jsonl"] if "\neval:\n  data:" in text else []
    flags += ["--reward-model.model", measured] if "\nreward_model:" in text else []
    done = rlhf_here("train", "--config", "ours.yaml", *flags, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "Checked: settings, plugins" in done.output
    assert not Path("run").exists()


def write_reward_and_agent(folder):
    """Writes them where the scripts expect those of OpenRLHF's repository."""
    examples = folder / "examples/python"
    examples.mkdir(parents=True, exist_ok=True)
    (examples / "math_reward_func.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0]}\n")
    (examples / "agent_func.py").write_text("async def execute(episode, policy):\n    return 1.0\n")


def test_defaults_there_become_settings_here(translated, script):
    said, text, values = translated(script("python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data p.jsonl\n"))
    assert values["kl"] == {"coef": 0.01}
    assert values["rollout"] == {"n": 1, "max_new_tokens": 2047, "max_tokens": 2048}
    assert values["data"]["template"] == "none"
    assert "  coef: 0.01  # default there: --init_kl_coef 0.01\n" in text
    assert "clip_eps:" not in text  # 0.2 on both sides
    assert (
        "# train.steps: SET THIS (1 pass over the data, each of prompts / 1024 steps): default there: --num_episodes 1\n"
        in text
    )
    assert values["train"]["steps"] == UNSET
    assert "--train.steps STEPS --dry-run" in said
    assert "2 options, 2 translated" in said


def test_a_configuration_of_verl(translated, script):
    said, text, values = translated(
        script(
            "actor_rollout_ref:\n  actor: {clip_ratio_high: 0.28, loss_agg_mode: seq-mean-token-sum-norm, use_kl_loss: false}\n"
            "  rollout: {name: vllm, n: 4, prompt_length: '${oc.select:data.max_prompt_length,512}'}\n"
            "  model: {path: m}\ndata: {train_files: [a.parquet, b.parquet], max_response_length: 100}\n"
            "algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}\n"
            "custom_reward_function: {path: my.py, name: score}\ntrainer: {total_training_steps: 9, logger: [console, file]}\n",
            "verl.yaml",
        )
    )
    assert values["algo"] == {
        "name": "grpo",
        "std": "none",
        "clip_eps_high": 0.28,
        "aggregation": "sequence-mean-token-sum-over(100)",
    }
    assert values["data"]["sources"] == [{"path": "a.parquet"}, {"path": "b.parquet"}]
    assert values["reward"] == {"score": {"name": "my.py:score"}}
    assert values["train"]["steps"] == 9
    assert "actor_rollout_ref.rollout.prompt_length=512 (line 3): rows are packed by tokens" in text
    assert "trainer.logger=[console, file] (line 8): no tracker here is called file" in said


def test_the_whole_configuration_of_verl(translated):
    path = ORACLES / "verl/verl/trainer/config/_generated_ppo_trainer.yaml"
    if not path.is_file():
        pytest.skip("make oracles fetches the published packages")
    said, text, values = translated(path)
    number = int(re.search(r": (\d+) options", said)[1])
    assert number > 800
    assert len(re.findall(r"\(line \d+\)", re.sub(r"\n *# +", " ", text))) >= number
    assert values["run_dir"] == "checkpoints/verl_examples/gsm8k"
    assert values["algo"]["name"] == "ppo"
    assert "more, in the comments of" in said


def test_what_is_too_long_for_the_end_of_a_line_is_above_it_and_there_once(translated):
    text = translated(HERE / "openrlhf_ppo.sh")[1]
    assert max(map(len, text.splitlines())) <= 128
    comments = [line.strip() for line in text.splitlines() if len(line.partition("#")[2]) > 60]
    assert len(set(comments)) == len(comments)
