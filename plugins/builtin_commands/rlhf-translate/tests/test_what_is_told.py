"""Refusals of ``rlhf translate``, and what it names and prints beside the settings."""

from __future__ import annotations

import re
import shlex

import pytest

from rlhf_host.settings import plain, read_yaml

from .known import DPO, GRPO, PPO, UNSET, VERL, flat

pytestmark = pytest.mark.usefixtures("algorithms")
ONE = f"{GRPO} --num_processes 1 --max_steps 3"


@pytest.mark.parametrize("name", ["train.sh", "ours.yaml"])
def test_an_existing_file_is_not_written_over(rlhf_here, script, tmp_path, name):
    path = script(f"{ONE}\n")
    (tmp_path / "ours.yaml").write_text("kept\n")
    before = (tmp_path / name).read_text()
    done = rlhf_here("translate", path, "-o", tmp_path / name)
    assert done.exit_code == 2
    assert f"{tmp_path / name} exists: remove it, or choose another --output" in done.output
    assert (tmp_path / name).read_text() == before


def test_none_of_several_files_is_written_where_one_exists(rlhf_here, script, tmp_path):
    (tmp_path / "run-2.yaml").write_text("kept\n")
    done = rlhf_here("translate", script(f"{ONE}\n{ONE}\n"), "-o", tmp_path / "run.yaml")
    assert (done.exit_code, (tmp_path / "run-1.yaml").exists()) == (2, False)
    assert (tmp_path / "run-2.yaml").read_text() == "kept\n"


def test_a_script_on_standard_input():
    from click.testing import CliRunner

    from rlhf_host.commands import main

    done = CliRunner().invoke(main, ["translate", "-"], input=f"{ONE}\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("# From standard input:1, a command of TRL (grpo).")


TAKEN = "--reward_funcs accuracy_reward r s think_format_reward --reward_weights 1 2 3 4"


@pytest.mark.parametrize(
    "command",
    [
        f"trl grpo --num_processes 1 --model_name_or_path m --dataset_name d --max_steps 3 {TAKEN}",
        "trl grpo --num_processes 1 --model_name_or_path m --dataset_name $D --max_steps $N --reward_funcs r",
        f"{VERL.replace('grpo', 'remax')} actor_rollout_ref.rollout.multi_turn.enable=true data.val_files=$V",
        f"{PPO} --init_kl_coef ${{KL}} --vllm_num_engines $N --actor_num_gpus_per_node 1",
        f"{DPO} --lr_scheduler_type $S --warmup_ratio 0.1 --use_peft --lora_r $R",
    ],
)
def test_the_printed_command_can_be_typed(rlhf_here, script, tmp_path, monkeypatch, command):
    """Its words are names: filled in, the settings are those of the file."""
    monkeypatch.chdir(tmp_path)
    done = rlhf_here("translate", script(f"{command}\n"), "-o", "ours.yaml")
    words = shlex.split(done.output.splitlines()[-2])[1:]
    words = [re.sub(r"NAME$", "math_verifier", word) for word in words]
    said = rlhf_here(*words).output
    assert not re.search(r"no such flag|give the plugin's name|no reward named|is chosen", said), said


def test_the_printed_command_keeps_the_other_rewards_and_their_weights(rlhf_here, script, tmp_path, tiny_model):
    command = f"trl grpo --num_processes 1 --model_name_or_path {tiny_model} --dataset_name d.jsonl --max_steps 3 {TAKEN}"
    done = rlhf_here("translate", script(f"{command}\n"), "-o", tmp_path / "ours.yaml")
    words = [re.sub("NAME$", "math_verifier", word) for word in shlex.split(done.output.splitlines()[-2])[1:]]
    said = rlhf_here(*words).output
    found = dict(re.findall(r"^reward:(\w+): .*, weight (\S+)$", said, re.M))
    assert found == {"accuracy_reward": "1", "r": "2", "s": "3", "think_format_reward": "4"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trl.rewards.accuracy_reward", {"accuracy_reward": "math_verifier"}),
        ("trl.rewards.accuracy_rewards.reasoning_accuracy_reward", {"reasoning_accuracy_reward": "math_verifier"}),
        ("trl.rewards.think_format_reward", {"think_format_reward": "format"}),
        ("trl.rewards.get_cosine_scaled_reward", {"get_cosine_scaled_reward": UNSET}),
        ("nowhere.short", {"short": UNSET}),
        ("here.short", {"short": "here.py:short"}),
        ("here.short there.short", {"short": "here.py:short", "there_short": "there.py:short"}),
    ],
)
def test_import_paths_of_rewards(translated, script, tmp_path, monkeypatch, name, expected):
    monkeypatch.chdir(tmp_path)
    for file in ("here.py", "there.py"):
        (tmp_path / file).touch()
    values = translated(script(f"{ONE.replace('accuracy_reward', name)}\n"))[2]["reward"]
    assert {alias: options["name"] for alias, options in values.items()} == expected


