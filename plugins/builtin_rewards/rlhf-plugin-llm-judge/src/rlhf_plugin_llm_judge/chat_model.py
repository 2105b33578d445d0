"""A model behind OpenAI's API: where it is, how it is asked, what is known of it, and what it costs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_host import RunContext, UserError
from rlhf_plugin_llm_judge.cache import KnownAnswers
from rlhf_plugin_llm_judge.costs import Costs
from rlhf_plugin_llm_judge.options import ChatOptions
from rlhf_plugin_llm_judge.serving import ModelServer

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class ChatModel:
    """A model of a plugin, with its failures, its answers that are known and its costs.

    Args:
        name: of the plugin, for messages and files.
        flags: the beginning of its flags: ``--reward.NAME``.
        who: what the model is in messages, such as ``judge``; one that is served beside the run and has no other name is called so.
        folder: of what it said, in the run's directory.
        otherwise: what else there is than a server, for the message about none.
    """

    def __init__(self, name: str, options: ChatOptions, *, flags: str, who: str, folder: str, otherwise: str = ""):
        self.name, self.options, self.who, self.folder = name, options, who, folder
        if options.serve is not None and options.base_url is not None:
            raise UserError(f"{name}: serve starts a server, and base_url names another: give one of them")
        if not options.model and options.serve is None:
            raise UserError(f"{name}: name the {who} with {flags}.model, or serve one beside the run, {flags}.serve{otherwise}")
        self.costs = Costs(options.price_in, options.price_out, who)
        self.known = KnownAnswers(options.cache_mb << 20)
        address = options.base_url or (None if options.serve else os.environ.get("OPENAI_BASE_URL"))
        self._identity = json.dumps(
            [options.model, address, options.system, options.temperature, options.max_tokens]
            + (
                []
                if options.serve is None
                else [options.serve, options.serve_with, options.serve_flags, _changed(options.serve)]
            )
        )
        self._server: ModelServer | None = None
        self._client: AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(options.at_once)

    async def start(self, context: RunContext | None) -> None:
        """Reads what is known, starts the server if there is one of the run's own, and asks it for its models. Raises
        ``UserError`` if it is not reached, or refuses the key.
        """
        import openai

        run_dir = None if context is None else context.run_dir
        folder = run_dir / self.folder if self.options.cache_dir is None and run_dir else self.options.cache_dir
        if folder is not None and self.options.cache_mb:
            self.known.open(Path(folder).expanduser() / f"{self.name}-{hash_of(self._identity)[:8]}.jsonl")
        if self.options.serve is not None and self._server is None:
            self._server = await ModelServer.shared(self.name, self.options, self.options.model or self.who, run_dir, self.who)
        client = self.client()
        try:
            await client.with_options(max_retries=0, timeout=min(self.options.timeout_s, 10.0)).models.list()
        except (openai.APIConnectionError, openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise UserError(
                f"{self.name}: the {self.who} at {client.base_url} cannot be asked: {told(error)}; see base_url and key_env"
                f" ({self.options.key_env})"
            ) from error
        except Exception:
            pass  # a server need not have this list; what is no JSON, the client raises as it comes

    async def finish(self) -> None:
        self.known.close()
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._server is not None:
            await self._server.leave()
            self._server = None

    def digest(self, *asked: Any) -> str:
        """Returns the hash of what this model is asked, which are JSON values."""
        return hash_of(json.dumps([self._identity, *asked]))

    async def request(self, messages: Sequence[Mapping[str, str]], **more: Any) -> tuple[str, bool]:
        """Returns the model's answer to a conversation, and True if it was cut. Raises ``ValueError`` for anything that is not an
        answer in a conversation, and what the client raises.

        Args:
            messages: without the system message of the options.
            more: further parameters of the request.
        """
        system = [{"role": "system", "content": self.options.system}] if self.options.system else []
        client = self.client()
        async with self._places:
            began = time.monotonic()
            answer = await client.chat.completions.create(
                model=self.options.model or self.who,
                messages=[*system, *({**message, "content": plain(message["content"])} for message in messages)],
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

    def failure(self, error: Exception) -> str:
        """Returns why the model gave no answer: its own server ended, or the error of a request."""
        ended = self._server.ended() if self._server is not None else None
        return ended or told(error)

    def client(self) -> AsyncOpenAI:
        """Returns a client of this event loop: a plugin may outlive a loop."""
        if self.options.serve is not None and self._server is None:
            raise RuntimeError(f"{self.name}: the {self.who}'s server starts with a run")
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            from openai import AsyncOpenAI

            self._loop, self._places = loop, asyncio.Semaphore(self.options.at_once)
            self.forget()
            served = self._server
            self._client = AsyncOpenAI(
                base_url=self.options.base_url if served is None else served.url,
                api_key=(os.environ.get(self.options.key_env) or "none") if served is None else served.key,
                timeout=self.options.timeout_s,
                max_retries=self.options.tries - 1,
            )
        return self._client

    def forget(self) -> None:
        """Forgets what another event loop has left."""


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def plain(text: str) -> str:
    """Returns the text without halves of characters, which no request can have."""
    return text.encode(errors="replace").decode()


def told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _changed(model: str) -> int:
    """Returns when a model's file or directory was changed last; 0 for a name."""
    path = Path(model).expanduser()
    files = path.rglob("*") if path.is_dir() else [path]
    return max((file.stat().st_mtime_ns for file in files if file.is_file()), default=0)
