"""What the pages say of Python, data and the environment is so; their scripts and tests run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import rlhf_authoring

from rlhf_host.config.schema import DataConfig, RunConfig
from rlhf_host.data.row_reader import LABEL_KEYS, PROMPT_KEYS
from rlhf_host.data.rows import COMPRESSED, SUFFIXES
from rlhf_host.plugins.reward_functions import OFFERS

from .conftest import DOCS, PAGES, ROOT, blocks


@pytest.mark.parametrize(("script", "last"), [("first.py", "0.0"), ("ask.py", ""), ("samples.py", "0.")])
def test_a_script_of_the_python_page_runs(script, last, tiny_model, tmp_path, monkeypatch, capsys):
    (source,) = [block.body for block in blocks(DOCS / "python.md") if block.title == script]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/SmolLM2-135M-Instruct").symlink_to(tiny_model)
    exec(compile(source, script, "exec"), {"__name__": "script"})
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)


@pytest.mark.parametrize(
    "block", [b for b in blocks(DOCS / "plugins/testing.md") if b.language == "python"], ids=lambda b: b.body[-40:]
)
def test_the_tests_of_the_testing_page_pass(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    exec(compile(block.body, "testing.md", "exec"), names)
    for name, value in names.items():
        if name.startswith("test_") and inspect.isfunction(value):
            value(tmp_path)


@pytest.mark.parametrize("section", ["train", "rollout", "checkpoint", "trajectories"])
def test_a_setting_that_a_page_names_is_there(section):
    """Where others' names are translated (coming-from.md, names.md), they are theirs."""
    known = RunConfig.model_fields[section].annotation.model_fields
    readme = ROOT.glob("plugins/*/*/README.md")
    texts = {
        page: page.read_text(encoding="utf-8") for page in (*PAGES, *readme) if page.name not in ("coming-from.md", "names.md")
    }
    named = {page: re.findall(rf"`(?:--)?{section}\.(?!py|jsonl)([a-z][a-z0-9_-]*)", text) for page, text in texts.items()}
    assert {
        (page.name, name) for page, names in named.items() for name in names if name.replace("-", "_") not in known
    } == set()


def test_the_python_page_names_what_a_reward_function_may_ask_for():
    assert set(re.findall(r"^\| `(\w+)` \| (?:what|the)", (DOCS / "python.md").read_text(), re.M)) == set(OFFERS)


def test_the_data_page_names_formats_and_columns():
    text = (DOCS / "data.md").read_text()
    (table,) = re.findall(r"## Files\n(.*?)\n## ", text, re.S)
    assert set(re.findall(r"`(\.\w+)`", table)) == {*SUFFIXES, *COMPRESSED}
    for name, keys in (("prompt", PROMPT_KEYS), ("label", LABEL_KEYS)):
        (row,) = re.findall(rf"^\| {name} \| (.*?) \|", text, re.M)
        assert tuple(re.findall(r"`([\w.]+)`", row)) == keys
        assert f"the first of {', '.join(keys)}" in str(DataConfig.model_fields[f"{name}_key"].description)


def test_the_environment_page_names_the_hosts_variables():
    text = (DOCS / "reference/environment.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "rlhf_host").rglob("*.py"))
    assert set(re.findall(r"^\| `(_?RLHF_\w+)`", text, re.M)) == set(re.findall(r"\b_?RLHF_[A-Z_]+\b", sources))
    named = re.findall(r"`([A-Z_]+)`", "".join(re.findall(r"^\| (`.*?) \|", text, re.M)))
    by_rich = {"COLUMNS", "NO_COLOR"}
    sources += "".join(path.read_text() for path in Path(rlhf_authoring.__file__).parent.rglob("*.py"))  # rlhf doctor
    of_libraries = ("MLFLOW_", "TRACKIO_", "SWANLAB_", "CLEARML_")  # read by the trackers' own libraries
    own = {name for name in named if name not in by_rich and not name.startswith(of_libraries)}
    assert {name for name in own if f'"{name}"' not in sources} == set()
