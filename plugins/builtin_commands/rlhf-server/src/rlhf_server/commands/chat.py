"""``rlhf chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click

from rlhf_host import EpisodeFailed, Message
from rlhf_host.commands import phase, visible
from rlhf_host.settings import CommandLine, RunConfig
from rlhf_server.commands.model_command import ANSWERS, SECTIONS, model_command

if TYPE_CHECKING:
    from rlhf_host import Reply

HELP_GROUP = "Use a model"

START = {
    "actor.model": "the model, instead of MODEL: a directory, hub name or GGUF file",
    "data.system-prompt": "the system message",
    "rollout.temperature": "0: the likeliest answer (float, default 1)",
    "rollout.max-new-tokens": "longest answer (int, default 256)",
}

ABOUT = """Talk to a model, or to the model of a run: a line is a message. An empty line begins anew, Ctrl-D ends. The
conversation is rendered and goes on as in training, for a run's model with the run's settings."""


@model_command("chat", about=ABOUT, start=START, sections=SECTIONS, takes=ANSWERS, example="runs/RUN --rollout.temperature 0")
def chat(line: CommandLine, config: RunConfig) -> None:
    """Talk to a model in the terminal."""
    phase("Loading libraries")
    from rlhf_server.serve import talk

    talk(config, _turns)


async def _turns(answer: Callable[[list[Message]], Awaitable[Reply]]) -> None:
    messages: list[Message] = []
    while True:
        click.echo("> ", nl=False, err=True)
        words = await _line()
        if not words:
            click.echo(err=True)
            return
        if not words.strip():
            messages = []
            click.echo("(a new conversation)", err=True)
            continue
        messages.append({"role": "user", "content": words.rstrip("\n")})
        try:
            reply = await answer(messages)
        except EpisodeFailed as failure:
            click.echo(f"{visible(failure.reason.removeprefix('codec: '))}; an empty line begins anew", err=True)
            messages.pop()
            continue
        messages.append(reply.message)
        if reply.reasoning:
            click.echo(f"({_shown(reply.reasoning)})", err=True)
        click.echo(_shown(reply.content) + (" [cut]" if reply.finish_reason == "length" else ""))


async def _line() -> str:
    """Returns the next line. It is read in a thread that nobody waits for at the end, because Ctrl-C must end the wait."""
    loop = asyncio.get_running_loop()
    read: asyncio.Future[str] = loop.create_future()

    def settle(words: str) -> None:
        if not read.done():
            read.set_result(words)

    def work() -> None:
        try:
            words = sys.stdin.readline()
        except UnicodeDecodeError:
            words = "\ufffd\n"  # it is no text in the terminal's encoding
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, words)

    threading.Thread(target=work, daemon=True, name="rlhf-line").start()
    return await read


def _shown(text: str) -> str:
    return "\n".join(map(visible, text.split("\n")))
