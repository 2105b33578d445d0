"""Plays an episode of the agent ``harness`` with mini-swe-agent: its loop, its prompts and its model class. The model is the
policy, and commands run in the episode's sandbox.

    python mini_swe.py TASK.json [CONFIG ...]

CONFIG is what ``mini -c`` takes: a file, or KEY=VALUE; default: mini, with calls of a tool by litellm. It runs in an environment
that has mini-swe-agent, and needs no network: ``make setup-mini-swe``.
"""

import json
import os
import shlex
import socket
import sys
from pathlib import Path

os.environ |= {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",  # the policy has no price
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # the policy is on this machine, and what it refuses it refuses again
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm would fetch prices
}

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model
from minisweagent.utils.serialize import recursive_merge

IS_OVER = ("context_length_exceeded", "ContextWindowExceeded", "episode_budget")
"""The words of an error that ends an episode like a limit: the tests judge what is there."""


class Sandbox(LocalEnvironment):
    """Runs commands in the episode's sandbox, each in a shell of its own, as mini-swe-agent tells the model."""

    def execute(self, action, cwd="", *, timeout=None):
        lines = [f"export {name}={shlex.quote(value)}" for name, value in self.config.env.items()]
        lines += [f"cd {shlex.quote(cwd or self.config.cwd)}"] if cwd or self.config.cwd else []
        command = f"bash -c {shlex.quote(chr(10).join([*lines, action.get('command', '')]))}"
        told = self.ask({"command": command, "timeout": timeout or self.config.timeout})
        why = told.get("error") or told.get("ended") or ""
        output = {"output": told.get("output", ""), "returncode": told.get("returncode", -1), "exception_info": why}
        self._check_finished(output)
        return output

    def ask(self, request):
        with socket.socket(socket.AF_UNIX) as shell:
            shell.connect(os.environ["RLHF_SHELL"])
            shell.sendall(json.dumps(request).encode() + b"\n")
            with shell.makefile("rb") as answers:
                return json.loads(answers.readline())


def policy(settings):
    """The model class of the settings, whose server is the policy's."""
    base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    kind = settings.get("model_class", "litellm")
    if kind.startswith("litellm"):
        more = {"api_base": base, "api_key": key}
        return get_model("openai/policy", {**settings, "model_kwargs": {**settings.get("model_kwargs", {}), **more}})
    if kind.startswith("openrouter"):
        model = get_model("policy", settings)
        model._api_url, model._api_key = f"{base}/chat/completions", key
        return model
    sys.exit(f"model_class {kind}: give litellm, litellm_textbased, openrouter or openrouter_textbased")


def main(task_file, *specs):
    task = json.loads(Path(task_file).read_text())
    config = recursive_merge(*[get_config_from_spec(spec) for spec in specs or ("mini",)])
    about = {name: value for name, value in config["agent"].items() if name not in ("mode", "confirm_exit", "agent_class")}
    agent = DefaultAgent(policy(config["model"]), Sandbox(**config.get("environment", {})), **about)
    try:
        print(json.dumps(agent.run(task["prompt"]).get("exit_status")))
    except Exception as error:
        if not any(each in f"{type(error).__name__} {error}" for each in IS_OVER):
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
