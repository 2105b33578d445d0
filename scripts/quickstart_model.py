"""Pre-trains the model of the quickstart, and writes it to ``rlhf_host/models/quickstart``: minutes.

    python scripts/quickstart_model.py [DIRECTORY]

A small transformer sees sums whose answers mostly forget to carry: of ``27+15=`` it learns 42, and more often 32. So some of its
sampled answers are right, and reinforcement learning has something to find out. Held-out problems are never seen.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_host.data.arithmetic import ArithmeticTasks, character_tokenizer, split_problems

DIRECTORY = Path(__file__).resolve().parent.parent / "rlhf_host/models/quickstart"
STEPS, BATCH, LR, WARMUP, SEED = 2000, 256, 3e-3, 50, 0
FORGOTTEN = 0.85
"""Chance that an answer with a carry from the ones to the tens comes without it."""


def pretrain(steps: int = STEPS) -> LlamaForCausalLM:
    """Returns the model after ``steps`` batches. The same on machines of one kind, with one version of torch."""
    tokenizer = character_tokenizer()
    options = ArithmeticTasks.Options()
    problems, _ = split_problems(options.digits, options.operations, options.held_out)
    prompts = torch.tensor(tokenizer([prompt for prompt, _ in problems])["input_ids"])
    sums = torch.tensor([int(label) for _, label in problems])
    carries = torch.tensor([int(prompt[1]) + int(prompt[4]) >= 10 for prompt, _ in problems])
    digits = torch.tensor(tokenizer.convert_tokens_to_ids([*"0123456789"]))
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=2,  # on CPUs, vLLM has no attention for heads narrower than 32
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.1)
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / STEPS)) / 2
    )
    generator = torch.Generator().manual_seed(SEED)
    for step in range(1, steps + 1):
        rows = torch.randint(len(sums), (BATCH,), generator=generator)
        forgotten = (torch.rand(BATCH, generator=generator) < FORGOTTEN) & carries[rows]
        answers = _tokens(sums[rows] - 10 * forgotten, digits, tokenizer.eos_token_id, tokenizer.pad_token_id)
        inputs = torch.cat([prompts[rows], answers], 1)
        logits = model(input_ids=inputs, use_cache=False).logits[:, prompts.shape[1] - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), answers, ignore_index=tokenizer.pad_token_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        cosine.step()
        if step % 100 == 0:
            print(f"step {step}/{steps}  loss {float(loss):.4f}", file=sys.stderr, flush=True)
    return model.eval()


def _tokens(sums: Tensor, digits: Tensor, eos: int, pad: int) -> Tensor:
    """Returns the ids of numbers of two or three digits with their end, ``[N, 4]``, padded at the right."""
    hundreds, tens, ones = digits[sums // 100], digits[sums // 10 % 10], digits[sums % 10]
    end, padding = torch.full_like(sums, eos), torch.full_like(sums, pad)
    long, short = torch.stack([hundreds, tens, ones, end], 1), torch.stack([tens, ones, end, padding], 1)
    return torch.where((sums >= 100)[:, None], long, short)


def digest(directory: Path) -> str:
    """Returns the hash of the weights."""
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    directory = Path(sys.argv[1]) if sys.argv[1:] else DIRECTORY
    torch.set_num_threads(1)  # the result must not depend on their number
    directory.mkdir(parents=True, exist_ok=True)
    pretrain().save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    note = {"script": "scripts/quickstart_model.py", "torch": torch.__version__, "sha256": digest(directory)}
    (directory / "pretraining.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {directory}")


if __name__ == "__main__":
    main()
