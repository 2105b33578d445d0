"""The run's configuration: one schema for YAML, flags and Python. Imports no torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from rlhf_host.config.section import Count, Fraction, Open, Section, Temperature, TokenId, TopK, TopP
from rlhf_host.config.yaml_file import plain, read_yaml


@cache
def defaults() -> dict[str, Any]:
    """``presets/defaults.yaml``, the lowest layer: the plugins of a run that chooses no others."""
    return cast(dict[str, Any], plain(read_yaml(Path(__file__).parent / "presets/defaults.yaml")))


class PluginChoice(Open):
    """One chosen plugin."""

    name: str = Field(min_length=1, description="NAME or DISTRIBUTION:NAME")


class RewardChoice(PluginChoice):
    weight: float = Field(1.0, ge=-1e9, le=1e9, description="factor in the weighted sum; 0: only logged")


class SyncChoice(PluginChoice):
    name: str = Field("", description="default: one that suits the engine and the runtime")
    verify: Literal["auto", "on", "off"] | int = Field(
        "auto",
        description="compare engines and trainer after a sync: auto (the first two), on (every one), off, or a number of syncs",
    )

    adapter: Literal["merged", "adapter"] = Field(
        "merged", description="of a LoRA run: send merged weights to any engine, or the adapter to one that has the base"
    )

    @field_validator("verify", mode="before")
    @classmethod
    def _countable(cls, value: Any) -> Any:
        if value not in ("auto", "on", "off") and not str(value).isdecimal():
            raise ValueError(f"should be 'auto' (the first two syncs), 'on', 'off' or a number of syncs, not {value!r}")
        return value


class LoraOptions(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685) that are trained in place of the weights."""

    rank: int = Field(0, ge=0, le=4096, description="rank of the adapters; 0: all weights are trained")
    alpha: Count | None = Field(None, description="adapters are scaled by alpha / rank; default: 2 × rank")
    targets: list[str] = Field(
        ["all-linear"],
        description="names of linear maps, such as q_proj; all-linear: all but the head; experts: tensors of experts, or one of"
        " them, such as experts.down_proj",
    )
    rslora: bool = Field(False, description="scale by alpha / √rank (arXiv:2312.03732)")
    init: Literal["default", "gaussian"] = Field(
        "default", description="first values of A; B begins at 0, so training begins at the model as it is"
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of A's inputs that are 0, at random, in passes that train; an adapter that goes on has it too",
    )


