"""Flags become settings; mistakes among them become one line each."""

from __future__ import annotations

import re
from typing import Literal

import pytest
from pydantic import BaseModel, ValidationError

from rlhf_host.config.flag_names import known_flags
from rlhf_host.config.flags import parse
from rlhf_host.config.load import load_config, read_config
from rlhf_host.errors import UserError
from rlhf_host.plugins.options import sentence


def load(*flags: str):
    return load_config(flags=["--actor.model", "m", "--data", "d.jsonl", *flags])


def refusal(*flags: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load(*flags)
    return str(error.value).splitlines()


def test_kebab_and_snake_equals_and_space_are_the_same():
    spellings = (["--rollout.max-new-tokens", "5"], ["--rollout.max_new_tokens=5"], ["--rollout.max-new-tokens=5"])
    assert {load(*flags).rollout.max_new_tokens for flags in spellings} == {5}


@pytest.mark.parametrize(
    ("flags", "name", "values"),
    [
        (["--algo", "toy", "--algo", "picky"], "--algo", "toy and picky"),
        (["--runtime", "local", "--runtime=ray"], "--runtime", "local and ray"),
        (["--seed", "1", "--seed", "2"], "--seed", "1 and 2"),
        (["--rollout.max-tokens", "9", "--rollout.max_tokens", "none"], "--rollout.max_tokens", "9 and none"),
        (["--eval.at-end", "--eval.at-end", "false"], "--eval.at-end", "true and false"),
        (["--sync.verify", "on", "--sync.verify", "off"], "--sync.verify", "on and off"),
        (
            ["--reward", "length", "--reward.length.weight", "1", "--reward.length.weight", "2"],
            "--reward.length.weight",
            "1 and 2",
        ),
    ],
)
def test_of_a_flag_that_takes_one_value_the_last_counts_and_that_is_said(flags, name, values):
    """So that a script's flags can be followed by others, and no value is left out without a word."""
    loaded = read_config(flags=parse(["--actor.model", "m", *flags]))
    assert loaded.notices == (f"{name} takes one value and is given 2, {values}: the last one counts",)
    once = flags[2:] if name in ("--algo", "--seed") else None
    assert once is None or loaded.config == load_config(flags=["--actor.model", "m", *once])


def test_so_it_is_for_options_of_plugins(rlhf, caplog):
    run = ("train", "--actor.model", "m", "--data", "d", "--algo", "toy", "--reward", "length", "--print-config")
    done = rlhf(*run, "--algo.mode", "fast", "--algo.mode", "slow", "--algo.layers", "1", "--algo.layers", "2")
    assert caplog.messages == ["--algo.mode takes one value and is given 2, fast and slow: the last one counts"]
    assert "mode: slow" in done.stdout


def test_the_same_value_twice_is_nothing_to_speak_of():
    flags = ["--algo", "toy", "--algo", "toy", "--rollout.n", "4", "--rollout.n", "4", "--eval.at-end", "--eval.at-end", "true"]
    loaded = read_config(flags=parse(["--actor.model", "m", *flags]))
    assert (loaded.config.algo.name, loaded.config.rollout.n, loaded.notices) == ("toy", 4, ())


def test_a_flag_without_value_is_true():
    config = load("--actor.gradient-checkpointing", "--eval.at-end", "true", "--data.shuffle", "false", "--checkpoint.final=no")
    assert config.roles["actor"].gradient_checkpointing is True
    assert (config.eval.at_end, config.data.shuffle, config.checkpoint.final) == (True, False, False)


def test_lists_come_from_repetition_commas_and_json():
    assert load("--eval.k", "1,2").eval.k == [1, 2]
    assert load("--eval.k", "1", "--eval.k", "2").eval.k == [1, 2]
    assert load("--rollout.stop", '["a,b", "c"]').rollout.stop == ["a,b", "c"]
    assert load("--rollout.stop", ",").rollout.stop == [","]
    assert load("--rollout.stop", "\n\nQ:").rollout.stop == ["\n\nQ:"]
    assert load("--actor.betas", "0.8,0.9").roles["actor"].betas == (0.8, 0.9)


def test_null_unsets_and_none_stays_a_word_where_it_is_one():
    config = load("--rollout.max-tokens", "none", "--eval.max-new-tokens", "null", "--data.template", "none")
    assert (config.rollout.max_tokens, config.eval.max_new_tokens, config.data.template) == (None, None, "none")


def test_values_may_begin_with_a_dash_and_after_equals_with_two():
    assert load("--reward", "length", "--reward.length.weight", "-3").reward["length"].weight == -3
    assert load("--data.system-prompt=--be brief").data.system_prompt == "--be brief"


def test_role_shorthands_and_other_roles():
    config = load("--critic.lr", "1e-5", "--roles.helper.model", "h")
    assert config.roles["critic"].lr == 1e-5
    assert config.roles["helper"].model == "h"
    assert config.roles["actor"].model == "m"


def test_reward_models_are_the_role_reward_which_flags_cannot_name():
    config = load("--reward", "length", "--reward-model.model", "r", "--reward_model.dtype", "bfloat16")
    assert set(config.roles) == {"actor", "reward"}
    assert (config.roles["reward"].model, config.roles["reward"].dtype) == ("r", "bfloat16")
    assert load("--roles.reward.model", "r").roles == load("--reward-model.model", "r").roles
    assert config.reward["length"].name == "length"


def test_data_sources_with_weights_and_their_own_settings():
    config = load("--data", "b/part.jsonl@2", "--data", "me@home", "--data.part.prompt-key", "q", "--data.prompt-key", "p")
    assert [(source.path, source.weight) for source in config.data.sources] == [
        ("d.jsonl", 1),
        ("b/part.jsonl", 2),
        ("me@home", 1),
    ]
    assert (config.data.sources[1].prompt_key, config.data.prompt_key) == ("q", "p")


def test_options_of_a_task_plugin():
    config = load_config(
        flags=["--data", "sums", "--data.sums.largest", "3", "--eval.data", "sums", "--eval.data.sums.largest", "2"]
    )
    assert config.data.sources[0].options == {"largest": "3"}
    assert config.eval.data.sources[0].options == {"largest": "2"}


def test_plugins_aliases_weights_and_options():
    config = load(
        *("--algo", "toy", "--algo.clip-eps", "0.3", "--reward", "length", "--reward", "strict=made-up:length"),
        *("--reward.strict.weight", "0.5", "--reward.strict.timeout-s", "9", "--with", "sift,other", "--tracker", "wandb"),
    )
    assert (config.algo.name, config.algo.options) == ("toy", {"clip_eps": "0.3"})
    assert {alias: (c.name, c.weight, c.options) for alias, c in config.reward.items()} == {
        "length": ("length", 1.0, {}),
        "strict": ("made-up:length", 0.5, {"timeout_s": "9"}),
    }
    assert list(config.extensions) == ["sift", "other"]
    assert list(config.tracker) == ["console", "jsonl", "wandb"]


def test_none_takes_a_tracker_away():
    assert list(load("--tracker", "console=none").tracker) == ["jsonl"]


def test_eval_rewards_are_their_own():
    config = load("--reward", "length", "--eval.reward", "judge", "--eval.reward.judge.timeout-s", "2")
    assert list(config.reward) == ["length"]
    assert config.eval.reward["judge"].options == {"timeout_s": "2"}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--rolout.n", "4"], "--rolout.n: no such flag; did you mean '--rollout.n'"),
        (["--rollout.tempreature", "4"], "--rollout.tempreature: no such flag; did you mean '--rollout.temperature'"),
        (["--critc.lr", "1"], "--critc.lr: no such flag; did you mean '--critic.lr'"),
        (["--actor.lrr", "1"], "--actor.lrr: no such flag; did you mean '--actor.lr'"),
        (["--roles.helper.modle", "1"], "--roles.helper.modle: no such flag; did you mean '--roles.helper.model'"),
        (["--rewrd", "length"], "--rewrd: no such flag; did you mean '--reward'"),
        (
            ["--cpu.width", "80"],
            "--cpu.width: no such flag; the options of 'cpu' are set with --kernels.width",
        ),
        (["--transformers.x", "1"], "--transformers.x: no such flag; the options of 'transformers' are set with --engine.x"),
        (["--rollout", "4"], "--rollout is a section: set its keys, such as --rollout.n"),
        (["--rollout.n"], "--rollout.n needs a value"),
        (["--name"], "--name needs a value"),
        (["--rollout.n", "many"], "--rollout.n: should be a valid integer, not 'many'"),
        (["--seed", "-1"], "--seed: should be greater than or equal to 0, not '-1'"),
        (["--rollout.temperature", "inf"], "--rollout.temperature: should be a finite number, not 'inf'"),
        (["--rollout.temperature", "1e-39"], "--rollout.temperature: should be 0 (greedy), or a number from 0.01 to 100"),
        (["--eval.temperature", "0.001"], "--eval.temperature: should be 0 (greedy), or a number from 0.01 to 100"),
        (["--rollout.temperature", "1e30"], "--rollout.temperature: should be 0 (greedy), or a number from 0.01 to 100"),
        (["--eval.top-p", "1e-39"], "--eval.top-p: should be a number from 0.000001 to 1"),
        (["--eval.top-k", "99999999999999999999"], "--eval.top-k: should be a whole number from 0 to 2147483647"),
        (["--actor.betas", "0.9,2"], "--actor.betas: should be less than 1, not '2'"),
        (["--rollout.n", "10000000000"], "--rollout.n: should be less than 2147483648, not '10000000000'"),
        (
            ["--reward", "length", "--reward.length.weight", "1e39"],
            "--reward.length.weight: should be less than or equal to 1000000000",
        ),
        (["--rollout.n", "0"], "--rollout.n: should be greater than 0, not '0'"),
        (["--train.autocast", "of"], "--train.autocast: should be 'auto', 'off' or 'bfloat16', not 'of'; did you mean 'off'?"),
        (["--data", "x@-1"], "--data x@-1: should be greater than 0, not '-1'"),
        (["--data.nme.weight", "2"], "--data.nme.weight: 'nme' is neither a data setting nor a source"),
        (["--algo"], "--algo needs the name of a plugin"),
        (["--algo.clip-eps", "1"], "--algo.clip-eps: no algo is chosen; add --algo NAME"),
        (
            ["--reward.lenght.weight", "1", "--reward", "length"],
            "--reward.lenght.weight: no reward plugin is called 'lenght' (chosen: length; did you mean 'length'?)",
        ),
        (
            ["--with.sift.cap", "1"],
            "--with.sift.cap: no with plugin is called 'sift' (none is chosen); choose it with --with sift",
        ),
        (["--reward.weight", "1"], "--reward.weight: give the plugin's name and the option: --reward.NAME.weight"),
        (["--reward", "length", "--reward", "length"], "--reward: 'length' is chosen twice"),
        (["--algo", "toy", "--algo.name", "picky"], "--algo.name: is set already by --algo: leave one out"),
        (["--algo", "toy", "--algo.a", "1", "--algo.a.b", "2"], "--algo.a.b: is set already by --algo.a: leave one out"),
        (["--algo", "toy", "--algo.a.b", "1", "--algo.a", "2"], "--algo.a: is set already by --algo.a.b: leave one out"),
        (["--kl.coef", "1", "--with.kl.coef", "2"], "--kl.coef and --with.kl.coef set the same: leave one out"),
        (["--critic.lr", "1", "--roles.critic.lr", "2"], "--critic.lr and --roles.critic.lr set the same: leave one out"),
        (["--tracker", "consle=none"], "--tracker: there is no 'consle' to take away; did you mean 'console'?"),
        (["--with", "sift=none"], "--with: there is no 'sift' to take away"),
        (["--lrr", "1"], "--lrr: no such flag; did you mean '--lr'"),
        (["--pretrain", "m"], "--pretrain: no such flag; OpenRLHF's --pretrain is --actor.model here"),
        (["--learning-rate", "1"], "--learning-rate: no such flag; OpenRLHF's and TRL's --learning_rate is --actor.lr here"),
        (
            ["--vllm.num_engines", "2"],
            "--vllm.num_engines: no such flag; OpenRLHF's --vllm.num_engines is --engine vllm --placement rollout=4 here",
        ),
        (["--reward.remote_url", "u"], "--reward.remote_url: no such flag; OpenRLHF's --reward.remote_url is --reward here"),
        (["--train.lr", "1"], "--train.lr: no such flag; did you mean '--actor.lr' or '--critic.lr'"),
        (
            ["--actor.learning-rate", "1"],
            "--actor.learning-rate: no such flag; OpenRLHF's and TRL's --learning_rate is --actor.lr here",
        ),
        (["--train.step", "8"], "--train.step: no such flag; did you mean '--train.steps'"),
        (["--dynamic-filterin.low", "0"], "--dynamic-filterin.low: no such flag; did you mean '--dynamic-filtering.low'"),
        (
            ["--beta", "0.04"],
            "--beta: no such flag; OpenRLHF's --beta is --algo.beta here; TRL's beta is --kl.coef here"
            " (GRPO: with --kl.place loss, --kl.estimator unbiased (k3 without use_bias_correction_kl) and the aggregation of the"
            " policy loss; RLOO: --kl.place reward; DPO and KTO: --algo.beta)",
        ),
        (
            ["--save_steps", "9"],
            "--save_steps: no such flag; OpenRLHF's and TRL's --save_steps is --checkpoint.every here",
        ),
        (
            ["algorithm.adv_estimator=grpo"],
            "unexpected argument 'algorithm.adv_estimator=grpo': flags look like --rollout.n 8;"
            " verl's algorithm.adv_estimator grpo is --algo grpo here",
        ),
        (
            ["--lora_rank", "8"],
            "--lora_rank: no such flag; OpenRLHF's --lora_rank is --actor.lora.rank here (alpha is twice the rank by default)",
        ),
        (
            ["--lora_dropout", "0.1"],
            "--lora_dropout: no such flag; OpenRLHF's and TRL's --lora_dropout is --actor.lora.dropout here",
        ),
        (
            ["--advantage_estimator", "gae"],
            "--advantage_estimator: no such flag; OpenRLHF's --advantage_estimator gae is --algo ppo here",
        ),
        (
            ["--algo.advantage.estimator", "gae"],
            "--algo.advantage.estimator: no algo is chosen; add --algo NAME;"
            " OpenRLHF's --algo.advantage.estimator gae is --algo ppo here",
        ),
        (
            ["--eps_clip_low_high", "0.2", "0.27"],
            "unexpected argument '0.27': flags look like --rollout.n 8;"
            " OpenRLHF's --eps_clip_low_high is --algo.clip-eps and --algo.clip-eps-high here",
        ),
        (
            ["actor_rollout_ref.model.path=m"],
            "unexpected argument 'actor_rollout_ref.model.path=m': flags look like --rollout.n 8;"
            " verl's actor_rollout_ref.model.path is --actor.model here",
        ),
        (["--reward", "1=length"], "--reward: '1' cannot be an alias"),
        (["rollout.n", "4"], "unexpected argument 'rollout.n': flags look like --rollout.n 8"),
        (["-rollout.n", "4"], "unexpected argument '-rollout.n': flags look like --rollout.n 8; did you mean '--rollout.n'?"),
    ],
)
def test_mistakes_are_one_line_each(flags, line):
    lines = refusal(*flags)
    assert len(lines) == 1
    assert lines[0].startswith(line)