def test_numbers_of_a_configuration_that_is_refused_are_numbers(translated, script):
    command = "trl kto --num_processes 1 --model_name_or_path m --dataset_name d --desirable_weight 0 --undesirable_weight 0"
    _, text, values = translated(script(f"{command} --learning_rate 5e-7 --max_length 64\n"))
    assert "--dry-run refuses this file until you decide: desirable_weight and undesirable_weight are both 0" in text
    values = flat(values)
    names = ("algo.desirable_weight", "actor.lr", "seed", "data.max_tokens")
    assert [values[name] for name in names] == [0.0, 5e-7, 42, 64]


def test_the_number_of_processes_that_the_reader_gave_is_its_own_cause(translated, script):
    text = translated(script(f"{DPO}\n"), "--processes", "2")[1]
    assert "placement: [actor=2]  # --processes 2\n" in text
    assert "one process" not in text


@pytest.mark.parametrize(
    ("command", "number", "message"),
    [
        (f"{DPO} --num_processes 8", 4, "--processes 4: PATH:1: says how many processes there are"),
        (f"{DPO} --num_processes 8", 0, "--processes: should be 1 or more"),
        (VERL, 4, "--processes 4: PATH:1: says on how many devices each role is"),
        (PPO, 4, "--processes 4: PATH:1: says on how many devices each role is"),
    ],
)
def test_a_number_of_processes_that_would_do_nothing(rlhf_here, script, command, number, message):
    path = script(f"{command}\n")
    done = rlhf_here("translate", path, "--processes", number)
    assert (done.exit_code, done.output.strip()) == (2, f"Error: {message.replace('PATH', str(path))}")


def test_the_number_is_for_the_commands_that_do_not_say_it(rlhf_here, script):
    done = rlhf_here("translate", script(f"{DPO} --num_processes 8\n{DPO}\n"), "--processes", "4")
    assert done.exit_code == 0
    assert "train.sh:1: says how many processes there are: --processes has no effect" in done.output
    assert "placement: [actor=4]  # --processes 4" in done.output


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("9.9.9", "# Version: read as TRL 1.16.0: 9.9.9 of --from is not known here; known are 0.14.0 to 1.16.0."),
        ("0.3", "# Version: read as TRL 0.14.0: 0.3 of --from is not known here; known are 0.14.0 to 1.16.0."),
        ("1.16", "# Version: TRL 1.16.0, as --from says."),
    ],
)
def test_a_version_that_is_not_known_is_named(translated, script, version, said):
    assert said in translated(script(f"{ONE}\n"), "--from", f"trl:grpo=={version}")[1]


def test_our_own_files_are_no_others(rlhf_here, script, translated):
    path = script("algo: grpo\nactor: {model: m, lr: 1e-6}\nrollout: {n: 4}\nseed: 1\n", "own.yaml")
    done = rlhf_here("translate", path)
    assert (done.exit_code, done.output) == (
        2,
        f"Error: {path}: is a configuration of rlhf already: rlhf train --config {path}\n",
    )
    translated(script(f"{ONE}\n"))
    done = rlhf_here("translate", path.parent / "ours.yaml")
    assert "is a configuration of rlhf already" in done.output
    assert plain(read_yaml(path.parent / "ours.yaml"))["train"]["steps"] == 3


def test_what_is_wrong_in_a_python_script_is_said_with_one_place(rlhf_here, script):
    path = script("x = 1\ny = = 2\n", "s.py")
    assert rlhf_here("translate", path).output == f"Error: {path}:2: is not valid Python: invalid syntax\n"


def test_a_server_before_the_training_is_named(translated, script):
    said = translated(script(f"trl vllm-serve --model m &\n{ONE}\n"))[0]
    assert "train.sh:1: trl vllm-serve trains nothing: it serves a model for a run" in said
