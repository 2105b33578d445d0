"""The host's contract, check by check, for both agents."""

from pathlib import Path

from rlhf_authoring import agent_contract

from rlhf_host import Task

TOOLS = Path(__file__).parent / "some_tools.py"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'

TestWithoutTools = agent_contract("multi_turn", tasks=[Task("1+1=", "2")], texts=("2", "3"))
TestTools = agent_contract(
    "multi_turn",
    {"tools": f"{TOOLS}:add", "max_turns": 3, "tool_format": "text"},
    tasks=[Task("1+2=", "3")],
    texts=(CALL, "3", "<tool_call>{", CALL.replace("add", "sub")),
)
TestRetry = agent_contract(
    "retry", {"max_turns": 3}, tasks=[Task("1+1=", "2"), Task("2+1=", "3", index=1)], texts=("2", "7", "x")
)
