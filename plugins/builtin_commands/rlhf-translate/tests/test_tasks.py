"""Commands that train nothing are answered with the command that does it here, which is one that ``rlhf`` has."""

from __future__ import annotations

import re

import pytest
from rlhf_translate import tasks
from rlhf_translate.commands import find_commands

from rlhf_host import UserError


@pytest.mark.parametrize(
    ("command", "here"),
    [
        (
            "python -m openrlhf.cli.lora_combiner --model_path a/b --lora_path ./l --output_path ./o",
            "rlhf merge-lora ./l --base a/b --output ./o",
        ),
        ("python -m openrlhf.cli.serve_rm --reward_pretrain a/b --port 5000 --max_len 8", "rlhf serve-reward a/b --port 5000"),
        ("deepspeed openrlhf/cli/serve_rm.py --reward.model_name_or_path=a", "rlhf serve-reward a"),
        (
            "python -m openrlhf.cli.batch_inference --eval_task generate_vllm --pretrain $M",
            "rlhf generate --model MODEL --data DATA",
        ),
        ("python -m openrlhf.cli.interactive_chat --pretrain 'a b'", "rlhf chat 'a b'"),
        ("python -m verl.model_merger merge --backend fsdp --target_dir t", "rlhf export RUN_DIR -o t"),
        ("python3 -m verl.trainer.main_eval data.path=x", "rlhf eval --model MODEL --data FILE"),
        ("python3 -m verl.trainer.main_generation_server", "rlhf generate"),
        ("python examples/data_preprocess/gsm8k.py --local_dir x", "rlhf data show PATH"),
        ("trl chat --model_name_or_path m", "rlhf chat m"),
        ("trl env", "rlhf doctor"),
        ("accelerate estimate-memory m", "rlhf plan"),
        ("accelerate merge-weights a b", "rlhf export"),
    ],
)
def test_the_answer_is_a_command_of_ours(script, command, here):
    with pytest.raises(UserError, match=r"train\.sh:1: .* trains nothing: it .*: ") as error:
        find_commands(script(f"{command}\n"))
    assert here in str(error.value)


def test_every_command_that_is_named_is_there(rlhf_here):
    for package in ("rlhf_plan", "rlhf_runs", "rlhf_samples", "rlhf_server"):
        pytest.importorskip(package)
    for task in tasks._TASKS:
        for words in re.findall(r"rlhf ((?:[a-z-]+ ?)+)", task.here):
            name = words.split()[0]
            flags = re.findall(rf"rlhf {name}[^,]*?((?: --[\w-]+| [^-,][^ ,]*)*)", task.here)
            done = rlhf_here(name, "--help")
            assert done.exit_code == 0, task.here
            for flag in re.findall(r"--[\w-]+", " ".join(flags)):
                assert flag in done.output, (task.here, flag)


def test_it_stands_beside_the_command_that_trains(translated, script):
    train = "python -m openrlhf.cli.train_dpo --pretrain m --dataset d"
    said, _, values = translated(script(f"{train}\npython -m openrlhf.cli.lora_combiner --lora_path l\n"))
    assert values["algo"]["name"] == "dpo"
    assert "train.sh:2: openrlhf.cli.lora_combiner trains nothing: it merges an adapter: rlhf merge-lora l" in said


def test_names_that_people_write_for_openrlhfs(translated, script):
    _, text, values = translated(
        script(
            "python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --clip_eps_low 0.1 --clip_eps_high 0.3"
            " --value_prefix_head score\n"
        )
    )
    assert (values["algo"]["clip_eps"], values["algo"]["clip_eps_high"]) == (0.1, 0.3)
    assert "--value_prefix_head score (line 1): models with a scalar head are found by their configuration" in text
