"""A tiny model for ``shell_lines``, with rows that teach it to write commands.

    python -m rlhf_plugin_shell.lines_model DIRECTORY

The model is a random Llama whose tokens are the words of these tasks. The rows are ``commands.jsonl`` in the same directory.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from rlhf_plugin_shell.lines import KINDS, LETTERS, rows

ROWS = 1500
SPECIAL = ("<pad>", "<eos>")
PIECES = r"\w+|[^\w\s]"


def make_model(folder: Path, seed: int = 0) -> None:
    """Writes the model, its tokenizer, and the rows."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    texts = [each for kind in KINDS for each in (kind.prompt, kind.command)]
    words = dict.fromkeys([*SPECIAL, *LETTERS, *re.findall(PIECES, " ".join([*texts, ":"]))])
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = "".join(json.dumps(row) + "\n" for row in rows(ROWS, 1 << 20))
    (folder / "commands.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
