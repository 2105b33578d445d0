"""Weights to vLLM by its own calls for weight transfer: ``/update_weights`` tells a server where this process has them, and the
server's workers, which run ``vllm_stream``, fetch them by TCP. No group of processes is formed, so servers may come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from rlhf_engine_http.connection import Connection, NoAnswer
from rlhf_engine_http.vllm_plugin import BACKEND
from rlhf_engine_http.weights import Stored
from rlhf_host import UserError

GREETING_S = 30.0
"""Seconds in which whoever connects has to say the word."""


async def stream(connection: Connection, stored: Stored, label: str, timeout_s: float) -> int:
    """Has a server load the weights, which it calls ``label`` then. Returns the number of bytes that were sent.

    Raises:
        NoAnswer, Refusal: it did not.
        UserError: the weights cannot be sent.
    """
    workers = int((await connection.get("/get_world_size"))["world_size"])
    about = await asyncio.to_thread(_about, stored)
    word = secrets.token_hex(16)
    await connection.post("/init_weight_transfer_engine", {"init_info": {}}, timeout_s=timeout_s)
    try:
        await connection.post("/start_weight_update", timeout_s=timeout_s)
    except NoAnswer:  # to vLLM an update goes on, which the end of a run left
        await mended(connection)
        await connection.post("/start_weight_update", timeout_s=timeout_s)
    with _listening(connection.url) as listener:
        host, port, *_ = listener.getsockname()
        where = {"host": host, "port": port, "word": word, "timeout_s": timeout_s}
        what = {
            "names": [name for name, *_ in about],
            "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, *_ in about],
            "shapes": [list(shape) for *_, shape, _ in about],
        }
        sending = asyncio.ensure_future(_send(listener, word, stored))
        try:
            await connection.post("/update_weights", {"update_info": where | what}, timeout_s=timeout_s)
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            if not sending.cancelled() and (error := sending.exception()) is not None:
                raise error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
    await connection.post("/finish_weight_update", {"weight_version": label}, timeout_s=timeout_s)
    return workers * sum(size for *_, size in about)


async def mended(connection: Connection) -> None:
    """Ends an update that broke off, so that the server has weights again, whatever they are."""
    with contextlib.suppress(NoAnswer):  # it goes on, so that it need not be begun to be ended
        await connection.post("/start_weight_update")
    await connection.post("/finish_weight_update")


def unfit(backend: str | None) -> str:
    """Returns why a server with this backend for weight transfer takes no stream."""
    had = "no backend" if backend is None else f"the backend {backend}"
    return (
        f"it has {had} for weight transfer, where --engine.transfer stream needs {BACKEND} (rlhf-engine-http installed beside"
        " vLLM)"
    )


async def _send(listener: socket.socket, word: str, stored: Stored) -> None:
    """Sends the weights to each who knows the word, until it is cancelled."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as sendings:
        while True:
            place, _ = await loop.sock_accept(listener)
            sendings.create_task(_send_one(place, word.encode(), stored))


async def _send_one(place: socket.socket, word: bytes, stored: Stored) -> None:
    loop = asyncio.get_running_loop()
    with place, contextlib.suppress(OSError, TimeoutError):  # the server's own answer says what went wrong
        place.setblocking(False)
        said = b""
        async with asyncio.timeout(GREETING_S):
            while len(said) < len(word) and (part := await loop.sock_recv(place, len(word) - len(said))):
                said += part
        if not secrets.compare_digest(said, word):
            return
        weights = stored.tensors()
        while (tensor := await asyncio.to_thread(_next, weights)) is not None:
            await loop.sock_sendall(place, memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))


def _about(stored: Stored) -> list[tuple[str, torch.dtype, tuple[int, ...], int]]:
    """Returns names, types, shapes and bytes."""
    return [(name, tensor.dtype, tuple(tensor.shape), tensor.nbytes) for name, tensor in stored.tensors()]


def _next(weights: Iterator[tuple[str, Tensor]]) -> Tensor | None:
    return next((tensor for _, tensor in weights), None)


@contextlib.contextmanager
def _listening(url: str) -> Iterator[socket.socket]:
    """Listens on the address of this machine from which the server is reached, and on no other."""
    parts = urlsplit(url)
    host = str(parts.hostname)
    try:
        (family, _, _, _, to), *_ = socket.getaddrinfo(host, parts.port or 80, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as looking:
            looking.connect(to)  # sends nothing
            own: Any = looking.getsockname()
        listener = socket.create_server((own[0], 0), family=family)
    except OSError as error:
        raise UserError(f"engine http has no address that {url} could reach: {error.strerror or error}") from error
    with listener:
        listener.setblocking(False)
        yield listener
