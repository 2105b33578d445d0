"""The reward ``format``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import regex
from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlhf_host import Reward, ScoreContext, Trajectory, Unjudged, UserError, hookimpl

PATTERN_S = 1.0
"""Maximum seconds of a search for the pattern in one answer: some patterns take for ever on some texts."""


class Format:
    """A regular expression, XML tags and a length, each of them optional."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        pattern: str | None = Field(None, description="a regular expression of the whole answer; '.' is a line break too")
        tags: list[str] = Field([], description="XML tags of which the answer consists, each once, in this order")
        between: bool = Field(False, description="other text may stand before, between and after the tags")
        min_tokens: int | None = Field(None, ge=0, description="fewest tokens")
        max_tokens: int | None = Field(None, ge=1, description="most tokens")
        turns: Literal["last", "all"] = Field("last", description="of episodes of several turns: the last answer, or each")
        partial: bool = Field(False, description="the share of what was asked for that is met, instead of all or nothing")

        @field_validator("tags", mode="before")
        @classmethod
        def _several(cls, value: Any) -> Any:
            return value.split(",") if isinstance(value, str) else value

    def __init__(self, options: Options):
        self.options = options
        asked = (options.pattern, options.tags or None, options.min_tokens, options.max_tokens)
        if all(one is None for one in asked):
            raise UserError("format asks for nothing: give pattern, tags, min_tokens or max_tokens")
        if options.min_tokens is not None and options.max_tokens is not None and options.min_tokens > options.max_tokens:
            raise UserError(f"format: min_tokens {options.min_tokens} is more than max_tokens {options.max_tokens}")
        if wrong := [tag for tag in options.tags if not re.fullmatch(r"[A-Za-z_][\w.:-]*", tag)]:
            raise UserError(f"format: {wrong[0]!r} is no name of a tag; write them as think,answer")
        if len(set(options.tags)) < len(options.tags):
            raise UserError("format: a tag stands twice in tags")
        try:
            self.pattern = None if options.pattern is None else regex.compile(options.pattern, regex.DOTALL)
        except regex.error as error:
            raise UserError(f"format: pattern is no regular expression: {error}") from error

    @hookimpl
    def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> list[Reward | Unjudged]:
        return [self._judge(trajectory) for trajectory in trajectories]

    def _judge(self, trajectory: Trajectory) -> Reward | Unjudged:
        actions = trajectory.actions if self.options.turns == "all" else trajectory.actions[-1:]
        texts = [trajectory._text(action.token_ids) for action in actions] or [""]
        met: dict[str, bool] = {}
        if self.pattern is not None:
            try:
                met["pattern"] = all(self.pattern.fullmatch(text.strip(), timeout=PATTERN_S) is not None for text in texts)
            except TimeoutError:
                return Unjudged(f"the pattern took more than {PATTERN_S:g} s on this answer: make it simpler")
        if self.options.tags:
            first = f"<{self.options.tags[0]}>"
            opened = [before.rstrip().endswith(first) for before in _before_actions(trajectory)][-len(texts) :]
            whole = [first + text if inside else text for text, inside in zip(texts, opened or [False], strict=True)]
            met["tags"] = all(map(self.has_tags, whole))
        lengths = [len(action.token_ids) for action in actions] or [0]
        if self.options.min_tokens is not None or self.options.max_tokens is not None:
            least, most = self.options.min_tokens or 0, self.options.max_tokens or max(lengths)
            met["length"] = all(least <= length <= most for length in lengths)
        share = sum(met.values()) / len(met)
        value = share if self.options.partial else float(share == 1.0)
        # No score: the form is no success, and pass@k would count it as one.
        return Reward(value, metrics={f"format/{name}": float(holds) for name, holds in met.items()})

    def has_tags(self, text: str) -> bool:
        """Returns True if each tag occurs once, with some content, and only white space is elsewhere, unless other text is
        allowed.
        """
        end = 0
        for tag in self.options.tags:
            begin, close = f"<{tag}>", f"</{tag}>"
            if text.count(begin) != 1 or text.count(close) != 1:
                return False
            start = text.index(begin)
            if start < end or not (self.options.between or not text[end:start].strip()):
                return False
            end = text.index(close)
            if end < start or not text[start + len(begin) : end].strip():
                return False
            end += len(close)
        return self.options.between or not text[end:].strip()


def _before_actions(trajectory: Trajectory) -> list[str]:
    """Returns the text before each action: the template's own text, which opens the first tag for reasoning models."""
    before: list[str] = []
    tokens: list[int] = []
    for segment in trajectory.segments:
        if segment.kind == "action":
            before.append(trajectory._text(tokens))
            tokens = []
        else:
            tokens += segment.token_ids
    return before
