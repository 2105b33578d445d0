"""The reward ``llm_judge``."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import regex
from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Outcome, Reward, RunContext, ScoreContext, Task, Trajectory, Unjudged, UserError, hookimpl
from rlhf_plugin_llm_judge.rubric import FIELDS, RUBRIC, conversation, fenced, filled
from rlhf_plugin_llm_judge.verdict import SCORE, number_in

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NO_LABEL = "the rubric has {label}, and the task has none"
KEPT = 100_000
"""Maximum number of judgements that are kept."""


class LLMJudge:
    """A model behind OpenAI's API gives a number by a rubric; it becomes a reward in [0, 1]."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

        model: str = Field("", description="the judge's name for its server")
        base_url: str | None = Field(None, description="its server, ending in /v1; default: $OPENAI_BASE_URL, else OpenAI")
        key_env: str = Field("OPENAI_API_KEY", description="environment variable with the API key; keys stand in no file")
        rubric: str | None = Field(
            None, description="a text file with {prompt} {answer} {label} {low} {high}; default: how right, helpful and clear"
        )
        system: str | None = Field(None, description="the system message")
        pattern: str = Field(
            "score",
            description="where the number is (the last one counts): score, after that word; json, 'score' of the last JSON object"
            " (not of what is in it);"
            " or a regular expression",
        )
        low: float = Field(0.0, description="the worst number: reward 0")
        high: float = Field(10.0, description="the best number: reward 1")
        answer: Literal["last", "all"] = Field("last", description="what is judged: the last turn, or all after the prompt")
        temperature: float = Field(0.0, ge=0, description="of the judge")
        max_tokens: int = Field(512, ge=1, description="longest judgement")
        at_once: int = Field(16, ge=1, description="open requests")
        timeout_s: float = Field(60.0, gt=0, description="deadline for an answer of the server, in seconds")
        tries: int = Field(4, ge=1, description="requests in all, where the server is not reached, busy or failing")

    def __init__(self, options: Options):
        self.options = options
        if not options.model:
            raise UserError("llm_judge: name the judge with --reward.llm_judge.model")
        if options.low >= options.high:
            raise UserError(f"llm_judge: low {options.low:g} is not below high {options.high:g}")
        self.rubric = RUBRIC if options.rubric is None else _read(options.rubric)
        if "{answer}" not in self.rubric:
            raise UserError(f"llm_judge: the rubric {options.rubric} has no {{answer}}; it may have {{{'} {'.join(FIELDS)}}}")
        try:
            written = SCORE if options.pattern == "score" else options.pattern
            self.pattern = None if options.pattern == "json" else regex.compile(written)
        except regex.error as error:
            raise UserError(f"llm_judge: pattern is no regular expression: {error}") from error
        self._known: OrderedDict[str, Reward] = OrderedDict()
        self._open: dict[str, asyncio.Task[Reward | Unjudged]] = {}
        """Pending judgements, by the text that the judge reads."""
        self._client: AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(options.at_once)

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        """Asks the server for its models. Raises ``UserError`` if the server is not reached, or refuses the key."""
        import openai

        client = self._openai()
        try:
            await client.with_options(max_retries=0, timeout=min(self.options.timeout_s, 10.0)).models.list()
        except (openai.APIConnectionError, openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise UserError(
                f"llm_judge: the judge at {client.base_url} cannot be asked: {_told(error)}; see base_url and key_env"
                f" ({self.options.key_env})"
            ) from error
        except Exception:
            pass  # a server need not have this list; what is no JSON, the client raises as it comes

    @hookimpl
    async def run_finished(self, outcome: Outcome) -> None:
        for task in self._open.values():
            task.cancel()
        self._open.clear()
        if self._client is not None:
            await self._client.close()
            self._client = None

    @hookimpl
    def check_labels(self, tasks: Sequence[Task]) -> dict[int, str]:
        return {place: NO_LABEL for place, task in enumerate(tasks) if self._lacks_label(task)}

    @hookimpl
    async def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> list[Reward | Unjudged]:
        return list(await asyncio.gather(*map(self._judge, trajectories)))

    async def _judge(self, trajectory: Trajectory) -> Reward | Unjudged:
        if self._lacks_label(trajectory.task):
            return Unjudged(NO_LABEL)
        text = self.asked(trajectory)
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        if (known := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
            return known
        self._openai()  # forgets what another event loop has left
        if (task := self._open.get(digest)) is None:
            task = self._open[digest] = asyncio.create_task(self._judge_anew(text, digest))
        # Of several who wait for the same judgement, one may give up.
        return await asyncio.shield(task)

    def _lacks_label(self, task: Task) -> bool:
        return "{label}" in self.rubric and self.options.rubric is not None and task.ground_truth is None

    async def _judge_anew(self, text: str, digest: str) -> Reward | Unjudged:
        try:
            for _ in range(2):
                said, cut = await self._ask(text)
                if (number := number_in(said, self.pattern, cut=cut)) is not None:
                    break
            else:
                why = "'s answer was cut by max_tokens, before a number" if cut else " said no number"
                return Unjudged(f"the judge{why}: {said[-200:]!r}")
        except Exception as error:  # a server may answer anything, and the client reads it in many ways
            return Unjudged(f"the judge: {_told(error)}")
        finally:
            self._open.pop(digest, None)
        low, high = self.options.low, self.options.high
        if not low <= number <= high:
            return Unjudged(f"the judge said {number:g}, which is not from {low:g} to {high:g}")
        value = (number - low) / (high - low)
        reward = self._known[digest] = Reward(value, score=value, metrics={"llm_judge/raw": number})
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return reward

    def asked(self, trajectory: Trajectory) -> str:
        """Returns the text that the judge reads."""
        answer = trajectory.last_text if self.options.answer == "last" else trajectory.full_text
        label = trajectory.task.ground_truth
        return filled(
            self.rubric,
            {
                "prompt": conversation(trajectory),
                "answer": fenced(answer),
                "label": "(none)" if label is None else str(label),
                "low": f"{self.options.low:g}",
                "high": f"{self.options.high:g}",
            },
        )

    async def _ask(self, text: str) -> tuple[str, bool]:
        """Returns the judge's answer, and True if it was cut. Raises ``ValueError`` for anything that is not an answer in a
        conversation.
        """
        messages = [{"role": "system", "content": self.options.system}] if self.options.system else []
        messages.append({"role": "user", "content": text.encode(errors="replace").decode()})
        client = self._openai()
        async with self._places:
            answer = await client.chat.completions.create(
                model=self.options.model,
                messages=messages,  # type: ignore[arg-type]
                temperature=self.options.temperature,
                max_tokens=self.options.max_tokens,
            )
        try:
            choice = answer.choices[0]
            said, cut = choice.message.content, choice.finish_reason == "length"
        except (AttributeError, IndexError, TypeError) as error:
            raise ValueError(f"no answer of a chat: {str(answer)[:200]}") from error
        if not isinstance(said, str | None):
            raise ValueError(f"no text: {str(said)[:200]}")
        return said or "", cut

    def _openai(self) -> AsyncOpenAI:
        """Returns a client of this event loop: a plugin may outlive a loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            from openai import AsyncOpenAI

            self._loop, self._places = loop, asyncio.Semaphore(self.options.at_once)
            self._open.clear()
            self._client = AsyncOpenAI(
                base_url=self.options.base_url,
                api_key=os.environ.get(self.options.key_env) or "none",
                timeout=self.options.timeout_s,
                max_retries=self.options.tries - 1,
            )
        return self._client


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no text in UTF-8"
        raise UserError(f"llm_judge: the rubric {path}: {why}") from error


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
