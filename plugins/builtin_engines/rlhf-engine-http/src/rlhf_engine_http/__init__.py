"""The engine ``http``: samples from vLLM and SGLang servers that are already running."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator

from rlhf_host import UserError
from rlhf_host.protocols import Engine, EngineStart, EngineTraits, RuntimeStart

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Http:
    """Servers that somebody else started: ``--engine http --engine.urls http://HOST:PORT[,...]``."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        urls: list[str] = Field([], description="addresses of the servers, with commas between")
        protocol: Literal["auto", "vllm", "sglang"] = Field("auto", description="what the servers are; auto: ask them")
        key_env: str | None = Field(None, description="environment variable with a key, sent as Authorization: Bearer")
        directory: Path | None = Field(
            None,
            description="a directory that this machine and the servers see under the same name, for weights; default: a temporary"
            " one, where all servers are on this machine",
        )
        at_once: PositiveInt = Field(256, description="open requests of one server; more wait")
        timeout_s: float = Field(3600.0, gt=0, description="longest time for one answer; then the request is sent again")
        load_s: float = Field(600.0, gt=0, description="longest time in which a server loads weights")
        retries: NonNegativeInt = Field(3, description="how often a request is sent again to a server that fails")
        wait_s: float = Field(600.0, gt=0, description="longest time without any server; then the run ends")
        seeds: bool = Field(
            True,
            description="draw each completion by its own seed, so that it depends on its key and the weights alone; false: by the"
            " servers' own state, so that no repetition gives the same",
        )

        @field_validator("urls", mode="before")
        @classmethod
        def _several(cls, value: Any) -> Any:
            return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    traits = EngineTraits(libraries=("aiohttp",), debug=False, takes="directory")

    def __init__(self, options: Options):
        self.options = options
        self.urls = [_address(url) for url in options.urls]
        if twice := next((url for url in self.urls if self.urls.count(url) > 1), None):
            raise UserError(f"engine http: {twice} is given twice in --engine.urls")
        self.key = None if options.key_env is None else _key(options.key_env)
        away = next((url for url in self.urls if urlsplit(url).hostname not in LOOPBACK), None)
        if options.directory is None and away is not None:
            raise UserError(
                f"engine http: {away} may be on another machine, so weights need a directory that it sees too, under the same name:"
                " --engine.directory DIR"
            )

    def check(self, start: RuntimeStart, devices: Mapping[str, str]) -> None:
        self._need_address()
        if other := next((need.name for need in start.needs.roles if need.generates), None):
            raise UserError(
                f"engine http: its servers hold the actor's weights, so the role {other} cannot be sampled from them; choose"
                " another --engine"
            )
        for text in start.placement:
            roles, _, rest = text.partition("=")
            if "rollout" in roles.split("+") and (roles != "rollout" or rest.split(":")[0] != "1"):
                raise UserError(
                    f"engine http: --placement {text} would make several engines for the same servers, or keep devices for"
                    " them; give --placement rollout=1:cpu"
                )

    def _need_address(self) -> None:
        if not self.urls:
            raise UserError("engine http: give an address, as in --engine.urls http://127.0.0.1:8000")

    def start(self, start: EngineStart) -> Engine:
        from rlhf_engine_http.engine import HttpEngine

        self._need_address()
        return HttpEngine(self.options, self.urls, self.key, start)


def _key(name: str) -> str:
    """Returns the key in an environment variable. No message has the key, also where it was given in place of the name."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UserError("engine http: --engine.key-env takes the name of an environment variable that has the key, not the key")
    key = os.environ.get(name, "").strip()
    if not key:
        raise UserError(f"engine http: the environment variable {name} (--engine.key-env) is not set, or is empty")
    if not key.isascii() or not key.isprintable():
        raise UserError(f"engine http: the environment variable {name} (--engine.key-env) has characters that no key has")
    return key


def _address(url: str) -> str:
    """Returns the address without a slash or ``/v1`` at its end."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if "@" in url or "?" in url:  # which may have secrets, so it is not shown
        raise UserError(
            "engine http: an address in --engine.urls has a user, a password or a query; write http://HOST:PORT, and give a key by"
            " --engine.key-env"
        )
    if not good or parts.fragment or any(letter.isspace() for letter in url):
        raise UserError(f"engine http: {url!r} is no address of a server; write http://HOST:PORT")
    place = parts._replace(scheme=parts.scheme.lower(), netloc=parts.netloc.lower()).geturl()
    return place.rstrip("/").removesuffix("/v1").rstrip("/")
