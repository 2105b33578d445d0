"""The command ``rlhf translate``: as it is typed, files with several commands, and files that will not do."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import yaml

from .known import HERE


def typed(file, code=0, **variables):
    """The command in an interpreter of its own."""
    command = [sys.executable, "-m", "rlhf_host", "translate", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "120", **variables})
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.usefixtures("algorithms")
def test_the_command_as_it_is_typed():
    done = typed(HERE / "trl_grpo.sh")
    assert yaml.safe_load(done.stdout)["algo"]["name"] == "grpo"
    assert "Save it with -o run.yaml first" in done.stderr
    assert re.search(r"train --config run.yaml .*--train.steps STEPS.* --dry-run", done.stderr)


@pytest.mark.usefixtures("algorithms")
def test_a_plugin_that_is_not_installed():
    done = typed(HERE / "verl_grpo.sh", code=2, RLHF_DISABLE_PLUGINS="grpo")
    assert not done.stdout
    assert "verl_grpo.sh:3: algorithm.adv_estimator=grpo: algo.name: algo 'grpo' is disabled" in done.stderr


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


def test_a_program_of_another_name(translated, script):
    path = script("python my_grpo.py --learning_rate 2e-6 --dataset_name d\n")
    assert translated(path, "--from", "trl:grpo")[2]["actor"]["lr"] == 2e-6


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
