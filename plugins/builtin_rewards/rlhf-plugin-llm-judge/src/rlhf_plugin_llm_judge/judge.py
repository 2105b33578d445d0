"""The judge: a model behind OpenAI's API, asked once for each text, with its failures, its cache and its costs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_host import RunContext, Unjudged, UserError
from rlhf_plugin_llm_judge.cache import Judgements
from rlhf_plugin_llm_judge.costs import Costs
from rlhf_plugin_llm_judge.options import JudgeOptions
from rlhf_plugin_llm_judge.serving import JudgeServer

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")
NAME = "judge"
"""Name of a model that is served beside the run and has no other."""


class Unreadable(ValueError):
    """What a judge said is no judgement. The text goes on after "the judge". ``again``: it may say something else if asked once
    more.
    """

    def __init__(self, why: str, again: bool = True):
        super().__init__(why)
        self.again = again


class Judge:
    """One judge of one reward.

    Args:
        name: of the reward, for messages and files.
        corrects: asked once more, the judge sees what it said and what was wrong with it.
    """

    def __init__(self, name: str, options: JudgeOptions, *, corrects: bool):
        self.name, self.options, self.corrects = name, options, corrects
        if options.serve is not None and options.base_url is not None:
            raise UserError(f"{name}: serve starts a server, and base_url names another: give one of them")
        if not options.model and options.serve is None:
            raise UserError(
                f"{name}: name the judge with --reward.{name}.model, or serve one beside the run, --reward.{name}.serve"
            )
        self.costs = Costs(options.price_in, options.price_out)
        self._cache = Judgements(options.cache_mb << 20)
        address = options.base_url or (None if options.serve else os.environ.get("OPENAI_BASE_URL"))
        self._who = json.dumps(
            [options.model, address, options.system, options.temperature, options.max_tokens]
            + (
                []
                if options.serve is None
                else [options.serve, options.serve_with, options.serve_flags, _changed(options.serve)]
            )
        )
        self._open: dict[str, asyncio.Task[Any]] = {}
        """Pending judgements, by the hash of what the judge reads."""
        self._server: JudgeServer | None = None
        self._client: AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(options.at_once)

    async def start(self, context: RunContext | None) -> None:
        """Reads what is known, starts the server if there is one of the run's own, and asks it for its models. Raises
        ``UserError`` if it is not reached, or refuses the key.
        """
        import openai

        run_dir = None if context is None else context.run_dir
        folder = run_dir / "judgements" if self.options.cache_dir is None and run_dir else self.options.cache_dir
        if folder is not None and self.options.cache_mb:
            self._cache.open(Path(folder).expanduser() / f"{self.name}-{_hash(self._who)[:8]}.jsonl")
        if self.options.serve is not None and self._server is None:
            self._server = await JudgeServer.shared(self.name, self.options, self.options.model or NAME, run_dir)
        client = self._openai()
        try:
            await client.with_options(max_retries=0, timeout=min(self.options.timeout_s, 10.0)).models.list()
        except (openai.APIConnectionError, openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise UserError(
                f"{self.name}: the judge at {client.base_url} cannot be asked: {_told(error)}; see base_url and key_env"
                f" ({self.options.key_env})"
            ) from error
        except Exception:
            pass  # a server need not have this list; what is no JSON, the client raises as it comes

    async def finish(self) -> None:
        for task in self._open.values():
            task.cancel()
        self._open.clear()
        self._cache.close()
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._server is not None:
            await self._server.leave()
            self._server = None

    async def ask(self, text: str, read: Callable[[str, bool], T], schema: Mapping[str, Any] | None = None) -> T | Unjudged:
        """Returns what ``read`` makes of the judge's words about the text, or why there is no judgement.

        Args:
            read: gets the words, and True if they were cut. Raises ``Unreadable``.
            schema: JSON schema of the answer, for servers that can keep to one.
        """
        digest = _hash(json.dumps([self._who, schema, text]))
        if (known := self._cache.get(digest)) is not None:
            with suppress(Unreadable):  # written by another version
                value = read(*known)
                self.costs.now.cached += 1
                return value
        self._openai()  # forgets what another event loop has left
        if (task := self._open.get(digest)) is None:
            task = self._open[digest] = asyncio.create_task(self._ask_anew(text, digest, read, schema))
        else:
            self.costs.now.cached += 1
        # Of several who wait for the same judgement, one may give up.
        answer: T | Unjudged = await asyncio.shield(task)
        return answer

    async def _ask_anew(
        self, text: str, digest: str, read: Callable[[str, bool], T], schema: Mapping[str, Any] | None
    ) -> T | Unjudged:
        messages = [{"role": "system", "content": self.options.system}] if self.options.system else []
        messages.append({"role": "user", "content": _plain(text)})
        try:
            for _ in range(2):
                said, cut = await self._request(messages, schema)
                try:
                    value = read(said, cut)
                except Unreadable as error:
                    unreadable = error
                    if not error.again:
                        break
                else:
                    self._cache.put(digest, said, cut)
                    return value
                if self.corrects:
                    wrong = f"This cannot be used: the judge{unreadable}. Write the JSON object again, and nothing else."
                    messages = [*messages, {"role": "assistant", "content": _plain(said)}, {"role": "user", "content": wrong}]
            why = str(unreadable)
        except Exception as error:  # a server may answer anything, and the client reads it in many ways
            ended = self._server.ended() if self._server is not None else None
            why = f": {ended or _told(error)}"
        finally:
            self._open.pop(digest, None)
        self.costs.now.failed += 1
        return Unjudged(f"the judge{why}")

    async def _request(self, messages: list[dict[str, str]], schema: Mapping[str, Any] | None) -> tuple[str, bool]:
        """Returns the judge's answer, and True if it was cut. Raises ``ValueError`` for anything that is not an answer in a
        conversation.
        """
        client = self._openai()
        more: dict[str, Any] = {}
        if schema is not None:
            more["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "judgement", "strict": True, "schema": schema},
            }
        async with self._places:
            began = time.monotonic()
            answer = await client.chat.completions.create(
                model=self.options.model or NAME,
                messages=messages,  # type: ignore[arg-type]
                temperature=self.options.temperature,
                max_tokens=self.options.max_tokens,
                **more,
            )
            self.costs.answered(answer, time.monotonic() - began)
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
        if self.options.serve is not None and self._server is None:
            raise RuntimeError(f"{self.name}: the judge's server starts with a run")
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            from openai import AsyncOpenAI

            self._loop, self._places = loop, asyncio.Semaphore(self.options.at_once)
            self._open.clear()
            served = self._server
            self._client = AsyncOpenAI(
                base_url=self.options.base_url if served is None else served.url,
                api_key=(os.environ.get(self.options.key_env) or "none") if served is None else served.key,
                timeout=self.options.timeout_s,
                max_retries=self.options.tries - 1,
            )
        return self._client


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _plain(text: str) -> str:
    return text.encode(errors="replace").decode()


def _changed(model: str) -> int:
    """Returns when a model's file or directory was changed last; 0 for a name."""
    path = Path(model).expanduser()
    files = path.rglob("*") if path.is_dir() else [path]
    return max((file.stat().st_mtime_ns for file in files if file.is_file()), default=0)


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
