"""The rows that the pages about data show are read as the pages say."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner
from rlhf_rows.formats import NAMES

from rlhf_host.cli.main import main
from tests.models.test_pictured_families import OUTCOMES

from .conftest import DOCS, blocks

ROWS = re.findall(r"^\| `(\w+)` \| `(\{.*\})` \|[^|]*\|$", (DOCS / "offline.md").read_text(encoding="utf-8"), re.M)
SOURCES = {block.title: block.body for block in blocks(DOCS / "data.md") if (block.title or "").startswith("sums.")}


@pytest.fixture(scope="module")
def chat_model(tiny_model, tmp_path_factory):
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


def shown(path, model):
    done = CliRunner().invoke(main, ["data", "show", str(path), "--actor.model", str(model)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_every_format_has_a_row():
    assert {name for name, _ in ROWS} == set(NAMES)


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{name}-{place}" for place, (name, _) in enumerate(ROWS)])
def test_a_row_is_read_in_its_format(name, row, chat_model, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(json.loads(row)) + "\n")
    first = shown(path, chat_model).splitlines()[0]
    assert f"read as {name} (it has " in first


@pytest.mark.parametrize("name", ["sums.jsonl", "sums.json", "sums.csv"])
def test_every_file_has_the_same_row(name, tiny_model, tmp_path):
    (tmp_path / name).write_text(SOURCES[name])
    assert shown(tmp_path / name, tiny_model).splitlines()[-1] == "1: 2+3? — label 5"


def test_the_families_that_see_pictures_are_those_that_are_tested():
    text = (DOCS / "data.md").read_text(encoding="utf-8")
    for start, outcome in (("pictures of shared", "shared"), ("each row has", "padded"), ("refused ", "refused")):
        assert re.findall(rf"^\| {start}[^|]*\| (.*) \|$", text, re.M) == [", ".join(OUTCOMES[outcome].split())]
