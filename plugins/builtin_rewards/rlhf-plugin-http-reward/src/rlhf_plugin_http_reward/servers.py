"""A pool of reward servers, and their answers.

The protocol is that of OpenRLHF's ``--remote_rm_url``: ``POST {"query": [...], "prompts": [...], "labels": [...]}``, and back
``{"rewards": [...], "scores": [...], "extra_logs": {NAME: [...]}}``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from rlhf_host import Reward, Unjudged, UserError

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

ANSWER_BYTES = 16 << 20
NO_PATH = " (is the path missing? many servers judge at /get_reward)"
LOGS = 100
"""Names in ``extra_logs`` that become metrics: the first ones of a run."""
WAIT_S = 0.5
"""Seconds before the second try; twice as many before each further one."""


class Failed(Exception):
    """No usable answer. ``again``: another try may get one."""

    def __init__(self, why: str, again: bool):
        super().__init__(why)
        self.again = again


class Servers:
    """Pool of servers: a group goes to the one with the fewest open requests.

    Args:
        at_once: maximum number of open requests of one server.
        tries: maximum number of times that a request is sent.
        key: sent as ``Authorization: Bearer``.
    """

    def __init__(self, urls: Sequence[str], *, at_once: int, timeout_s: float, tries: int, key: str | None):
        self.urls, self.at_once, self.timeout_s, self.tries = list(urls), at_once, timeout_s, tries
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._logs: dict[str, str] = {}
        """Names in ``extra_logs`` that are metrics by now → their names here."""
        self._left_out = False
        self._open: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free = asyncio.Condition()
        self._client: aiohttp.ClientSession | None = None

    async def check(self) -> None:
        """Checks that every server accepts connections. Raises ``UserError`` if one does not."""
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
        """Returns the rewards of ``count`` rows."""
        text = json.dumps(body)
        for number in range(self.tries):
            if number:
                await asyncio.sleep(WAIT_S * 2 ** (number - 1))
            try:
                return rewards_of(await self._post(text), count, self._metric)
            except Failed as failure:
                why = str(failure)
                if not failure.again:
                    break
        return [Unjudged(f"the reward server: {why}")] * count

    def _metric(self, name: str) -> str | None:
        """Returns the metric's name for one in ``extra_logs``, or None: a server must not fill the log, or hide its contents."""
        if (known := self._logs.get(name)) is not None:
            return known
        if len(self._logs) < LOGS and re.fullmatch(r"[\w./-]{1,100}", name, re.ASCII):
            return self._logs.setdefault(name, f"reward/http/{name}")
        if not self._left_out:
            self._left_out = True
            log.warning(
                "http_reward: some of extra_logs are left out, such as %.100r: metrics are the first %d names of at most 100"
                " letters, digits and _ . / -",
                name,
                LOGS,
            )
        return None

    async def _post(self, text: str) -> Any:
        import aiohttp

        url = await self._take()
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self._http().post(
                    url, data=text, headers=self.headers | {"Content-Type": "application/json"}, allow_redirects=False
                ) as answer,
            ):
                if (place := answer.headers.get("Location")) and 300 <= answer.status < 400:
                    # A client that follows most of these asks again with GET, and takes any page for the answer.
                    place = urljoin(url, place)[:200]
                    raise Failed(f"{url} has moved (status {answer.status}): give its new address, {place}", again=False)
                content = await answer.content.read(ANSWER_BYTES + 1)
                while len(content) <= ANSWER_BYTES and (more := await answer.content.read(ANSWER_BYTES + 1 - len(content))):
                    content += more
                if len(content) > ANSWER_BYTES:
                    raise Failed(f"{url} answered with more than {ANSWER_BYTES >> 20} MiB", again=False)
                if answer.status != 200:
                    said = content[:200].decode(errors="replace").strip()
                    busy = answer.status in (408, 429) or answer.status >= 500
                    hint = NO_PATH if answer.status == 404 else ""
                    raise Failed(f"{url} answered with status {answer.status}{hint}: {said}", again=busy)
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
        """Resets the client for the current event loop: a plugin outlives a loop if several runs follow in one process."""
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


def rewards_of(answer: Any, count: int, metric: Callable[[str], str | None]) -> list[Reward | Unjudged]:
    """Returns the rewards of an answer. Raises ``Failed`` for an answer outside of the protocol.

    Args:
        metric: the metric's name for one in ``extra_logs``; None: it is not a metric.
    """
    if not isinstance(answer, Mapping) or "rewards" not in answer:
        raise Failed(f"the answer has no 'rewards': {str(answer)[:200]}", again=False)
    values = _column("rewards", answer["rewards"], count)
    scores = _column("scores", answer.get("scores"), count)
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise Failed(f"'extra_logs' is a {type(logs).__name__}, not an object", again=False)
    names = {name: known for name in logs if (known := metric(str(name))) is not None}
    metrics = {known: _column(f"extra_logs.{name}", logs[name], count) for name, known in names.items()}
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
    """Returns a number or null for each row. A single number is for all rows if it is a metric, and for one row if it is a
    reward.
    """
    if values is None:
        return [None] * count
    if isinstance(values, int | float) and (count == 1 or name.startswith("extra_logs")):
        values = [values] * count
    if not isinstance(values, list) or len(values) != count:
        got = f"{len(values)} values" if isinstance(values, list) else f"a {type(values).__name__}"
        raise Failed(f"{name!r} has {got} for {count} rows", again=False)
    values = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]
    return [None if value is None else _number(name, value) for value in values]


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # JSON's whole numbers are as long as they like
        number = math.inf
    if not math.isfinite(number):
        raise Failed(f"{name!r} has {repr(value)[:50]}, which is no finite number", again=False)
    return number
