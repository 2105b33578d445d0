"""TRL's GRPO and RLOO: loss, penalty and corrections."""

from __future__ import annotations

from urllib.parse import urlsplit

from rlhf_translate.options import (
    PROGRAM,
    Convert,
    Given,
    Option,
    Outcome,
    Table,
    lost,
    same,
    shown,
    switch,
    to,
)
from rlhf_translate.shared import REPLAYED, aggregation, clip_limits, reward_range, template_kwargs
from rlhf_translate.trl.batch import batch, generations, iterations
from rlhf_translate.trl.rewards import functions, weights

MATTERS = (
    "learning_rate",
    "temperature",
    "top_k",
    "max_prompt_length",
    "max_completion_length",
    "num_generations",
    "epsilon",
    "epsilon_high",
    "delta",
    "num_iterations",
    "beta",
    "use_bias_correction_kl",
    "loss_type",
    "scale_rewards",
    "vllm_gpu_memory_utilization",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_cap",
)
"""Options whose defaults matter here, beside those of every program."""

_EPS = 1e-4
"""Number that TRL adds to the deviation of rewards."""


def _program(option: Option, given: Given) -> Outcome:
    if given.method == "rloo":
        settings = {"algo.name": "rloo", "algo.aggregation": "sequence-mean-token-sum", "algo.dual_clip": None}
        return to(settings, "ratio and clip per token here, of the whole sequence there; on policy the gradient is the same")
    if given["multi_objective_aggregation"].value == "normalize_then_sum":
        return to({"algo.name": "gdpo", "algo.std_eps": _EPS})
    if _loss_type(given) == "dr_grpo" and not _is_gspo(given):
        return to({"algo.name": "dr_grpo"})
    return to({"algo.name": "grpo", "algo.std_eps": _EPS})


_LOSSES = {
    "dapo": {"algo.aggregation": "token-mean"},
    "bnpo": {"algo.aggregation": "token-mean"},
    "grpo": {"algo.aggregation": "sequence-mean-token-mean"},
    "luspo": {"algo.aggregation": "sequence-mean-token-sum"},
    "cispo": {"algo.loss": "cispo", "algo.aggregation": "token-mean"},
    "sapo": {"algo.loss": "sapo", "algo.aggregation": "sequence-mean-token-mean"},
    "dr_grpo": {"algo.name": "dr_grpo"},
}


def _loss_type(given: Given) -> str:
    return given["loss_type"].value


def _is_gspo(given: Given) -> bool:
    return given["importance_sampling_level"].value == "sequence" and _loss_type(given) not in ("cispo", "sapo")


def _loss(option: Option, given: Given) -> Outcome:
    name = _loss_type(given)
    if name not in _LOSSES:
        return lost(f"losses that are known here: {', '.join(_LOSSES)}")
    if _is_gspo(given) and name == "dr_grpo":
        return to({"algo.std": "none"}, "gspo is a mean over sequences here, not a sum")
    settings: dict[str, object] = dict(_LOSSES[name])
    if name == "cispo" and "epsilon_high" in given:
        settings["algo.cispo_max"] = given["epsilon_high"].value
    if _is_gspo(given) and "algo.aggregation" in settings:
        return aggregation("gspo", _LOSSES[name]["algo.aggregation"])
    return to(settings)


def _level(option: Option, given: Given) -> Outcome:
    if option.value != "sequence":
        return same("token, as it is here")
    if not _is_gspo(given):
        return lost(f"the ratio of {_loss_type(given)} is that of a token here")
    return to({"algo.loss": "gspo"})


def _clip(option: Option, given: Given) -> Outcome:
    loss = "gspo" if _is_gspo(given) else "clip"
    if _loss_type(given) in ("cispo", "sapo"):
        return same(f"no limit of {_loss_type(given)}")
    high = given["epsilon_high"] if "epsilon_high" in given else given["epsilon"]
    return clip_limits(loss, given["epsilon"].value, high.value, "the upper limit is 0.28 by default here" * (loss == "clip"))