EPOCHS = (
    "here it is --data.epochs N for passes over a data set that is trained on as it is, or --train.steps N, in batches of prompts,"
    " for a run that samples (--train.epochs N is passes over each of these batches)"
)
PPO = ("--algo", "ppo", "--reward", "math_verifier")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--wandb", "sums"],
            "--wandb takes no value: set an option of 'wandb', --wandb.project VALUE or --wandb.entity VALUE",
        ),
        (["--vllm"], "--vllm: no such flag; 'vllm' is an engine: --engine vllm"),
        (
            ["--gpus", "8"],
            "--gpus: no such flag; here it is --runtime ray --placement actor+rollout=8, where roles joined by + share 8 devices",
        ),
        (["--kl-coef", "0.1"], "--kl-coef: no such flag; did you mean '--kl.coef'?"),
        (["--kl", "0.1"], "--kl takes no value: set an option of 'kl', --kl.coef VALUE"),
        (["--rollout-n", "4"], "--rollout-n: no such flag; did you mean '--rollout.n'?"),
        (["--console-width", "80"], "--console-width: no such flag; did you mean '--console.width'?"),
        ([*PPO, "--value-clip", "1"], "--value-clip: no such flag; did you mean '--algo.value-clip'?"),
        (["--epochs", "3"], f"--epochs: no such flag; {EPOCHS}"),
        (["--algo", "toy", "--gamma", "0.9"], "--gamma: no such flag"),
        ([*PPO, "--beta", "0.1"], "--beta: no such flag; TRL's beta is --kl.coef here"),
        (["--cpu"], "--cpu: no such flag; here it is --actor.device cpu"),
    ],
)
def test_habits_of_other_programs_are_answered_with_what_is_accepted(flags, line):
    (said,) = refusal(*flags)
    assert said.startswith(line)


