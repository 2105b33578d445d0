"""The paper index has every preset and every paper that a plugin names, and its settings are accepted."""

from __future__ import annotations

import re
import shlex

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from rlhf_host.plugins.discovery import discover, preset_file

from .conftest import DOCS, ROOT

PAGE = (DOCS / "recipes.md").read_text().partition("## Papers")[2]
SETTINGS = re.findall(r"`(--[^`]+)`", PAGE.partition("```")[0])


def test_every_preset_stands_in_the_index():
    presets = {info.name for info in discover() if info.kind == "preset" and info.distribution.startswith("rlhf-plugin")}
    published = {path.stem for path in ROOT.glob("plugins/*/*/src/*/presets/*.yaml")}
    assert published <= presets
    assert published == {setting.split()[1] for setting in SETTINGS if setting.startswith("--config")}


def test_every_paper_that_a_preset_reproduces_is_linked_with_it():
    for path in ROOT.glob("plugins/*/*/src/*/presets/*.yaml"):
        (first, *_) = re.findall(r"arXiv:(\d{4}\.\d{5})", path.read_text())
        (row,) = [line for line in PAGE.splitlines() if line.endswith(f"| `--config {path.stem}` |")]
        assert f"[{first}](https://arxiv.org/abs/{first})" in row


def test_every_paper_that_an_algorithm_or_correction_cites_is_in_the_index_or_beside_its_formula():
    cited = set()
    for path in [*ROOT.glob("plugins/*/*/src/**/*.py"), *ROOT.glob("rlhf_host/functional/*.py")]:
        cited |= set(re.findall(r"arXiv:(\d{4}\.\d{5})", path.read_text()))
    known = PAGE + (DOCS / "algorithms.md").read_text()
    assert {number for number in cited if number not in known} == set()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_the_index_is_accepted(setting):
    from rlhf_host.cli.main import main

    flags = shlex.split(setting)
    algo = [] if {"--algo", "--config"} & set(flags) else ["--algo", "grpo"]
    reward = ["--reward", "math_verifier"]
    done = CliRunner().invoke(main, ["train", *flags, *algo, *reward, "--print-config"])
    assert done.exit_code == 0, done.output
    config = YAML(typ="safe").load(done.stdout)
    if flags[0] == "--config":
        (info,) = [info for info in discover() if (info.kind, info.name) == ("preset", flags[1])]
        asked = YAML(typ="safe").load(preset_file(info).read_text())
        assert config["algo"]["name"] == asked["algo"]["name"]
