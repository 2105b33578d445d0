"""Generated sums for the quickstart (``--data arithmetic``), and a tokenizer of single characters."""

from __future__ import annotations

import random
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host.errors import UserError
from rlhf_host.hookspecs import hookimpl
from rlhf_host.records.episodes import Task

_SPLIT_SEED = 20240229
"""Fixed, so that no run ever trains on a problem that another run holds out."""


class ArithmeticTasks:
    """Generated sums, such as ``37+48=`` with the label ``85``. The two splits share no problem, whatever the seed."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        digits: int = Field(2, ge=1, le=3, description="digits of each number")
        operations: Literal["+", "-", "+-"] = Field("+", description="which operations the problems have")
        held_out: int = Field(1500, ge=1, description="number of problems held out for evaluation")
        count: int | None = Field(None, ge=1, description="use at most this many problems of the split; default: all")

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> list[Task]:
        problems = split_problems(self.options.digits, self.options.operations, self.options.held_out)[split == "eval"]
        return [Task(prompt, label) for prompt, label in problems[: self.options.count]]


def split_problems(digits: int, operations: str, held_out: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns ``(prompt, label)`` pairs for training and held-out pairs, disjoint, each in a shuffled order that is always the
    same.

    Raises ``UserError`` if fewer problems are left for training than are held out.
    """
    numbers = range(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    problems = [
        (f"{a}{sign}{b}=", str(a + b if sign == "+" else a - b)) for a in numbers for b in numbers for sign in operations
    ]
    if len(problems) < 2 * held_out:
        raise UserError(f"arithmetic: of {len(problems)} problems at most {len(problems) // 2} can be held out, not {held_out}")
    random.Random(_SPLIT_SEED).shuffle(problems)
    return problems[held_out:], problems[:held_out]


def character_tokenizer() -> Any:
    """Returns a ``PreTrainedTokenizerFast`` with one token per character, ``<pad>``, ``<eos>``, and no chat template."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = ["<pad>", "<eos>", *"0123456789+-*= "]
    inner = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(characters)}, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")
