"""The embedded default model: a small transformer briefly pre-trained on generated sums, built once and cached."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_host.data.arithmetic import ArithmeticTasks, character_tokenizer, split_problems
from rlhf_host.directories import cache_directory, flush
from rlhf_host.errors import UserError
from rlhf_host.scratch import Scratch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL = "quickstart"
"""Name of the model in settings."""

VERSION = 2
"""Part of the cached directory's name; increases with every change to the built model."""

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


def quickstart_model_dir(progress: bool = True, recipe: Recipe | None = None) -> Path:
    """Returns the model as an ordinary model directory (configuration, safetensors, tokenizer), built by the first call.

    It lies under ``$RLHF_CACHE``, or ``~/.cache/rlhf-host``, for everyone who may read that. The directory appears complete or
    not at all. If two processes build at once, the first to finish wins and both get the same directory. The next build removes
    what killed builds left. ``progress`` shows a bar on standard error. Raises ``UserError`` if the cache cannot be written.
    """
    root = cache_directory()
    final = root / f"quickstart-{VERSION}"
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        scratch = Scratch(f".{final.name}-", root)
    except OSError as error:
        raise UserError(
            f"cannot write the model cache {root}: {error.strerror}; set RLHF_CACHE to a directory that can be written"
        ) from error
    with scratch as aside:
        _build(aside, recipe or Recipe(), progress)
        readers = root.stat().st_mode & 0o055  # mkdtemp and safetensors keep others out, whoever may read the cache
        for path in (*aside.iterdir(), aside):
            path.chmod((0o700 | readers) if path.is_dir() else (0o600 | readers & 0o044))
        try:
            aside.rename(final)
        except OSError:
            if not final.is_dir():  # otherwise another process was first
                raise
    return final


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
def pretrain(
    recipe: Recipe, show: Callable[[int, float], None] = lambda step, chance: None
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Trains a model on the answers of training-split problems until a sampled answer is right with chance ``target``.

    Deterministic on one kind of machine. On others floating point differs, but training stops at a measured chance instead of a
    step, so results are similar. Held-out problems are never seen. Leaves torch's global generator alone.

    ``show(step, chance)`` is called at every check. Returns the model and the measurements.
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
            show(step, chance)
            if chance >= recipe.target:
                break
    return model.eval(), {"steps": step, "chance": chance, "seconds": time.monotonic() - begun}


def _build(directory: Path, recipe: Recipe, progress: bool) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers.utils import logging

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not progress) as bar:
        task = bar.add_task("Building the quickstart model (once)", total=recipe.target, note="")

        def show(step: int, chance: float) -> None:
            bar.update(task, completed=min(chance, recipe.target), note=f"step {step}, {chance:.0%} of sampled answers right")

        model, measured = pretrain(recipe, show)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        if bars:
            logging.enable_progress_bar()
    character_tokenizer().save_pretrained(directory)
    note = json.dumps({"recipe": asdict(recipe), "measured": measured}, indent=2)
    (directory / "pretraining.json").write_text(note + "\n", encoding="utf-8")
    for path in directory.iterdir():
        flush(path)


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