def _beta(option: Option, given: Given) -> Outcome:
    if not option.number:
        return same("0: no reference model is loaded")
    if given.method == "rloo":
        return to({"kl.coef": option.value, "kl.place": "reward"})
    estimator = "unbiased" if given.is_on("use_bias_correction_kl") else "k3"
    loss = _loss_type(given)
    mode = _LOSSES.get(loss, {}).get("algo.aggregation", "token-mean")
    if loss == "dr_grpo":
        mode = f"sequence-mean-token-sum-over({given['max_completion_length'].value})"
    settings = {"kl.coef": option.value, "kl.place": "loss", "kl.estimator": estimator}
    written = given.wrote("use_bias_correction_kl") or estimator == "k3"
    remark = "" if written else "use_bias_correction_kl is on there by default"
    return to(settings | ({"kl.aggregation": mode} if mode != "token-mean" else {}), remark)


def _of_beta(option: Option, given: Given) -> Outcome:
    return _beta(given["beta"], given)


def _scale(option: Option, given: Given) -> Outcome:
    if _loss_type(given) == "dr_grpo" and not _is_gspo(given):
        if option.value.lower() in ("none", "false") or not option.line:
            return same("dr_grpo does not scale")
        return lost("dr_grpo does not scale")
    known = {"group": "group", "true": "group", "batch": "batch", "none": "none", "false": "none"}
    name = known.get(option.value.lower())
    return to({"algo.std": name}) if name else lost("scales here: group, batch, none")


def _range(option: Option, given: Given) -> Outcome:
    """Handles limits of the sum of rewards, from 0.22 on."""
    if option.is_off:
        return same("off, as it is here")
    low, high = option.pair
    return reward_range(low, high)


def _correction(option: Option, given: Given) -> Outcome:
    """Handles corrections, from 0.23 on. Until modes came with 0.26, weights of tokens were cut."""
    on = "vllm_importance_sampling_correction" in given and given.is_on("vllm_importance_sampling_correction")
    if not given.is_on("use_vllm") or not on:
        return same("no correction is on")
    mode = given["vllm_importance_sampling_mode"].value if "vllm_importance_sampling_mode" in given else "token_truncate"
    low = given["vllm_importance_sampling_clip_min"].number
    names = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    high = next((given[name].number for name in names if given.wrote(name)), None)
    high = high or next((given[name].number for name in names if name in given), None)
    options = {
        "token_truncate": ("tis", {"low": low, "cap": high}),
        "token_mask": ("icepop", {"low": low or 0.0, "high": high}),
        "sequence_truncate": ("sequence_truncate", {"cap": high}),
        "sequence_mask": ("sequence_mask", {"low": low, "high": high}),
    }.get(mode)
    if options is None:
        return lost("modes here: token_truncate, token_mask, sequence_truncate, sequence_mask")
    return to({f"with.{options[0]}.{name}": value for name, value in options[1].items() if value is not None})


def _vllm(name: str) -> Convert:
    return lambda option, given: (
        same("no vLLM samples")
        if not given.is_on("use_vllm")
        else same("the server's own")
        if _by_server(given)
        else to({f"engine.{name}": option.written if option.values else True})
    )


def _truncating(name: str, usual: float) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if option.is_off or option.number == usual:
            return same(f"{shown(usual)}: all tokens")
        return to({f"rollout.{name}": option.written}, REPLAYED)

    return convert


def _penalty(option: Option, given: Given) -> Outcome:
    if option.is_off or option.number == 1:
        return same("1: none")
    return lost("training refuses it: it could not correct for it")


def _longest_prompt(option: Option, given: Given) -> Outcome:
    if option.is_off:
        return same("prompts have no limit")
    return to({"data.max_prompt_tokens": option.written, "data.long_prompts": "truncate"})