class RoleConfig(Section):
    """A model's job. ``None`` means: as the actor, or the role's own default."""

    model: str | None = Field(None, description="model directory, hub name, or GGUF file")
    revision: str | None = Field(None, description="hub revision")
    tokenizer: str | None = Field(None, description="tokenizer directory or hub name; default: the model's own")
    adapter: str | None = Field(None, description="directory of a LoRA adapter; a trained role continues to train it")
    lora: LoraOptions = Field(default_factory=LoraOptions, description="train adapters in place of all weights")
    freeze: list[str] = Field([], description="patterns of weights that are not trained, such as '*embed_tokens*'")
    train_only: list[str] = Field([], description="patterns of weights; all others are not trained")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of the weights in memory; auto: float32 for trained roles, the checkpoint's type for others"
    )
    quantize: Literal["4bit"] | None = Field(
        None, description="keep frozen weights in 4 bits (NF4, by bitsandbytes); with adapters this is QLoRA (arXiv:2305.14314)"
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = Field(
        "auto", description="attention kernel; auto: sdpa, or eager where sdpa would leave out a part of the model"
    )
    gradient_checkpointing: Count | bool | Literal["auto"] = Field(
        False,
        description="recompute layers in the backward pass to save memory: all (true), the first so many, or as many as memory"
        " asks for (auto)",
    )
    sequence_parallel: Count = Field(
        1, description="number of neighbouring devices that compute a part of each row, and of the memory for it (Ulysses)"
    )
    trust_remote_code: bool = Field(False, description="allow code from the model repository to run")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N, mps")
    precompute: bool = Field(
        False, description="compute a frozen role's log-probabilities of a data set before the run, keep them, and not load it"
    )
    lr: float | None = Field(
        None, ge=0, description="peak learning rate; default: set by the algorithm, else 1e-6; ten times that for adapters"
    )
    router_aux_loss_coef: float | None = Field(
        None,
        ge=0,
        description="weight of the loss that keeps experts evenly used; 0: off; default: that of the model's configuration, if it"
        " has output_router_logits",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after warm-up")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="lowest rate of the schedule, as a fraction of lr")
    warmup_steps: int = Field(0, ge=0, description="optimizer updates of linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of AdamW")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW betas")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW epsilon")
    max_grad_norm: float = Field(1.0, ge=0, description="clip the gradient to this norm; 0: off")

    @field_validator("gradient_checkpointing", mode="wrap")
    @classmethod
    def _layers(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(f"should be true, false, 'auto' or a number of layers, not {value!r}") from None

    @property
    def adapts(self) -> bool:
        """True if the role has an adapter, from a directory or a new one, and trains nothing else."""
        return bool(self.adapter or self.lora.rank)

    @property
    def base(self) -> RoleConfig:
        """The role with the model's own weights, without an adapter and in all their bits."""
        return self.model_copy(update={"adapter": None, "quantize": None})

    @property
    def peak_lr(self) -> float:
        """``lr``, or the default where neither the configuration nor a plugin's needs set one."""
        return 1e-6 if self.lr is None else self.lr


class DataSource(Open):
    """A source of tasks; a task plugin's options are beside these."""

    path: str = Field(description="file, directory, hub name, or a task plugin's name")
    name: str | None = Field(None, description="its name in metrics; default: the last part of path")
    subset: str | None = Field(None, description="hub configuration name")
    split: str | None = Field(None, description="split of a hub dataset or datasets directory")
    weight: float = Field(1.0, gt=0, description="share of this source when several are mixed")
    prompt_key: str | None = Field(None, description="column with the prompt; default: the section's")
    label_key: str | None = Field(None, description="column with the ground truth; default: the section's")
    max_samples: Count | None = Field(None, description="use only the first rows, at most this many")


class DataConfig(Section):
    sources: list[DataSource] = Field([], description="--data PATH[@WEIGHT], repeatable")
    prompt_key: str | None = Field(
        None,
        description="column with the prompt; default: the first of prompt, question, problem, messages, instruction, input",
    )
    label_key: str | None = Field(
        None,
        description="column with the ground truth; default: the first of label, answer, ground_truth, solution, target, output,"
        " reward_model.ground_truth",
    )
    agent_key: str | None = Field(None, description="column with the agent's name")
    ignore: list[str] = Field(
        [], description="columns, and keys of messages, left unread although other projects give them a meaning; repeatable"
    )
    fetch_images: bool = Field(False, description="fetch pictures whose address is http or https, once, into the cache")
    system_prompt: str | None = Field(None, description="system message put before every prompt")
    template: str | None = Field(
        None, description="prompt template with {prompt}; 'none': no chat template; default: the tokenizer's chat template"
    )
    template_kwargs: list[str] = Field(
        [], description="KEY=VALUE for the chat template, such as enable_thinking=false; values are JSON or texts"
    )
    day: str | None = Field(
        None, description="what chat templates take for today, as 2026-12-31; default: the day on which the run began"
    )
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
    ) = Field(None, description="how to read rows that have answers; default: what the columns say")
    split_at: str | None = Field(
        None, description="text before every answer, where chosen and rejected are whole dialogues without a prompt"
    )
    hh: Literal["text", "chat"] = Field(
        "text",
        description="transcripts of 'Human:' and 'Assistant:' stay as they are, or become conversations in the chat template",
    )
    condition: str | None = Field(
        None,
        description="prompt of a row of the format generated, with its reward, such as '{prompt} <rm_score>: {reward:.2f} '",
    )
    max_tokens: Count | None = Field(
        None, description="longest row that has an answer, prompt included, in tokens; default: the model's context"
    )
    long_rows: Literal["auto", "truncate", "filter"] = Field(
        "auto",
        description="what to do with longer rows; truncate cuts the end of the answer; auto: truncate for one answer to imitate, "
        "else filter",
    )
    history: Literal["rows", "refuse"] = Field(
        "rows", description="turns that the chat template changes once others follow: rows of their own, or an error"
    )
    max_prompt_tokens: Count | None = Field(None, description="longest prompt, in tokens")
    long_prompts: Literal["filter", "truncate"] = Field(
        "filter", description="what to do with longer prompts; truncate keeps the end"
    )
    on_bad_row: Literal["stop", "skip"] = Field(
        "stop", description="what to do with rows without a usable prompt or label; skip counts them"
    )
    max_samples: Count | None = Field(None, description="use at most this many tasks in total")
    shuffle: bool = Field(True, description="draw tasks in an order fixed by the seed")
    epochs: float = Field(1.0, gt=0, description="passes over data that is trained on as it is; train.steps overrides it")


class RolloutConfig(Section):
    n: Count = Field(8, description="samples per prompt")
    temperature: Temperature = Field(1.0, description="above 0 in training; log-probabilities use it too")
    top_p: TopP = Field(1.0, description="1: off; else training replays which tokens could be drawn, if the engine tells them")
    top_k: TopK = Field(0, description="0: off; else as top_p")
    min_p: float = Field(0.0, ge=0, lt=1, description="0: off; else as top_p")
    max_new_tokens: Count = Field(256, description="longest answer per turn, in tokens")
    max_tokens: Count | None = Field(
        None, description="longest trajectory including the prompt, in tokens; default: the model's context"
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], description="stop strings")
    stop_token_ids: list[TokenId] = Field([], description="stop tokens in addition to the end-of-sequence tokens")
    max_unjudged: float = Field(
        0.5, ge=0, le=1, description="the run stops if more than this fraction of a step's trajectories is unjudged"
    )
    max_refills: int = Field(8, ge=0, description="how many more batches of prompts a step may draw to replace dropped groups")
    score_timeout_s: float = Field(300.0, gt=0, description="deadline for one reward plugin on one group")
    score_retries: int = Field(0, ge=0, description="further attempts after a reward plugin raised an error")
    step_timeout_s: float = Field(600.0, gt=0, description="deadline for one call of agent_reset, agent_step or agent_close")
    episode_timeout_s: float = Field(3600.0, gt=0, description="deadline for agent_run on one episode, generation included")
    stall_s: float = Field(
        5400.0,
        ge=0,
        description="stop the run after this many seconds in which no token is sampled, no episode ends and nothing is scored;"
        " 0: never",
    )
    episode_retries: int = Field(2, ge=0, description="further attempts after EpisodeFailed(retryable=True)")
    history: Literal["append", "template", "refuse"] = Field(
        "append",
        description="turns that the chat template would write otherwise once others follow: left as they were sampled, "
        "a row of their own as the template writes them, or a failure of the episode",
    )
    policy_port: int = Field(
        0, ge=0, le=65535, description="port of the policy server on 127.0.0.1, for programs that already run; 0: a free one"
    )
    tool_format: str = Field(
        "auto", description="how the model writes tool calls; auto: as its tokenizer or chat template says"
    )

    @property
    def truncated_by(self) -> dict[str, float]:
        """The settings that leave tokens out of the distribution, each with the value that turns it off."""
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return {name: value for name, value in off.items() if getattr(self, name) != value}


