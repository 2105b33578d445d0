"""A real, tiny reward model judges as transformers' own forward pass does, whatever shares its batch."""

import asyncio
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rlhf_authoring.models import SYMBOLS, write_tiny_model
from rlhf_plugin_reward_model import RewardModel
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_host import Group, Needs, ScoreContext, Segment, Task, Trajectory, UserError
from rlhf_host.cli.main import main
from rlhf_host.config.schema import RoleConfig, RolloutConfig, TrainConfig
from rlhf_host.models.loading import context_length, load_model, load_tokenizer
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.rollouts.experience import apply_rewards, make_experience
from rlhf_host.rollouts.scoring import judges, score_group
from rlhf_host.runtimes.compute import Inline
from rlhf_host.runtimes.local_runtime import LocalTrainer
from rlhf_host.training.role import Role
from rlhf_host.training.role_handles import TrainerRole
from rlhf_host.training.worker import Worker

CHAT = "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}<eos>{% endfor %}"


def write_reward_model(directory: Path, symbols: list[str], template: str | None = None) -> Path:
    """A random Llama with a scalar head over characters."""
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = template
    config = LlamaConfig(
        vocab_size=len(symbols), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = LlamaForSequenceClassification(config)
        model.score.weight.data.normal_()  # scores of size 1, as trained models have them
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def same(tmp_path_factory) -> Path:
    """The policy's vocabulary and one token more."""
    return write_reward_model(tmp_path_factory.mktemp("same") / "reward", [*SYMBOLS, "|"])


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Another vocabulary, with a chat template."""
    return write_reward_model(tmp_path_factory.mktemp("other") / "reward", SYMBOLS[::-1], CHAT)


class Watched(TrainerRole):
    """Keeps the rows of every pass."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.passes: list[list[Trajectory]] = []

    async def scores(self, trajectories):
        self.passes.append(list(trajectories))
        return await super().scores(trajectories)


def role_of(path: Path, budget: int = 16384) -> Watched:
    settings = RoleConfig(model=str(path), device="cpu")
    model = load_model(settings, head="scalar")
    train = TrainConfig(max_tokens_per_microbatch=budget)
    worker = Worker({"reward": Role.of("reward", model, train)}, PluginManager([]), train, Needs())
    return Watched(LocalTrainer(worker, Inline()), "reward", settings, context_length(model), temperature=1.0)


@pytest.fixture
def groups(policy) -> list[list[Trajectory]]:
    """Three groups of three, of 1 to 20 tokens after prompts of several lengths."""
    tokenizer = load_tokenizer(RoleConfig(model=str(policy)))
    made = []
    for number, prompt in enumerate(["1+1=", "what is a house?", "a"]):
        ids = tokenizer(prompt)["input_ids"]
        texts = ["2", "a bird" * (number + 1), "no. " * 5]
        made.append(
            [
                Trajectory(
                    f"{number}-{sample}", str(number), Task(prompt, index=number),
                    [Segment("prompt", ids), Segment("action", tokenizer(text)["input_ids"])],
                    sample=sample, decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
                )
                for sample, text in enumerate(texts)
            ]
        )  # fmt: skip
    return made


def ids_of(row: Trajectory) -> list[int]:
    return [token for segment in row.segments for token in segment.token_ids]


def by_transformers(path: Path, ids: list[int]) -> float:
    """The model's own forward pass over one row."""
    model = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def judge(role: TrainerRole, *groups: list[Trajectory], split="train", **options) -> list[list[float | None]]:
    """Each group's rewards, asked for at once."""
    plugin = RewardModel(RewardModel.Options(**options))
    context = ScoreContext(split, 1, {"reward": role})

    async def ask():
        return await asyncio.gather(*(plugin.score(group, context) for group in groups))

    return [[None if reward is None else reward.total for reward in rewards] for rewards in asyncio.run(ask())]


def start(role: TrainerRole, policy: Path, config=(), **options) -> None:
    tokenizer = load_tokenizer(RoleConfig(model=str(policy)))
    plugin = RewardModel(RewardModel.Options(**options))
    plugin.check_run(dict(config), {"actor": tokenizer, "reward": role.tokenizer})


# --- what the model says ------------------------------------------------------------------------


def test_the_reward_is_the_scalar_head_at_the_last_token(same, groups):
    found = judge(role_of(same), *groups)
    for group, rewards in zip(groups, found, strict=True):
        assert rewards == pytest.approx([by_transformers(same, ids_of(row)) for row in group], abs=1e-5)
    assert statistics.pstdev(reward for rewards in found for reward in rewards) > 0.1


@pytest.mark.parametrize("budget", [1, 30, 100, 16384])
@pytest.mark.parametrize("template", ["same_tokens", "text"])
def test_what_shares_a_batch_changes_nothing(same, groups, budget, template):
    role = role_of(same, budget)
    alone = [[judge(role, [row], template=template)[0][0] for row in group] for group in groups]
    together = judge(role, *groups, template=template)
    backwards = judge(role, *[group[::-1] for group in groups[::-1]], template=template)
    for i in range(3):
        assert together[i] == pytest.approx(alone[i], abs=1e-5)
        assert backwards[-1 - i][::-1] == pytest.approx(alone[i], abs=1e-5)


def test_groups_that_finish_together_share_a_pass_and_later_ones_the_next(same, groups):
    role = role_of(same)
    plugin = RewardModel(RewardModel.Options())
    context = ScoreContext(roles={"reward": role})

    async def ask():
        first = [asyncio.create_task(plugin.score(group, context)) for group in groups[:2]]
        while not role.passes:
            await asyncio.sleep(0)
        late = [asyncio.create_task(plugin.score(group, context)) for group in (groups[2], groups[0])]
        return await asyncio.gather(*first, *late)

    rewards = asyncio.run(ask())
    assert [len(rows) for rows in role.passes] == [6, 6]
    assert [reward.total for reward in rewards[3]] == pytest.approx([reward.total for reward in rewards[0]], abs=1e-5)


def test_who_gives_up_or_fails_takes_nobody_along(same, groups):
    role = role_of(same)
    plugin = RewardModel(RewardModel.Options())
    context = ScoreContext(roles={"reward": role})
    broken = [Trajectory("b", "b", Task("x"), [Segment("prompt", [10_000]), Segment("action", [1])])]

    async def ask():
        given_up, kept = (asyncio.create_task(plugin.score(group, context)) for group in groups[:2])
        await asyncio.sleep(0)
        given_up.cancel()
        rewards = await kept
        with pytest.raises(IndexError):
            await plugin.score(broken, context)
        return rewards, await plugin.score(groups[2], context)

    first, after = asyncio.run(ask())
    assert [len(rows) for rows in role.passes] == [3, 1, 3]
    assert None not in [*first, *after]


# --- what the model reads -----------------------------------------------------------------------


def test_chat_fills_in_the_models_own_template(other, groups):
    tokenizer = load_tokenizer(RoleConfig(model=str(other)))
    role = role_of(other)
    (rewards,) = judge(role, groups[1], template="chat")
    wanted = [
        tokenizer(f"[u]what is a house?<eos>[a]{answer}<eos>")["input_ids"] for answer in ("2", "a birda bird", "no. " * 5)
    ]
    assert [ids_of(row) for row in role.passes[0]] == wanted
    assert rewards == pytest.approx([by_transformers(other, ids) for ids in wanted], abs=1e-5)


def test_chat_keeps_a_conversation(other, groups):
    row = groups[0][0]
    row.task = Task([{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}])
    role = role_of(other)
    judge(role, [row], template="chat")
    assert (
        load_tokenizer(RoleConfig(model=str(other))).decode(ids_of(role.passes[0][0]))
        == "[s]be brief<eos>[u]1+1?<eos>[a]2<eos>"
    )


def test_text_is_prompt_and_completion_with_the_turns_in_order(other, groups):
    tokenizer, row = load_tokenizer(RoleConfig(model=str(other))), groups[0][0]
    row.segments += [Segment("observation", row.segments[0].token_ids), Segment("action", row.segments[1].token_ids)]
    role = role_of(other)
    (rewards,) = judge(role, [row], template="text")
    assert ids_of(role.passes[0][0]) == tokenizer("1+1=21+1=2")["input_ids"]
    assert rewards == pytest.approx([by_transformers(other, tokenizer("1+1=21+1=2")["input_ids"])], abs=1e-5)


def test_a_completion_that_begins_another_is_all_prompt_and_still_judged(same, groups):
    short, long = groups[0][0], groups[0][1]
    long.segments[1] = Segment("action", short.segments[1].token_ids * 3)
    found = judge(role_of(same), [short, long], template="text")[0]
    assert found == pytest.approx([by_transformers(same, ids_of(row)) for row in (short, long)], abs=1e-5)


def test_tokens_that_mean_something_else_are_refused(policy, same, other):
    start(role_of(same), policy)
    with pytest.raises(UserError, match=r"another vocabulary than the policy .* set template to chat or text"):
        start(role_of(other), policy)
    start(role_of(other), policy, template="chat")
    start(role_of(other), policy, template="text")


def test_chat_needs_a_template(policy, same):
    with pytest.raises(UserError, match="no chat template: set template to text"):
        start(role_of(same), policy, template="chat")


def test_two_different_models_are_refused(policy, same):
    with pytest.raises(UserError, match="give one of them"):
        start(role_of(same), policy, {"roles": {"reward": {"model": "elsewhere"}}}, model=str(same))
    start(role_of(same), policy, {"roles": {"reward": {"model": str(same)}}}, model=str(same))


# --- what cannot be judged ----------------------------------------------------------------------


def test_trajectories_that_are_too_long_are_not_judged_and_said(same, groups, caplog):
    groups[1][1].segments[1] = Segment("action", [5] * 60)  # 76 tokens, and the model has 64 positions
    (rewards,) = judge(role_of(same), groups[1])
    assert [reward is None for reward in rewards] == [False, True, False]
    assert "76 tokens are more than the limit of 64" in caplog.text
    (rewards,) = judge(role_of(same), groups[1], max_tokens=17)
    assert [reward is None for reward in rewards] == [False, True, True]
    assert judge(role_of(same), groups[1], max_tokens=1) == [[None, None, None]]


def test_a_number_that_is_not_finite_is_no_reward(same, groups):
    role = role_of(same)
    role._trainer.worker.roles["reward"].passes.model.score.weight.data[0, 3] = math.nan
    assert judge(role, groups[0]) == [[None, None, None]]


def test_a_trajectory_without_tokens_is_not_judged(same, groups):
    del groups[0][1].segments[1:]
    assert [reward is None for reward in judge(role_of(same), groups[0])[0]] == [False, True, False]


def test_the_score_is_a_sigmoid_on_request(same, groups):
    context = ScoreContext(roles={"reward": role_of(same)})
    for option in ("none", "sigmoid"):
        plugin = RewardModel(RewardModel.Options(score=option))
        for reward in asyncio.run(plugin.score(groups[0], context)):
            assert reward.score == (None if option == "none" else pytest.approx(1 / (1 + math.exp(-reward.total))))


# --- normalisation ------------------------------------------------------------------------------


def train_batch(role: TrainerRole, groups, *plugins: tuple[str, RewardModel, float]):
    """Score the groups and make the batch, as a step does; gives the experience after ``transform_rewards``."""
    info = PluginInfo("reward", "reward_model", "rlhf-plugin-reward-model", "1", ">=1", "ok", "", "m:X", "")
    manager = PluginManager([Loaded("reward", alias, info, plugin, weight) for alias, plugin, weight in plugins])
    by, context = judges(manager, "train"), ScoreContext(roles={"reward": role})

    async def ask():
        await asyncio.gather(*(score_group(manager, by, group, context, RolloutConfig()) for group in groups))

    asyncio.run(ask())
    records = [Group(rows[0].group_id, rows[0].task, rows) for rows in groups]
    weights = {alias: weight for alias, _, weight in plugins}
    experience = make_experience(records, weights, step=1, max_new_tokens=20, temperature=1.0)
    apply_rewards(experience, manager)
    return experience


def test_running_counts_every_trajectory_so_far(same, groups):
    plugin = RewardModel(RewardModel.Options(normalize="running"))
    role, seen = role_of(same), []
    for part in (groups[:1], groups[1:], groups[:2]):
        batch = train_batch(role, part, ("helpful", plugin, 0.5))
        raw = batch.plugin_rewards[:, 0].tolist()
        seen += raw
        mean, deviation = statistics.fmean(seen), statistics.pstdev(seen)
        assert batch.rewards.tolist() == pytest.approx([0.5 * (x - mean) / deviation for x in raw], abs=1e-5)
        assert raw == pytest.approx([row.rewards["helpful"].total for rows in part for row in rows]), (
            "records keep what was said"
        )
        assert torch.allclose(batch.token_rewards.sum(-1), batch.rewards, atol=1e-5)


@pytest.mark.parametrize("normalize", ["running", "batch"])
def test_an_episode_of_several_trajectories_counts_once(same, groups, normalize):
    plugin = RewardModel(RewardModel.Options(normalize=normalize))
    together = [dataclasses.replace(row, episode_id="one", row=number) for number, row in enumerate(groups[0])]
    batch = train_batch(role_of(same), [together, *groups[1:]], ("helpful", plugin, 1.0))
    raw, count = batch.plugin_rewards[:, 0].tolist(), len(together)
    each = [statistics.fmean(raw[:count]), *raw[count:]]
    mean, deviation = statistics.fmean(each), statistics.pstdev(each)
    assert batch.rewards.tolist() == pytest.approx([(x - mean) / deviation for x in raw], abs=1e-5)


def test_running_statistics_are_those_of_training_and_survive_a_checkpoint(same, groups):
    role, options = role_of(same), RewardModel.Options(normalize="running")
    first = RewardModel(options)
    train_batch(role, groups[:2], ("reward_model", first, 1.0))
    state = json.loads(json.dumps(first.state_dict()))
    asyncio.run(first.score(groups[2], ScoreContext("eval", roles={"reward": role})))
    assert first.state_dict() == state
    again = RewardModel(options)
    again.load_state_dict(state)
    goes_on = train_batch(role, groups[2:], ("reward_model", first, 1.0)).rewards
    resumed = train_batch(role, groups[2:], ("reward_model", again, 1.0)).rewards
    assert torch.equal(goes_on, resumed)
    fresh = train_batch(role, groups[2:], ("reward_model", RewardModel(options), 1.0)).rewards
    assert not torch.allclose(fresh, resumed)


def test_batch_and_clip(same, groups):
    plugin = RewardModel(RewardModel.Options(normalize="batch", clip=1.0))
    batch = train_batch(role_of(same), groups, ("reward_model", plugin, -2.0))
    raw = batch.plugin_rewards[:, 0].tolist()
    mean, deviation = statistics.fmean(raw), statistics.pstdev(raw)
    expected = [-2 * min(max((x - mean) / deviation, -1.0), 1.0) for x in raw]
    assert batch.rewards.tolist() == pytest.approx(expected, abs=1e-5)
    assert {2.0, -2.0} & {round(x, 5) for x in expected}, "something was cut"
    assert plugin.state_dict()["count"] == 0


@pytest.fixture
def measured(tmp_path):
    """A reward model whose file has mean and std, as OpenRLHF writes them."""
    model = write_reward_model(tmp_path / "measured", [*SYMBOLS, "|"])
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "mean": 0.75, "std": 2.5, "normalize_reward": True}))
    return model


