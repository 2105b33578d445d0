"""The engine ``http``: samples from vLLM and SGLang servers that are already running."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator

from rlhf_engine_http.addresses import ServerFile, addresses
from rlhf_host import UserError
from rlhf_host.protocols import Engine, EngineStart, EngineTraits, RuntimeStart


class Http:
    """Servers that somebody else started: ``--engine http --engine.urls http://HOST:PORT[,...]``, or ``--engine.servers FILE``."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        urls: list[str] = Field([], description="addresses of the servers, with commas between")
        servers: Path | None = Field(
            None,
            description="a file with addresses, one a line, which is read again when it changes: servers come and go while the run"
            " goes on",
        )
        protocol: Literal["auto", "vllm", "sglang"] = Field("auto", description="what the servers are; auto: ask them")
        key_env: str | None = Field(None, description="environment variable with a key, sent as Authorization: Bearer")
        directory: Path | None = Field(
            None,
            description="a directory that this machine and the servers see under the same name, for weights; default: a temporary"
            " one, where all servers are on this machine",
        )
        transfer: Literal["auto", "files", "stream"] = Field(
            "auto",
            description="how servers get weights. files: they read a directory; stream: by vLLM's calls for weight transfer,"
            " without files; auto: stream to servers that take it",
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

        @field_validator("servers")
        @classmethod
        def _whole(cls, value: Path | None) -> Path | None:
            return None if value is None else value.expanduser().absolute()

    traits = EngineTraits(libraries=("aiohttp",), debug=False, takes="directory")

    def __init__(self, options: Options):
        self.options = options
        self.key = None if options.key_env is None else _key(options.key_env)
        if options.transfer == "stream" and options.directory is not None:
            raise UserError("engine http: with --engine.transfer stream no server reads --engine.directory; leave it out")
        elsewhere = options.directory is not None or options.transfer == "stream"
        self.urls = addresses(options.urls, "--engine.urls", elsewhere=elsewhere)
        self.listed = None
        if options.servers is not None:
            self.listed = ServerFile(options.servers, self.urls, elsewhere=elsewhere)

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
        if not self.urls and self.listed is None:
            raise UserError(
                "engine http: give an address, as in --engine.urls http://127.0.0.1:8000, or a file of addresses, as in"
                " --engine.servers FILE"
            )

    def start(self, start: EngineStart) -> Engine:
        from rlhf_engine_http.engine import HttpEngine

        self._need_address()
        return HttpEngine(self.options, self.urls, self.listed, self.key, start)


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
