"""Every command on every page does what it says, or at least is one: dry runs where there is a model, and flags that exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from PIL import Image
from rlhf_plan import phases
from rlhf_plan.footprint import footprint
from rlhf_plugin_shapes.model import make_model
from rlhf_plugin_shapes.rows import write_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_host.plugins.catalogue import install_line

from .conftest import DOCS, PAGES, ROOT, blocks, commands

SEEING = ("models/shapes", "Qwen/Qwen2.5-VL-3B-Instruct")
"""Models of the pages that see pictures."""
PLACEHOLDER = re.compile(r"^(?:[A-Z][A-Z_]*|\.\.\.|D)$")
JUST_WRITTEN = {
    "my_algo": "median",
    "my_engine": "transformers",
    "my_backend": "torch",
    "my_runtime": "local",
}
"""A plugin that the reader has just written → one that the test can use instead."""
SCORING = ("--reward-model.model", "--reward.prm.model")
FAKE_VERIFIERS = ROOT / "plugins/builtin_agents/rlhf-plugin-verifiers/tests/fake_python.py"
DISTRIBUTIONS = {path.parent.name for path in ROOT.glob("plugins/*/*/pyproject.toml")} | {"rlhf-host"}


FIRST = {tuple(words): page for page in reversed(PAGES) for words in commands(page)}
LISTED = [pytest.param(page, words, id=f"{page.relative_to(ROOT)}: {shlex.join(words)[:90]}") for words, page in FIRST.items()]
"""Every command once, on the first page that has it."""


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory, tiny_model, prompts):
    """A working directory where the models, files and the run that pages name are at hand, tiny."""
    folder = tmp_path_factory.mktemp("sandbox")
    scores = tmp_path_factory.mktemp("reward_model")
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype="auto").save_pretrained(scores)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(scores)
    sees = make_model(tmp_path_factory.mktemp("sees"))
    for page in PAGES:
        for words in commands(page):
            for flag, value in pairwise(words):
                if flag.endswith(("--model", ".model")) and not PLACEHOLDER.match(value) and not (folder / value).exists():
                    (folder / value).parent.mkdir(parents=True, exist_ok=True)
                    model = scores if flag in SCORING else sees if value in SEEING else tiny_model
                    (folder / value).symlink_to(model)
                elif flag.endswith("data") and (path := value.partition("@")[0]).endswith(".jsonl"):
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(prompts, folder / path)
    for block in [
        *blocks(DOCS / "getting-started.md"),
        *blocks(DOCS / "offline.md"),
        *blocks(DOCS / "agents.md"),
        *blocks(DOCS / "python.md"),
        *blocks(DOCS / "rewards.md"),
        *blocks(DOCS / "data.md"),
        *blocks(DOCS / "servers.md"),
    ]:
        if block.title and (
            block.title.endswith((".yaml", ".jsonl", ".json", ".py", ".txt")) or block.title.startswith("tasks/")
        ):
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.body)
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples/nim.py", folder / "examples")
    (folder / "charts").mkdir()
    for number in (1, 2):
        Image.new("RGB", (56, 28 * number)).save(folder / f"charts/{number}.png")
    for split in ("train", "eval"):
        write_rows(folder / "rows", 4, split=split)
    other_python = folder / "verifiers-env/bin/python"
    other_python.parent.mkdir(parents=True)
    other_python.write_text(f"#!{sys.executable}\n" + FAKE_VERIFIERS.read_text())
    other_python.chmod(0o755)
    for path in folder.glob("*-pairs.jsonl"):
        shutil.copy(folder / "pairs.jsonl", path)
    return folder


@pytest.fixture(scope="session")
def finished(sandbox):
    """A run directory of one step, and its trajectories as ``rlhf rollout`` would have written them."""
    small = ["--rollout.n", "2", "--train.threads", "1"]
    model = ["--actor.model", sandbox / "models/SmolLM2-135M-Instruct", "--data", sandbox / "train.jsonl"]
    start = ["train", "--algo", "rloo", "--reward", "math_verifier", "--train.batch-size", "2", "--train.steps", "1"]
    start += ["--rollout.max-new-tokens", "4"]
    done = rlhf([*start, *small, *model, "--eval.data", sandbox / "train.jsonl", "--run-dir", sandbox / "RUN"])
    assert done.exit_code == 0, done.output
    rolled = ["rollout", "--output", sandbox / "rolled.jsonl", "--reward", "math_verifier", "--train.batch-size", "2"]
    done = rlhf([*rolled, *small, *model])
    assert done.exit_code == 0, done.output
    return sandbox / "RUN"


def rlhf(words):
    from rlhf_host.cli.main import main

    return CliRunner().invoke(main, [str(word) for word in words], prog_name="rlhf")


@pytest.fixture(scope="module")
def installed(install):
    """All plugins of the pages in ``docs/plugins`` are installed: once, for all metadata is read again where the path changes."""
    with pytest.MonkeyPatch.context() as patch:
        for page in sorted((DOCS / "plugins").glob("*.md")):
            if any(block.title == "pyproject.toml" for block in blocks(page)):
                patch.syspath_prepend(str(install(page).site))
        yield


@pytest.fixture(scope="module")
def measured_once():
    """The plan of memory measures a model's passes once, not again for every command: most have the same model."""
    known = {}

    def remembered(model, **settings):
        key = (type(model), model.config.to_json_string(), *settings.values())
        if key not in known:
            known[key] = footprint(model, **settings)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "footprint", remembered)
        yield


def test_commands_are_found_at_all():
    found = {page.relative_to(ROOT).as_posix() for page in PAGES if commands(page)}
    assert {"README.md", "docs/getting-started.md", "docs/plugins/algo.md", "docs/results.md"} <= found


