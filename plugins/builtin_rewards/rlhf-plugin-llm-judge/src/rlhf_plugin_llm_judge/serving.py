"""A server of a model that lives as long as the run."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import ClassVar

from rlhf_host import UserError
from rlhf_host.distributed import reserved
from rlhf_plugin_llm_judge.options import ChatOptions

POLL_S = 0.2
END_S = 20.0
"""Seconds for the server to end, asked and then killed by ``beside.py``."""


COMMANDS = {
    "rlhf": "rlhf serve {model} --host 127.0.0.1 --port {port} --name {name} --key-file {key_file}",
    "vllm": "vllm serve {model} --host 127.0.0.1 --port {port} --served-model-name {name}",
}


def words_of(options: ChatOptions, **fields: object) -> list[str]:
    """Returns the command that serves, with its fields filled in. Raises ``UserError`` if it cannot be run here."""
    written = COMMANDS.get(options.serve_with, options.serve_with)
    try:
        first, *others = shlex.split(written)
        flags = shlex.split(options.serve_flags)
    except ValueError as error:
        raise UserError(f"serve_with and serve_flags are no words of a shell: {error}") from error
    if "{port}" not in written:
        raise UserError(f"serve_with {options.serve_with!r}: give rlhf, vllm, or a command that has {{port}}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (program := shutil.which(first, path=path)) is None:
        raise UserError(f"serve_with: there is no command {first!r}: install it, or choose another one")
    for name, value in fields.items():
        others = [word.replace("{" + name + "}", str(value)) for word in others]
    return [program, *others, *flags]


class ModelServer:
    """A command that serves on 127.0.0.1, with a key of its own. Plugins of a process that want the same one share it."""

    _running: ClassVar[dict[tuple[object, ...], ModelServer]] = {}

    def __init__(self, place: tuple[object, ...], process: asyncio.subprocess.Process, url: str, key: str, log: Path, who: str):
        self.place, self.process, self.url, self.key, self.log, self.who = place, process, url, key, log, who
        self.folder: Path | None = None
        self.users = 1

    @classmethod
    async def shared(cls, whose: str, options: ChatOptions, name: str, run_dir: Path | None, who: str) -> ModelServer:
        """Returns the server, which answers. ``leave`` ends it if nobody else has it.

        Args:
            whose: the plugin, for messages.
            name: of the model, for requests.
            who: the model in messages and names of files.

        Raises:
            UserError: it does not start, or does not answer in time.
        """
        command = (options.serve, options.serve_with, options.serve_flags, options.serve_devices, name)
        place = (id(asyncio.get_running_loop()), *command)
        if (known := cls._running.get(place)) is not None and known.process.returncode is None:
            known.users += 1
            return known
        folder = Path(tempfile.mkdtemp(prefix=f"rlhf-{who}-"))
        try:
            with reserved("127.0.0.1") as kept:
                server = await cls._start(place, whose, options, name, folder, run_dir, kept.getsockname()[1], who)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        server.folder = folder
        cls._running[place] = server
        return server

    @classmethod
    async def _start(
        cls,
        place: tuple[object, ...],
        whose: str,
        options: ChatOptions,
        name: str,
        folder: Path,
        run_dir: Path | None,
        port: int,
        who: str,
    ) -> ModelServer:
        key, key_file = secrets.token_urlsafe(24), folder / "key"
        key_file.touch(mode=0o600)
        key_file.write_text(key)  # not on a command line, which others read
        environment = {**os.environ, "VLLM_API_KEY": key}
        if options.serve_devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = options.serve_devices
        command = words_of(options, model=options.serve, port=port, name=name, key_file=key_file)
        log = (folder if run_dir is None else run_dir) / f"{who}-server.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(Path(__file__).with_name("beside.py")), *command),
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        server = cls(place, process, f"http://127.0.0.1:{port}/v1", key, log, who)
        try:
            await server._answers(whose, options)
        except BaseException:
            await asyncio.shield(server._end())
            raise
        return server

    async def _answers(self, whose: str, options: ChatOptions) -> None:
        """Waits until the server lists its models."""
        from openai import AsyncOpenAI, OpenAIError

        until = time.monotonic() + options.serve_timeout_s
        async with AsyncOpenAI(base_url=self.url, api_key=self.key, max_retries=0, timeout=10.0) as client:
            while True:
                if (ended := self.ended()) is not None:
                    raise UserError(f"{whose}: {ended}")
                try:
                    await client.models.list()
                    return
                except OpenAIError as error:
                    if time.monotonic() > until:
                        raise UserError(
                            f"{whose}: the {self.who}'s server did not answer in {options.serve_timeout_s:g} s (serve_timeout_s);"
                            f" see {self.log}"
                        ) from error
                await asyncio.sleep(POLL_S)

    def ended(self) -> str | None:
        """Returns how the server ended, with the last line of its log; None while it runs."""
        if self.process.returncode is None:
            return None
        lines = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        return f"the {self.who}'s server ended with exit code {self.process.returncode}; {self.log} says last: {last[:300]}"

    async def leave(self) -> None:
        """Ends the server if nobody else has it."""
        self.users -= 1
        if not self.users:
            self._running.pop(self.place, None)
            await self._end()
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)

    async def _end(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), END_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
