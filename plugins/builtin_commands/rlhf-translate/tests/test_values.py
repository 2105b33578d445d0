"""Values as a file gives them: variables, options that are given twice, in other files, unknown or unreadable; keys."""

from __future__ import annotations

import re


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


def test_an_option_given_twice(translated, script):
    said, _, values = translated(script("trl dpo --learning_rate 1e-5 \\\n --learning_rate=2e-5 --dataset_name d\n"))
    assert values["actor"]["lr"] == 2e-5
    assert "--learning_rate 1e-5 (line 1): set again (line 2), which counts" in said


def test_what_is_unknown_or_unfit_is_named(translated, script):
    said, _, values = translated(
        script(
            "trl grpo --model_name_or_path m --frobnicate 3 --lr_scheduler_type inverse_sqrt --top_p 0.9 --repetition_penalty 1.1"
            " --num_generations many\n"
        )
    )
    assert "--frobnicate 3 (line 1): not an option of TRL 0.14.0 to 1.16.0, and not known here" in said
    assert "--lr_scheduler_type inverse_sqrt (line 1): schedules here: constant, linear, cosine" in said
    assert "--repetition_penalty 1.1 (line 1): training refuses it" in said
    assert values["rollout"]["top_p"] == 0.9
    reason = "rollout.n: SET THIS (rollout.n: should be a valid integer, not 'many'): --num_generations many (line 1)"
    assert reason in said


def test_values_that_cannot_be_read(translated, script):
    said, _, _ = translated(
        script(
            "python -m openrlhf.cli.train_ppo_ray --adam_betas a b --reward_clip_range 1 --max_samples 1e999 --prompt_data p\n"
        )
    )
    assert re.search(r"actor.betas: SET THIS \(a b is not a list of numbers\): --adam_betas a b \(line 1\)", said)
    why = "should be two numbers, the lower limit and the upper one, and is 1"
    assert f"with.reward_scaling.low: SET THIS ({why}): --reward_clip_range 1 (line 1)" in said
    assert re.search(r"data.max_samples: SET THIS \(.*1e999.*\): --max_samples 1e999 \(line 1\)", said)


def test_a_list_without_items_is_none(translated, script):
    said, _, values = translated(
        script("python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data p --pretrain_data []\n")
    )
    assert "with" not in values or "ptx" not in values["with"]
    assert "Traceback" not in said


def test_keys_are_not_written_down(translated, script):
    said, text, values = translated(
        script(
            'WANDB_API_KEY=abc123 ray job submit --runtime-env-json=\'{"env_vars": {"HF_TOKEN": "ghi789"}}\' --'
            " python -m openrlhf.cli.train_ppo_ray --pretrain m --use_wandb def456 --prompt_data p\n"
        )
    )
    assert not {"abc123", "def456", "ghi789"} & set(re.findall(r"\w+", said + text))
    assert values["tracker"] == {"wandb": {"name": "wandb"}}


def test_a_file_that_trls_command_reads(translated, script, tmp_path):
    script("learning_rate: 3e-6\nmax_steps: 8\ndataset_name: d\n", "sft.yaml")
    _, text, values = translated(script("trl sft --config sft.yaml --max_steps 4\n"))
    assert (values["actor"]["lr"], values["train"]["steps"]) == (3e-6, 4)
    assert "--config sft.yaml (line 1): its options are translated" in text
    assert "--learning_rate 3e-06 (sft.yaml:1)" in text
    assert "--max_steps 8 (sft.yaml:2): set again (line 1), which counts" in text
