"""``rlhf data``: files as a run reads them, and what runs keep."""

import json

import pytest
from rlhf_rows.unit_store import keep_units
from rlhf_rows.units import Row, Unit


@pytest.fixture
def write(tmp_path):
    def make(name, *rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return make


def test_pairs_are_shown_with_their_trained_tokens_and_lengths(rlhf_here, tiny_model, write):
    path = write("pairs.jsonl", *({"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0"} for n in range(5)))
    done = rlhf_here("data", "show", path, "--actor.model", tiny_model, "--rows", 2)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"pairs: 5 pairs from {path}, read as preference (it has chosen, rejected")
    assert "tokens of prompts: least 4, half have at most 4, most 4" in lines[1]
    assert [line.split(" — ")[0] for line in lines if line[0].isdigit()] == [
        "1 label 1: 0+1=⟦1<eos>⟧",
        "1 label 0: 0+1=⟦0<eos>⟧",
        "2 label 1: 1+1=⟦2<eos>⟧",
        "2 label 0: 1+1=⟦0<eos>⟧",
    ]


def test_a_model_s_directory_without_weights_is_enough(rlhf_here, tiny_model, write, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix == ".json":
            (bare / file.name).write_bytes(file.read_bytes())
    path = write("pairs.jsonl", {"prompt": "1+1=", "chosen": "2", "rejected": "0"})
    done = rlhf_here("data", "show", path, "--actor.model", bare)
    assert done.exit_code == 0, done.output
    assert "1 label 1: 1+1=⟦2<eos>⟧" in done.stdout


def test_rows_without_answers_are_shown_as_prompts(rlhf_here, tiny_model, write):
    path = write("prompts.jsonl", {"prompt": "1+1=", "label": "2"})
    done = rlhf_here("data", "show", path, "--actor.model", tiny_model)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "1: 1+1= — label 2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no file is given"),
        (["FILE"], "no model is given: add --actor.model DIR"),
        (["FILE", "--actor.model", "MODEL", "--rows", "all"], "--rows all: how many rows"),
        (["nowhere.jsonl", "--actor.model", "MODEL"], "nowhere.jsonl: no such file or directory"),
        (["FILE", "--actor.model", "MODEL", "--data.format", "stepwise"], ":1: no 'completions' (the steps)"),
        (["FILE", "--actor.model", "MODEL", "--data.hh", "chat"], "data.hh is chat, and there is no chat template"),
    ],
)
def test_what_cannot_be_shown_is_said(rlhf_here, tiny_model, write, arguments, message):
    path = write("pairs.jsonl", {"prompt": "1+1=", "chosen": "2", "rejected": "0"})
    places = {"FILE": path, "MODEL": tiny_model}
    done = rlhf_here("data", "show", *(places.get(each, each) for each in arguments))
    assert done.exit_code == 2
    assert message in done.output


def test_what_runs_kept_is_removed(rlhf_here, monkeypatch, tmp_path):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    units = [Unit((Row([1], [2], ((0, 1),)),))] * 20_000
    keep_units("some-key", iter([units]), 1, dict)
    assert list((tmp_path / "cache").rglob("rows.arrow"))
    done = rlhf_here("data", "clear")
    assert done.output.startswith("Removed the tokens of 1 data source, ")
    assert "the log-probabilities of 0 data sources" in done.output
    assert not list((tmp_path / "cache").rglob("rows.arrow"))
    assert "0 data sources" in rlhf_here("data", "clear").output
