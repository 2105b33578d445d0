"""Readers of what requests say: numbers, texts, tokens, pages of listings, the optimizer's parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf_server import ApiError

from rlhf_tinker import wire

if TYPE_CHECKING:
    from aiohttp import web

LONG_TTL_S = 10 * 366 * 86400
"""Longest life of saved weights."""
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
"""Fields of ``AdamParams`` and their defaults."""


def answer_of(value: Any) -> web.StreamResponse:
    """Returns a value as the answer to a request."""
    from aiohttp import web

    return value if isinstance(value, web.StreamResponse) else web.json_response(value)


def invalid(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", "invalid_value", param)


def whole(value: Any, name: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise invalid(name, f"a whole number from {low} to {high:,}, not {str(value)[:40]}")
    return value


def number(value: Any, name: str, low: float, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
        upper = "" if high == math.inf else f" to {high:g}"
        raise invalid(name, f"a finite number from {low:g}{upper}, not {str(value)[:40]}")
    return float(value)


def page(request: web.Request) -> tuple[int, int]:
    """Returns offset and limit of a listing."""
    values = []
    for name, usual in (("offset", 0), ("limit", 100)):
        text = request.query.get(name, str(usual))
        if not text.isascii() or not text.isdecimal() or len(text) > 9:
            raise invalid(name, "a whole number from 0")
        values.append(int(text))
    return values[0], min(values[1], 1000)


def texts(value: Any) -> dict[str, str] | None:
    """Returns a user's own texts about something. Raises ``ApiError`` for anything else."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(own, str) for own in value.values()):
        raise invalid("user_metadata", "an object of texts")
    return dict(value)


def read_ttl(body: Mapping[str, Any]) -> int | None:
    ttl = body.get("ttl_seconds")
    return None if ttl is None else whole(ttl, "ttl_seconds", 1, LONG_TTL_S)


def read_adam(body: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Returns the learning rate, and other settings of the optimizer by their names here. Raises ``ApiError`` for wrong ones."""
    params = body.get("adam_params")
    if not isinstance(params, Mapping):
        raise ApiError(400, "adam_params: an object; other optimizers are not here", "not_here", "adam_params")
    if odd := [name for name in params if name not in ADAM]:
        raise invalid(f"adam_params.{odd[0][:40]}", f"unknown; there are {', '.join(ADAM)}")
    given = {name: number(params.get(name, usual), f"adam_params.{name}", 0.0) for name, usual in ADAM.items()}
    for name in ("beta1", "beta2"):
        if given[name] >= 1:
            raise invalid(f"adam_params.{name}", "below 1")
    if given["eps"] == 0:
        raise invalid("adam_params.eps", "above 0")
    return given["learning_rate"], {
        "betas": (given["beta1"], given["beta2"]),
        "adam_eps": given["eps"],
        "weight_decay": given["weight_decay"],
        "max_grad_norm": given["grad_clip_norm"],
    }


def tokens_of(chunks: Any) -> Any:
    """Returns the tokens of a model input. Raises ``ValueError`` for pictures and sounds."""
    import numpy as np

    parts = []
    for chunk in chunks:
        if not chunk.HasField("encoded_text"):
            raise ValueError("model_input has a chunk that is no text: pictures and sounds are not here")
        parts.append(wire.tokens_of(chunk.encoded_text.tokens, "model_input"))
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
