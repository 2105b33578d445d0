"""Trajectories as lines of a file: written whole, read back step by step with their scores."""

from __future__ import annotations

import math
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf_host.config.run_dir import CONFIG, named_run, near_runs
from rlhf_host.config.schema import RunConfig
from rlhf_host.config.yaml_file import plain, read_yaml
from rlhf_host.data.rows import LINES, file_format, read_path
from rlhf_host.directories import write_file
from rlhf_host.errors import UserError, near_matches
from rlhf_host.protocols.data import Split
from rlhf_host.records.episodes import Reward, Segment, Task, Trajectory
from rlhf_host.records.generations import SUPPORT
from rlhf_host.records.pictures import is_list, is_picture, pictures_in
from rlhf_host.records.token_sets import check_support
from rlhf_host.rollouts.scoring import AGENT
from rlhf_host.training.picture_files import PictureFiles
from rlhf_host.training.records import json_line, provenance, record

SAME = ("episode_id", "group_id", "finish_reason", "sample", "role", "final", "agent_rewards", "reward", "score", "events")
"""Fields of a trajectory that a line has under the same names."""
WITH_TOKENS = "write token ids too: rlhf rollout does, and rlhf train with --trajectories.tokens"


@dataclass(slots=True)
class SavedStep:
    """Trajectories of one step and split, in file order, including unjudged ones."""

    step: int
    split: Split
    rows: list[Trajectory]
    weights: dict[str, float]
    """Reward alias → weight, if the file has them."""
    sampling: dict[str, int | float] = field(default_factory=dict)
    """Sampling settings, if the file has them."""
    where: str = ""
    """Place of the first row, for messages."""
    tokens: bool = True
    """True if the token ids are from the file, and not stand-ins."""
    joined: bool = False
    """True if several turns without tokens became one text."""

    @property
    def origin(self) -> dict[str, Any]:
        """Origin of the rows, as ``lines`` writes it."""
        return {"sampling": self.sampling, "weights": self.weights}

    @classmethod
    def of(cls, config: RunConfig, step: int, split: Split, rows: Sequence[Trajectory]) -> SavedStep:
        """Returns rows that were sampled and scored as ``config`` says."""
        return cls(step, split, list(rows), **provenance(config.model_dump(mode="json"), split))

    def require_tokens(self, why: str) -> None:
        """Raises ``UserError`` if the file has only texts."""
        if not self.tokens:
            raise UserError(f"{self.where}: {why}: {WITH_TOKENS}")


def lines(step: int, split: Split, rows: Iterable[Trajectory], origin: Mapping[str, Any], directory: Path) -> bytes:
    """Returns the rows as JSON lines that ``read_steps`` reads, and writes their pictures.

    Args:
        origin: ``sampling`` and ``weights``, as from ``records.provenance``.
        directory: where the lines will be.
    """
    named = PictureFiles(directory).named
    return b"".join(json_line({"step": step, "split": split, **record(row, tokens=True), **origin}, named) for row in rows)


