"""Plays an exported environment from another project's Python: a process of rlhf-host beside it, asked over HTTP.

``rlhf env export`` copies this file into what it writes. It needs the standard library alone.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LEFT_OUT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Environment variables of this Python, which would mislead the other one."""
AT_ONCE = 128


class PlayError(Exception):
    """Refusal of the environment, or an episode that failed. It is no reward."""

    def __init__(self, message: str, kind: str = "failed", retry: bool = False):
        super().__init__(message)
        self.kind, self.status_code = kind, 503 if retry else 422


class Player:
    """The process, started when it is first asked, and ended with this one.

    Args:
        folder: has ``environment.yaml`` and what that names.
    """

    def __init__(self, folder: Path = HERE):
        self.folder = folder
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._at: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(AT_ONCE, "rlhf-player")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def use(self, url: str, key: str) -> Player:
        """Asks a process that another one has started."""
        self._at = {"url": url, "key": key}
        return self

    @property
    def address(self) -> dict[str, str]:
        """Its ``url`` and ``key``. Starts the process. Raises ``PlayError`` where that is not possible."""
        with self._lock:
            died = self._process is not None and self._process.poll() is not None
            if not self._at or died:
                self._at = self._start()
            return self._at

    async def ask(self, name: str, /, **body: Any) -> dict[str, Any]:
        """Returns an answer of the environment. Raises ``PlayError``."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: self.ask_now(name, **body))

    def ask_now(self, name: str, /, **body: Any) -> dict[str, Any]:
        """Does the same, and waits."""
        at = self.address
        sent = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {at['key']}"}
        request = urllib.request.Request(f"{at['url']}/{name}", sent, headers)
        try:
            with self._opener.open(request) as answer:
                told: dict[str, Any] = json.loads(answer.read())
                return told
        except urllib.error.HTTPError as error:
            problem = json.loads(error.read()).get("error", {})
            raise PlayError(
                problem.get("message", str(error)), problem.get("kind", "failed"), problem.get("retry", False)
            ) from None
        except (OSError, ValueError) as error:
            raise PlayError(f"the environment's process does not answer: {error}", retry=True) from error

    def tasks(self) -> list[dict[str, Any]]:
        """Returns all tasks: ``messages``, ``source`` and ``index`` of each."""
        rows: list[dict[str, Any]] = []
        while True:
            page = self.ask_now("tasks", begin=len(rows))
            rows += page["tasks"]
            if not page["more"]:
                return rows

    def close(self) -> None:
        process, self._process, self._at = self._process, None, {}
        if process is not None and process.stdin is not None:
            process.stdin.close()  # which ends it
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self) -> dict[str, str]:
        command = [self._python(), "-m", "rlhf_environments", str(self.folder)]
        variables = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)
        except OSError as error:
            raise PlayError(
                f"{command[0]} cannot be started: {error.strerror}: set RLHF_PYTHON to a Python with rlhf-environments"
            ) from error
        assert process.stdout is not None
        line = process.stdout.readline()
        told = (
            json.loads(line)
            if line.startswith(b"{")
            else {"error": f"{' '.join(command)} ended with exit code {process.wait()}"}
        )
        if "error" in told:
            raise PlayError(f"{told['error']} (RLHF_PYTHON names a Python with rlhf-environments)")
        self._process = process
        atexit.register(self.close)
        return dict(told)

    def _python(self) -> str:
        """Returns a Python with rlhf-environments: the one that ``RLHF_PYTHON`` names, this one, or that of the export."""
        if named := os.environ.get("RLHF_PYTHON"):
            return named
        if importlib.util.find_spec("rlhf_environments") is not None:
            return sys.executable
        return str(json.loads((self.folder / "exported.json").read_text(encoding="utf-8"))["python"])
