"""A critic through the real command line: where its head comes from, what it learns, that it is saved and resumed exactly."""

import json
import shutil

import pytest
import torch
from rlhf_authoring.models import SYMBOLS
from ruamel.yaml import YAML
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM, LlamaConfig
from transformers import LlamaForSequenceClassification as RewardModel

from rlhf_host.config.run_dir import config_yaml
from rlhf_host.config.schema import RoleConfig, RunConfig
from rlhf_host.config.yaml_file import plain, read_yaml
from rlhf_host.errors import UserError
from rlhf_host.models.loading import load_model
from rlhf_host.models.passes import Passes
from rlhf_host.records.needs import Needs, RoleNeed
from rlhf_host.training.role_settings import role_settings

MACHINE = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")


@pytest.fixture
def train(rlhf_here, small_run, tmp_path):
    """PPO in this process; gives the rows of metrics.jsonl and the run directory."""

    def run(*flags, code=0):
        run_dir = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        result = rlhf_here(*small_run, "--algo", "ppo", "--run-dir", run_dir, "--train.steps", "2", *flags)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return (curve(run_dir) if code == 0 else []), run_dir, result.output

    return run


def curve(run_dir):
    """The rows of ``metrics.jsonl`` without what measures this machine."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(MACHINE)} for row in rows]


def weights(directory):
    return load_file(directory / "model.safetensors")


def critic_of(run_dir, step):
    return weights(run_dir / "checkpoints" / f"step-{step:06d}" / "roles" / "critic")


@pytest.fixture
def reward_model(tiny_model, tmp_path):
    """A reward model directory as transformers writes it, with a head that is not zero and the policy's tokenizer."""
    config = LlamaConfig.from_pretrained(tiny_model, num_labels=1)
    torch.manual_seed(5)
    model = RewardModel(config)
    model.score.weight.data.normal_()
    model.save_pretrained(tmp_path / "reward-model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "reward-model")
    return tmp_path / "reward-model"


def test_a_new_head_on_the_actors_model_learns_at_its_own_rate(train, tiny_model):
    rows, run_dir, _ = train("--train.steps", "3", "--critic.lr", "1e-2", "--checkpoint.every", "1")
    assert [row["critic/lr"] for row in rows] == [1e-2] * 3
    assert [row["lr"] for row in rows] == [1e-3] * 3
    assert rows[0]["critic/value"] == 0.0
    assert rows[1]["critic/value"] != 0.0
    # 0.5·V² at V = 0 of returns G: half their mean square.
    assert rows[0]["critic/loss"] == rows[0]["critic/loss/value"] > 0
    assert rows[0]["critic/grad_norm"] > 0
    before, after = weights(tiny_model), critic_of(run_dir, 3)
    assert after["score.weight"].shape == (1, 32)
    assert "lm_head.weight" not in after
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])


def test_the_learning_rate_is_the_algorithms_unless_the_configuration_sets_one(train):
    rows, run_dir, _ = train("--train.steps", "1", "--critic.warmup-steps", "0")
    assert rows[0]["critic/lr"] == 1e-5
    assert plain(read_yaml(run_dir / "config.yaml"))["roles"]["critic"]["lr"] is None


def test_a_rate_of_the_algorithm_survives_a_printed_configuration():
    """The whole configuration is printed and saved: a default in it must not come back as somebody's choice."""
    need = RoleNeed("critic", head="scalar", trainable=True, lr=1e-5)
    config = RunConfig(roles={"actor": RoleConfig(model="m"), "critic": RoleConfig(model="c")})
    for again in (config, RunConfig.model_validate(YAML(typ="safe").load(config_yaml(config)))):
        assert role_settings(again.roles, need, None, Needs()).peak_lr == 1e-5
        assert role_settings(again.roles, RoleNeed("critic"), None, Needs()).peak_lr == 1e-6
    config.roles["critic"].lr = 1e-6
    assert role_settings(config.roles, need, None, Needs()).peak_lr == 1e-6


@pytest.mark.parametrize("flag", ["--critic.model", "--reward-model.model"])
def test_a_reward_models_head_is_where_the_critic_starts(train, reward_model, flag):
    """Given as the critic's own model, or as that of the role ``reward``."""
    frozen = ("--critic.lr", "0", "--algo.critic-from", "reward")
    _, run_dir, output = train(flag, reward_model, *frozen, "--train.steps", "1")
    assert "no chosen plugin needs it" not in output
    start, saved = weights(reward_model), critic_of(run_dir, 1)
    assert start.keys() == saved.keys()
    assert all(torch.equal(start[name], saved[name]) for name in start)


