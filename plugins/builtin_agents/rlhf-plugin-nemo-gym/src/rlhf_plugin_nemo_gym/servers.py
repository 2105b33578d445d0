"""Servers of NeMo Gym: running ones, or a set that is started here and ends with the run."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yaml

from rlhf_host import RunError, UserError
from rlhf_host.distributed import reserved
from rlhf_plugin_nemo_gym.rows import located

log = logging.getLogger(__name__)

MODEL = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
"""Gym's model server that passes token ids on."""
LOOPING = "simple_agent"
"""Gym's agent that calls tools until the policy stops."""
PASSED = ("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
"""Environment variables that are passed on, with those that configure uv: tools that a model controls get no keys of yours."""
LAST_LINES = 50
POLL_S = 0.5
WATCH_S = 5.0
"""Seconds between two checks that all servers are running."""
PING_S = 5.0
ENDS_S = 30.0
READY = ".ready"
"""File in an environment that was set up completely."""


@dataclass(slots=True)
class Gym:
    """Servers that answered."""

    agents: Mapping[str, str]
    """Name → URL."""
    urls: Sequence[str]
    """URLs of all servers."""
    settings: Mapping[str, Any]
    """Gym's own configuration."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """True if one of them is gone."""


@dataclass(slots=True)
class Servers:
    """Attaches to servers or starts them, when they are first needed, and again when one has died.

    ``name`` is the agent's alias, for messages.
    """

    name: str
    attach: str | None
    configs: Sequence[str]
    python: str | None
    overrides: Sequence[str]
    environment: Sequence[str]
    max_steps: int
    start_timeout_s: float
    log_file: Path | None = None
    """File for the servers' output; default: a temporary file."""
    starts: int = 0
    _ready: asyncio.Task[Gym] | None = None
    _http: aiohttp.ClientSession | None = None
    _process: asyncio.subprocess.Process | None = None
    _folder: Path | None = None
    _watch: asyncio.Task[None] | None = None

    @property
    def http(self) -> aiohttp.ClientSession:
        """One pool of connections; every request has its own deadline."""
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=10.0)
            self._http = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=aiohttp.ClientTimeout(total=PING_S)
            )
        return self._http

    def check(self) -> None:
        """Raises ``UserError`` for files that do not exist."""
        if self.python is None:
            return
        if not self._gym.is_file():
            raise UserError(
                f"--agent.python {self.python}: there is no nemo-gym beside it ({self._gym}); make setup-nemo-gym makes an"
                " environment, or: uv venv --python 3.12 DIR && uv pip install --python DIR nemo-gym==0.4.0 uv"
            )
        for config in self._configs:
            if not located(config, self.python).is_file():
                raise UserError(f"--agent.configs {config}: no such file, here or in the package of {self.python}")

    async def ready(self, policy_url: str) -> Gym:
        """Returns servers that ask the policy at ``policy_url``.

        Raises:
            UserError: they cannot be reached or started.
            RunError: they died for the second time.
        """
        if self._ready is None or (_succeeded(self._ready) and self._ready.result().gone.is_set()):
            self._ready = asyncio.ensure_future(self._begin(policy_url))
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Ends the servers that were started here."""
        if self._ready is not None:
            self._ready.cancel()
            await asyncio.wait([self._ready])
        await self._end()
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _begin(self, policy_url: str) -> Gym:
        await self._end()
        self.starts += 1
        if self.starts > 1 and self.attach is None:
            if self.starts > 2:
                raise RunError(f"{self.name}: NeMo Gym's servers died a second time{self._last_lines()}")
            log.warning("%s: a server of NeMo Gym died; they are started again", self.name)
        try:
            if self.attach is not None:
                gym = await self._answering(self.attach.rstrip("/"))
            else:
                gym = await self._start(policy_url)
            self._fits(gym, policy_url)
        except BaseException:
            await asyncio.shield(self._end())
            raise
        self._watch = asyncio.ensure_future(self._watched(gym))
        return gym

    # --- starting ---------------------------------------------------------------------------------

    async def _start(self, policy_url: str) -> Gym:
        self.check()
        assert self.python is not None
        python = Path(self.python).expanduser().absolute()
        # Short, because Ray puts sockets there, and their names have at most 107 characters.
        place = "/tmp" if os.access("/tmp", os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix="gym-", dir=place))
        if self.log_file is None:
            self.log_file = self._folder / "nemo-gym.log"
        venvs = python.parent.parent / "servers"
        if not os.access(venvs.parent, os.W_OK):
            venvs = self._folder / "servers"
        venvs.mkdir(exist_ok=True)
        async with _alone(venvs / ".lock"):
            for venv in venvs.glob("*/*/.venv"):
                if not (venv / READY).exists():
                    shutil.rmtree(venv)  # of a start that was interrupted
            began = self.log_file.stat().st_size if self.log_file.exists() else 0
            with reserved("127.0.0.1") as kept:
                port = kept.getsockname()[1]
                with self.log_file.open("ab") as output:
                    self._process = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-I", str(Path(__file__).with_name("supervise.py")), str(self._gym)),
                        *("env", "start", *self._settings(policy_url, port, venvs)),
                        env=self._environment(python, self._folder),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                gym = await self._answering(f"http://127.0.0.1:{port}", began)
            for venv in venvs.glob("*/*/.venv"):
                (venv / READY).touch()
        return gym

    @property
    def _gym(self) -> Path:
        return Path(self.python or "").expanduser().absolute().parent / "gym"

    @property
    def _configs(self) -> list[str]:
        model = [] if any("responses_api_models/" in config for config in self.configs) else [MODEL]
        return [*self.configs, *model]

    def _settings(self, policy_url: str, port: int, venvs: Path) -> list[str]:
        bounded = [
            f"++{name}.responses_api_agents.{LOOPING}.max_steps={self.max_steps}"
            for config in self._configs
            for name in _unbounded(_read(located(config, self.python)))
        ]
        return [
            f"+config_paths=[{','.join(self._configs)}]",
            f"+policy_base_url={policy_url}",
            # Episodes have keys of their own, so the servers need none.
            *("+policy_api_key=none", "+policy_model_name=policy"),
            f"+head_server={{host: 127.0.0.1, port: {port}}}",
            *("+default_host=127.0.0.1", "+skip_venv_if_present=true"),
            f"+uv_venv_dir={venvs}",
            f"+uv_cache_dir={os.environ.get('UV_CACHE_DIR') or venvs / 'cache'}",
            *(f"hydra.run.dir={self._folder}", "hydra.output_subdir=null"),
            *bounded,
            *self.overrides,
        ]

    def _environment(self, python: Path, folder: Path) -> dict[str, str]:
        passed = [name for name in os.environ if name.startswith("UV_") or name.lower().endswith("_proxy")]
        kept = {name: os.environ[name] for name in (*PASSED, *passed, *self.environment) if name in os.environ}
        # uv looks for the interpreter by its version, along this path.
        path = [str(python.parent), str(python.resolve().parent), os.environ.get("PATH", os.defpath)]
        own = {"PATH": os.pathsep.join(path), "RAY_TMPDIR": str(folder), "TMPDIR": str(folder)}
        own |= {"RAY_USAGE_STATS_ENABLED": "0", "UV_PYTHON_DOWNLOADS": "never", "PYTHONUNBUFFERED": "1"}
        return {"HOME": str(folder)} | kept | own

    # --- being there ------------------------------------------------------------------------------

    async def _answering(self, head: str, began: int = 0) -> Gym:
        """Waits until every server answers."""
        until = time.monotonic() + self.start_timeout_s
        missing = f"nothing answers at {head}"
        while time.monotonic() < until:
            if self._process is not None and self._process.returncode is not None:
                raise UserError(
                    f"{self.name}: NeMo Gym ended with exit code {self._process.returncode}{self._last_lines(began)}"
                )
            instances = await self._get(f"{head}/server_instances")
            if isinstance(instances, list) and instances:
                urls = {_name(instance): _url(instance, head) for instance in instances}
                silent = [name for name, up in zip(urls, await self._all_up(urls.values()), strict=True) if not up]
                if not silent:
                    agents = {_name(one) for one in instances if one.get("server_type") == "responses_api_agents"}
                    settings = await self._get(f"{head}/global_config_dict_yaml")
                    known = yaml.safe_load(settings) if isinstance(settings, str) else {}
                    return Gym({name: url for name, url in urls.items() if name in agents}, [head, *urls.values()], known or {})
                missing = f"no answer of {', '.join(silent)}"
            await asyncio.sleep(POLL_S)
        raise UserError(
            f"{self.name}: NeMo Gym's servers were not ready in {self.start_timeout_s:g} s (--agent.start-timeout-s):"
            f" {missing}{self._last_lines(began)}"
        )

    def _fits(self, gym: Gym, policy_url: str) -> None:
        """Raises ``UserError`` for servers that ask another model, or ask without limit."""
        if not gym.agents:
            raise UserError(f"{self.name}: none of NeMo Gym's servers is an agent")
        asked = gym.settings.get("policy_base_url")
        if self.attach is not None and isinstance(asked, str) and asked and not _same(asked, policy_url):
            port = urlsplit(asked).port
            raise UserError(
                f"{self.name}: the servers at {self.attach} ask the policy at {asked}, and this run's is {policy_url}: "
                f"give --rollout.policy-port {port or 'PORT'}, or start them with +policy_base_url={policy_url}"
            )
        if endless := _unbounded(gym.settings):
            raise UserError(
                f"{self.name}: Gym's agent {endless[0]} has no max_steps, so it would call tools without end: start it with "
                f"++{endless[0]}.responses_api_agents.{LOOPING}.max_steps=16"
            )

    async def _watched(self, gym: Gym) -> None:
        """Notices when a server is gone. A busy one may be late; one that is gone refuses connections."""
        ended = asyncio.ensure_future(self._process.wait()) if self._process is not None else None
        try:
            missed = 0
            while missed < 2:
                if ended is None:
                    await asyncio.sleep(WATCH_S)
                elif (await asyncio.wait([ended], timeout=WATCH_S))[0]:
                    break
                missed = 0 if all(await self._all_up(gym.urls, late=True)) else missed + 1
            gym.gone.set()
        finally:
            if ended is not None:
                ended.cancel()

    async def _get(self, url: str) -> Any:
        """Returns its answer, or None."""
        try:
            async with self.http.get(url) as response:
                return await response.json(content_type=None) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def _all_up(self, urls: Any, *, late: bool = False) -> list[bool]:
        async def up(url: str) -> bool:
            try:
                async with self.http.get(f"{url}/"):
                    return True
            except TimeoutError:
                return late
            except aiohttp.ClientConnectorError:
                return False
            except aiohttp.ClientError:
                return True  # it is there, though busy with something else

        return list(await asyncio.gather(*map(up, urls)))

    # --- ending -----------------------------------------------------------------------------------

    async def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
            self._watch = None
        if (process := self._process) is not None:
            self._process = None
            if process.stdin is not None:
                process.stdin.close()  # which is what the supervisor waits for
            try:
                await asyncio.wait_for(process.wait(), ENDS_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._folder is not None:
            if self.log_file is not None and self.log_file.parent == self._folder:
                self._kept = self._tail(0)
                self.log_file = None
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            self._folder = None

    _kept: list[str] = field(default_factory=list)

    def _tail(self, began: int) -> list[str]:
        if self.log_file is None or not self.log_file.exists():
            return self._kept
        with self.log_file.open("rb") as file:
            file.seek(max(began, self.log_file.stat().st_size - (64 << 10)))
            return file.read().decode("utf-8", "replace").splitlines()[-LAST_LINES:]

    def _last_lines(self, began: int = 0) -> str:
        lines = self._tail(began)
        return "; the end of their log:\n" + "\n".join(lines) if lines else ""


def _succeeded(task: asyncio.Task[Gym]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _name(instance: Mapping[str, Any]) -> str:
    return str(instance.get("process_name") or instance.get("name"))


def _url(instance: Mapping[str, Any], head: str) -> str:
    """Returns the URL. Servers that listen everywhere are reached on the host of the head server."""
    url = str(instance.get("url") or f"http://{instance.get('host')}:{instance.get('port')}").rstrip("/")
    host = urlsplit(head).hostname or "127.0.0.1"
    return url.replace("//0.0.0.0:", f"//{host}:")


def _same(one: str, other: str) -> bool:
    first, second = (urlsplit(url.rstrip("/").replace("//localhost", "//127.0.0.1")) for url in (one, other))
    return (first.hostname, first.port, first.path) == (second.hostname, second.port, second.path)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--agent.configs {path}: {' '.join(str(error).split())}") from error
    return settings if isinstance(settings, Mapping) else {}


def _unbounded(settings: Mapping[str, Any]) -> list[str]:
    """Returns the names of agents that would call tools for ever."""
    names = []
    for name, server in settings.items():
        agents = server.get("responses_api_agents") if isinstance(server, Mapping) else None
        agent = agents.get(LOOPING) if isinstance(agents, Mapping) else None
        if isinstance(agent, Mapping) and not agent.get("max_steps"):
            names.append(str(name))
    return names


@contextlib.asynccontextmanager
async def _alone(path: Path) -> AsyncIterator[None]:
    """Holds a lock, so that runs that share an environment set its servers up one after another."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(POLL_S)
        yield
