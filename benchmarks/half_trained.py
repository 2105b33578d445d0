"""The task of the learning benchmarks: two-digit sums, and a small transformer that was pre-trained until half of its sampled
answers are right. ``directory()`` is the model, built once into ``build/half-trained``; ``half_trained.yaml`` the settings.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_host.data.arithmetic import ArithmeticTasks, character_tokenizer, split_problems
from rlhf_host.directories import new_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SETTINGS = Path(__file__).with_name("half_trained.yaml")
DIRECTORY = Path(__file__).resolve().parent.parent / "build/half-trained"
_CHECK_PROBLEMS = 1024


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of the model. Pre-training stops at ``target``, so that something is left for RL to learn."""

    hidden_size: int = 64
    intermediate_size: int = 256
    layers: int = 3
    heads: int = 2
    """Number of heads. On CPUs, vLLM has no attention for heads narrower than 32."""
    batch_size: int = 128
    lr: float = 4e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    target: float = 0.5
    """Chance of a right answer sampled at temperature 1, over problems of the training split."""
    max_steps: int = 2000
    check_every: int = 5
    seed: int = 0


def directory() -> Path:
    """Returns the model, built by the first call: a minute."""
    if not DIRECTORY.is_dir():
        print("Building the model (once): a minute", flush=True)
        with new_directory(DIRECTORY) as aside:
            pretrain(Recipe())[0].save_pretrained(aside)
            character_tokenizer().save_pretrained(aside)
    return DIRECTORY


def flags() -> list[str]:
    """Returns what chooses model, data and settings on the command line."""
    return ["--config", str(SETTINGS), "--model", str(directory())]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Uses one thread. The model is so small that a second thread mostly waits, and the result must not depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def pretrain(recipe: Recipe) -> tuple[PreTrainedModel, dict[str, float]]:
    """Trains a model on the answers of training-split problems until a sampled answer is right with chance ``target``.

    Deterministic on one kind of machine. On others floating point differs, but training stops at a measured chance instead of a
    step, so results are similar. Held-out problems are never seen. Leaves torch's global generator alone.

    Returns the model and the measurements.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = character_tokenizer()
    options = ArithmeticTasks.Options()
    problems, _ = split_problems(options.digits, options.operations, options.held_out)
    tokens, answers = _encode(problems, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=recipe.hidden_size,
                intermediate_size=recipe.intermediate_size,
                num_hidden_layers=recipe.layers,
                num_attention_heads=recipe.heads,
                num_key_value_heads=recipe.heads,
                max_position_embeddings=64,
                tie_word_embeddings=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
            )
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / recipe.warmup_steps))
    generator = torch.Generator().manual_seed(recipe.seed)
    begun, chance, step = time.monotonic(), 0.0, 0
    for step in range(1, recipe.max_steps + 1):
        rows = torch.randint(len(tokens), (recipe.batch_size,), generator=generator)
        logprobs, mask = _answer_logprobs(model, tokens[rows], answers[rows])
        loss = -logprobs.sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        # Checks cost as much as several steps: rarely while far from the target.
        if step % (recipe.check_every if chance > 0.5 * recipe.target else 5 * recipe.check_every) == 0:
            chance = _chance(model, tokens[-_CHECK_PROBLEMS:], answers[-_CHECK_PROBLEMS:])
            if chance >= recipe.target:
                break
    return model.eval(), {"steps": step, "chance": chance, "seconds": time.monotonic() - begun}


def _encode(problems: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Returns token ids ``[N, L]`` int64 of prompt, answer and end, right-padded, and a mask of answer and end, ``[N, L]``
    bool.
    """
    prompts = tokenizer([prompt for prompt, _ in problems])["input_ids"]
    labels = tokenizer([label for _, label in problems])["input_ids"]
    length = max(len(prompt) + len(label) + 1 for prompt, label in zip(prompts, labels, strict=True))
    tokens = torch.full((len(problems), length), tokenizer.pad_token_id)
    answers = torch.zeros(len(problems), length, dtype=torch.bool)
    for row, (prompt, label) in enumerate(zip(prompts, labels, strict=True)):
        ids = [*prompt, *label, tokenizer.eos_token_id]
        tokens[row, : len(ids)] = torch.tensor(ids)
        answers[row, len(prompt) : len(ids)] = True
    return tokens, answers


def _answer_logprobs(model: PreTrainedModel, tokens: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities ``[N, L - 1]`` of the answer tokens, 0 elsewhere, and their mask. Padding is at the right, so
    causal attention needs no mask.
    """
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    mask = answers[:, 1:]
    logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return logprobs * mask, mask


@torch.no_grad()
def _chance(model: PreTrainedModel, tokens: Tensor, answers: Tensor) -> float:
    """Returns the mean probability of exactly the right answer: pass@1 at temperature 1 without sampling noise."""
    parts = [
        _answer_logprobs(model, tokens[i : i + 512], answers[i : i + 512])[0].sum(-1).exp() for i in range(0, len(tokens), 512)
    ]
    return torch.cat(parts).mean().item()