def test_the_source_may_have_its_model_from_a_plugin():
    """``reward`` starts from what the reward plugin's own option says; the configuration comes first."""
    config = RunConfig(roles={"actor": RoleConfig(model="m", revision="v2", trust_remote_code=True)})
    reward = RoleNeed("reward", head="scalar", source="judge")
    critic = RoleNeed("critic", head="scalar", trainable=True, source="reward")
    needs = Needs(roles=(RoleNeed("actor", trainable=True, source=None), reward, critic))
    assert role_settings(config.roles, critic, None, needs).model == "judge"
    config.roles["reward"] = RoleConfig(model="other")
    assert role_settings(config.roles, critic, None, needs).model == "other"
    of_actor = role_settings(config.roles, RoleNeed("critic"), None, needs)
    assert (of_actor.model, of_actor.revision, of_actor.trust_remote_code) == ("m", "v2", True)


def test_a_source_without_a_model_is_met_at_the_door(train):
    _, run_dir, output = train("--algo.critic-from", "reward", code=2)
    assert (
        "the role 'critic' starts from the role 'reward', which has no model:"
        " give --reward-model.model PATH, or --critic.model PATH"
    ) in output
    assert not run_dir.exists()


def test_two_plugins_with_other_rates_are_told_so():
    from rlhf_host.config.resolve import _spec

    assert _spec(RoleNeed("critic", head="scalar", trainable=True, lr=2e-6)) == (
        "scalar head, trainable, from actor, learning rate 2e-06"
    )


def test_while_the_critic_warms_up_the_actor_stays_as_it_is(train, tiny_model):
    flags = ("--algo.critic-warmup", "2", "--critic.lr", "1e-2", "--checkpoint.every", "1", "--checkpoint.keep", "0")
    rows, run_dir, _ = train("--train.steps", "3", *flags, "--algo.entropy-coef", "0.1", "--kl.coef", "0.1")
    start = weights(tiny_model)
    for step, moved in ((1, False), (2, False), (3, True)):
        now = weights(run_dir / "checkpoints" / f"step-{step:06d}" / "model")
        assert any(not torch.equal(start[name], now[name]) for name in start) == moved
        assert ("loss/policy" in rows[step - 1]) == moved
        assert rows[step - 1]["critic/grad_norm"] > 0
    assert not torch.equal(critic_of(run_dir, 1)["score.weight"], critic_of(run_dir, 2)["score.weight"])


def test_a_kl_loss_counts_after_the_warm_up(train, tiny_model):
    flags = ("--kl.coef", "0.1", "--kl.place", "loss", "--checkpoint.every", "1", "--checkpoint.keep", "0")
    rows, run_dir, _ = train("--train.steps", "3", "--algo.critic-warmup", "2", *flags)
    assert [("loss/kl" in row, "kl" in row) for row in rows] == [(False, True), (False, True), (True, True)]
    second = weights(run_dir / "checkpoints" / "step-000002" / "model")
    assert all(torch.equal(value, second[name]) for name, value in weights(tiny_model).items())


def test_a_warm_up_as_long_as_the_run_is_said(train):
    _, _, output = train("--train.steps", "1", "--algo.critic-warmup", "1", "--checkpoint.final", "false")
    assert "the role actor is idle in the first 1 steps, which is the whole run: it is not trained" in output


@pytest.mark.parametrize("updates", [(), ("--train.minibatches", "2", "--train.batch-size", "4")], ids=["one", "two"])
def test_the_actors_schedule_ends_with_the_run_however_long_the_critic_warms_up(train, updates):
    flags = ("--actor.schedule", "linear", "--critic.schedule", "linear", "--checkpoint.final", "false", *updates)
    rows, _, _ = train("--train.steps", "4", "--algo.critic-warmup", "2", *flags)
    assert ["lr" in row for row in rows] == [False, False, True, True]
    assert rows[2]["lr"] == pytest.approx(1e-3 if not updates else 8.75e-4)  # the mean of a step's updates
    assert rows[3]["lr"] == pytest.approx(5e-4 if not updates else 3.75e-4)
    assert rows[3]["critic/lr"] == pytest.approx(2.5e-6 if not updates else 1.875e-6)


def test_the_critic_learns_what_the_reward_is(train):
    """With a policy that stands still it comes to know more than a constant could: the vowels that were already written."""
    flags = ("--train.steps", "30", "--algo.critic-warmup", "30", "--train.batch-size", "16", "--train.epochs", "4")
    rows, _, _ = train(*flags, "--critic.lr", "4e-3", "--checkpoint.final", "false")
    assert rows[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-9)
    assert sum(row["critic/explained_variance"] for row in rows[-10:]) / 10 > 0.1