class TrainConfig(Section):
    steps: Count | None = Field(
        None, description="training steps; default: 100, or data.epochs passes over data that is trained on as it is"
    )
    batch_size: Count = Field(
        32, description="prompts per step, of which each makes rollout.n trajectories; or rows or pairs of the data"
    )
    epochs: Count = Field(1, description="passes over each batch")
    minibatches: Count = Field(1, description="optimizer updates per pass")
    max_tokens_per_microbatch: Count = Field(16384, description="token budget of one forward and backward pass")
    old_logprobs: Literal["auto", "fused", "recompute", "sampler"] = Field(
        "auto",
        description="which policy the ratio compares with; auto: fused with one update per batch and no dropout, else recompute;"
        " with async_depth: sampler",
    )
    autocast: Literal["auto", "off", "bfloat16"] = Field("auto", description="type of passes' weights; auto: bfloat16 on GPUs")
    shared_prefix: Literal["auto", "on", "off"] = Field("auto", description="compute a group's prompt once in training")
    keep_logits: Literal["auto", "on", "off"] = Field(
        "auto", description="keep logits for the backward pass, or compute them twice; auto: keep them on GPUs where they fit"
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="what to do after a non-finite loss or gradient; its trajectories are saved first"
    )
    threads: int = Field(0, ge=0, le=4096, description="CPU threads; 0: torch's default")

    @property
    def updates_per_batch(self) -> int:
        return self.epochs * self.minibatches


class PipelineConfig(Section):
    """Settings of sampling ahead of training, with ``async_depth``."""

    schedule: Literal["free", "fixed"] = Field(
        "free",
        description="free: new weights come while episodes play; fixed: episodes are over before new weights come, so that a run"
        " gives the same values again",
    )
    max_staleness: int | None = Field(
        None,
        ge=1,
        description="let slow episodes finish in later batches, by weights at most so many versions newer; more than async_depth."
        " Default: batches come in the order of the draws",
    )


class EvalConfig(Section):
    data: DataConfig = Field(default_factory=DataConfig)
    every: int = Field(0, ge=0, description="steps between evaluations; 0: only before the first step and after the last one")
    at_start: bool = Field(True, description="evaluate before the first step")
    at_end: bool = Field(True, description="evaluate after the last step")
    reward: dict[str, RewardChoice] = Field({}, description="rewards for evaluation; default: the training rewards")
    n: Count = Field(1, description="samples per prompt")
    k: list[Count] = Field([], description="pass@k to report besides 1 and n")
    temperature: Temperature = Field(1.0, description="0: greedy")
    top_p: TopP = Field(1.0, description="1: off")
    top_k: TopK = Field(0, description="0: off")
    min_p: float = Field(0.0, ge=0, lt=1, description="0: off")
    max_new_tokens: Count | None = Field(None, description="default: as in training")
    seed: int = Field(0, ge=0, description="fixes the evaluation samples; independent of the run's seed")


