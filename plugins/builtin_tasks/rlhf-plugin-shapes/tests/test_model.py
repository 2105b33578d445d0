"""The tiny model: a directory that transformers loads without torchvision, and that learns."""

import importlib.util
import json

import pytest
import torch
from rlhf_plugin_shapes import Shapes
from rlhf_plugin_shapes.model import (
    END,
    IMAGE,
    Sizes,
    Training,
    answer_logprobs,
    main,
    make_model,
    make_network,
    make_tokenizer,
    train,
)
from rlhf_plugin_shapes.scenes import QUESTIONS, SCENES


def load(split="train", **options):
    return Shapes(Shapes.Options(**options)).load_tasks(split, 0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def processor(directory):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(directory)


@pytest.fixture(scope="module")
def model(directory):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(directory).eval()


def inputs_of(processor, task):
    """Returns ids of the prompt with one placeholder, and what the processor gives for the text and the picture."""
    text = processor.apply_chat_template(task.prompt, tokenize=False, add_generation_prompt=True)
    picture = task.prompt[0]["content"][0]["image"]
    return processor.tokenizer(text)["input_ids"], processor(text=[text], images=[picture], return_tensors="pt")


def test_the_directory_is_complete_and_loads_without_torchvision(directory, processor, model):
    assert {path.name for path in directory.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert type(processor).__name__ == "PaddleOCRVLProcessor"
    if importlib.util.find_spec("torchvision") is None:
        assert type(processor.image_processor).__name__ == "PaddleOCRVLImageProcessorPil"
    assert model.config.model_type == "paddleocr_vl"


@pytest.mark.parametrize(("size", "tokens"), [(56, 16), (84, 36), (60, 16), (112, 64), (224, 64)])
def test_the_placeholder_becomes_a_token_for_every_four_patches(processor, size, tokens):
    image = processor.tokenizer.convert_tokens_to_ids(IMAGE)
    ids, inputs = inputs_of(processor, load(size=size)[0])
    place = ids.index(image)
    assert ids.count(image) == 1
    assert inputs["input_ids"][0].tolist() == [*ids[:place], *[image] * tokens, *ids[place + 1 :]]
    assert inputs["mm_token_type_ids"].sum() == tokens
    assert inputs["image_grid_thw"].prod() == 4 * tokens


def test_texts_are_read_and_written_exactly():
    tokenizer = make_tokenizer()
    for text in [*QUESTIONS, "Answer with one word or number.", "a,  b\nc"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("How many shapes are there?")["input_ids"]) == 6
    answers = {task.ground_truth for kind in SCENES for task in load(kind=kind, tasks=50)}
    assert {len(tokenizer(answer)["input_ids"]) for answer in answers} == {1}
    assert tokenizer.decode(tokenizer(f"red{END}")["input_ids"], skip_special_tokens=True) == "red"


def test_it_sees_the_picture(processor, model):
    first, second = (inputs_of(processor, task)[1] for task in load(kind="colour")[:2])
    with torch.no_grad():
        logits, others = (
            model(**inputs).logits[0, -1] for inputs in (first, {**first, "pixel_values": second["pixel_values"]})
        )
        answer = model.generate(**first, max_new_tokens=2, do_sample=False)
    assert (logits - others).abs().max() > 1e-3
    assert answer.shape == (1, first["input_ids"].shape[1] + 2)


def test_weights_depend_on_the_seed_alone(directory, tmp_path):
    weights = (directory / "model.safetensors").read_bytes()
    assert (make_model(tmp_path / "same") / "model.safetensors").read_bytes() == weights
    assert (make_model(tmp_path / "other", seed=1) / "model.safetensors").read_bytes() != weights


def test_it_learns(processor):
    seen = []
    model = make_network(Sizes(), processor.tokenizer)
    training = Training("colour", 0.4, batch_size=32, check_tasks=64)
    assert train(model, processor, training, show=lambda step, chance: seen.append(chance)) == seen[-1]
    assert seen[0] < 0.1
    assert seen[-1] >= 0.4
    with torch.no_grad():
        held_out = answer_logprobs(model, processor, load("eval", eval_tasks=64)[:])[0].sum(-1).exp().mean()
    assert held_out > 0.3


def test_the_command(tmp_path, capsys):
    main([str(tmp_path / "model"), "--size", "28"])
    assert f"{tmp_path / 'model'}\n" in capsys.readouterr().out
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["vision_config"]["image_size"] == 28