def test_bootstrapped_returns_differ_by_the_value_after_the_last_token(train, reward_model):
    """With γ = λ = 1 every return of a cut completion grows by ``V`` after its last token, as transformers computes it."""
    flags = ("--critic.model", reward_model, "--train.steps", "1", "--checkpoint.final", "false", "--trajectories.tokens")
    plain = train(*flags)[0][0]
    (with_it,), run_dir, _ = train(*flags, "--algo.bootstrap-truncated")
    assert 0 < with_it["truncated"] < 1
    assert with_it["critic/value"] == plain["critic/value"] != 0.0
    model = RewardModel.from_pretrained(reward_model).eval()
    added = tokens = 0
    for line in (run_dir / "trajectories" / "train-step-000001.jsonl").read_text().splitlines():
        row = json.loads(line)
        ids = [token for segment in row["segments"] for token in segment["token_ids"]]
        with torch.no_grad():
            value = model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1]).item()
        added += value * row["length"] if row["finish_reason"] == "length" else 0.0
        tokens += row["length"]
    assert with_it["critic/return"] - plain["critic/return"] == pytest.approx(added / tokens, abs=1e-5)


# --- resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("made", ["llama", "gpt2"])
def test_a_resumed_critic_is_the_one_that_never_stopped(rlhf_here, small_run, tiny_model, tmp_path, made):
    """Metrics are equal to the last digit, with several updates per batch, a schedule and momentum at work."""
    if made == "gpt2":  # whose kernels round by where a file happens to put the weights
        config = GPT2Config(
            vocab_size=len(SYMBOLS), n_embd=32, n_head=4, n_layer=2, n_positions=64, bos_token_id=1, eos_token_id=2
        )
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "gpt2")
    model = tmp_path / "gpt2" if made == "gpt2" else tiny_model
    flags = [*small_run, "--algo", "ppo", "--actor.model", model, "--critic.lr", "3e-3", "--critic.schedule", "cosine"]
    flags += ["--train.steps", "4", "--train.minibatches", "2", "--train.epochs", "2", "--algo.lam", "0.9"]
    flags += ["--checkpoint.every", "2", "--kl.coef", "0.05", "--algo.bootstrap-truncated", "--algo.critic-warmup", "1"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run_dir in (whole, cut):
        result = rlhf_here(*flags, "--run-dir", run_dir)
        assert result.exit_code == 0, result.output
    shutil.rmtree(cut / "checkpoints" / "step-000004")
    result = rlhf_here("train", "--resume", cut)
    assert result.exit_code == 0, result.output
    assert curve(cut) == curve(whole)
    assert curve(whole)[3]["critic/value"] != 0.0
    first, second = critic_of(whole, 4), critic_of(cut, 4)
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- any causal language model ------------------------------------------------------------------


def test_a_scalar_head_on_a_model_that_transformers_has_no_classifier_for(train, tiny_model, tmp_path):
    config = GraniteConfig(
        vocab_size=len(SYMBOLS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GraniteForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "granite")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "granite")
    rows, run_dir, _ = train("--actor.model", tmp_path / "granite", "--critic.lr", "1e-2")
    assert rows[1]["critic/value"] != 0.0
    saved = run_dir / "checkpoints" / "step-000002" / "roles" / "critic"
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["GraniteForSequenceClassification"]

    critic = load_model(RoleConfig(model=str(saved), device="cpu"), head="scalar")
    ids = torch.tensor([[5, 6, 7, 8]])
    found = Passes(critic).forward([[3, 4]], ids, ids > 0, outputs=frozenset({"values", "scores"}))
    hidden = critic.model(torch.tensor([[3, 4, 5, 6, 7, 8]])).last_hidden_state[0]
    torch.testing.assert_close(found.values[0], critic.score(hidden)[1:5, 0])
    torch.testing.assert_close(found.scores[0], critic.score(hidden)[5, 0])


def test_a_frozen_role_of_such_a_model_still_needs_a_trained_head(tmp_path):
    config = GraniteConfig(
        vocab_size=len(SYMBOLS), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path / "granite")
    with pytest.raises(UserError, match="has no scalar head"):
        load_model(RoleConfig(model=str(tmp_path / "granite"), device="cpu"), head="scalar")


def test_trainable_weights_lie_where_arithmetic_does_not_depend_on_the_file(tiny_model):
    model = load_model(RoleConfig(model=str(tiny_model), device="cpu"), trainable=True)
    assert {parameter.data_ptr() % 64 for parameter in model.parameters()} == {0}
