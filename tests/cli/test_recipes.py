"""``rlhf train --config``: every recipe is whole, is checked with the flags for larger models, and takes two small steps."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import closing
from pathlib import Path

import pytest
from rlhf_authoring.models import write_tiny_model
from rlhf_plugin_shapes.model import make_model
from rlhf_plugin_shell import fixes_model, lines_model

from rlhf_host.config.check import check
from rlhf_host.config.flags import parse
from rlhf_host.config.load import read_config
from rlhf_host.config.recipes import about, recipe_settings, recipes
from rlhf_host.config.resolve import merge_needs, resolve

from ..scripts_as_modules import load_script

ROOT = Path(__file__).parents[2]
SIZES = ("0.5B", "7B", "70B")
MODEL = "models/SmolLM2-135M-Instruct"
SEES = "models/shapes"
WORKS = "models/shell"
REPAIRS = "models/mini_swe"
QUICK = "quickstart"
CHAT = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
TOPICS = {"rloo", "grpo", "dr_grpo", "ppo", "sft", "dpo", "rm", "kto", "distill", "sdpo"}
OWN_TESTS = {
    "nemo_gym": "tests/outside/test_nemo_gym.py",
    "mini_swe": "tests/outside/test_mini_swe.py",
    "ray_deepspeed_vllm": "tests/distributed/ray",
}
"""Recipes that start servers or many processes, and where these are tested; here they are only checked."""


@pytest.fixture(scope="module")
def script():
    return load_script("scripts/recipes.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory where the model of the recipes is a tiny one. Its tokens are characters, so it needs more of them. The
    model that sees pictures is not trained, and neither are those of the shell.
    """
    folder = tmp_path_factory.mktemp("recipes")
    config = write_tiny_model(folder / MODEL) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2048}))
    (folder / MODEL / "chat_template.jinja").write_text(CHAT)
    make_model(folder / SEES)
    lines_model.make_model(folder / WORKS)
    fixes_model.make_model(folder / REPAIRS)
    return folder


def configured(name, flags=()):
    loaded = read_config(recipe_settings(name), parse(flags))
    run = resolve(loaded.config, loaded.origins)
    with closing(run.plugins()) as manager:
        return run.config, list(check(run, manager, merge_needs(manager)))


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_is_whole(name, script):
    head = about(recipes()[name])
    text = recipes()[name].read_text()
    assert len(head["about"][0]) > 30
    assert head.keys() >= {"needs", "data", "reward", "expected", *SIZES}
    config, warnings = configured(name)
    assert not warnings
    assert config.run_dir == f"runs/recipes/{name}"
    assert config.roles["actor"].model in {
        MODEL,
        SEES,
        WORKS,
        REPAIRS,
        QUICK,
        *(f"runs/recipes/{before}/model" for before in recipes()),
    }
    assert (config.train.steps or 0) <= {"shell_sft": 250, "mini_swe_sft": 250, "hints_sft": 300, "sdpo": 100}.get(name, 30)
    expected = script.Recipe(name, recipes()[name]).expected
    assert expected
    assert all(0 < each.tolerance < 10 for each in expected)
    used = set(re.findall(r"runs/recipes/(\w+)/model", text))
    assert set(script.Recipe(name, recipes()[name]).before) == used
    assert max(map(len, text.splitlines())) <= 132


@pytest.mark.parametrize("name", recipes())
def test_the_flags_for_larger_models_are_right(name):
    head = about(recipes()[name])
    for size in SIZES:
        (flags,) = head[size]
        config, _ = configured(name, shlex.split(flags))
        assert config.roles["actor"].model not in (MODEL, SEES, WORKS, QUICK, None)
        assert config.train.autocast == "bfloat16"
        if size == "7B":
            assert (config.runtime.name, config.backend.name) == ("ray", "deepspeed")
            assert config.backend.options["zero_stage"] == 3
        if size == "70B":  # docs/sizing.md: no device holds it in 16 bits
            assert (config.runtime.name, config.roles["actor"].quantize) == ("ray", "4bit")
            assert config.roles["actor"].lora.rank


def test_all_that_was_asked_for_is_there():
    configs = [configured(name)[0] for name in recipes()]
    assert len(configs) >= 12
    assert {config.algo.name for config in configs} == TOPICS
    assert {config.agent.name for config in configs} == {"single_turn", "multi_turn", "nemo_gym", "shell", "harness"}
    assert any(config.roles["actor"].lora.rank for config in configs)
    assert any(config.async_depth for config in configs)
    assert any("code_exec" in config.reward for config in configs)
    assert any(
        (config.runtime.name, config.backend.name, config.engine.name) == ("ray", "deepspeed", "vllm") for config in configs
    )