@pytest.mark.parametrize(("page", "words"), LISTED)
def test_a_command_on_a_page_is_true(page, words, sandbox, finished, installed, measured_once, monkeypatch):
    monkeypatch.chdir(sandbox)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    program, *rest = words
    if program == "rlhf":
        check_rlhf(at_hand(rest, finished))
    elif program == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert rest[0] in targets
    elif program == "python":
        assert (ROOT / rest[0]).is_file()
    else:
        held = False
        while rest[1] == "-c":
            held |= rest[2] == "dist/wheels.txt"
            assert rest[2] == "dist/wheels.txt" or (ROOT / rest[2]).is_file()
            del rest[1:3]
        for name in (word for word in rest[1:] if not word.startswith("-")):
            check_requirement(name, held)


def at_hand(words, finished):
    """The command with a plugin and a run that are there, in place of what the reader has just made."""
    again = ("--resume", "--checkpoint", "replay")
    runs = [word == "RUN_DIR" or (before in again and word.startswith("runs/")) for before, word in pairwise(["", *words])]
    return [str(finished) if run else JUST_WRITTEN.get(word, word) for run, word in zip(runs, words, strict=True)]


def check_requirement(name, held):
    """What is to be installed is the project's own, from the wheels that ``make wheels`` builds while it is on no index; a page's
    plugin; or a folder that the page has just made. The host is there already where its extras are added."""
    if name.startswith(("./", ".")) or "/" in name or PLACEHOLDER.match(name):
        return
    requirement = Requirement(name)
    assert requirement.name in DISTRIBUTIONS, f"nobody here publishes {name}"
    assert held or requirement.extras or not install_line(name).partition(" -c ")[1], install_line(name)


def check_rlhf(words):
    command, *rest = words
    if command == "train":
        check_train(rest)
    elif command in ("eval", "rollout", "generate", "replay", "plan"):
        check_flags([command], rest)
    elif words[:2] == ["env", "export"]:
        check_flags(words[:2], words[2:])
    elif command == "sweep" and rest[:1] and rest[0].startswith("--vary"):
        done = rlhf([*words, "--dry-run"])
        assert done.exit_code == 0, done.output
    else:
        check_plain(words)


def check_train(flags):
    if any(PLACEHOLDER.match(word) for word in flags):
        # Something is left for the reader to fill in: the settings are still read, and unknown ones refused.
        kept, skip = [], False
        for flag, value in zip(flags, [*flags[1:], ""], strict=True):
            if skip or flag == "...":
                skip = False
            elif PLACEHOLDER.match(value) and value != "...":
                assert flag.startswith("--")
                skip = True
            else:
                kept.append(flag)
        flags = kept
    last = [] if {"--print-config", "--help"} & set(flags) else ["--dry-run"]
    if last and "--algo" not in flags and "--config" not in flags and "--resume" not in flags:
        last = ["--print-config"]
    if "--resume" in flags and "--train.steps" not in flags:
        last += ["--train.steps", "2"]  # the run at hand is finished
    done = rlhf(["train", *flags, *last])
    if done.exit_code and last == ["--dry-run"] and "no reward is chosen" in done.output:
        done = rlhf(["train", *flags, "--print-config"])
    assert done.exit_code == 0, done.output


def check_flags(path, flags):
    """The flags are ones of the command: with ``--help`` behind them, options of the chosen plugins are listed too."""
    plain = [flag for flag in flags if re.match("--?[a-z]", flag)]
    shown = rlhf([*path, *(flag for flag in flags if not PLACEHOLDER.match(flag)), "--help"])
    assert shown.exit_code == 0, shown.output
    for flag in plain:
        row = rf"^\s+(?:--?[\w-]+, )*{re.escape(flag)}(?:\s|$|,)|\(default: {re.escape(flag)}\)"
        assert re.search(row, shown.output, re.M), f"{' '.join(path)} has no {flag}\n{shown.output}"


def check_plain(words):
    path = [word for word in words if re.fullmatch(r"[a-z]+", word)][:2] if words[0] in ("plugins", "data") else words[:1]
    while path:
        shown = rlhf([*path, "--help"])
        if shown.exit_code == 0:
            break
        path = path[:-1]
    assert path, f"no such command: {words}"
    for flag in (word for word in words if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", shown.output), f"{' '.join(path)} has no {flag}"
    if words[:2] == ["plugins", "show"]:
        done = rlhf(words)
        assert done.exit_code == 0, done.output


def test_the_script_on_the_first_page_runs(sandbox, tmp_path, monkeypatch, capsys):
    (source,) = [block.body for block in blocks(DOCS / "getting-started.md") if block.title == "train.py"]
    monkeypatch.chdir(sandbox)
    monkeypatch.setitem(sys.modules, "__main__", sys)
    exec(compile(source, "train.py", "exec"), {"__name__": "train"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("[[")


def test_the_replay_and_the_evaluation_of_the_first_page_run(finished, sandbox, monkeypatch):
    monkeypatch.chdir(sandbox)
    for words in commands(DOCS / "getting-started.md"):
        if words[1:2] == ["replay"]:
            done = rlhf([*at_hand(words[1:], finished), "--json"])
            assert done.exit_code == 0, done.output
        if words[1:2] == ["eval"]:
            done = rlhf([str(finished) if word == "RUN_DIR" else word for word in [*words[1:], "--json"]])
            assert done.exit_code == 0, done.output
            assert "eval/pass@4" in json.loads(done.stdout)


def test_the_data_of_the_first_page_is_data(sandbox):
    rows = [json.loads(line) for line in Path(sandbox, "train.jsonl").read_text().splitlines()]
    assert all(row.keys() == {"prompt", "label"} for row in rows)
