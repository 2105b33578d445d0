"""Episodes in a shell with a policy that says what a test says."""

import asyncio
import sys

import pytest
from rlhf_authoring import ScriptedEngine
from rlhf_plugin_shell import ShellAgent
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_host import Advantages, Episode, Sampling, hookimpl
from rlhf_host import functional as F
from rlhf_host.installed import find
from rlhf_host.internals import Episodes, EpisodeSettings, Gate, Loaded, PluginManager, SampledModel
from rlhf_host.settings import RolloutConfig

collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]  # contained by system calls of Linux
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{%- endfor %}'
    "<|im_end|>\n{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


def byte_tokenizer():
    """One token per byte, with ChatML's special tokens and tools."""
    special = ["<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Played:
    """One episode: its row, its log, and the whole conversation as a text."""

    def __init__(self, row, episode, tokenizer):
        self.row, self.log = row, episode.events
        self.text = tokenizer.decode([token for segment in row.segments for token in segment.token_ids])

    @property
    def reward(self):
        *before, last = self.row.agent_rewards
        assert before == [None] * len(before)
        return last


@pytest.fixture
def play():
    """Plays a task: ``says`` is a list of answers, or a function of the text so far. Returns ``Played``."""

    def run(task, says, max_tokens=8000, new_tokens=2000, **options):
        agent = ShellAgent(ShellAgent.Options(**options))
        if agent.options.format == "auto":
            agent.format = "native"
        tokenizer = byte_tokenizer()
        answers = iter(says) if isinstance(says, list) else None

        def script(ids, key):
            said = says(tokenizer.decode(ids)) if answers is None else next(answers)
            return [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]

        async def main():
            manager = PluginManager([Loaded("agent", "shell", find("agent", "shell"), agent)])
            model = SampledModel(engine=Gate(ScriptedEngine(script)), tokenizer=tokenizer)
            rollout = RolloutConfig(episode_retries=0, episode_timeout_s=100)
            settings = EpisodeSettings(sampling=Sampling(max_new_tokens=new_tokens), max_tokens=max_tokens, rollout=rollout)
            episode = Episode("e", "g", task)
            try:
                [row] = await Episodes(manager, model, settings).play(episode)
                return Played(row, episode, tokenizer)
            finally:
                manager.close()

        return asyncio.run(main())

    return run


class Learner:
    """RLOO in few lines: these tests run where no algorithm is installed."""

    @hookimpl
    def needs(self):
        return F.policy_needs(F.PolicyLossOptions(), min_group_size=2)

    @hookimpl
    def compute_advantages(self, experience):
        values = F.leave_one_out(experience.rewards, experience.group_id, experience.episode_id)
        return Advantages(F.on_actions(values, experience.action_mask))

    @hookimpl
    def compute_loss(self, outputs, batch):
        return F.policy_loss(outputs, batch, F.PolicyLossOptions())


@pytest.fixture
def learner():
    return Learner()