class CheckpointConfig(Section):
    every: int = Field(20, ge=0, description="steps between checkpoints; 0: only at the end, on Ctrl-C and when the run fails")
    keep: int | None = Field(
        None,
        ge=0,
        description="how many of the newest checkpoints to keep; 0: all; default: two while the run goes on, and the last one when"
        " it has finished",
    )
    best: str | None = Field(
        None, description="also keep the checkpoint with the best value of this metric, such as eval/pass@1"
    )
    best_mode: Literal["max", "min"] = Field("max", description="whether a larger or a smaller value is better")
    final: bool = Field(True, description="write a checkpoint and model/ at the end")
    on_error: Literal["stop", "warn"] = Field(
        "stop",
        description="when a checkpoint cannot be written, as on a full disk: stop the run, or warn and go on without it; the last"
        " one of a run always stops it",
    )


class TrajectoryLog(Section):
    every: int = Field(1, ge=0, description="steps between trajectory files; 0: none")
    max_per_step: int = Field(64, ge=0, description="trajectories written per step; 0: all")
    tokens: bool = Field(False, description="write token ids, log-probabilities and versions too")
    show: int = Field(2, ge=0, description="completions shown in the console table")


class RunConfig(Section):
    """Everything a run is. Dumped, it is the tree that ``config.yaml`` holds."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    seed: int = Field(0, ge=0, description="fixes data order, sampling and initial heads")
    name: str | None = Field(None, description="the run's name; default: from algorithm and reward")
    run_dir: str | None = Field(None, description="default: runs/<time>-<name>")
    roles: dict[str, RoleConfig] = Field({}, description="--actor.*, --critic.* are shorthands")
    data: DataConfig = Field(default_factory=DataConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    algo: PluginChoice | None = None
    reward: dict[str, RewardChoice] = Field({}, description="alias → plugin; --reward, repeatable")
    agent: PluginChoice = Field(default_factory=lambda: defaults()["agent"])
    agents: dict[str, PluginChoice] = Field({}, description="alias → plugin; further agents, for tasks that name one")
    extensions: dict[str, PluginChoice] = Field({}, alias="with", description="alias → plugin; --with, repeatable, in order")
    tracker: dict[str, PluginChoice] = Field(
        default_factory=lambda: defaults()["tracker"],
        description="alias → plugin; --tracker, repeatable; adds to the default ones",
    )
    engine: PluginChoice = Field(default_factory=lambda: defaults()["engine"])
    backend: PluginChoice = Field(default_factory=lambda: defaults()["backend"])
    runtime: PluginChoice = Field(default_factory=lambda: defaults()["runtime"])
    sync: SyncChoice = Field(default_factory=SyncChoice)
    kernels: PluginChoice = Field(
        default_factory=lambda: defaults()["kernels"],
        description="auto: installed ones that suit model and device; none: the plain path; or one by name",
    )
    placement: list[str] = Field(
        [], description="ROLE+ROLE=[NODESx]DEVICES[:cpu|gpu][:pack|spread]: roles that share devices; repeatable"
    )
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    max_restarts: int = Field(0, ge=0, description="how often a run begins again from its checkpoint by itself, whatever died")
    trajectories: TrajectoryLog = Field(default_factory=TrajectoryLog)
    async_depth: int = Field(
        0,
        ge=0,
        description="maximum age of a batch, in weight versions: sampling goes on while the trainer works;"
        " 0: sample and train in turns",
    )
    in_flight_updates: bool | None = Field(
        None,
        description="with async_depth: new weights come while requests are answered, which go on under them; default: if engine and"
        " runtime can",
    )
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    from_trajectories: str | None = Field(
        None, description="train on the rollouts in this file, or in a run's trajectories/, without sampling"
    )
    debug: bool = Field(
        False, description="run everything in one process and one thread, so that a debugger works in any plugin"
    )

    @property
    def old_logprobs_mode(self) -> str:
        """``fused``, ``recompute`` or ``sampler``: ``train.old_logprobs`` with ``auto`` decided."""
        if self.train.old_logprobs != "auto":
            return self.train.old_logprobs
        if self.async_depth:
            return "sampler"  # the weights that sampled are gone
        # The pass that trains drops inputs at random, and π_old is the policy without that.
        dropping = self.roles["actor"].lora.dropout > 0
        return "fused" if self.train.updates_per_batch == 1 and not dropping else "recompute"

    @field_validator("roles")
    @classmethod
    def _actor_first(cls, roles: dict[str, RoleConfig]) -> dict[str, RoleConfig]:
        return {"actor": roles.get("actor", RoleConfig()), **roles}
