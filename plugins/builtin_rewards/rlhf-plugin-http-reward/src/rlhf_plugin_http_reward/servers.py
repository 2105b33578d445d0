"""A pool of reward servers, and what they answer.

The protocol is that of OpenRLHF's ``--remote_rm_url``: ``POST {"query": [...], "prompts": [...], "labels": [...]}``, and back
``{"rewards": [...], "scores": [...], "extra_logs": {NAME: [...]}}``.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlhf_host import Reward, Unjudged, UserError

if TYPE_CHECKING:
    import aiohttp

ANSWER_BYTES = 16 << 20
WAIT_S = 0.5
"""Before the second try; twice as long before each further one."""


class Failed(Exception):
    """No answer that can be used. ``again``: another try may get one."""

    def __init__(self, why: str, again: bool):
        super().__init__(why)
        self.again = again


class Servers:
    """A group goes to the server with the fewest open requests.

    Args:
        at_once: open requests of one server.
        tries: how often a request is sent in all.
        key: sent as ``Authorization: Bearer``.
    """

    def __init__(self, urls: Sequence[str], *, at_once: int, timeout_s: float, tries: int, key: str | None):
        self.urls, self.at_once, self.timeout_s, self.tries = list(urls), at_once, timeout_s, tries
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._open: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free = asyncio.Condition()
        self._client: aiohttp.ClientSession | None = None

    async def check(self) -> None:
        """Every server accepts connections. Raises ``UserError`` where one does not."""
        await asyncio.gather(*map(self._check, self.urls))

    async def _check(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(min(self.timeout_s, 10.0)):
                _, writer = await asyncio.open_connection(
                    parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
                )
                writer.close()
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise UserError(
                f"http_reward: nothing answers at {url} ({why}): start the server, or correct the address"
            ) from error

    async def ask(self, body: Mapping[str, Any], count: int) -> list[Reward | Unjudged]:
        """The rewards of ``count`` rows."""
        text = json.dumps(body)
        for number in range(self.tries):
            if number:
                await asyncio.sleep(WAIT_S * 2 ** (number - 1))
            try:
                return rewards_of(await self._post(text), count)
            except Failed as failure:
                why = str(failure)
                if not failure.again:
                    break
        return [Unjudged(f"the reward server: {why}")] * count

    async def _post(self, text: str) -> Any:
        import aiohttp

        url = await self._take()
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self._http().post(url, data=text, headers=self.headers | {"Content-Type": "application/json"}) as answer,
            ):
                content = await answer.content.read(ANSWER_BYTES + 1)
                while len(content) <= ANSWER_BYTES and (more := await answer.content.read(ANSWER_BYTES + 1 - len(content))):
                    content += more
                if len(content) > ANSWER_BYTES:
                    raise Failed(f"{url} answered with more than {ANSWER_BYTES >> 20} MiB", again=False)
                if answer.status != 200:
                    said = content[:200].decode(errors="replace").strip()
                    busy = answer.status in (408, 429) or answer.status >= 500
                    raise Failed(f"{url} answered with status {answer.status}: {said}", again=busy)
                return json.loads(content)
        except TimeoutError as error:
            raise Failed(f"{url} did not answer in {self.timeout_s:g} s", again=True) from error
        except (OSError, aiohttp.ClientError) as error:
            raise Failed(f"{url}: {type(error).__name__}: {error}".rstrip(": "), again=True) from error
        except (ValueError, RecursionError) as error:
            raise Failed(f"{url} answered with something that is no JSON: {error}", again=False) from error
        finally:
            await asyncio.shield(self._give_back(url))

    async def _take(self) -> str:
        self._on_this_loop()
        async with self._free:
            await self._free.wait_for(lambda: any(self._open[url] < self.at_once for url in self.urls))
            url = min(self.urls, key=lambda url: self._open[url])
            self._open[url] += 1
            return url

    async def _give_back(self, url: str) -> None:
        async with self._free:
            self._open[url] -= 1
            self._free.notify()

    def _on_this_loop(self) -> None:
        """A plugin outlives an event loop where runs follow one another in a process."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._free, self._client = loop, asyncio.Condition(), None
            self._open.clear()

    def _http(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._client is None:
            self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


def rewards_of(answer: Any, count: int) -> list[Reward | Unjudged]:
    """Raises ``Failed`` for an answer that is not of the protocol."""
    if not isinstance(answer, Mapping) or "rewards" not in answer:
        raise Failed(f"the answer has no 'rewards': {str(answer)[:200]}", again=False)
    values = _column("rewards", answer["rewards"], count)
    scores = _column("scores", answer.get("scores"), count)
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise Failed(f"'extra_logs' is a {type(logs).__name__}, not an object", again=False)
    metrics = {str(name): _column(f"extra_logs.{name}", column, count) for name, column in logs.items()}
    return [
        Unjudged("the reward server gave null")
        if value is None
        else Reward(
            value,
            score=score if score is not None and 0.0 <= score <= 1.0 else None,  # theirs may be any number
            metrics={name: column[i] or 0.0 for name, column in metrics.items() if column[i] is not None},
        )
        for i, (value, score) in enumerate(zip(values, scores, strict=True))
    ]


def _column(name: str, values: Any, count: int) -> list[float | None]:
    """A number or null for each row. One number alone is every row's of metrics, and a group's of one row."""
    if values is None:
        return [None] * count
    if isinstance(values, int | float) and (count == 1 or name.startswith("extra_logs")):
        values = [values] * count
    if not isinstance(values, list) or len(values) != count:
        got = f"{len(values)} values" if isinstance(values, list) else f"a {type(values).__name__}"
        raise Failed(f"{name!r} has {got} for {count} rows", again=False)
    values = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]
    for value in values:
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise Failed(f"{name!r} has {value!r}, which is no finite number", again=False)
    return [None if value is None else float(value) for value in values]
