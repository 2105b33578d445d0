"""A tiny vision-language model for these tasks, as a directory: ``python -m rlhf_plugin_shapes.model DIRECTORY``.

It is a PaddleOCR-VL: a tower for pictures of any size, and a decoder with positions in three dimensions, as Qwen-VL has. Its
processor has no part for videos, so it loads without torchvision, and so does vLLM's code for it.
"""

from __future__ import annotations

import argparse
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from rlhf_host import Task
from rlhf_plugin_shapes.scenes import COLOURS, QUESTIONS, SHAPES
from rlhf_plugin_shapes.tasks import Kind, Shapes

PAD, UNKNOWN, START, END = "<|endoftext|>", "<|unknown|>", "<|im_start|>", "<|im_end|>"
IMAGE, IMAGE_START, IMAGE_END, VIDEO = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
SPECIAL = (PAD, UNKNOWN, START, END, IMAGE_START, IMAGE_END, IMAGE, VIDEO)

TEMPLATE = f"""\
{{% for message in messages %}}{START}{{{{ message.role }}}}
{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{{% for part in message.content %}}\
{{% if part.type == 'image' %}}{IMAGE_START}{IMAGE}{IMAGE_END}{{% elif part.type == 'text' %}}{{{{ part.text }}}}{{% endif %}}\
{{% endfor %}}{{% endif %}}{END}
{{% endfor %}}{{% if add_generation_prompt %}}{START}assistant
{{% endif %}}"""

MERGE = 2
"""A token of a picture is this many patches wide and high. vLLM has no other number for this family."""
_PIECES = r" ?\w+|\n|[^\w\s]| "


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model."""

    picture: int = 56
    """Width and height of a picture in pixels. The tower learns one position for each of its patches. Other pictures are taken
    too, but transformers and vLLM stretch the positions over them in two ways.
    """
    patch: int = 7
    """Width of a patch in pixels."""
    hidden_size: int = 64
    layers: int = 2
    tower_layers: int = 2
    heads: int = 2
    """Number of heads. On CPUs, vLLM has no attention for heads narrower than 32."""
    spread: float = 0.08
    """Standard deviation of random weights. With transformers' 0.02 so small a model learns much later."""


@dataclass(frozen=True, slots=True)
class Training:
    """Supervised training of the model. It stops at ``target``, so that something is left for RL to learn."""

    kind: Kind = "colour"
    target: float = 0.4
    """Chance of a right answer sampled at temperature 1, over training tasks."""
    batch_size: int = 64
    lr: float = 1e-3
    warmup_steps: int = 30
    max_steps: int = 1000
    check_every: int = 5
    check_tasks: int = 256


