"""Files, the command, and what it makes of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner
from rlhf_authoring import write_tiny_model
from rlhf_translate.commands import find_commands

import rlhf_host
from rlhf_host.commands import main
from rlhf_host.settings import plain, read_yaml

ROOT = Path(rlhf_host.__file__).parent.parent
"""The repository, where the host is in one."""
ORACLES = ROOT / ".oracles"
"""Published packages, where ``make oracles`` has put them."""
CHOSEN = ("dpo", "grpo", "math_verifier", "off_policy", "ppo", "reinforce_pp", "reward_model", "reward_model_training", "sft")
"""Plugins of other packages, that translations choose."""


@pytest.fixture(scope="session")
def algorithms():
    """A translation is tried with the plugins that it chooses."""
    for name in (*(f"rlhf_plugin_{name}" for name in CHOSEN), "rlhf_backend_fsdp"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name.replace('_', '-')} is not installed")


@pytest.fixture
def rlhf_here(monkeypatch):
    """The command line in this process, where starting costs nothing."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def translated(algorithms, rlhf_here, tmp_path):
    """A file's translation: what was said, the file's text, its values."""

    def run(path, *flags):
        out = tmp_path / "ours.yaml"
        out.unlink(missing_ok=True)
        done = rlhf_here("translate", path, "-o", out, *flags)
        assert done.exit_code == 0, done.output
        return done.output, out.read_text(), plain(read_yaml(out))

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def scorer(tiny_model, tmp_path_factory):
    """A reward model."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / "scorer"
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    model.config.mean, model.config.std = 0.0, 1.0  # of its scores, as OpenRLHF writes them
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture
def script(tmp_path):
    def write(text, name="train.sh"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def options(script):
    """Names and values of a script's training command, and what is said of other lines."""

    def read(text, name="train.sh", **given):
        commands, others = find_commands(script(text, name), given=given)
        read.commands = commands
        return {option.name: option.written for option in commands[0].options}, others, commands[0]

    return read
