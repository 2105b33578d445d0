"""The generated sums and the embedded model, in a build of a few steps."""

import json
import os
import threading
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_host.data.arithmetic import ArithmeticTasks, character_tokenizer, split_problems
from rlhf_host.errors import UserError
from rlhf_host.models import quickstart
from rlhf_host.models.quickstart import Recipe, pretrain, quickstart_model_dir

TINY = Recipe(hidden_size=16, intermediate_size=16, layers=1, heads=2, batch_size=8, max_steps=5, check_every=1)


def tasks(split, **options):
    return list(ArithmeticTasks(ArithmeticTasks.Options(**options)).load_tasks(split, seed=0))


def test_the_sums_are_right_and_the_splits_share_none():
    train, held_out = tasks("train"), tasks("eval")
    assert len(held_out) == 1500
    assert len(train) == 8100 - 1500
    for task in train[:100] + held_out[:100]:
        a, b = task.prompt.removesuffix("=").split("+")
        assert int(a) + int(b) == int(task.ground_truth)
    assert not {task.prompt for task in train} & {task.prompt for task in held_out}


def test_what_is_held_out_does_not_depend_on_the_seed():
    plugin = ArithmeticTasks(ArithmeticTasks.Options())
    assert [task.prompt for task in plugin.load_tasks("eval", seed=0)] == [
        task.prompt for task in plugin.load_tasks("eval", seed=1)
    ]


def test_other_digits_and_operations():
    differences = tasks("train", operations="-", count=50)
    assert len(differences) == 50
    assert all(eval(task.prompt.removesuffix("=")) == int(task.ground_truth) for task in differences)
    assert all(len(task.prompt) == 4 for task in tasks("eval", digits=1, held_out=20))
    with pytest.raises(UserError, match="of 100 problems at most 50 can be held out, not 51"):
        split_problems(1, "+", 51)


def test_every_character_is_a_token_and_comes_back():
    tokenizer = character_tokenizer()
    ids = tokenizer("37+48=85")["input_ids"]
    assert len(ids) == 8
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "37+48=85"
    assert tokenizer.chat_template is None


def test_the_build_is_an_ordinary_model_directory_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    directory = quickstart_model_dir(progress=False, recipe=TINY)
    assert directory == tmp_path / "cache" / f"quickstart-{quickstart.VERSION}"
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert json.loads((directory / "pretraining.json").read_text())["measured"]["steps"] == 5

    monkeypatch.setattr(quickstart, "pretrain", lambda *_: pytest.fail("built again"))
    assert quickstart_model_dir(progress=False) == directory


def test_progress_is_shown_on_standard_error(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))
    quickstart_model_dir(recipe=TINY)
    out, err = capfd.readouterr()
    assert not out
    assert "Building the quickstart model (once)" in err
    assert "step 5" in err
    assert "shards" not in err


def test_pretraining_is_the_same_every_time_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, measured = pretrain(TINY)
    second, again = pretrain(TINY)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert measured["chance"] == again["chance"]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_pretraining_stops_at_the_measured_chance():
    """Far from the target every fifth check is left out, so the first comes at step 5."""
    _, measured = pretrain(replace(TINY, target=1e-9, max_steps=50))
    assert measured["steps"] == 5
    assert measured["chance"] >= 1e-9


def test_who_may_read_the_cache_may_read_the_model_and_killed_builds_go_away(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))
    tmp_path.chmod(0o755)
    killed, under_way = (tmp_path / f".quickstart-{quickstart.VERSION}-{name}" for name in ("killed", "mine"))
    for left in (killed, under_way):
        left.mkdir()
    os.utime(killed, (0, 0))
    directory = quickstart_model_dir(progress=False, recipe=TINY)
    assert {path.stat().st_mode & 0o055 for path in [directory]} == {0o055}
    assert {path.stat().st_mode & 0o044 for path in directory.iterdir()} == {0o044}
    assert sorted(path.name for path in tmp_path.iterdir()) == [under_way.name, directory.name]


def test_an_interrupted_build_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart, "pretrain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quickstart_model_dir(progress=False, recipe=TINY)
    assert list(tmp_path.iterdir()) == []


def test_two_builds_at_once_end_in_one_whole_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))
    both, found = threading.Barrier(2), []
    real = quickstart.pretrain

    def together(*arguments):
        made = real(*arguments)
        both.wait(timeout=60)
        return made

    monkeypatch.setattr(quickstart, "pretrain", together)
    threads = [
        threading.Thread(target=lambda: found.append(quickstart_model_dir(progress=False, recipe=TINY))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / f"quickstart-{quickstart.VERSION}"] * 2
    assert [path.name for path in tmp_path.iterdir()] == [f"quickstart-{quickstart.VERSION}"]
    AutoModelForCausalLM.from_pretrained(found[0])


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot write the model cache .*; set RLHF_CACHE"):
        quickstart_model_dir(progress=False, recipe=TINY)
