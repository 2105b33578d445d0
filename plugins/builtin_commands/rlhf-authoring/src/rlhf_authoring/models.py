"""A tiny real model for tests and benchmarks, a random Llama over characters as an ordinary model directory; tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SYMBOLS = ["<pad>", "<bos>", "<eos>", *"0123456789+-*= \nQA:abcdefghijklmnopqrstuvwxyz?.!,;()[]<>/"]

TOOLS_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{%- endfor %}'
    "<|im_end|>\n{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
"""A chat template in ChatML, with tools and calls in the form of Qwen."""


def tiny_tokenizer() -> Any:
    """The tiny model's tokenizer: one token per character of ``SYMBOLS``; other characters are left out."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(SYMBOLS)}, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def byte_tokenizer(template: str | None = None, special: Sequence[str] = ()) -> Any:
    """A tokenizer of one token a byte: any text is encoded, and decoded to the same text.

    Args:
        template: its chat template, such as ``TOOLS_TEMPLATE``.
        special: special tokens beside ``<s>``, which begins texts, ``<|im_start|>``, and ``<|im_end|>``, which ends and pads them.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "<|im_start|>", "<|im_end|>", *special]
    vocabulary = {token: i for i, token in enumerate([*tokens, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def write_tiny_model(
    directory: Path,
    *,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    tied: bool = False,
    seed: int = 0,
    positions: int = 512,
) -> Path:
    """Write config, safetensors and tokenizer; the same arguments give the same weights.

    Args:
        hidden: width.
        layers: number of blocks (``hidden=128, layers=4`` makes 0.6M parameters).
        heads: of attention; half as many have keys and values.
        tied: share the embedding with the head.
        seed: of the random weights.
        positions: that the model has room for.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=positions,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