def make_model(directory: str | Path, sizes: Sizes | None = None, training: Training | None = None, seed: int = 0) -> Path:
    """Writes the model, its tokenizer and its processor. Returns the directory.

    Args:
        training: if given, the model is trained before; else its weights are random.
    """
    directory, sizes = Path(directory), sizes or Sizes()
    processor = make_processor(sizes)
    model = make_network(sizes, processor.tokenizer, seed)
    if training is not None:
        train(model, processor, training, sizes.picture, seed)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def make_tokenizer() -> Any:
    """Returns a tokenizer with a token for each word of these tasks, and for each character of ASCII, for other words."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [piece for question in QUESTIONS for piece in re.findall(_PIECES, question)]
    tokens = [*SPECIAL, "\n", *string.printable[:95], "system", "user", "assistant", *SHAPES, *COLOURS, *pieces]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN, ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        extra_special_tokens={"image_token": IMAGE},  # read by the processor
        padding_side="left",
        chat_template=TEMPLATE,
    )


def make_processor(sizes: Sizes) -> Any:
    """Returns the processor, with an image processor that works on PIL's pictures and numpy's arrays."""
    from transformers import PaddleOCRVLProcessor
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

    image_processor = PaddleOCRVLImageProcessorPil(
        patch_size=sizes.patch,
        merge_size=MERGE,
        temporal_patch_size=1,
        size={"shortest_edge": (MERGE * sizes.patch) ** 2, "longest_edge": 4 * sizes.picture**2},  # in pixels of the area
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return PaddleOCRVLProcessor(image_processor, make_tokenizer(), chat_template=TEMPLATE)


def make_network(sizes: Sizes, tokenizer: Any, seed: int = 0) -> Any:
    """Returns the model with random weights. Leaves torch's global generator alone."""
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    head = sizes.hidden_size // sizes.heads
    axis = head // 6  # of the pairs of a head, a third for each of time, height and width
    same = dict(
        hidden_size=sizes.hidden_size,
        intermediate_size=4 * sizes.hidden_size,
        num_attention_heads=sizes.heads,
        initializer_range=sizes.spread,
    )
    text = dict(
        vocab_size=len(tokenizer),
        num_hidden_layers=sizes.layers,
        num_key_value_heads=sizes.heads,
        head_dim=head,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [head // 2 - 2 * axis, axis, axis],
        },
        **same,
    )
    tower = dict(
        num_hidden_layers=sizes.tower_layers,
        image_size=sizes.picture,
        patch_size=sizes.patch,
        spatial_merge_size=MERGE,
        **same,
    )
    config = PaddleOCRVLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(IMAGE_START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(IMAGE_END),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PaddleOCRVLForConditionalGeneration(config)


def train(
    model: Any,
    processor: Any,
    training: Training,
    size: int = 56,
    seed: int = 0,
    show: Callable[[int, float], None] = lambda step, chance: None,
) -> float:
    """Trains a model on answers of training tasks until a sampled answer is right with chance ``target``. Returns the chance.

    Held-out tasks are never seen. ``show(step, chance)`` is called at every check.
    """
    options = Shapes.Options(kind=training.kind, size=size, tasks=training.max_steps * training.batch_size)
    tasks = Shapes(options).load_tasks("train", seed)
    checked = Shapes(options).load_tasks("train", seed + 1)[: training.check_tasks]
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / training.warmup_steps))
    chance = 0.0
    for step in range(1, training.max_steps + 1):
        batch = tasks[(step - 1) * training.batch_size : step * training.batch_size]
        logprobs, mask = answer_logprobs(model, processor, batch)
        loss = -logprobs.sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % training.check_every == 0:
            with torch.no_grad():
                chance = answer_logprobs(model, processor, checked)[0].sum(-1).exp().mean().item()
            show(step, chance)
            if chance >= training.target:
                break
    return chance


def answer_logprobs(model: Any, processor: Any, tasks: Sequence[Task]) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities ``[B, L - 1]`` of the labels' tokens and the end, 0 elsewhere, and their mask."""
    prompts = [processor.apply_chat_template(task.prompt, tokenize=False, add_generation_prompt=True) for task in tasks]
    texts = [f"{prompt}{task.ground_truth}{END}" for prompt, task in zip(prompts, tasks, strict=True)]
    pictures = [part["image"] for task in tasks for part in task.prompt[0]["content"] if part["type"] == "image"]  # type: ignore[index]
    inputs = processor(text=texts, images=pictures, padding=True, padding_side="right", return_tensors="pt")
    answers = torch.tensor([len(processor.tokenizer(f"{task.ground_truth}{END}")["input_ids"]) for task in tasks])
    ends = inputs["attention_mask"].sum(-1)
    places = torch.arange(inputs["input_ids"].shape[1])
    mask = ((places >= (ends - answers)[:, None]) & (places < ends[:, None]))[:, 1:]
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    logprobs = torch.log_softmax(logits, -1).gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1)
    return logprobs * mask, mask


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_plugin_shapes.model", description="Make a tiny vision-language model."
    )
    parser.add_argument("directory", type=Path, help="where to write it")
    parser.add_argument("--kind", choices=get_args(Kind), default="colour", help="kind of the tasks that it is trained on")
    parser.add_argument("--target", type=float, default=0.0, help="train until an answer is right with this chance; default: 0")
    parser.add_argument("--size", type=int, default=56, help="width and height of the pictures in pixels")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the tasks")
    given = parser.parse_args(arguments)
    training = Training(given.kind, given.target) if given.target > 0 else None
    print(make_model(given.directory, Sizes(picture=given.size), training, given.seed))


if __name__ == "__main__":
    main()
