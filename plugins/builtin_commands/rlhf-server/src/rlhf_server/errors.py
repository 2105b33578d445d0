"""Errors of requests."""

from __future__ import annotations

from typing import Any

from rlhf_host import EpisodeFailed, NoRoom, RunError, UserError


class ApiError(Exception):
    """An answer that is an error. ``retry``: True if the same request may succeed later; clients are told."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None, *, retry: bool = False):
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry = status, message, code, param, retry

    @property
    def headers(self) -> dict[str, str]:
        headers = {"x-should-retry": "true" if self.retry else "false"}
        return headers | ({"retry-after": "1"} if self.status == 429 else {})


def openai_form(error: ApiError) -> dict[str, Any]:
    """Returns an error in the form that OpenAI's clients read."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def invalid(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", "invalid_value", param)


def as_api_error(error: Exception, max_tokens: int) -> ApiError:
    """Returns the policy's exception as an ``ApiError``. Exceptions other than the project's own are raised again."""
    text = " ".join(str(error).removeprefix("codec: ").split())
    if isinstance(error, NoRoom):
        return ApiError(400, f"This model's maximum context length is {max_tokens} tokens: {text}", "context_length_exceeded")
    if isinstance(error, EpisodeFailed | UserError):
        return ApiError(400, text, "invalid_conversation", "messages")
    if isinstance(error, RunError):
        return ApiError(503, text, "engine_lost")
    raise error
