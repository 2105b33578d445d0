"""A tiny real model for tests and benchmarks: a random Llama over characters, as an ordinary model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SYMBOLS = ["<pad>", "<bos>", "<eos>", *"0123456789+-*= \nQA:abcdefghijklmnopqrstuvwxyz?.!,;()[]<>/"]


def tiny_tokenizer() -> Any:
    """The tiny model's tokenizer: one token per character of ``SYMBOLS``; other characters are left out."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(SYMBOLS)}, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


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