def test_the_models_own_mean_and_std(measured, policy, groups):
    plugin = RewardModel(RewardModel.Options(model=str(measured), normalize="file", clip=3.0))
    role = role_of(measured)
    plugin.check_run({}, {"actor": load_tokenizer(RoleConfig(model=str(policy))), "reward": role.tokenizer})
    batch = train_batch(role, groups, ("reward_model", plugin, 2.0))
    expected = [2 * min(max((x - 0.75) / 2.5, -3.0), 3.0) for x in batch.plugin_rewards[:, 0].tolist()]
    assert batch.rewards.tolist() == pytest.approx(expected, abs=1e-6)
    assert len({round(abs(x), 6) for x in expected}) > 2, "not all were cut"


@pytest.mark.parametrize(
    "numbers", [{}, {"mean": 1.0}, {"mean": 1.0, "std": 0.0}, {"mean": "1", "std": 1.0}, {"mean": math.nan, "std": 1}]
)
def test_a_model_without_them_is_refused(measured, policy, numbers):
    config = json.loads((measured / "config.json").read_text())
    rest = {name: value for name, value in config.items() if name not in ("mean", "std")}
    (measured / "config.json").write_text(json.dumps({**rest, **numbers}))
    with pytest.raises(UserError, match="does not have the mean of its scores and their std above 0"):
        start(role_of(measured), policy, model=str(measured), normalize="file")