def test_an_option_that_an_algorithm_lacks_is_not_suggested_for_it(rlhf):
    run = ("--actor.model", "m", "--data", "d.jsonl", "--reward", "length", "--print-config")
    (line,) = rlhf.refused("train", "--algo", "toy", "--algo.beta", "0.1", *run)
    assert line.startswith("--algo.beta: algo 'toy' has no option 'beta'; TRL's beta is --kl.coef here")
    (line,) = rlhf.refused("train", "--algo", "pairs", "--algo.beta", "0.1", *run)
    assert line == "--algo.beta: algo 'pairs' has no option 'beta'; it takes no options"


def test_no_flag_is_suggested_that_does_not_exist():
    (line,) = refusal("--rollout.num-samples", "4")
    assert {flag.removeprefix("--") for flag in re.findall(r"'(--.*?)'", line)} <= set(known_flags())


def test_several_mistakes_are_told_at_once():
    assert len(refusal("--rolout.n", "4", "--train.steps", "x", "--seed")) == 3


def test_words_of_a_choice_are_written_as_in_a_configuration():
    class Options(BaseModel):
        on: Literal[True, "True"] = True
        off: Literal[False] | None = None
        always: Literal[True] = True

    def said(**values):
        with pytest.raises(ValidationError) as error:
            Options(**values)
        return sentence(error.value.errors()[0])

    assert said(off="true") == "should be false, not 'true'"
    assert said(always="True") == "should be true, not 'True'; did you mean 'true'?"
    assert said(on="x") == "should be true or 'True', not 'x'"


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("1", 1), ("0", False), ("14", 14), ("auto", "auto")]
)
def test_a_number_of_layers_is_not_a_switch(text, value):
    found = load("--actor.gradient-checkpointing", text).roles["actor"].gradient_checkpointing
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["some", "-3", "1.5", "null"])
def test_other_words_for_layers_are_one_error(text):
    with pytest.raises(UserError) as caught:
        load(f"--actor.gradient-checkpointing={text}")
    assert str(caught.value).count("\n") == 0
    assert "should be true, false, 'auto' or a number of layers, not " in str(caught.value)
