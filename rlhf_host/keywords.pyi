"""Sections of the settings, as types of arguments. Generated from ``config/schema.py`` by ``scripts/keywords.py``."""

from typing import Any, Literal, TypedDict

class CheckpointSettings(TypedDict, total=False):
    every: int
    keep: int | None
    best: str | None
    best_mode: Literal["max", "min"]
    final: bool
    on_error: Literal["stop", "warn"]

class DataSettings(TypedDict, total=False):
    sources: list[Any]
    prompt_key: str | None
    label_key: str | None
    agent_key: str | None
    ignore: list[str]
    fetch_images: bool
    system_prompt: str | None
    template: str | None
    template_kwargs: list[str]
    day: str | None
    format: (
        Literal[
            "messages",
            "prompt_completion",
            "text",
            "preference",
            "triple",
            "hh",
            "unpaired",
            "kto_tag",
            "stepwise",
            "sharegpt",
            "alpaca",
            "tokens",
            "generated",
        ]
        | None
    )
    split_at: str | None
    hh: Literal["text", "chat"]
    condition: str | None
    max_tokens: int | None
    long_rows: Literal["auto", "truncate", "filter"]
    history: Literal["rows", "refuse"]
    max_prompt_tokens: int | None
    long_prompts: Literal["filter", "truncate"]
    on_bad_row: Literal["stop", "skip"]
    max_samples: int | None
    shuffle: bool
    epochs: float

class EvalSettings(TypedDict, total=False):
    data: DataSettings
    every: int
    at_start: bool
    at_end: bool
    reward: dict[str, Any]
    n: int
    k: list[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int | None
    seed: int

class LoraSettings(TypedDict, total=False):
    rank: int
    alpha: int | None
    targets: list[str]
    rslora: bool
    init: Literal["default", "gaussian"]
    dropout: float

class PipelineSettings(TypedDict, total=False):
    schedule: Literal["free", "fixed"]
    max_staleness: int | None

class RoleSettings(TypedDict, total=False):
    model: str | None
    revision: str | None
    tokenizer: str | None
    adapter: str | None
    lora: LoraSettings
    freeze: list[str]
    train_only: list[str]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quantize: Literal["4bit"] | None
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"]
    gradient_checkpointing: int | bool | Literal["auto"]
    sequence_parallel: int
    trust_remote_code: bool
    device: str
    precompute: bool
    lr: float | None
    router_aux_loss_coef: float | None
    schedule: Literal["constant", "linear", "cosine"]
    min_lr_ratio: float
    warmup_steps: int
    weight_decay: float
    betas: tuple[float, float]
    adam_eps: float
    max_grad_norm: float

class RolloutSettings(TypedDict, total=False):
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    max_tokens: int | None
    stop: list[str]
    stop_token_ids: list[int]
    max_unjudged: float
    max_refills: int
    score_timeout_s: float
    score_retries: int
    step_timeout_s: float
    episode_timeout_s: float
    stall_s: float
    episode_retries: int
    history: Literal["append", "template", "refuse"]
    policy_port: int
    tool_format: str

class TrainSettings(TypedDict, total=False):
    steps: int | None
    batch_size: int
    epochs: int
    minibatches: int
    max_tokens_per_microbatch: int
    old_logprobs: Literal["auto", "fused", "recompute", "sampler"]
    autocast: Literal["auto", "off", "bfloat16"]
    shared_prefix: Literal["auto", "on", "off"]
    keep_logits: Literal["auto", "on", "off"]
    on_nonfinite: Literal["stop", "skip"]
    threads: int

class TrajectoryLogSettings(TypedDict, total=False):
    every: int
    max_per_step: int
    tokens: bool
    show: int
