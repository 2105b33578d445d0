"""Batches, samplings and updates of TRL, of all processes together."""

from __future__ import annotations

import pytest

from .known import UNSET, flat

SHAPE = "accelerate launch --num_processes 8 -m trl.scripts.grpo --model_name_or_path m --dataset_name d --num_generations 16"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # prompts, minibatches, epochs, checkpoint.every; 8 processes × 4 completions are 2 prompts per micro-batch
        ("--steps_per_generation 1", (16, 1, 1, 100)),
        ("--steps_per_generation 4", (16, 1, 1, 100)),
        ("--generation_batch_size 64", (16, 1, 1, 100)),
        ("--steps_per_generation 4 --num_iterations 2", (8, 1, 1, 100)),
        ("--steps_per_generation 2 --num_iterations 2", (8, 1, 1, 100)),
        ("--steps_per_generation 4 --num_iterations 4", (8, 1, 2, 50)),
        ("--steps_per_generation 8 --num_iterations 2", (16, 1, 2, 50)),
        ("--steps_per_generation 16 --num_iterations 2", (32, 2, 2, 25)),
        ("--num_iterations 2", (16, 1, 2, 50)),
        ("--steps_per_generation 3", (UNSET, 1, 1, 100)),
        ("--steps_per_generation 4 --num_iterations 3", (UNSET, 1, UNSET, 100)),
        ("--steps_per_generation 12", (UNSET, 1, 1, 100)),
        ("--generation_batch_size 250", (16, 1, 1, 100)),
    ],
)
def test_sampling_and_updates_of_trl(translated, script, flags, expected):
    """``_prepare_inputs`` of TRL 0.19 to 1.16: completions are made every ``steps_per_generation × num_iterations`` micro-batches.
    Here there are 8 per update.
    """
    per_update = "--per_device_train_batch_size 4 --gradient_accumulation_steps 8 --save_steps 100"
    values = flat(translated(script(f"{SHAPE} {per_update} {flags}\n"))[2])
    names = ("train.batch_size", "train.minibatches", "train.epochs", "checkpoint.every")
    usual = {"train.minibatches": 1, "train.epochs": 1}
    assert tuple(values.get(name, usual.get(name)) for name in names) == expected


def test_an_update_that_mixes_policies_is_said(translated, script):
    per_update = "--per_device_train_batch_size 4 --gradient_accumulation_steps 8 --steps_per_generation 3 --save_steps 100"
    said = translated(script(f"{SHAPE} {per_update}\n"))[0]
    assert (
        "TRL samples every 3 micro-batches and updates every 8, so that an update mixes completions of several policies" in said
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("trl sft --model_name_or_path m --dataset_name d --packing", UNSET),
        ("trl sft --model_name_or_path m --dataset_name d --packing False", 8),
        ("trl sft --model_name_or_path m --dataset_name d --per_device_train_batch_size 0", UNSET),
        ("trl sft --model_name_or_path m --dataset_name d --gradient_accumulation_steps 0", UNSET),
        ("trl sft --model_name_or_path m --dataset_name d --padding_free", 8),
    ],
)
def test_rows_of_an_update(translated, script, command, expected):
    """Packed rows are several rows of the data; none is no number."""
    assert translated(script(f"{command}\n"), "--processes", "1")[2]["train"]["batch_size"] == expected


def test_the_warm_up_of_packed_rows_is_asked_for(translated, script, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    command = f"trl sft --num_processes 1 --model_name_or_path m --dataset_name {tmp_path / 'd.jsonl'} --packing"
    assert translated(script(f"{command} --warmup_ratio 0.1\n"))[2]["actor"]["warmup_steps"] == UNSET
