"""Plugins that play and judge, and a manager of them, for the tests of rollouts."""

from rlhf_host import EpisodeFailed, Reward, Step, Trajectory, hookimpl
from rlhf_host.extensions.single_turn import SingleTurn
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.records.episodes import Segment

INFO = PluginInfo("reward", "made_up", "made-up", "1", ">=1", "ok", "", "m:X", "")


class Length:
    """The reward is how much was said."""

    @hookimpl
    def score(self, trajectories):
        return [Reward(float(t.action_length), score=float(t.action_length > 2)) for t in trajectories]


def load(*plugins, agent=None, weights=None, threads=True):
    """A manager of these. Without ``threads`` hooks run on the loop, as ``virtual_time`` needs it."""
    loaded = [Loaded("agent", "single_turn", INFO, agent or SingleTurn(None))]
    for number, plugin in enumerate(plugins):
        kind = "reward" if hasattr(plugin, "score") else "extension"
        loaded.append(Loaded(kind, f"p{number}", INFO, plugin, (weights or {}).get(number, 1.0)))
    return PluginManager(loaded, threads=threads)


class Guess:
    """Three turns: hints until the third guess; some episodes fail."""

    def __init__(self, fails=0, retryable=True):
        self.fails, self.retryable = fails, retryable
        self.opened, self.closed = [], []

    @hookimpl
    def agent_reset(self, episode):
        self.opened.append(episode.episode_id)
        if self.fails:
            self.fails -= 1
            raise EpisodeFailed("sandbox lost", retryable=self.retryable)
        return Step("go:")

    @hookimpl
    def agent_step(self, episode, action):
        return Step("try again ", reward=0.25) if episode.turn < 2 else Step(reward=1.0, done=True, score=1.0)

    @hookimpl
    def agent_close(self, episode):
        self.closed.append(episode.episode_id)


class Own:
    """One answer to the prompt ``5, 6``, sampled as ``asked`` of the run's settings."""

    def __init__(self, asked=lambda sampling: None, prompt=(5, 6), more=()):
        self.asked, self.prompt, self.more = asked, list(prompt), list(more)
        self.closed = []

    @hookimpl
    async def agent_run(self, episode, policy):
        answer = await policy.generate(self.prompt, self.asked(policy.sampling))
        segments = [Segment("prompt", self.prompt), Segment("action", answer.token_ids, answer.logprobs, answer.versions)]
        segments += [Segment("observation", self.more)] if self.more else []
        return [Trajectory(episode.episode_id, episode.group_id, episode.task, segments, agent_rewards=[1.0])]

    @hookimpl
    def agent_close(self, episode):
        self.closed.append(episode.episode_id)
