"""``rlhf view``: runs in the browser, as they go on."""

from __future__ import annotations

import asyncio
import signal
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import click

from rlhf_host import RunDirectory, UserError
from rlhf_host.installed import install_line
from rlhf_runs.folder import chosen_runs
from rlhf_runs.names import names_of

HELP_GROUP = "Look at runs"


@click.command()
@click.argument("runs", metavar="[RUN...]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of the address; default: any free one.")
@click.option("--browser/--no-browser", default=True, help="Open the address, or only print it.")
def view(runs: Sequence[Path], port: int, browser: bool) -> None:
    """Open the page of rlhf report in the browser, and follow runs that go on. Ctrl-C ends it.

    Without RUN it is the newest one in runs/. Only this machine reaches it, by an address with a token. It needs rlhf-runs[view].
    """
    found = chosen_runs(runs)
    asyncio.run(_serve(found, names_of([run.path for run in found]), port, browser))


async def _serve(runs: Sequence[RunDirectory], names: Sequence[str], port: int, browser: bool) -> None:
    try:
        from rlhf_runs.server import RunsServer
    except ModuleNotFoundError as error:
        if error.name != "rlhf_server":
            raise
        raise UserError(f"rlhf view needs rlhf-server: {install_line('rlhf-runs[view]')}") from None

    server, ended = RunsServer(runs, names), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        # A script that starts a command with & has it ignore SIGINT: Ctrl-C is meant for others.
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
    url = await server.start(port)
    click.echo(url)
    click.echo("Ctrl-C ends it.", err=True)
    if browser:
        await asyncio.to_thread(webbrowser.open, url)
    await ended.wait()
    await server.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending
    click.echo("Ended.", err=True)
