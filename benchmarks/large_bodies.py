"""Large bodies at every server: how long another client waits meanwhile, and the memory that they take.

    python benchmarks/large_bodies.py [--server serve ...] [--mib 60] [--times 3]

Starts ``rlhf serve``, ``rlhf serve-reward``, ``rlhf view`` and a policy server as runs have it, each in a process of its own.
While others send bodies, with and without a key, a client asks for the server's health, one request after the other. Prints for
each kind of body the longest of these waits, the memory that the server and its children took at their most, and what the sender
was told. The last line is a JSON object: server, kind of body, seconds and MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import http.client
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

EPISODE = "an-open-episode-s-token"
PIECE = 1 << 18


@dataclass(frozen=True)
class Server:
    """Where it listens, and how requests reach it."""

    process: int
    host: str
    port: int
    paths: tuple[str, str]
    """Without and with the right key."""
    key: str
    """The header of a client that has it."""
    health: str


@dataclass(frozen=True)
class Body:
    name: str
    make: Callable[[int], bytes]
    keyed: bool = False
    headers: str = ""
    chunked: bool = False
    share: float = 1.0
    """Of the size that was asked for."""


def nothing(size: int) -> bytes:
    return b"{}"


def text(size: int) -> bytes:
    words = "some words of a message, " * (size // 75)  # it comes three times
    return json.dumps({"messages": [{"role": "user", "content": words}], "query": [words], "prompt": words}).encode()


def texts(size: int) -> bytes:
    one = "some words of an answer\n" * 160
    return json.dumps({"query": [one] * (size // len(one) * 9 // 10)}).encode()


def lists(size: int) -> bytes:
    return b'{"messages": [' + b"[]," * (size // 3) + b"1]}"


def tokens(size: int) -> bytes:
    return b'{"prompt": [' + b"100," * (size // 4) + b"1]}"


def deep(size: int) -> bytes:
    return b'{"a": ' + b"[" * (size - 8)


def zipped(size: int) -> bytes:
    return gzip.compress(b" " * size * 10)


def headers(size: int) -> bytes:
    return b"x-a: b\r\n" * (size // 8)


BODIES = [
    Body("nothing much", nothing, keyed=True),
    Body("a text, no key", text),
    Body("lists, no key", lists),
    Body("deep, no key", deep),
    Body("no length, no key", lists, chunked=True),
    Body("asks first, no key", lists, headers="Expect: 100-continue\r\n"),
    Body("gzip, no key", zipped, headers="Content-Encoding: gzip\r\n"),
    Body("websocket, no key", lists, headers="Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    Body("as headers, no key", headers, headers="headers"),
    Body("a text", text, keyed=True),
    Body("lists", lists, keyed=True),
    Body("no length", lists, keyed=True, chunked=True),
    Body("gzip", zipped, keyed=True, headers="Content-Encoding: gzip\r\n"),
    Body("a text, a quarter", text, keyed=True, share=0.25),
    Body("lists, a quarter", lists, keyed=True, share=0.25),
    Body("tokens, a quarter", tokens, keyed=True, share=0.25),
    Body("deep, a quarter", deep, keyed=True, share=0.25),
    Body("texts to judge", texts, keyed=True, share=0.02),
]


def send(server: Server, body: Body, size: int) -> str:
    """What the server says to one body, however it ends."""
    data = body.make(int(size * body.share))
    path = server.paths[body.keyed]
    head = f"POST {path} HTTP/1.1\r\nHost: {server.host}\r\nContent-Type: application/json\r\n"
    head += server.key if body.keyed else ""
    head += "" if body.headers == "headers" else body.headers
    if body.headers != "headers":
        head += "Transfer-Encoding: chunked\r\n\r\n" if body.chunked else f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=120) as connection:
        said: list[bytes] = []
        listener = threading.Thread(target=lambda: said.append(_first_line(connection)))
        listener.start()
        with contextlib.suppress(OSError):
            connection.sendall(head.encode())
            for place in range(0, len(data), PIECE):
                piece = data[place : place + PIECE]
                connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if body.chunked else piece)
            connection.sendall(b"0\r\n\r\n" if body.chunked else b"")
        listener.join()
    return said[0].decode(errors="replace").strip() or "closed"


def _first_line(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(OSError):
        while b"\r\n\r\n" not in data.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n") and (more := connection.recv(4096)):
            data += more
    return data.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n")[0].removeprefix(b"HTTP/1.1 ")


def resident(process: int) -> float:
    """MiB of a process and its children, each at its most."""
    total = 0.0
    with contextlib.suppress(OSError, IndexError):  # it has ended
        status = Path(f"/proc/{process}/status").read_text()
        total = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        for thread in Path(f"/proc/{process}/task").iterdir():
            total += sum(resident(int(child)) for child in (thread / "children").read_text().split())
    return total


def measure(server: Server, body: Body, size: int, times: int) -> tuple[float, float, str]:
    """Longest wait of another client in seconds, memory in MiB, and what the sender was told."""
    Path(f"/proc/{server.process}/clear_refs").write_text("5")  # its most is from now on
    before = most = resident(server.process)
    longest = 0.0
    with multiprocessing.Pool(2) as pool:
        pool.map(abs, range(2))  # both have started
        sending = [pool.apply_async(send, (server, body, size)) for _ in range(times)]
        client = http.client.HTTPConnection(server.host, server.port, timeout=300)
        time.sleep(0.1)
        while not all(one.ready() for one in sending):
            began = time.perf_counter()
            client.request("GET", server.health)
            client.getresponse().read()
            longest = max(longest, time.perf_counter() - began)
            most = max(most, resident(server.process))
            time.sleep(0.005)
        client.close()
        return longest, most - before, "; ".join(sorted({one.get() for one in sending}))


def own_server() -> None:
    """A policy server as runs have it, with one open episode."""
    from rlhf_authoring.engines import ScriptedEngine
    from rlhf_authoring.models import tiny_tokenizer
    from rlhf_server.app import PolicyServer

    from rlhf_host import Episode, Sampling, Task
    from rlhf_host.plugins.manager import PluginManager
    from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
    from rlhf_host.rollouts.episodes import Episodes
    from rlhf_host.rollouts.gate import Gate

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"

    model = SampledModel(engine=Gate(ScriptedEngine(lambda ids, key: [5])), tokenizer=tokenizer)
    settings = EpisodeSettings(sampling=Sampling(max_new_tokens=64), max_tokens=4096)
    episodes = Episodes(PluginManager([]), model, settings)

    async def main() -> None:
        server = await PolicyServer.start()
        session = server.open(episodes.policy(Episode("e", "g", Task("q"))))
        server.sessions[EPISODE] = session
        print(server.url, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())


@contextlib.contextmanager
def started(name: str, folder: Path) -> Iterator[Server]:
    from rlhf_authoring.models import write_tiny_model

    rlhf = [sys.executable, "-m", "rlhf_host.cli.main"]
    model, lines = folder / "model", 1
    if name == "own":
        command = [sys.executable, __file__, "--own"]
    elif name == "view":
        (folder / "run").mkdir(exist_ok=True)
        settings = {"train": {"steps": 9}, "checkpoint": {}, "roles": {"actor": {"model": "m"}}, "data": {"sources": []}}
        (folder / "run/config.yaml").write_text(json.dumps(settings))
        (folder / "run/metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        command = [*rlhf, "view", str(folder / "run"), "--no-browser"]
    elif name == "serve":
        command, lines = [*rlhf, "serve", str(model), "--port", "0", "--rollout.max-new-tokens", "4"], 2
    else:
        (folder / "key").write_text("k" * 32)
        command = [*rlhf, "serve-reward", str(_reward_model(folder)), "--port", "0", "--key-file", str(folder / "key")]
    if not model.exists():
        write_tiny_model(model)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        try:
            assert process.stdout is not None
            told = [process.stdout.readline().strip().rpartition("=")[2] for _ in range(lines)]
            url = urlsplit(told[0])
            key = f"Authorization: Bearer {told[-1] if name == 'serve' else 'k' * 32}\r\n"
            chat, health = "/v1/chat/completions", "/health"
            paths = {
                "own": (f"/e/nobody{chat}", f"/e/{EPISODE}{chat}"),
                "view": ("/nobody/chunk/head", f"{url.path}chunk/head"),
                "serve": (chat, chat),
                "serve-reward": ("/get_reward", "/get_reward"),
            }
            assert url.hostname
            assert url.port
            health = f"{url.path}chunk/head" if name == "view" else health
            yield Server(process.pid, url.hostname, url.port, paths[name], key, health)
        finally:
            process.kill()


def _reward_model(folder: Path) -> Path:
    import torch
    from rlhf_authoring.models import tiny_tokenizer
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = tiny_tokenizer()
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=4096, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    return folder / "reward"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    servers = ("serve", "serve-reward", "own", "view")
    parser.add_argument("--server", choices=servers, nargs="*", default=servers)
    parser.add_argument("--body", default="", help="only kinds of bodies whose names begin so")
    parser.add_argument("--mib", type=int, default=60)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.own:
        own_server()
        return
    results: dict[str, dict[str, list[float]]] = {}
    for name in asked.server:
        with tempfile.TemporaryDirectory() as folder, started(name, Path(folder)) as server:
            for body in (body for body in BODIES if body.name.startswith(asked.body)):
                wait, memory, said = measure(server, body, asked.mib << 20, asked.times)
                results.setdefault(name, {})[body.name] = [round(wait, 3), round(memory)]
                print(f"{name:13} {body.name:20} waits {wait:6.3f} s, {memory:5.0f} MiB: {said}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