def test_a_model_whose_numbers_are_not_used_is_named(measured, policy, caplog):
    start(role_of(measured), policy, model=str(measured))
    assert "scores have mean 0.75 and std 2.5: normalize file uses that" in caplog.text
    caplog.clear()
    start(role_of(measured), policy, model=str(measured), normalize="running")
    assert not caplog.text


def test_equal_rewards_normalise_to_zero(same, groups):
    row = groups[0][0]
    for option in ("running", "batch"):
        plugin = RewardModel(RewardModel.Options(normalize=option))
        assert train_batch(role_of(same), [[row]], ("reward_model", plugin, 1.0)).rewards.abs().max() < 1e-6


def test_each_of_several_finds_its_own_column(same, groups):
    plain, normal = RewardModel(RewardModel.Options()), RewardModel(RewardModel.Options(normalize="batch"))
    batch = train_batch(role_of(same), groups, ("plain", plain, 2.0), ("normal", normal, 1.0))
    raw = batch.plugin_rewards[:, 0].double()
    expected = 2 * raw + (raw - raw.mean()) / raw.std(correction=0)
    assert torch.allclose(batch.rewards.double(), expected, atol=1e-5)


# --- the command line ---------------------------------------------------------------------------


@pytest.fixture
def flags(policy, tmp_path) -> list[str]:
    """A run of 2 prompts × 4 samples × 8 tokens."""
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "label": str(2 * i)}) + "\n" for i in range(8)))
    flags = [
        "train",
        "--algo",
        "rloo",
        "--reward",
        "reward_model",
        "--actor.model",
        policy,
        "--actor.lr",
        "1e-3",
        "--data",
        prompts,
    ]
    flags += ["--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "2", "--train.threads", "1"]
    return [str(flag) for flag in flags]


def rlhf(*arguments: str | Path, code: int = 0) -> str:
    """The real command; gives what it said."""
    command = [sys.executable, "-m", "rlhf_host.cli.main", *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rlhf_here(*arguments: str | Path, code: int = 0) -> str:
    """The same in this process, where starting costs nothing."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_a_run_trains_on_a_reward_model_and_resumes_its_statistics(flags, other, tmp_path):
    run_dir = tmp_path / "run"
    chosen = ["--reward.reward_model.template", "chat", "--reward.reward_model.normalize", "running"]
    rlhf(*flags, "--run-dir", run_dir, "--roles.reward.model", other, *chosen, "--train.steps", "2")
    rlhf_here("train", "--resume", run_dir, "--train.steps", "3")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["rollout/unjudged"] == 0 and math.isfinite(row["reward/reward_model"]) for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    saved = torch.load(run_dir / "checkpoints" / "step-000003" / "trainer.pt", weights_only=True)
    assert saved["plugins"]["reward:reward_model"]["count"] == 3 * 2 * 4


def test_the_model_may_be_an_option_of_the_plugin(flags, same, tmp_path):
    rlhf_here(*flags, "--run-dir", tmp_path / "run", "--reward.reward_model.model", same, "--train.steps", "1")
    assert (tmp_path / "run" / "model").exists()


def test_what_cannot_judge_is_refused_in_one_line(flags, policy, other, tmp_path):
    flags += ["--run-dir", str(tmp_path / "run")]
    assert "the role 'reward' has no model: give --reward-model.model PATH" in rlhf_here(*flags, code=2)
    said = rlhf_here(*flags, "--roles.reward.model", policy, code=2)
    assert "has no scalar head, and a frozen role cannot learn one: give a reward or value model" in said
    assert "another vocabulary than the policy" in rlhf_here(*flags, "--roles.reward.model", other, code=2)
    (tmp_path / "RM_RUN").mkdir()
    (tmp_path / "RM_RUN" / "model").symlink_to(other)
    said = rlhf_here(*flags, "--reward-model.model", tmp_path / "RM_RUN", code=2)
    assert f"has no config.json: the model of this run is {tmp_path / 'RM_RUN' / 'model'}" in said