def write_lines(path: Path, parts: Iterable[bytes]) -> None:
    """Writes the lines completely or not at all; creates missing directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, b"".join(parts))


class TrajectoryFile:
    """A new file of trajectories, which is written whole.

    Raises:
        UserError: the file exists already, or its name would prevent reading it back.
    """

    def __init__(self, path: Path):
        if path.suffix.lower() not in LINES:
            raise UserError(f"--output {path}: trajectories are JSON lines: give it a name that ends in .jsonl")
        if path.exists():
            raise UserError(f"--output {path}: this file already exists: choose another name, or remove it")
        self.path = path
        self._parts: list[bytes] = []

    def add(self, step: SavedStep) -> None:
        self._parts.append(lines(step.step, step.split, step.rows, step.origin, self.path.parent))

    def write(self) -> None:
        """Writes what was added; creates missing directories."""
        write_lines(self.path, self._parts)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _Image(_Strict):
    file: str
    width: int
    height: int


class _Segment(_Strict):
    kind: Literal["prompt", "action", "observation"]
    token_ids: list[int]
    logprobs: list[float] | None = None
    versions: list[int] | None = None
    text: str | None = None
    images: list[_Image] = []


class _Verdict(_Strict):
    value: float | None = None
    turns: list[float] | None = None
    tokens: list[float] | None = None
    score: float | None = None
    metrics: dict[str, float | None] = {}
    parts: dict[str, float] = {}
    feedback: str | None = None


class _Tree(_Strict):
    row: int = 0
    parent: int | None = None
    branch: int = 0


class _Task(_Strict):
    prompt: str | list[dict[str, Any]] = ""
    metadata: dict[str, Any] = {}
    agent: str | None = None
    prompt_ids: list[int] | None = None


class _Row(_Strict):
    step: int
    split: Literal["train", "eval"] = "train"
    episode_id: str
    group_id: str
    segments: list[_Segment]
    source: str = ""
    task: int = 0
    sample: int = 0
    prompt: str = ""
    text: str = ""
    full_text: str | None = None
    label: Any = None
    reward: float | None
    rewards: dict[str, float | None] = {}
    verdicts: dict[str, _Verdict | None] | None = None
    agent_rewards: list[float | None] = []
    score: float | None = None
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    role: str = ""
    final: bool = True
    metrics: dict[str, float | None] = {}
    advantage: float | None = None
    unjudged: str | None = None
    images: list[_Image] = []
    events: list[dict[str, Any]] = []
    row: _Task | None = None
    tree: _Tree = _Tree()
    columns: dict[str, float | None] = {}
    traces: dict[str, list[Any]] = {}
    weights: dict[str, float] = {}
    sampling: dict[str, int | float] = {}


def read_steps(path: Path, *, texts: bool = False, joined: bool = False) -> list[SavedStep]:
    """Reads the steps of a file, or of the files of a run's ``trajectories/``, in order. Numbers that were not finite are NaN.

    Texts are read from the file, so whole segments need no tokenizer.

    Args:
        texts: texts are enough; tokens that are not in the file become as many stand-ins.
        joined: with ``texts``, several turns without tokens become one, with their whole text.

    Raises:
        UserError: a line is not a trajectory, or a picture is not as it was written; names file and line.
    """
    steps: dict[tuple[int, str], SavedStep] = {}
    owners: dict[str, tuple[int, str]] = {}
    last: tuple[int, str] | None = None
    for file in _files(path):
        rows, pictures = read_path(file, None, None, ()), PictureFiles(file.parent)
        for index, values in enumerate(rows.rows):
            where = rows.where(index)
            tokens = "segments" in values or not texts
            one = not tokens and joined and values.get("full_text") is not None
            row = _parse(values if tokens else _with_stand_ins(_as_one_turn(values) if one else values, where), where)
            key = (row.step, row.split)
            if key != last and key in steps:
                raise UserError(f"{where}: step {row.step} continues after another step began: sort the file by step")
            if owners.setdefault(row.group_id, key) != key:
                then, _ = owners[row.group_id]
                raise UserError(f"{where}: the group {row.group_id!r} is in step {row.step} and in step {then}")
            step = steps.setdefault(key, SavedStep(*key, [], row.weights, row.sampling, where))
            step.tokens, step.joined = step.tokens and tokens, step.joined or one
            step.rows.append(_trajectory(row, where, pictures))
            last = key
    if not steps:
        raise UserError(f"{path} holds no trajectories")
    return list(steps.values())


def _files(path: Path) -> list[Path]:
    path = named_run(path)
    if path.is_dir():
        for folder in (path, path / "trajectories"):
            if files := sorted(folder.glob("train-step-*.jsonl")):
                return files
        evaluated = sorted([*path.glob("eval-step-*.jsonl"), *path.glob("trajectories/eval-step-*.jsonl")])
        more = (
            f"; of evaluations there is {evaluated[-1]}, and training writes every --trajectories.every steps{_every(path)}"
            if evaluated
            else ""
        )
        none = f"{path} has no trajectories/train-step-*.jsonl"
        raise UserError(f"{none}: give a file, a run directory or its trajectories/{more}")
    if not path.exists():
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        known = [*near_runs(path), *(str(path.parent / each.name) for each in beside if not each.name.startswith("."))]
        raise UserError(f"{path}: no such file or directory{near_matches(str(path), dict.fromkeys(known))}")
    if file_format(path) not in LINES:
        raise UserError(f"{path}: trajectories are JSON lines: .jsonl")
    return [path]


def _every(run: Path) -> str:
    """Returns how often the run writes, if its settings say it."""
    settings: Any = plain(read_yaml(run / CONFIG)) if (run / CONFIG).is_file() else None
    try:
        every = int(settings["trajectories"]["every"])
    except (TypeError, KeyError, ValueError):
        return ""
    return f", here {every}, first of step {every}" if every > 1 else ", here none" if every == 0 else ""


def _parse(values: Mapping[str, Any], where: str) -> _Row:
    if "segments" not in values:
        if "episode_id" in values and "text" in values:
            again = "without them it can only be scored again: rlhf replay --reward NAME"
            raise UserError(f"{where}: a trajectory without its tokens: {WITH_TOKENS}; {again}")
        raise UserError(f"{where}: not a trajectory; it has {', '.join(values) or 'no keys'}")
    try:
        row = _Row.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{where}: {place}: {first['msg'].removeprefix('Input ')}") from error
    if problem := _inconsistency(row):
        raise UserError(f"{where}: {problem}")
    return row


def _as_one_turn(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row whose text is that of all its turns; what is counted by turn is left out."""
    left_out = ("full_text", "verdicts", "agent_rewards")
    return {name: value for name, value in values.items() if name not in left_out} | {"text": values["full_text"]}


