"""Calls of a service of sandboxes: tried again while the service is the reason, and never with its key in a message."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rlhf_plugin_shell.sandboxes import SandboxFailed

KEY = "E2B_API_KEY"
"""Environment variable with the service's key."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 20.0
MOST_ERROR = 400
"""Most characters of an error that a message shows."""
LASTING = (
    *("AuthenticationException", "InvalidArgumentException", "NotFoundException", "SandboxNotRunningException"),
    *("NotEnoughSpaceException", "TemplateException", "CommandExitException"),
)
"""Errors of the client that another try does not change."""
REFUSED = ("RateLimitException", "ServiceBusyException")
"""Errors of the client which say that nothing was done."""
LOST = ("TimeoutException", "AuthenticationException", *REFUSED)
"""Errors of the client that are not an answer of the machine."""
MISTAKES = (TypeError, AttributeError, LookupError, NameError, AssertionError)

Result = TypeVar("Result")


class ServiceFailed(SandboxFailed):
    """A call of the service failed for good.

    Attributes:
        answered: the machine said so, and works.
        exited: a command in it ended with another exit code than 0.
    """

    def __init__(self, message: str, answered: bool = False, exited: bool = False):
        super().__init__(message)
        self.answered, self.exited = answered, exited


async def tried(what: str, call: Callable[[], Awaitable[Result]], times: int, *, repeatable: bool = True) -> Result:
    """Returns the result of a call, which is made up to ``times`` times. Raises ``ServiceFailed``.

    Args:
        what: name of the call in messages.
        repeatable: a call whose answer was lost may be made again. If not, only one that was refused is.
    """
    for number in range(1, times + 1):
        try:
            return await call()
        except MISTAKES:
            raise
        except Exception as error:  # the client passes on errors of three libraries
            if number == times or not (is_passing(error) if repeatable else is_one_of(error, REFUSED)):
                raise failed(what, error, number) from None  # the error itself may have the key
        await asyncio.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (number - 1)) * random.uniform(0.5, 1.0))
    raise ValueError(f"times is {times}; a call is made once or more")


def failed(what: str, error: Exception, number: int = 1) -> ServiceFailed:
    """Returns an error of the client as one without the key."""
    text = " ".join(f"{error}".split()) or type(error).__name__
    if key := os.environ.get(KEY):
        text = text.replace(key, "...")
    answered = is_one_of(error, ("SandboxException",)) and not is_one_of(error, LOST)
    tries = f" ({number} tries)" if number > 1 else ""
    return ServiceFailed(f"{what}: {text[:MOST_ERROR]}{tries}", answered, is_one_of(error, ("CommandExitException",)))


def is_passing(error: Exception) -> bool:
    """Returns True for an error that may be over at another try: rate limits, 5xx, lost connections and deadlines."""
    if is_one_of(error, LASTING):
        return False
    status = getattr(error, "status_code", None)
    return status is None or status in (408, 425, 429) or status >= 500


def is_one_of(error: Exception, names: tuple[str, ...]) -> bool:
    """Returns True if an error is of a class with one of these names: the client is imported where it is used."""
    return any(kind.__name__ in names for kind in type(error).__mro__)
