"""Units kept on disk are the same units, are found again, and only for the same data."""

import json
import math

import pytest
from rlhf_rows.encoding import Encoder
from rlhf_rows.load_units import load_units
from rlhf_rows.unit_store import StoredUnits, unit_lengths

from rlhf_host.config.schema import DataConfig
from rlhf_host.errors import UserError
from rlhf_host.records.numbers import Numbers

from .conftest import CHATML, byte_tokenizer

TABLE = {
    "prompt_completion": [{"prompt": f"{i}?", "completion": "x" * (i % 7 + 1)} for i in range(2600)],
    "preference": [
        {"prompt": f"{i}?", "chosen": "yes", "rejected": "no", **({"margin": i} if i % 2 else {})} for i in range(9)
    ],
    "triple": [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no", "reference": "surely"} for i in range(9)],
    "unpaired": [{"prompt": f"{i}?", "completion": "yes", "label": i % 2} for i in range(9)],
    "stepwise": [{"prompt": f"{i}?", "completions": ["one", "two"], "labels": [1, i / 9]} for i in range(9)],
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small(monkeypatch):
    """So many units as a test has do not stay in memory."""
    monkeypatch.setattr("rlhf_rows.unit_store.MOST_IN_MEMORY", 5)


def load(path, kind="preference", tokenizer=None, context=None, **settings):
    data = DataConfig(sources=[{"path": path, "max_samples": settings.pop("rows", None)}], **settings)
    return load_units(data, kind=kind, split="train", tokenizer=tokenizer or byte_tokenizer(), max_tokens=context)


def written(write, kind="preference", rows=None, name="data.jsonl"):
    return write(name, "".join(json.dumps(row) + "\n" for row in rows or TABLE[kind]))


def kept(cache):
    return sorted(path.name for path in cache.glob("units-*/*"))


def plain_values(unit):
    def numbers(row):
        return {name: [None if math.isnan(each) else each for each in values] for name, values in row.token_columns.items()}

    return [(list(row.prompt_ids), list(row.completion_ids), row.trained, row.columns, numbers(row)) for row in unit.rows]


@pytest.mark.parametrize("kind", TABLE)
def test_units_on_disk_are_those_in_memory(kind, write, cache, monkeypatch):
    path = written(write, kind)
    memory = load(path, kind)
    assert kept(cache) == []  # few units are not kept
    monkeypatch.setattr("rlhf_rows.unit_store.MOST_IN_MEMORY", 5)
    stored, found = load(path, kind), load(path, kind)
    assert len(kept(cache)) == 1
    for each in (stored, found):
        units = each.sources["data"]
        assert isinstance(units, StoredUnits)
        assert list(map(plain_values, units)) == list(map(plain_values, memory.sources["data"]))
        assert (each.fingerprint, each.report) == (memory.fingerprint, memory.report)
        assert isinstance(units[0].rows[0].prompt_ids, Numbers)
        assert unit_lengths(units).tolist() == unit_lengths(memory.sources["data"]).tolist()
        assert unit_lengths(units[3:1:-1]).tolist() == unit_lengths(memory.sources["data"][3:1:-1]).tolist()
    assert plain_values(found.sources["data"][-1]) == plain_values(memory.sources["data"][-1])


def test_a_part_of_them_is_a_part(write, cache, small):
    units = load(written(write)).sources["data"]
    part = units[2:8:3]
    assert [len(part), plain_values(part[1])] == [2, plain_values(units[5])]
    with pytest.raises(IndexError):
        part[2]


def test_samples_over_all_sources_are_taken_from_the_front(write, cache, small):
    path = written(write)
    assert len(load(path, max_samples=6)) == 6


def test_the_second_start_tokenises_nothing(write, cache, small, monkeypatch):
    path = written(write)
    load(path)
    monkeypatch.setattr(Encoder, "encode", lambda *_: pytest.fail("tokenised"))
    assert len(load(path)) == 9


def test_whatever_decides_about_the_units_is_in_the_key(write, cache, small, tmp_path):
    rows = TABLE["preference"]
    path = written(write)
    load(path)
    tokenizers = [byte_tokenizer(CHATML), byte_tokenizer(CHATML.replace("helpful", "brief")), byte_tokenizer(bos=True)]
    special = byte_tokenizer()
    special.eos_token = "<s>"
    for tokenizer in (*tokenizers, special):
        load(path, tokenizer=tokenizer)
    for settings in (
        {"max_tokens": 50},
        {"context": 60},
        {"system_prompt": "S"},
        {"template": "Q {prompt}"},
        {"long_rows": "truncate"},
        {"rows": 7},
    ):
        load(path, **settings)
    load(path, "unpaired")
    assert len(kept(cache)) == 12
    assert load(path).fingerprint == load(path).fingerprint
    assert len(kept(cache)) == 12
    changed = written(write, rows=[{**rows[0], "chosen": "yet"}, *rows[1:]])  # one byte, the same path and size
    first = load(changed).sources["data"][0].rows[0]
    assert byte_tokenizer().decode(first.completion_ids) == "yet<|im_end|>"
    assert len(kept(cache)) == 13


def test_a_damaged_entry_is_made_again(write, cache, small):
    path = written(write)
    before = load(path).fingerprint
    (entry,) = cache.glob("units-*/*")
    for name, content in (("about.json", "{"), ("rows.arrow", "x")):
        (entry / name).write_text(content)
        units = load(path)
        assert (units.fingerprint, len(list(units.sources["data"]))) == (before, 9)
        assert len(kept(cache)) == 1


def test_rows_that_stop_leave_nothing_behind(write, cache, small):
    rows = TABLE["prompt_completion"][:600]
    with pytest.raises(UserError, match=r"data\.jsonl:601: 'completion' is empty"):
        load(written(write, rows=[*rows, {"prompt": "p", "completion": ""}]), "prompt_completion")
    many = [*rows, *({"prompt": "p", "completion": ""} for _ in range(80))]
    with pytest.raises(UserError, match=r"left out 80 bad rows of 680 .* more than 10% of the rows$"):
        load(written(write, rows=many), "prompt_completion", on_bad_row="skip")
    assert kept(cache) == []


def test_a_cache_that_cannot_be_written_says_what_to_do(write, small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"units-\d+ cannot be written: Not a directory; set RLHF_CACHE to a directory"):
        load(written(write))


def test_rows_of_python_are_not_kept(cache, small, plain):
    data = DataConfig(sources=[{"path": "python:x"}])
    units = load_units(data, kind="preference", split="train", tokenizer=plain, rows={"python:x": TABLE["preference"]})
    assert isinstance(units.sources["x"], list)
    assert kept(cache) == []
