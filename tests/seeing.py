"""Model directories that see pictures, small enough to be made in a blink, with real processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,?!:'\n"
TEMPLATE = (
    "{%% for m in messages %%}<|im_start|>{{ m['role'] }}\n{%% if m['content'] is string %%}{{ m['content'] }}{%% else %%}"
    "{%% for c in m['content'] %%}{%% if c['type'] == 'image' %%}%s{%% else %%}{{ c['text'] }}{%% endif %%}{%% endfor %%}"
    "{%% endif %%}<|im_end|>\n{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)


def tokenizer(special: list[str], picture: str) -> PreTrainedTokenizerFast:
    """A token per character, and a chat template that takes pictures."""
    names = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>", *special]
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*names, *LETTERS])}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<|im_end|>", additional_special_tokens=names[2:]
    )
    made.chat_template = TEMPLATE % picture
    return made


def write(directory: Path, model: Any, words: Any, processor: Any, scale: float = 3.0) -> Path:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(scale)  # so that pictures matter
    model.save_pretrained(directory)
    words.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def text_of(words: Any, kind: str, heads: int) -> dict[str, Any]:
    """The decoder's configuration."""
    return {
        "model_type": kind,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "vocab_size": len(words),
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": 0,
    }


def qwen(directory: Path, seed: int = 0) -> Path:
    """Writes a Qwen2.5-VL: positions of three axes, and as many tokens as a picture is large."""
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    words = tokenizer(special, "<|vision_start|><|image_pad|><|vision_end|>")
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = text_of(words, "qwen2_5_vl_text", heads=4) | {"rope_parameters": rope}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
        "window_size": 28,
        "patch_size": 7,
    }
    ids = dict(
        zip(("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), range(4, 8), strict=True)
    )
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    processor = Qwen2VLImageProcessorPil(patch_size=7, min_pixels=14 * 14, max_pixels=28 * 28 * 100)
    return write(directory, Qwen2_5_VLForConditionalGeneration(config), words, processor)


def idefics(directory: Path, seed: int = 0) -> Path:
    """Writes an Idefics3, which vLLM serves without torchvision: each picture is four tokens between two others."""
    special = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
    words = tokenizer(special, "<image>")
    text = text_of(words, "llama", heads=2)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    torch.manual_seed(seed)
    config = Idefics3Config(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=5, pad_token_id=0, tie_word_embeddings=False
    )
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, do_image_splitting=False
    )
    whole = Idefics3Processor(processor, words, image_seq_len=4)
    return write(directory, Idefics3ForConditionalGeneration(config), words, whole)


def noise(path: Path, size: tuple[int, int], seed: int) -> Path:
    """Writes a picture of random colours."""
    colours = torch.randint(256, (size[1], size[0], 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    Image.fromarray(colours.numpy()).save(path)
    return path
