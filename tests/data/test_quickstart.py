"""The generated sums, and the model that comes with the host."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_host.data.arithmetic import ArithmeticTasks, character_tokenizer, split_problems
from rlhf_host.errors import UserError
from rlhf_host.models.locations import find_model

from ..scripts_as_modules import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("scripts/quickstart_model.py")


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


def test_the_model_is_an_ordinary_directory_that_comes_with_the_host():
    place = find_model("quickstart").path
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer("37+48=")["input_ids"] == character_tokenizer()("37+48=")["input_ids"]


def test_the_weights_are_those_that_the_script_wrote(script):
    note = json.loads((script.DIRECTORY / "pretraining.json").read_text())
    assert script.digest(script.DIRECTORY) == note["sha256"]


def test_it_forgets_to_carry():
    """Held-out answers are right where nothing is carried, and mostly wrong by ten where something is."""
    place = find_model("quickstart").path
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    _, problems = split_problems(2, "+", 1500)
    carried = [(prompt, int(label)) for prompt, label in problems if int(prompt[1]) + int(prompt[4]) >= 10]
    plain = [(prompt, int(label)) for prompt, label in problems if int(prompt[1]) + int(prompt[4]) < 10]

    def greedy(rows):
        inputs = torch.tensor(tokenizer([prompt for prompt, _ in rows])["input_ids"])
        answers = model.generate(inputs, max_new_tokens=4, do_sample=False)[:, inputs.shape[1] :]
        return [int(text) for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]

    right = [answer == label for answer, (_, label) in zip(greedy(plain), plain, strict=True)]
    forgotten = [answer == label - 10 for answer, (_, label) in zip(greedy(carried), carried, strict=True)]
    assert sum(right) > 0.98 * len(plain)
    assert sum(forgotten) > 0.95 * len(carried)


def test_the_script_gives_the_same_weights_every_time(script):
    first, second = (script.pretrain(steps=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
