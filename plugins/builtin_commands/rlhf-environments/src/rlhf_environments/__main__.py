"""``python -m rlhf_environments DIR``: plays the environment of a folder that ``rlhf env export`` has written.

It prints its address and key as a line of JSON, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from rlhf_host import RunError, UserError
from rlhf_host.settings import read_config

SETTINGS = "environment.yaml"


async def _until_input_ends(server: Any, told: Any) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await server.start("127.0.0.1", 0)
    told({"url": server.url, "key": server.key})
    while await lines.read(1 << 16):
        pass


def main(folder: str) -> None:
    from rlhf_environments.opening import opened
    from rlhf_environments.play_server import PlayServer

    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what plugins print is no answer

    def tell(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    try:
        os.chdir(folder)  # where its files are
        loaded = read_config(Path(SETTINGS), quickstart=False)
        limits = json.loads(Path("limits.json").read_text(encoding="utf-8")) if Path("limits.json").exists() else {}
        with opened(loaded.config, loaded.origins, **limits) as environment:
            server = PlayServer(environment.environment)
            try:
                environment.session.run(_until_input_ends(server, tell))
            finally:
                environment.session.run(server.close(), interruptible=False)
    except (UserError, RunError) as error:
        tell({"error": str(error)})
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        click.echo("python -m rlhf_environments DIR", err=True)
        raise SystemExit(2)
    main(sys.argv[1])
