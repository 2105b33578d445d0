"""Options of ``accelerate launch`` and of its files: which processes share rows, and whose options are whose."""

from __future__ import annotations

import pytest

FILE = """distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3}
num_processes: 4
parallelism_config:
  parallelism_config_dp_shard_size: 2
  parallelism_config_sp_size: 2
  parallelism_config_sp_backend: deepspeed
"""
DPO = "examples/scripts/dpo.py --model_name_or_path M --dataset_name D --max_steps 9 --per_device_train_batch_size 2"
ON = "--use_fsdp --fsdp_version 2 --use_parallelism_config"


def test_processes_that_share_rows_are_no_batch(translated, script, tmp_path):
    (tmp_path / "sp.yaml").write_text(FILE)
    _, text, values = translated(script(f"accelerate launch --config_file sp.yaml {DPO} --gradient_accumulation_steps 4\n"))
    assert values["train"]["batch_size"] == 2 * 4 * 4 // 2
    assert values["actor"]["sequence_parallel"] == 2
    assert values["placement"] == ["actor=4"]
    assert "not known here" not in text


@pytest.mark.parametrize(
    ("options", "rows", "parts"),
    [
        (f"{ON} --parallelism_config_sp_size 4", 4, 4),
        (f"{ON} --parallelism_config_cp_size 2 --parallelism_config_sp_size 2", 4, 4),
        (f"{ON} --parallelism_config_tp_size 2", 8, None),
        ("--parallelism_config_sp_size 4", 16, None),  # which accelerate launch ignores
        ("--gradient_accumulation_steps 5", 16, None),  # of DeepSpeed's plugin: the Trainer's own number counts
    ],
)
def test_the_batch_is_that_of_the_other_processes(translated, script, options, rows, parts):
    _, _, values = translated(script(f"accelerate launch --num_processes 8 {options} {DPO}\n"))
    assert values["train"]["batch_size"] == rows
    assert values["actor"].get("sequence_parallel") == parts


def test_numbers_that_cannot_share_rows_are_asked_for(translated, script):
    said = translated(script(f"accelerate launch --num_processes 8 {ON} --parallelism_config_sp_size 3 {DPO}\n"))[0]
    follows = "follows from --parallelism_config_sp_size 3 (line 1): 8 processes cannot share rows by 3"
    assert f"train.batch_size: SET THIS ({follows})" in said


def test_deepspeed_of_the_command_line(translated, script):
    command = f"accelerate launch --num_processes 8 --zero_stage 3 --offload_optimizer_device cpu USE {DPO}\n"
    _, _, values = translated(script(command.replace("USE", "--use_deepspeed")))
    assert values["backend"] == {"name": "deepspeed", "zero_stage": 3, "offload_optimizer": "cpu"}
    assert "backend" not in translated(script(command.replace("USE", "")))[2]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--megatron_lm_tp_degree 2", "Megatron"),
        ("--fp8_backend TE", "numbers of 8 bits"),
        ("--dynamo_backend inductor", "it changes the speed, not the result"),
        ("--frob 2", "an option of what starts the program"),
    ],
)
def test_options_that_are_accelerates_own(translated, script, option, told):
    text = translated(script(f"accelerate launch --num_processes 2 {option} {DPO}\n"))[1]
    assert f"{option} (line 1): {told}" in text