def test_a_recipe_takes_two_small_steps_after_those_that_it_needs(script, folder, environment, fork):
    """As ``scripts/recipes.py --short`` does, with a tiny model."""
    for recipe in script.in_order():
        if recipe.name in OWN_TESTS:
            continue
        longer = ["--data.max-prompt-tokens", "1024"] if "max_prompt_tokens:" in recipe.file.read_text() else []
        flags = [*recipe.more_when_short, *longer, "--kernels", "none"]
        process = fork(["train", "--config", recipe.name, *flags], environment, folder)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, f"{recipe.name}\n{out}\n{err}"
        rows = [json.loads(line) for line in (folder / f"runs/recipes/{recipe.name}/metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["step"] == 2
        missing = {each.metric for each in recipe.expected} - {key for row in rows for key in row}
        assert not missing, f"{recipe.name} expects metrics that no run has"


@pytest.mark.parametrize("name", OWN_TESTS)
def test_a_recipe_with_servers_is_checked(name, script, rlhf_here, folder, monkeypatch):
    monkeypatch.chdir(folder)
    (recipe,) = [each for each in script.in_order() if each.name == name]
    for before in recipe.before:
        if not (model := folder / f"runs/recipes/{before}/model").exists():
            write_tiny_model(model)
    done = rlhf_here("train", "--config", name, "--dry-run")
    assert done.exit_code == 0, done.output
    assert f"The run would be written to runs/recipes/{name}." in done.output


def test_flags_override_and_the_file_runs_by_its_path_too(rlhf_here, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = rlhf_here("train", "--config", "gsm8k_rloo", "--rollout.n", "3", "--print-config").stdout
    config = rlhf_here("train", "--config", "examples/recipes/gsm8k_rloo.yaml", "--rollout.n", "3", "--print-config").stdout
    assert "  n: 3\n" in recipe
    assert recipe == config.replace("examples/data", f"{ROOT}/examples/data")


def test_an_unknown_name_is_refused(rlhf_here):
    done = rlhf_here("train", "--config", "gsm8k_rlo")
    assert done.exit_code == 2
    assert done.output.startswith(
        "Error: --config gsm8k_rlo: no file, preset, recipe or environment is called so; did you mean 'gsm8k_rloo'"
    )
    done = rlhf_here("train", "--config", "nowhere")
    assert f"; recipes are {', '.join(recipes())}, and rlhf plugins" in done.output
    done = rlhf_here("train", "--config", "sft", "--resume", "run")
    assert done.exit_code == 2
    assert "leave --config out" in done.output


def test_a_model_that_is_not_there_names_what_makes_it(rlhf_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = rlhf_here("train", "--config", "dpo_after_sft")
    assert (done.exit_code, done.output) == (
        2,
        "Error: --config dpo_after_sft: there is no runs/recipes/sft/model; before it: rlhf train --config sft;"
        " or give another model: --actor.model DIR\n",
    )
    done = rlhf_here("train", "--config", "gsm8k_rloo")
    assert (done.exit_code, done.output) == (
        2,
        f"Error: --config gsm8k_rloo: there is no {MODEL}; before it: make smollm2; or give another model: --actor.model DIR\n",
    )
    assert not any(tmp_path.iterdir())


def test_names_are_completed_and_help_knows_the_options_of_its_plugins(site, rlhf_here):
    line = ["rlhf", "train", "--config", "gsm8k_rl"]
    done = site.rlhf(_RLHF_COMPLETE="bash_complete", COMP_WORDS=shlex.join(line), COMP_CWORD="3")
    assert done.stdout == "plain,gsm8k_rloo\nfile,gsm8k_rl\n"
    text = rlhf_here("train", "--config", "code", "--help").output
    assert "--config" in text
    assert "Options of reward 'code_exec'" in text


def test_the_page_says_what_the_files_say(script):
    _, _, rest = (ROOT / "docs/recipes.md").read_text().partition(script.BEGIN)
    assert rest.partition(script.END)[0] == script.page(script.in_order()), "run: python scripts/recipes.py --pages"


def test_flags_of_most_recipes_are_those_of_more_than_half(script):
    lines = ["--a 1 --b 'x y' --c 3", "--b 'x y' --a 1", "--a 2 --b 'x y'", "--c 3 --d 4"]
    assert script.majority(lines) == "--b 'x y'"
    assert script.majority(lines[:3]) == "--a 1 --b 'x y'"
