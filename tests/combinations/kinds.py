"""Values of the matrix: what is installed, kinds of data, schedules, and the options of plugins that its cases change."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from rlhf_host import EpisodeFailed, Reward, Step, hookimpl
from rlhf_host.plugins.discovery import PluginInfo, discover
from rlhf_host.plugins.options import options_model
from rlhf_host.plugins.selection import load

from ..chat_models import save_chat_model

PLAIN = ""
"""The value of a dimension that changes nothing."""


@cache
def installed(kind: str) -> tuple[PluginInfo, ...]:
    return tuple(info for info in discover() if info.kind == kind and info.status == "ok")


def names(kind: str) -> tuple[str, ...]:
    return tuple(info.name for info in installed(kind))


def named(kind: str, name: str) -> PluginInfo:
    return next(info for info in installed(kind) if info.name == name)


# --- options ------------------------------------------------------------------------------------


@cache
def fields(kind: str, name: str) -> Mapping[str, FieldInfo]:
    return options_model(load(named(kind, name)), kind).model_fields


def required(kind: str, name: str, texts: Path) -> dict[str, Any]:
    """Values for options without a default: numbers, and files of texts."""
    values = {float: 0.1, int: 1, str: str(texts)}
    return {key: values[_type(field)] for key, field in fields(kind, name).items() if field.is_required()}


@cache
def changes(kind: str, name: str, *, words: bool = False) -> tuple[tuple[str, Any], ...]:
    """Options with another value than the default: every other word, switches turned, and numbers where there was none.

    Args:
        words: only those that are one of several words.
    """
    return tuple((key, value) for key, field in fields(kind, name).items() for value in _others(field, words))


def _others(field: FieldInfo, words: bool) -> Iterator[Any]:
    if typing.get_origin(field.annotation) is typing.Literal:
        yield from (word for word in typing.get_args(field.annotation) if word != field.default)
    elif words or field.is_required():
        return
    elif isinstance(field.default, bool):
        yield not field.default
    elif field.default in (0, None) and _type(field) in (int, float):
        yield {int: 1, float: 0.5}[_type(field)]


def _type(field: FieldInfo) -> Any:
    annotation: Any = field.annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(each for each in typing.get_args(annotation) if each is not type(None))
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


# --- rewards and agents -------------------------------------------------------------------------


class Parity:
    """A reward that differs within most groups."""

    @hookimpl
    def score(self, trajectories):
        sums = [sum(map(sum, (segment.token_ids for segment in row.actions))) for row in trajectories]
        return [Reward(total % 7 / 6, score=float(total % 2), feedback="odd" if total % 2 else None) for total in sums]


class Picky(Parity):
    """Cannot judge one answer of each group."""

    @hookimpl
    def score(self, trajectories):
        judged = Parity.score(self, trajectories)
        return [None if row.sample == 0 else reward for row, reward in zip(trajectories, judged, strict=True)]


class TwoTurns:
    """Asks again, so a row has tokens that nobody sampled between two answers."""

    @hookimpl
    def agent_reset(self, episode):
        return Step()

    @hookimpl
    def agent_step(self, episode):
        return Step(observation=[{"role": "user", "content": "and?"}], done=episode.turn > 1)


class Failing(TwoTurns):
    """Cannot finish every second episode."""

    @hookimpl
    def agent_step(self, episode):
        if episode.sample % 2:
            raise EpisodeFailed("the environment is gone")
        return Step(done=True)


class Branches:
    """Two answers to one prompt in an episode, each a row."""

    @hookimpl
    async def agent_run(self, episode, policy):
        prompt = list(episode.task.prompt_ids)
        await policy.generate(prompt)
        await policy.generate(prompt)
        return policy.trajectories()


# --- data ---------------------------------------------------------------------------------------

WORDS = ("abc", "de", "fghi", "j")


def _rows(make: typing.Callable[[str, str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    return [make(f"{n}+{n}=", WORDS[n % 4], WORDS[(n + 1) % 4] * 2) for n in range(8)]


def _turns(question: str, answer: str, other: str) -> list[dict[str, str]]:
    texts = question, answer, "and?", other
    return [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(texts)]


TASKS = _rows(lambda question, answer, _: {"prompt": question, "label": answer})

DATA: dict[str, dict[str, Any]] = {
    "tasks": {"data": TASKS},
    "some unjudged": {"data": TASKS, "rewards": Picky},
    "two turns": {"data": TASKS, "agent": TwoTurns},
    "two rows": {"data": TASKS, "agent": Branches},
    "some failed": {"data": TASKS, "agent": Failing},
    "saved": {"saved": True},
    "saved, unknown samplers": {"saved": False},
    "prompt_completion": {"data": _rows(lambda q, a, _: {"prompt": q, "completion": a})},
    "messages": {"data": _rows(lambda q, a, b: {"messages": _turns(q, a, b)})},
    "tokens": {"data": _rows(lambda q, a, _: {"prompt_ids": [4, 5 + len(a)], "completion_ids": [6, 7, 2]})},
    "generated": {"data": _rows(lambda q, a, b: {"prompt": q, "completion": a, "reward": len(b) / 8})},
    "preference": {"data": _rows(lambda q, a, b: {"prompt": q, "chosen": a, "rejected": b})},
    "triple": {"data": _rows(lambda q, a, b: {"prompt": q, "chosen": a, "rejected": b, "reference": a + b})},
    "rated": {"data": _rows(lambda q, a, b: {"prompt": q, "completion": a, "reward": len(b) / 8})},
    "unpaired": {"data": _rows(lambda q, a, b: {"prompt": q, "completion": a, "label": len(a) > 2})},
    "stepwise": {"data": _rows(lambda q, a, b: {"prompt": q, "completions": [a, b], "labels": [True, len(a) > 2]})},
}
"""Kind of data → arguments of ``train``. ``saved``: sampled rows of a file, whose samplers are all known or not."""

SCHEDULES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "linear": {"role": {"schedule": "linear"}},
    "warm-up": {"role": {"schedule": "cosine", "warmup_steps": 1, "min_lr_ratio": 0.1}},
    "two epochs": {"role": {"schedule": "linear"}, "train": {"epochs": 2}},
    "two minibatches": {"role": {"schedule": "cosine"}, "train": {"minibatches": 2}},
    "recompute": {"role": {"schedule": "linear"}, "train": {"old_logprobs": "recompute"}},
    "sampler": {"role": {"schedule": "linear"}, "train": {"old_logprobs": "sampler", "epochs": 2}},
    "ahead": {"role": {"schedule": "linear"}, "async_depth": 1},
    "ahead, overtaking": {"async_depth": 1, "pipeline": {"max_staleness": 2}},
}
"""Schedule → settings; those of ``role`` are for every trained role."""


@dataclass(frozen=True)
class Files:
    """What all runs share on disk."""

    folder: Path
    model: Path
    texts: Path

    @classmethod
    def make(cls, folder: Path) -> Files:
        model = save_chat_model(folder / "tiny", context=512)
        texts = folder / "texts.jsonl"
        texts.write_text("".join(json.dumps(row) + "\n" for row in DATA["prompt_completion"]["data"]))
        return cls(folder, model, texts)

    def saved(self, temperature: float, *, known: bool) -> Path:
        return self.folder / f"saved-{temperature:g}-{known}.jsonl"
