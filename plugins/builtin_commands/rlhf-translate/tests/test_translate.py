"""``rlhf translate``: published commands of other projects become configurations that load, and none of their options is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlhf_host.settings import plain, read_yaml

from .conftest import ORACLES
from .known import GRPO, HERE, PLAUSIBLE, PPO, UNSET, flag, unset

OPENRLHF = ("openrlhf_ppo.sh", "openrlhf_prorlv2.sh", "openrlhf_reinforce_baseline.sh", "openrlhf_dpo.sh")
TRL = ("trl_grpo.sh", "trl_grpo.yaml", "trl_dpo.sh")
VERL = ("verl_grpo.sh",)
PUBLISHED = (*OPENRLHF, *TRL, *VERL)

MEANINGS = {
    "openrlhf_ppo.sh": {
        "algo": {"name": "ppo", "critic_from": "reward", "clip_eps_high": 0.2, "dual_clip": None},
        "train": {"batch_size": 1024, "minibatches": 8, "epochs": 1, "steps": UNSET},
        "placement": ["actor+critic+reference+reward+rollout=8"],
        "reward": {"reward_model": {"name": "reward_model", "normalize": "running", "clip": 10.0}},
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
    flags = ["--actor.model", tiny_model, "--data", "rows.jsonl", "--run-dir", "run"]
    flags += ["--actor.attn-implementation", "sdpa"] if "flash_attention_2" in text else []
    flags += [word for key in unset(plain(read_yaml(Path("ours.yaml")))) for word in (flag(key), PLAUSIBLE.get(key, "2"))]
    flags += ["--eval.data", "rows.jsonl"] if "\neval:\n  data:" in text else []
    flags += ["--reward-model.model", scorer] if "\nreward_model:" in text else []
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


def test_what_the_file_sets_is_put_in_and_what_it_does_not_is_named(translated, script):
    said, text, values = translated(
        script(
            "BASE=Qwen\nMODEL=\"$BASE/${SIZE:-0.5B}\"\nexport LR=1e-6\nROOT=$(pwd)\nARGS='--save_path out'\n"
            "ARGS+=' --seed 7'\n"
            'CUDA_VISIBLE_DEVICES=0 python -m openrlhf.cli.train_ppo_ray --pretrain $MODEL --actor_learning_rate "$LR" \\\n'
            "  --prompt_data $ROOT/p.jsonl $ARGS \"$@\" --input_template 'Q: {} #$x' > log.txt 2>&1 &\n"
        )
    )
    assert values["actor"]["model"] == "Qwen/0.5B"
    assert values["actor"]["lr"] == 1e-6
    assert (values["run_dir"], values["seed"]) == ("out", 7)
    assert values["data"]["template"] == "Q: {prompt} #$x"
    assert values["data"]["sources"] == [{"path": "${ROOT}/p.jsonl"}]
    place = "# data.sources: SET THIS (no value in the file for ${ROOT} ($(pwd))): --prompt_data ${ROOT}/p.jsonl (line 8)"
    assert place in text
    assert "$@ (line 8): arguments of the script itself are not known: add them" in said
    assert "CUDA_VISIBLE_DEVICES=0 (line 7): a variable of the environment" in text
    assert "log.txt" not in text


def test_what_a_command_would_put_in_is_named(translated, script):
    said, _, values = translated(
        script('trl dpo --dataset_name "$(ls *.jsonl)" --output_dir `date` --no_gradient_checkpointing\n')
    )
    assert "data.sources: SET THIS (no value in the file for $(ls *.jsonl)): --dataset_name $(ls *.jsonl) (line 1)" in said
    assert "run_dir: SET THIS (no value in the file for `date`): --output_dir `date` (line 1)" in said
    assert values["data"]["sources"] == [{"path": "$(ls *.jsonl)"}]
    assert "gradient_checkpointing" not in values["actor"] or values["actor"]["gradient_checkpointing"] is False


def test_a_mixture_of_data(translated, script):
    mixture = "datasets:\n- {path: a/b, name: main, split: train, fraction: 0.3}\n- {path: c.jsonl, fraction: 0.7}\n"
    _, _, values = translated(script(f"{mixture}reward_funcs: my.f\n", "mixed.yaml"))
    assert values["data"]["sources"] == [
        {"path": "a/b", "subset": "main", "split": "train", "weight": 0.3},
        {"path": "c.jsonl", "weight": 0.7},
    ]
    assert values["reward"] == {"f": {"name": UNSET}}


def test_an_option_given_twice(translated, script):
    said, _, values = translated(script("trl dpo --learning_rate 1e-5 \\\n --learning_rate=2e-5 --dataset_name d\n"))
    assert values["actor"]["lr"] == 2e-5
    assert "--learning_rate 1e-5 (line 1): set again (line 2), which counts" in said


def test_what_is_unknown_or_unfit_is_named(translated, script):
    said, _, _ = translated(
        script(
            "trl grpo --model_name_or_path m --frobnicate 3 --lr_scheduler_type inverse_sqrt --top_p 0.9 --num_generations many\n"
        )
    )
    assert "--frobnicate 3 (line 1): not an option of TRL 0.14.0 to 1.16.0, and not known here" in said
    assert "--lr_scheduler_type inverse_sqrt (line 1): schedules here: constant, linear, cosine" in said
    assert "--top_p 0.9 (line 1): training refuses it" in said
    reason = "rollout.n: SET THIS (rollout.n: should be a valid integer, not 'many'): --num_generations many (line 1)"
    assert reason in said


def test_values_that_cannot_be_read(translated, script):
    said, _, _ = translated(
        script(
            "python -m openrlhf.cli.train_ppo_ray --adam_betas a b --reward_clip_range 1 --max_samples 1e999 --prompt_data p\n"
        )
    )
    assert re.search(r"actor.betas: SET THIS \(a b is not a list of numbers\): --adam_betas a b \(line 1\)", said)
    assert "--reward_clip_range 1 (line 1): the value cannot be read" in said
    assert re.search(r"data.max_samples: SET THIS \(.*1e999.*\): --max_samples 1e999 \(line 1\)", said)


def typed(file, code=0, **variables):
    """The command in an interpreter of its own."""
    command = [sys.executable, "-m", "rlhf_host", "translate", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "120", **variables})
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.usefixtures("algorithms")
def test_a_plugin_that_is_not_installed():
    done = typed(HERE / "verl_grpo.sh", code=2, RLHF_DISABLE_PLUGINS="grpo")
    assert not done.stdout
    assert "verl_grpo.sh:3: algorithm.adv_estimator=grpo: algo.name: algo 'grpo' is disabled" in done.stderr


def test_keys_are_not_written_down(translated, script):
    said, text, values = translated(
        script(
            'WANDB_API_KEY=abc123 ray job submit --runtime-env-json=\'{"env_vars": {"HF_TOKEN": "ghi789"}}\' --'
            " python -m openrlhf.cli.train_ppo_ray --pretrain m --use_wandb def456 --prompt_data p\n"
        )
    )
    assert not {"abc123", "def456", "ghi789"} & set(re.findall(r"\w+", said + text))
    assert values["tracker"] == {"wandb": {"name": "wandb"}}


def test_models_on_devices_of_their_own(translated, script):
    """As in examples/scripts/train_ppo_llama_ray.sh of OpenRLHF 0.8."""
    flags = " ".join(f"--{role}_num_nodes 1 --{role}_num_gpus_per_node 2" for role in ("ref", "reward", "critic"))
    _, _, values = translated(
        script(
            f"python -m openrlhf.cli.train_ppo_ray {flags} --actor_num_nodes 2 --actor_num_gpus_per_node 4 --vllm_num_engines 2"
            " --vllm_tensor_parallel_size 2 --colocate_critic_reward --colocate_actor_ref --pretrain m --reward_pretrain r"
            " --use_kl_estimator_k3 --flash_attn --prompt_data a,b --prompt_data_probs 0.3,0.7\n"
        )
    )
    assert values["placement"] == ["actor+reference=2x4", "critic+reward=2", "rollout=4"]
    assert values["kl"] == {"estimator": "k3", "force": True, "coef": 0.01}
    assert values["actor"]["attn_implementation"] == "flash_attention_2"
    assert values["data"]["sources"] == [{"path": "a", "weight": 0.3}, {"path": "b", "weight": 0.7}]


def test_rewards_of_trl(translated, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my/rewards.py").write_text("def short(completions, **columns): ...\n")
    _, _, values = translated(
        script(
            "accelerate launch --num_processes 2 trl/scripts/grpo.py --model_name_or_path m --dataset_name d --use_vllm True"
            " --reward_funcs my.rewards.short think_format_reward get_soft_overlong_punishment --reward_weights 1 0.5 2"
            " --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --steps_per_generation 8 --num_generations 16"
            " --beta 0.04 --loss_type grpo --vllm_importance_sampling_mode token_truncate --max_steps 100 --save_steps 50\n"
        )
    )
    assert values["reward"]["short"] == {"name": "my/rewards.py:short", "weight": 1.0}
    assert values["reward"]["think_format_reward"]["name"] == "format"
    assert values["with"]["overlong_penalty"] == {"max_length": 1280, "buffer": 256, "factor": 2.0}
    assert values["with"]["tis"] == {"cap": 3.0}
    assert values["train"] == {"batch_size": 8, "minibatches": 2, "steps": 50, "autocast": "bfloat16"}
    assert values["kl"] == {"coef": 0.04, "place": "loss", "estimator": "unbiased", "aggregation": "sequence-mean-token-mean"}
    assert values["checkpoint"]["every"] == 25


@pytest.mark.usefixtures("algorithms")
def test_several_commands_get_a_file_each(rlhf_here, script, tmp_path):
    path = script(
        "pip install trl\ntrl sft --model_name_or_path a --dataset_name d\ntrl dpo --model_name_or_path b --dataset_name e\n"
    )
    done = rlhf_here("translate", path, "-o", tmp_path / "out.yaml")
    assert done.exit_code == 0, done.output
    assert f"{path}:1: not a training command, left out: pip" in done.output
    algorithms = [yaml.safe_load((tmp_path / f"out-{n}.yaml").read_text())["algo"]["name"] for n in (1, 2)]
    assert algorithms == ["sft", "dpo"]
    assert not (tmp_path / "out.yaml").exists()
    documents = list(yaml.safe_load_all(rlhf_here("translate", path).stdout))
    assert [document["actor"]["model"] for document in documents] == ["a", "b"]


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


def test_trackers_and_their_projects(translated, script):
    chosen = "'trainer.logger=[console,mlflow,swanlab,clearml]' trainer.project_name=sums"
    text = f"python -m verl.trainer.main_ppo data.train_files=p.parquet {chosen}"
    assert translated(script(text + "\n"))[2]["tracker"] == {
        "mlflow": {"name": "mlflow", "experiment": "sums"},
        "swanlab": {"name": "swanlab", "project": "sums"},
        "clearml": {"name": "clearml", "project": "sums"},
    }
    text = "trl grpo --model_name_or_path m --dataset_name d --report_to trackio --project sums --trackio_space_id me/sums"
    assert translated(script(text + "\n"))[2]["tracker"] == {
        "trackio": {"name": "trackio", "project": "sums", "space_id": "me/sums"}
    }
    text = "trl grpo --model_name_or_path m --dataset_name d --report_to mlflow --project sums"
    assert translated(script(text + "\n"))[2]["tracker"] == {"mlflow": {"name": "mlflow"}}


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


def test_a_file_that_trls_command_reads(translated, script, tmp_path):
    script("learning_rate: 3e-6\nmax_steps: 8\ndataset_name: d\n", "sft.yaml")
    _, text, values = translated(script("trl sft --config sft.yaml --max_steps 4\n"))
    assert (values["actor"]["lr"], values["train"]["steps"]) == (3e-6, 4)
    assert "--config sft.yaml (line 1): its options are translated" in text
    assert "--learning_rate 3e-06 (sft.yaml:1)" in text
    assert "--max_steps 8 (sft.yaml:2): set again (line 1), which counts" in text


@pytest.mark.parametrize(
    ("text", "name", "flags", "message"),
    [
        ("", "empty.sh", [], "no training command of OpenRLHF, TRL or verl, such as openrlhf.cli.train_ppo_ray"),
        ("", "empty.yaml", [], "has no settings"),
        ("set -x\nls -l\n", "ls.sh", [], "it has ls; --from PROJECT takes a command whose program has another name"),
        ("trl sft --a 'b\n", "quote.sh", [], "quote.sh:1: a quote that begins here does not end"),
        ('trl sft --a "$(b\n', "bracket.sh", [], "bracket.sh:1: a bracket that begins here does not end"),
        (
            "python -m openrlhf.cli.train_ppo\n",
            "old.sh",
            [],
            "old.sh:1: openrlhf.cli.train_ppo is not translated: the program of OpenRLHF up to 0.4 without Ray",
        ),
        ("A=(1 2\n", "array.sh", [], "array.sh:1: a bracket that begins here does not end"),
        ("cat <<E\nx\n", "here.sh", [], "here.sh:1: the here-document E that begins here does not end"),
        ("a: 1\n", "own.yaml", [], "has no names of verl or TRL that are known here"),
        (
            "learning_rate: 1\n",
            "trl.yaml",
            [],
            "does not say what reads it; say it with --from trl:grpo|rloo|dpo|sft|kto|reward",
        ),
        ("a: [\n", "bad.yaml", [], "bad.yaml:2: not valid YAML"),
        ("trl sft\n", "x.sh", ["--from", "prime"], "--from prime: should be one of openrlhf[:ppo_ray|dpo|sft|rm|kto|kd|prm]"),
        ("trl sft\n", "x.sh", ["--from", "trl:ppo"], "--from trl:ppo: should be one of"),
        ("trl sft\n", "x.sh", ["--from", "trl==new"], "--from trl==new: not a version such as 1."),
        ("trl sft\n", "x.sh", ["--set", "A"], "--set A: should be NAME=VALUE"),
        ("trl sft\n", "x.sh", ["--processes", "0"], "--processes: should be 1 or more"),
        ("trl sft\n", "x.sh", ["-o", "nowhere/x.yaml"], "there is no directory nowhere"),
    ],
)
def test_files_that_will_not_do(rlhf_here, script, monkeypatch, tmp_path, text, name, flags, message):
    monkeypatch.chdir(tmp_path)
    done = rlhf_here("translate", script(text, name).name, *flags)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert not done.stdout


def test_what_is_no_text(rlhf_here, tmp_path):
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00trl sft")
    for path, message in (
        (tmp_path, "is a directory"),
        (tmp_path / "binary.sh", "not UTF-8"),
        (tmp_path / "no.sh", "No such file"),
    ):
        done = rlhf_here("translate", path)
        assert (done.exit_code, message in done.output) == (2, True), done.output


def test_a_program_of_another_name(translated, script):
    path = script("python my_grpo.py --learning_rate 2e-6 --dataset_name d\n")
    assert translated(path, "--from", "trl:grpo")[2]["actor"]["lr"] == 2e-6


@pytest.mark.usefixtures("algorithms")
def test_the_command_as_it_is_typed():
    done = typed(HERE / "trl_grpo.sh")
    assert yaml.safe_load(done.stdout)["algo"]["name"] == "grpo"
    assert "Save it with -o run.yaml first" in done.stderr
    assert re.search(r"train --config run.yaml .*--train.steps STEPS.* --dry-run", done.stderr)


VERL_GSPO = "python -m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode=gspo algorithm.adv_estimator=grpo"


@pytest.mark.parametrize(
    "command",
    [
        f"{PPO} --advantage_estimator rloo --n_samples_per_prompt 4 --policy_loss_type gspo --eps_clip_low_high 0.01 0.02",
        f"{GRPO} --importance_sampling_level sequence --loss_type grpo --epsilon 0.01 --epsilon_high 0.02",
        f"{VERL_GSPO} actor_rollout_ref.actor.clip_ratio_low=0.01 actor_rollout_ref.actor.clip_ratio_high=0.02",
    ],
)
def test_the_limits_of_gspo(translated, script, command):
    algo = translated(script(command))[2]["algo"]
    assert (algo["loss"], algo["gspo_eps"], algo["gspo_eps_high"]) == ("gspo", 0.01, 0.02)
    assert "clip_eps" not in algo


def test_other_aggregations_of_gspo(translated, script):
    """Defaults of both projects, which our loss refuses."""
    for command in (f"{GRPO} --importance_sampling_level sequence", VERL_GSPO):
        _, text, values = translated(script(command))
        assert "aggregation" not in values["algo"]
        assert "token-mean: gspo is a mean over sequences here" in text or "dapo: gspo is a mean over sequences here" in text


@pytest.mark.parametrize(
    ("loss", "algo"),
    [("dr_grpo", ("grpo", "gspo", "none")), ("sapo", ("grpo", "sapo", None)), ("grpo", ("grpo", "gspo", None))],
)
def test_ratios_of_sequences_with_other_losses_of_trl(translated, script, loss, algo):
    said, _, values = translated(script(f"{GRPO} --importance_sampling_level sequence --loss_type {loss}"))
    assert (values["algo"]["name"], values["algo"]["loss"], values["algo"].get("std")) == algo
    assert ("the ratio of sapo is that of a token here" in said) == (loss == "sapo")


def test_gspo_that_samples_ahead_is_accepted(translated, script, rlhf_here, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"input": "1+1=", "label": "2"}) + "\n")
    command = f"{PPO} --advantage_estimator rloo --n_samples_per_prompt 4 --policy_loss_type gspo --train.async_enable"
    _, text, values = translated(script(f"{command} --vllm_num_engines 1\n"))
    assert (values["train"]["old_logprobs"], values["with"]) == ("recompute", {"tis": {"name": "tis"}})
    assert "sampling ahead needs a correction: tis" in re.sub(r"\n *# +", " ", text)
    flags = ["--actor.model", tiny_model, "--data", "rows.jsonl", "--run-dir", "run", "--reward", "math_verifier"]
    flags += [word for key in unset(values) for word in (flag(key), PLAUSIBLE.get(key, "2"))]
    done = rlhf_here("train", "--config", "ours.yaml", *flags, "--dry-run")
    assert done.exit_code == 0, done.output


def test_the_kl_in_trls_loss(translated, script):
    _, text, values = translated(script(f"{GRPO} --beta 0.1 --loss_type dr_grpo --max_completion_length 64\n"))
    kl = values["kl"]
    assert "use_bias_correction_kl is on there by default" in text
    assert kl == {"coef": 0.1, "place": "loss", "estimator": "unbiased", "aggregation": "sequence-mean-token-sum-over(64)"}
    kl = translated(script(f"{GRPO} --beta 0.1 --use_bias_correction_kl False\n"))[2]["kl"]
    assert kl == {"coef": 0.1, "place": "loss", "estimator": "k3"}


def test_openrlhfs_kl_after_the_groups_statistics(translated, script):
    remark = "there each token gets the KL from it to the end"
    command = f"{PPO} --advantage_estimator group_norm --n_samples_per_prompt 4"
    assert remark in translated(script(command))[1]
    assert remark not in translated(script(f"{command} --use_kl_loss"))[1]


@pytest.mark.parametrize(
    "command",
    [
        f"{PPO} --lr_scheduler {{}} --lr_warmup_ratio 0.01",
        "trl dpo --lr_scheduler_type {} --warmup_steps 3",
    ],
)
def test_a_constant_schedule_of_transformers_ignores_the_warm_up(translated, script, command):
    _, text, values = translated(script(command.format("constant")))
    assert values["actor"]["warmup_steps"] == 0
    assert "the schedule constant has no warm-up there; constant_with_warmup has" in text
    assert translated(script(command.format("constant_with_warmup")))[2]["actor"]["warmup_steps"] in (3, UNSET)


def test_a_share_of_the_updates_is_rounded_up(translated, script, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"input": "a"}\n' * 10240)
    command = f"{PPO.replace('p.jsonl', str(tmp_path / 'p.jsonl'))} --train_batch_size 1024 --lr_warmup_ratio 0.11"
    assert translated(script(command))[2]["actor"]["warmup_steps"] == 2


def test_updates_that_do_not_fill_a_batch(translated, script):
    command = f"{GRPO} --steps_per_generation 8 --gradient_accumulation_steps 2 --max_steps 10"
    _, text, values = translated(script(command), "--processes", "1")
    assert values["train"]["steps"] == 2
    assert "10 updates, 4 per batch; not a whole number, so it is rounded" in text


def test_what_trls_sft_trains(translated, script):
    assert (
        "# Defaults of TRL without a counterpart here:\n#   --assistant_only_loss False: " in translated(script("trl sft\n"))[1]
    )
    assert (
        "--assistant_only_loss (line 1): only answers are trained here"
        in translated(script("trl sft --assistant_only_loss\n"))[1]
    )


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_are_counted_for_the_number_of_steps(translated, script, tmp_path, suffix):
    from datasets import Dataset

    path, rows = tmp_path / f"rows.{suffix}", Dataset.from_list([{"prompt": "a"}] * 100)
    rows.to_parquet(path) if suffix == "parquet" else rows.to_json(path)
    command = f"python -m verl.trainer.main_ppo data.train_files={path} data.train_batch_size=16 trainer.total_epochs=3"
    assert translated(script(command))[2]["train"]["steps"] == 18
    assert translated(script(f"{command} data.train_max_samples=32"))[2]["train"]["steps"] == 6


def test_float16(translated, script):
    _, text, values = translated(script(f"{GRPO} --fp16\n"))
    assert "autocast" not in values["train"]
    assert "--fp16 (line 1): mixed precision in float16; train.autocast is bfloat16 on GPUs, off elsewhere" in text


def test_an_algorithm_that_is_not_here(translated, script):
    said, text, values = translated(script("python -m verl.trainer.main_ppo algorithm.adv_estimator=remax\n"))
    assert values["algo"] == {"name": UNSET, "aggregation": "token-mean", "clip_eps_high": 0.2}
    assert (
        "# algo.name: SET THIS (no algorithm here does what remax does there): algorithm.adv_estimator=remax (line 1)\n" in text
    )
    assert re.search(r"train --config \S+ .*--algo NAME.*\n", said)


def test_what_is_too_long_for_the_end_of_a_line_is_above_it_and_there_once(translated):
    text = translated(HERE / "openrlhf_ppo.sh")[1]
    assert max(map(len, text.splitlines())) <= 128
    comments = [line.strip() for line in text.splitlines() if len(line.partition("#")[2]) > 60]
    assert len(set(comments)) == len(comments)