def _with_stand_ins(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns a row of texts with segments that decode to them. Their log-probabilities are NaN, so that nothing can use them
    by mistake.
    """
    length = values.get("length")
    if not isinstance(length, int) or not 0 <= length < 1 << 24 or "text" not in values:
        return values
    if "full_text" in values:
        raise UserError(f"{where}: several turns without their tokens: {WITH_TOKENS}")
    action = {"kind": "action", "token_ids": [1] * length, "logprobs": [math.nan] * length, "versions": [0] * length}
    of_agent = (values.get("rewards") or {}).get(AGENT)
    agent_rewards = [] if of_agent is None else [of_agent]
    prompt = {"kind": "prompt", "token_ids": [0], "images": values.get("images", [])}
    return {**values, "segments": [prompt, action], "agent_rewards": agent_rewards}


def _inconsistency(row: _Row) -> str:
    """Returns what makes the row unusable, or an empty string."""
    kinds = [segment.kind for segment in row.segments]
    if kinds[:1] != ["prompt"] or "prompt" in kinds[1:]:
        return "segments: a trajectory begins with its prompt, and has one"
    if any(token < 0 for segment in row.segments for token in segment.token_ids):
        return "segments: a token id is negative"
    if row.images != (placed := [image for segment in row.segments for image in segment.images]):
        return f"images: {len(row.images)} pictures, and its segments have {len(placed)}, or others"
    actions = [(number, segment) for number, segment in enumerate(row.segments) if segment.kind == "action"]
    for number, segment in actions:
        count = len(segment.token_ids)
        for name, values in (("logprobs", segment.logprobs), ("versions", segment.versions)):
            if values is None or len(values) != count:
                return f"segments.{number}: {count} tokens were sampled, and it has {len(values or ())} {name}"
        if any(not 0 <= version < 1 << 31 for version in segment.versions or ()):
            return f"segments.{number}: versions of weights are numbers from 0 on, of 31 bits"
    if row.reward is not None and not math.isfinite(row.reward):
        return "reward: not a finite number"
    sampled = sum(len(segment.token_ids) for _, segment in actions)
    for name, verdict in (row.verdicts or {}).items():
        if verdict and verdict.turns is not None and len(verdict.turns) != len(actions):
            return f"verdicts.{name}: {len(verdict.turns)} rewards for {len(actions)} turns"
        if verdict and verdict.tokens is not None and len(verdict.tokens) != sampled:
            return f"verdicts.{name}: {len(verdict.tokens)} rewards for {sampled} sampled tokens"
    return ""


def _trajectory(row: _Row, where: str, pictures: PictureFiles) -> Trajectory:
    saved = row.row or _Task(prompt=row.prompt)
    ids = row.segments[0].token_ids if saved.prompt_ids is None else saved.prompt_ids
    try:
        images = [tuple(pictures.find(**image.model_dump()) for image in segment.images) for segment in row.segments]
        prompt = _with_pictures(saved.prompt, pictures)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    of_task = pictures_in(prompt) if row.row else images[0]
    task = Task(prompt, row.label, saved.metadata, saved.agent, row.task, row.source, tuple(ids), images=of_task)
    verdicts = row.verdicts
    if verdicts is None:
        verdicts = {name: None if value is None else _Verdict(value=value) for name, value in row.rewards.items()}
    if not verdicts and row.reward is not None:
        verdicts = {"reward": _Verdict(value=row.reward)}
    try:
        rewards = {name: None if verdict is None else _reward(verdict) for name, verdict in verdicts.items()}
        traces = {name: _trace(name, *own) for name, own in row.traces.items()}
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: verdicts or traces: {error}") from error
    return Trajectory(
        task=task,
        segments=[
            Segment(s.kind, s.token_ids, s.logprobs, s.versions, images=own)
            for s, own in zip(row.segments, images, strict=True)
        ],
        rewards=rewards,
        metrics=_numbers(row.metrics),
        advantage=row.advantage,
        unjudged_reason=row.unjudged,
        decode=_reader(row, where),
        columns=_numbers(row.columns),
        traces=traces,
        **{name: getattr(row, name) for name in SAME},
        **row.tree.model_dump(),
    )


def _trace(name: str, kind: str, size: Sequence[int], own: str | list[str]) -> np.ndarray:
    if isinstance(own, str):
        if not re.fullmatch(r"[<>|][biufSU]\d+", kind):
            raise ValueError(f"{name} has values of the type {kind!r}")
        found = np.frombuffer(b64decode(own, validate=True), kind).reshape(size)
    else:
        found = np.array([b64decode(one, validate=True) for one in own], dtype=object).reshape(size)
    if name == SUPPORT:
        check_support(found)
    return found


def _with_pictures(prompt: Any, pictures: PictureFiles) -> Any:
    """Returns a prompt whose parts have their pictures again."""

    def part(value: Any) -> Any:
        if not is_picture(value):
            return value
        try:
            image = _Image.model_validate(value.get("image"))
        except ValidationError as error:
            raise UserError("row.prompt: a picture without its file, width and height") from error
        return {**value, "image": pictures.find(**image.model_dump())}

    def message(value: Any) -> Any:
        content = value.get("content") if isinstance(value, dict) else None
        return {**value, "content": list(map(part, content))} if is_list(content) else value

    return list(map(message, prompt)) if is_list(prompt) else prompt


def _reward(verdict: _Verdict) -> Reward:
    return Reward(**{**verdict.model_dump(), "metrics": _numbers(verdict.metrics)})


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in values.items()}


def _reader(row: _Row, where: str) -> Callable[[Sequence[int]], str]:
    """Returns a decoder that looks up the texts of the file."""
    completion = row.segments[1:]
    texts = {tuple(row.segments[0].token_ids): row.prompt}
    if len(completion) == 1:
        texts[tuple(completion[0].token_ids)] = row.text
    elif row.full_text is not None:
        texts[tuple(token for segment in completion for token in segment.token_ids)] = row.full_text
    texts |= {tuple(segment.token_ids): segment.text for segment in completion if segment.text is not None}
    texts[()] = ""

    def decode(token_ids: Sequence[int]) -> str:
        try:
            return texts[tuple(token_ids)]
        except KeyError:
            raise UserError(
                f"{where}: the file has no text for {len(token_ids)} tokens that were asked for: "
                "give the model that they come from, --actor.model PATH, for its tokenizer"
            ) from None

    return decode


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=True)
