"""Environments as people write them for TRL, OpenRLHF and this host."""

import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor

from rlhf_host import Step, hookimpl

OPEN = []


class Counter:
    """As of TRL's documentation: reset, tools, get_reward."""

    def __init__(self):
        self.count = None
        OPEN.append(self)

    def reset(self, start, **columns) -> str:
        self.count = start
        self.columns = columns
        return f"{start}+1="

    def increment(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: How much.

        Returns:
            The new count.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count == 3)

    def close(self):
        OPEN.remove(self)

    def _hidden(self):
        raise AssertionError


class Judged:
    """Without a reward of its own."""

    async def reset(self):
        return None

    async def look(self) -> str:
        """Looks.

        Returns:
            What it sees.
        """
        return "nothing"


class AgentInstance(AgentInstanceBase):
    """As of OpenRLHF's examples: feedback until the answer is right, or the third."""

    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states: dict, **kwargs):
        self.prompt = states["observation"]
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.turns += 1
        assert states["observation_text"].startswith(self.prompt)
        right = str(states["label"]) in states["action_text"]
        done = right or self.turns == 3
        states["sampling_params"].max_tokens = 4
        return {
            "rewards": torch.tensor(float(right)),
            "scores": torch.tensor([float(right)]),
            "environment_feedback": "" if done else " - " + self.prompt,
            "done": done,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"turns": torch.tensor(self.turns)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)


class Late(AgentInstance):
    """Form that the pages of OpenRLHF print: an async ``__init__``."""

    async def __init__(self, *args, **kwargs):
        self.turns = 0


class Patient(Late):
    """Leaves each answer all the room that there is."""

    async def step(self, states: dict, **kwargs):
        told = await super().step(states)
        told["sampling_params"].max_tokens = 100
        return told


class LateExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Late)


class Older(AgentExecutorBase):
    """Form that the pages of OpenRLHF up to 0.9.2 print."""

    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(Patient, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)


class OlderOwn(Older):
    """An ``execute`` of its own that asks twice."""

    async def execute(self, prompt, label, sampling_params):
        ids = self.hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        for _ in range(2):
            sampling_params.max_tokens = 3
            output = (await self.generate(ids, sampling_params)).outputs[0]
            ids = ids + output.token_ids
        logs = {"room": self.max_length}
        await self.result_queue.put(
            {"observation_tokens": ids, "reward": torch.tensor([0.5]), "scores": 0.25, "extra_logs": logs}
        )


class Silent(Older):
    async def execute(self, prompt, label, sampling_params):
        await self.generate(self.hf_tokenizer(prompt, add_special_tokens=False)["input_ids"], sampling_params)


class Stranger(Older):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue, server):
        super().__init__(max_steps, max_length, llm_engine, hf_tokenizer, result_queue)


class Deaf(Older):
    def __init__(self, max_steps):
        pass


class Own(AgentExecutorBase):
    """An execute of its own."""

    spoils = False

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        ids = hf_tokenizer(text=prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        sampling_params.max_tokens = min(5, max_length - len(ids))
        out = (await llm_engine.generate(ids, sampling_params)).outputs[0]
        assert [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)]
        seen = ids + out.token_ids
        right = float(str(label) in out.text)
        tokens = [0, *seen] if self.spoils else seen
        return {"observation_tokens": tokens, "action_ranges": [(len(ids), len(seen))], "reward": right, "scores": right}


class Spoiled(Own):
    spoils = True


async def play(episode, policy):
    answer = await policy.generate(episode.task.prompt_ids)
    return float(len(answer.token_ids))


async def talk(task, base_url, api_key):
    return 1.0


class Hooks:
    @hookimpl
    def agent_reset(self, episode):
        return Step()

    @hookimpl
    def agent_step(self, episode, action):
        return Step(reward=0.25, done=True)


class Nothing:
    pass