SERVER = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout")
START = "start the server with vllm serve in place of trl vllm-serve, as the page Engines shows"


def _by_server(given: Given) -> bool:
    """Returns True if vLLM samples in a server: its mode is written, or else a part of its address."""
    if not given.is_on("use_vllm"):
        return False
    return given["vllm_mode"].value == "server" if given.wrote("vllm_mode") else given.wrote(*SERVER)


def _engine(option: Option, given: Given) -> Outcome:
    if not given.is_on("use_vllm"):
        return same("off, as it is here")
    if not _by_server(given):
        return to({"engine.name": "vllm"})
    if "vllm_server_base_url" in given:
        address = given["vllm_server_base_url"].value
    else:
        usual = {"vllm_server_host": "0.0.0.0", "vllm_server_port": "8000"}
        host, port = (given[name].value if name in given else value for name, value in usual.items())
        address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    settings = {"engine.name": "http", "engine.urls": [address]}
    if urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1"):
        return to(settings, START)
    remark = f"{START}; a directory that both machines see, for weights"
    return Outcome(settings, remark, asks=("engine.directory",), stand_ins={"engine.directory": "weights"})


def _of_server(option: Option, given: Given) -> Outcome:
    return _engine(option, given) if _by_server(given) else same("no server samples")


def _wait(option: Option, given: Given) -> Outcome:
    return to({"engine.wait_s": option.written}) if _by_server(given) else same("no server samples")


def _mode(option: Option, given: Given) -> Outcome:
    if not given.is_on("use_vllm"):
        return same("no vLLM samples")
    if option.value == "colocate":
        return same("engines belong to the run")
    return _engine(option, given)


TABLE: Table = {
    PROGRAM: _program,
    "num_generations": generations,
    "generation_batch_size": batch,
    "steps_per_generation": batch,
    "num_iterations": iterations,
    "max_prompt_length": _longest_prompt,
    "top_p": _truncating("top_p", 1),
    "top_k": _truncating("top_k", 0),
    "min_p": _truncating("min_p", 0),
    "repetition_penalty": _penalty,
    "top_entropy_quantile": lambda option, given: (
        same("1: all tokens") if option.number == 1 else to({"with.top_entropy.share": option.value})
    ),
    "loss_type": _loss,
    "importance_sampling_level": _level,
    "epsilon": _clip,
    "epsilon_high": _clip,
    "delta": lambda option, given: to({"algo.dual_clip": None if option.is_off else option.value}),
    "beta": _beta,
    "use_bias_correction_kl": _of_beta,
    "scale_rewards": _scale,
    "multi_objective_aggregation": _program,
    "normalize_advantages": switch({"algo.name": "reinforce_pp_baseline"}, "RLOO has no whitening here"),
    "reward_funcs": functions,
    "reward_weights": weights,
    "reward_clip_range": _range,
    "off_policy_mask_threshold": lambda option, given: (
        same("off, as it is here") if option.is_off else to({"with.off_policy_mask.delta": option.value})
    ),
    "use_vllm": _engine,
    **dict.fromkeys(SERVER[:3], _of_server),
    "vllm_server_timeout": _wait,
    "vllm_mode": _mode,
    "vllm_gpu_memory_utilization": _vllm("gpu_memory_utilization"),
    "vllm_tensor_parallel_size": _vllm("tensor_parallel_size"),
    "vllm_enable_sleep_mode": _vllm("sleep"),
    "vllm_max_model_length": _vllm("max_model_len"),
    "vllm_enable_prefix_caching": _vllm("enable_prefix_caching"),
    "vllm_dtype": _vllm("dtype"),
    "chat_template_kwargs": template_kwargs,
    "vllm_max_model_len": _vllm("max_model_len"),
    **{f"vllm_importance_sampling_{name}": _correction for name in ("correction", "mode", "cap", "clip_min", "clip_max")},
}
