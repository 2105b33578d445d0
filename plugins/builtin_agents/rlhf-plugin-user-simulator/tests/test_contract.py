"""The host's contract, check by check: with a role as the user, and with a server."""

from pathlib import Path

import pytest
from rlhf_authoring import agent_contract

from rlhf_host import Task

from .users import User

TASKS = [
    Task("A table, please.", metadata={"user": {"goal": "A table.", "success": {"contains": "yes"}}}),
    Task([{"role": "system", "content": "You book tables."}], metadata={"user": "A table."}, index=1),
]
TEXTS = ("yes", "no", "For when?")
SHORT = str(Path(__file__).with_name("instructions.txt"))
"""The contract's conversations have 512 tokens, and a letter is one."""


def answer(messages, number):
    """Is done after a yes."""
    return "Thanks. [DONE]" if messages[-1]["content"] == "yes" else "A table, please."


@pytest.fixture(scope="module", autouse=True)
def reachable():
    """For the contract, whose options are made before any test."""
    with User(answer) as user, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", user.url)
        yield


TestRole = agent_contract("user_simulator", {"role": "user", "max_turns": 3, "instructions": SHORT}, tasks=TASKS, texts=TEXTS)
TestServer = agent_contract("user_simulator", {"model": "m", "max_turns": 3}, tasks=TASKS, texts=TEXTS)
