"""Real tokenizers that are made in a moment, and tiny models for them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "the sum of seven and nine is sixteen, so the answer is sixteen.",
    "Q: 12 + 30 = ? A: 42. Thinking about thinking: (a + b) * c, naïve café, größer, 東京, мир, 🙂🙃",
    "def answer(x):\n    return x + 1\n\n# so it is, and it is so; this and that; then and there",
] * 3
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]\n"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@cache
def byte_level(size: int, chat: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as of GPT-2, with ``size`` tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>" if chat else "<|end|>", pad_token="<|end|>"
    )
    tokenizer.chat_template = CHATML if chat else None
    return tokenizer


@cache
def sentence_piece(size: int, chat: bool = False) -> PreTrainedTokenizerFast:
    """BPE over characters with bytes to fall back to, as of Llama 2, with about ``size`` tokens; a space begins every text."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.train_from_iterator(TEXT[:1], trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>"], show_progress=False))
    known = json.loads(inner.to_str())["model"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    names = ["<unk>", "<s>", "</s>", *bytes_, *(token for token in known["vocab"] if token != "<unk>")]
    merges = [tuple(pair) for pair in known["merges"]]
    vocabulary = {token: number for number, token in enumerate(names)}
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(token, special=True) for token in names[:3]])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )
    tokenizer.chat_template = INST if chat else None
    return tokenizer


def lower_case() -> PreTrainedTokenizerFast:
    """A tokenizer that does not keep texts."""
    inner = Tokenizer.from_str(byte_level(300).backend_tokenizer.to_str())
    inner.normalizer = normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


def word_piece() -> PreTrainedTokenizerFast:
    """A tokenizer that joins words by spaces."""
    inner = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "</s>": 3}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "removed")
    inner.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="[UNK]")


def write_model(
    directory: Path, tokenizer: PreTrainedTokenizerFast, *, hidden: int = 32, seed: int = 0, sharper: float = 1.0
) -> Path:
    """Writes a tiny random Llama for a tokenizer; ``sharper`` multiplies its logits, because random models know nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        model.lm_head.weight.mul_(sharper)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
