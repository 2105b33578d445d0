"""Presets that reproduce papers' settings: each is found, fits its plugins' options, and says where its numbers are from."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhf_host.cli.main import main
from rlhf_host.config import resolve as resolving
from rlhf_host.config.load import load_config
from rlhf_host.plugins.catalogue import offered
from rlhf_host.plugins.discovery import discover, preset_file
from rlhf_host.plugins.selection import find

# Preset → what its paper's run is made of.
PAPERS = {
    "cispo": ("2506.13585", "grpo", "cispo", ["dynamic_filtering", "overlong_penalty"]),
    "dapo": ("2503.14476", "grpo", "clip", ["dynamic_filtering", "overlong_penalty"]),
    "dr_grpo": ("2503.20783", "dr_grpo", "clip", []),
    "grpo": ("2402.03300", "grpo", "clip", []),
    "gspo": ("2507.18071", "grpo", "gspo", []),
    "ppo_instructgpt": ("2203.02155", "ppo", "clip", []),
    "reinforce_pp": ("2501.03262", "reinforce_pp", "clip", []),
    "rloo": ("2402.14740", "rloo", "pg", []),
    "scalerl": ("2510.13786", "grpo", "cispo", ["dynamic_filtering"]),
    "vapo": ("2504.05118", "ppo", "clip", []),
}


@pytest.fixture
def flags(tiny_model: Path, prompts: Path):
    return ["--actor.model", tiny_model, "--critic.model", tiny_model, "--data", prompts, "--reward", "length", "--dry-run"]


def train(*arguments):
    return CliRunner().invoke(main, ["train", *map(str, arguments)], prog_name="rlhf")


def test_every_preset_of_the_catalogue_is_here():
    listed = {name: offer.distribution for name, offer in offered()["preset"].items()}
    assert {name: find("preset", name).distribution for name in PAPERS} == listed


@pytest.mark.parametrize("name", PAPERS)
def test_a_dry_run_accepts_the_preset(name, flags):
    _, algo, loss, extensions = PAPERS[name]
    result = train("--config", name, *flags)
    assert result.exit_code == 0, result.output
    plugins = [line.partition(": ")[0] for line in result.stdout.splitlines()]
    assert f"algo:{algo}" in plugins
    assert [plugin for plugin in plugins if plugin.startswith("extension:") and plugin != "extension:kl"] == [
        f"extension:{extension}" for extension in extensions
    ]
    config = load_config(name)
    assert config.algo.options["loss"] == loss
    assert ("role reference" in plugins) == (config.extensions["kl"].options["coef"] > 0)


@pytest.mark.parametrize("name", PAPERS)
def test_the_preset_names_its_paper_and_what_it_leaves_out(name):
    text = preset_file(find("preset", name)).read_text()
    comment = text[: text.index("\nalgo:")]
    assert all(line.startswith("#") for line in comment.splitlines())
    assert f"arXiv:{PAPERS[name][0]}" in comment
    assert "section" in text or "appendix" in text
    assert "Not reproduced:" in comment


@pytest.mark.parametrize("name", PAPERS)
def test_what_the_preset_says_is_what_its_plugins_get(name):
    filled = resolving.resolve(load_config(name, ["--reward", "length"])).config
    given = load_config(name)
    for written, complete in [
        (given.algo, filled.algo),
        *((given.extensions[a], filled.extensions[a]) for a in given.extensions),
    ]:
        for key, value in written.options.items():
            assert complete.options[key] == (float(value) if isinstance(complete.options[key], float) else value), key


def test_numbers_of_the_papers_arrive():
    dapo = load_config("dapo")
    assert (dapo.rollout.n, dapo.train.batch_size, dapo.train.minibatches) == (16, 512, 16)
    assert dapo.train.batch_size * dapo.rollout.n // dapo.train.minibatches == 512, "samples per update"
    assert dapo.roles["actor"].warmup_steps == 20 * dapo.train.minibatches, "20 rollout steps"
    assert dapo.rollout.max_new_tokens == 16384 + dapo.extensions["overlong_penalty"].options["buffer"]
    assert load_config("scalerl").train.batch_size * 16 == 768
    assert load_config("grpo").train.batch_size * 64 == 1024
    instruct = load_config("ppo_instructgpt")
    assert instruct.train.batch_size // instruct.train.minibatches == 64
    assert instruct.train.steps * instruct.train.batch_size == 256_000


def test_settings_on_top_of_a_preset_win():
    config = load_config("dapo", ["--rollout.n", "8", "--with", "overlong_penalty=none", "--algo.clip-eps-high", "0.3"])
    assert (config.rollout.n, config.rollout.max_new_tokens, list(config.extensions)) == (8, 20480, ["dynamic_filtering", "kl"])
    assert config.algo.options["clip_eps_high"] == "0.3"
    assert config.algo.options["clip_eps"] == 0.2


def test_a_preset_whose_plugin_is_missing_says_what_to_install(flags, monkeypatch):
    without = [info for info in discover() if info.distribution != "rlhf-plugin-dapo"]
    monkeypatch.setattr(resolving, "discover", lambda: without)
    result = train("--config", "scalerl", *flags)
    assert result.exit_code == 2
    message = "no extension named 'dynamic_filtering' is installed; pip install -c dist/wheels.txt rlhf-plugin-dapo"
    assert result.stderr.splitlines()[-1].endswith(message)


def test_presets_ship_with_their_packages():
    for name in PAPERS:
        (entry,) = [e for e in importlib.metadata.entry_points(group="rlhf.presets") if e.name == name]
        package = entry.value.partition(".")[0]
        assert preset_file(find("preset", name)).parent.name == "presets"
        assert preset_file(find("preset", name)).parent.parent.name == package
