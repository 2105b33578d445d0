"""What a request asks of the sampling, and what of it the run does not follow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rlhf_host.records.episodes import Sampling
from rlhf_host.serving.errors import invalid
from rlhf_host.serving.limits import Limits

REFUSED = {
    "functions": "use tools",
    "function_call": "use tools",
    "audio": "this policy reads text",
    "prediction": "not supported",
    "echo": "not supported",
    "suffix": "not supported",
    "best_of": "use n",
    "use_beam_search": "tokens come from the run's own distribution",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        "tokens come from the run's own distribution",
    ),
}
"""Parameters that would change what the answer means."""
DISTRIBUTION: dict[str, tuple[float, float]] = {
    "temperature": (0, 10),
    "top_p": (1e-6, 1),
    "top_k": (0, 1 << 20),
    "min_p": (0, 1),
}
"""Parameters of the distribution, with their ranges."""
LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def sampling_of(body: Mapping[str, Any], run: Sampling, limits: Limits, *, free: bool = False) -> Sampling:
    """The run's sampling with the request's length and stops, and where it is ``free`` its distribution too. Raises ``ApiError``
    for what cannot be followed."""
    for name, way in REFUSED.items():
        if body.get(name) not in (None, False):
            raise invalid(name, way)
    if body.get("top_logprobs"):
        raise invalid("top_logprobs", "only the sampled token's log-probability is known")
    length = run.max_new_tokens
    for name in LENGTHS:
        if (value := integer(body, name, 1)) is not None:
            length = min(length, value)
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops) or len(stops) > limits.stops:
        raise invalid("stop", f"a text, or at most {limits.stops} texts")
    sampling = replace(run, max_new_tokens=length, stop=tuple(stops))
    if not free:
        return sampling
    given = {name: number(body, name, least, most) for name, (least, most) in DISTRIBUTION.items()}
    return replace(sampling, **{name: value for name, value in given.items() if value is not None})


def ignored_in(body: Mapping[str, Any], run: Sampling, known: Collection[str], *, free: bool = False) -> list[str]:
    """The request's parameters that have no effect. Values equal to the run's are none of them."""
    same: dict[str, Any] = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k, "min_p": run.min_p}
    same |= {"tool_choice": "auto", "store": False, "parallel_tool_calls": True, "response_format": {"type": "text"}}
    followed = {*known, *LENGTHS, "stop", "n", "model", "stream", "stream_options", "logprobs", "metadata", *REFUSED}
    followed |= {"top_logprobs", "return_token_ids", "return_tokens_as_token_ids"}
    followed |= DISTRIBUTION.keys() if free else set()
    given = [name for name, value in body.items() if value is not None and name not in followed]
    odd = [name for name in given if name not in same or body[name] != same[name]]
    return [name if name.isidentifier() and name.isascii() and len(name) < 40 else "other" for name in odd[:50]]


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a stream ends with the usage. Raises ``ApiError`` for options that are no object."""
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise invalid("stream_options", "an object")
    return bool(options.get("include_usage"))


def number(body: Mapping[str, Any], name: str, least: float, most: float) -> Any:
    """Raises ``ApiError`` for another value than a number of this range; ``top_k`` is an integer."""
    value = body.get(name)
    kinds = int if name == "top_k" else int | float
    if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most):
        raise invalid(name, f"a number from {least:g} to {most:g}, not {value!r}")
    return value


def integer(body: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    """Raises ``ApiError`` for another value than an integer of this range."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise invalid(name, f"an integer from {least}" + (f" to {most}" if most is not None else "") + f", not {value!r}")
    return value
