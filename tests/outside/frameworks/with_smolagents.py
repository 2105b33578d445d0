"""smolagents: an agent that calls tools, two steps; what the model says is no call, so it is told so."""

import json
import logging
import os
import sys
from pathlib import Path

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


logging.disable(logging.CRITICAL)
task = json.loads(Path(sys.argv[1]).read_text())
model = OpenAIServerModel(
    model_id=os.environ["OPENAI_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=2, verbosity_level=0)
answer = agent.run(task["prompt"])
print(json.dumps({"reward": len(str(answer)) % 5 / 4}))
