"""Options and scripts of other projects for pictures."""

from __future__ import annotations

import pytest

from .known import PPO, VERL, alone

RENAMED = "pictures are read from the columns image and images: rename it in the data"
SFT_OF_VERL = "torchrun --nproc_per_node=1 -m verl.trainer.sft_trainer model.path=m data.train_files=d.parquet"
VLM = "accelerate launch --num_processes 1 examples/scripts/{}_vlm.py --dataset_name d --model_name_or_path m"


@pytest.mark.parametrize(
    "command",
    [
        f"{PPO} --freeze_visual_encoder --image_key images",
        f"{PPO} --actor.freeze_visual_encoder --data.image_key image --data.max_images_per_prompt 0",
        f"{VERL} actor_rollout_ref.actor.freeze_vision_tower=True data.image_key=images data.return_multi_modal_inputs=False",
    ],
)
def test_a_frozen_tower_and_the_usual_columns(translated, script, command):
    said, text, values = translated(script(f"{command}\n"))
    assert values["actor"]["freeze"] == ["*visual*"]
    assert "Options without a counterpart" not in text
    assert RENAMED not in said


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (f"{PPO} --image_key pics", RENAMED),
        (f"{PPO} --data.image_key pics", RENAMED),
        (f"{VERL} data.image_key=pics", RENAMED),
        (f"{SFT_OF_VERL} data.image_key=pics", RENAMED),
        (f"{PPO} --max_images_per_prompt 2", "a limit for the pictures of a prompt"),
        (f"{VERL} +actor_rollout_ref.rollout.limit_images=2", "a limit for the pictures of a prompt"),
        (f"{VERL} data.video_key=videos2", "video and sound"),
    ],
)
def test_what_has_no_counterpart_is_named(translated, script, command, reason):
    said, _, values = translated(script(f"{command}\n"))
    assert reason in said
    assert "freeze" not in values.get("actor", {})


@pytest.mark.parametrize(("name", "algo"), [("sft", "sft"), ("dpo", "dpo"), ("mpo", "dpo")])
def test_scripts_of_trl_whose_rows_have_pictures(translated, script, name, algo):
    command = VLM.format(name)
    values = translated(script(f"{command}\n"), *alone(command))[2]
    assert values["algo"]["name"] == algo
    assert ("max_tokens" in values["data"]) == (name != "sft")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("grpo", "its data and its rewards are in its code; it is --algo grpo here"),
        ("rloo", "its data and its rewards are in its code; it is --algo rloo here"),
        ("online_dpo", "it is --algo online_dpo with --reward here, with pictures in the rows"),
    ],
)
def test_scripts_of_trl_that_are_refused(rlhf_here, script, name, reason):
    done = rlhf_here("translate", script(f"{VLM.format(name)}\n"))
    assert done.exit_code == 2
    assert reason in done.output


def test_losses_of_mpo_are_asked_for(translated, script):
    said = translated(script(f"{VLM.format('mpo')} --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0\n"))[0]
    assert "algo.loss: SET THIS (one loss at a time here, and sft beside it, not sigmoid, bco_pair, sft)" in said
