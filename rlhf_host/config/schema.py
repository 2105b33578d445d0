"""The run's configuration: one schema for YAML, flags and Python. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator

from rlhf_host.functional.options import AGGREGATIONS, check_aggregation


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values are checked when set."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True)


class PluginChoice(Section):
    """One chosen plugin: ``plugin`` is ``name`` or ``distribution:name``; ``options`` are its own."""

    plugin: str
    weight: float = Field(1.0, description="rewards only: factor in the weighted sum; 0 logs without counting")
    options: dict[str, Any] = Field(default_factory=dict)


class RoleConfig(Section):
    """A model's job. ``None`` means: as the actor, or the role's own default."""

    model: str | None = Field(None, description="model directory, hub name, or GGUF file")
    revision: str | None = Field(None, description="hub revision")
    tokenizer: str | None = Field(None, description="tokenizer directory or hub name, where it is not beside the model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="weights in memory; auto: float32 for trainable roles, the checkpoint's own for frozen ones"
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = Field(
        "auto", description="attention kernel; auto: sdpa, or eager where sdpa would leave out a part of the model"
    )
    gradient_checkpointing: bool = Field(False, description="recompute layers in the backward pass to save memory")
    trust_remote_code: bool = Field(False, description="allow code from the model repository to run")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N, mps")
    lr: float | None = Field(None, ge=0, description="peak learning rate; default: the algorithm's for the role, or 1e-6")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after warm-up")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="floor of the schedule, as a fraction of lr")
    warmup_steps: int = Field(0, ge=0, description="optimizer updates of linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's, decoupled")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW epsilon")
    max_grad_norm: float = Field(1.0, ge=0, description="gradient norm clip; 0: off")

    @property
    def peak_lr(self) -> float:
        """``lr``, or the default where neither the configuration nor a plugin's needs set one."""
        return 1e-6 if self.lr is None else self.lr


class DataSource(Section):
    """Where tasks come from."""

    path: str = Field(description="file, directory, hub name, or a task plugin's name")
    name: str | None = Field(None, description="how metrics call it; default: the last part of path")
    subset: str | None = Field(None, description="hub configuration name")
    split: str | None = Field(None, description="split of a hub dataset or datasets directory")
    weight: float = Field(1.0, gt=0, description="share when several sources are mixed")
    prompt_key: str | None = Field(None, description="column with the prompt; default: the section's")
    label_key: str | None = Field(None, description="column with the ground truth; default: the section's")
    max_samples: PositiveInt | None = Field(None, description="use only the first so many rows")
    options: dict[str, Any] = Field(default_factory=dict, description="a task plugin's own options")


class DataConfig(Section):
    sources: list[DataSource] = Field(default_factory=list, description="--data PATH[@WEIGHT], repeatable")
    prompt_key: str | None = Field(
        None, description="column with the prompt; default: the first of prompt, question, problem, messages, input"
    )
    label_key: str | None = Field(
        None,
        description="column with the ground truth; default: the first of label, answer, ground_truth, solution, target, output",
    )
    agent_key: str | None = Field(None, description="column with the agent's name")
    system_prompt: str | None = Field(None, description="system message put before every prompt")
    template: str | None = Field(
        None, description="own prompt template with {prompt}; 'none': no chat template; default: the tokenizer's"
    )
    max_prompt_tokens: PositiveInt | None = Field(None, description="longest prompt")
    long_prompts: Literal["filter", "truncate"] = Field(
        "filter", description="what happens to longer ones; truncation keeps the end"
    )
    max_samples: PositiveInt | None = Field(None, description="use only so many tasks in all")
    shuffle: bool = Field(True, description="draw tasks in an order fixed by the seed")


class RolloutConfig(Section):
    n: PositiveInt = Field(8, description="samples per prompt")
    temperature: float = Field(1.0, ge=0, description="above 0 in training; log-probabilities are taken at it too")
    top_p: float = Field(1.0, gt=0, le=1, description="1: off; training refuses others, as it could not correct for them")
    top_k: int = Field(0, ge=0, description="0: off; likewise")
    min_p: float = Field(0.0, ge=0, lt=1, description="0: off; likewise")
    max_new_tokens: PositiveInt = Field(256, description="per turn")
    max_tokens: PositiveInt | None = Field(
        None, description="longest whole trajectory, prompt included; default: the model's context"
    )
    stop: list[str] = Field(default_factory=list, description="stop strings")
    stop_token_ids: list[int] = Field(default_factory=list, description="stop tokens beside the end-of-sequence tokens")
    max_unjudged: float = Field(
        0.5, ge=0, le=1, description="largest fraction of unjudged trajectories in a step before the run stops"
    )
    max_refills: int = Field(
        8, ge=0, description="how many times the batch's worth of prompts may be drawn again for dropped groups"
    )
    score_timeout_s: float = Field(300.0, gt=0, description="deadline for one reward plugin on one group")
    score_retries: int = Field(0, ge=0, description="further tries after a reward plugin raised")
    episode_retries: int = Field(2, ge=0, description="further tries of an episode that failed retryably")


class TrainConfig(Section):
    steps: PositiveInt = Field(100, description="rollout batches")
    batch_size: PositiveInt = Field(32, description="prompts per step; each makes rollout.n trajectories")
    epochs: PositiveInt = Field(1, description="passes over each batch")
    minibatches: PositiveInt = Field(1, description="optimizer updates per pass")
    max_tokens_per_microbatch: PositiveInt = Field(16384, description="token budget of one forward and backward pass")
    old_logprobs: Literal["auto", "fused", "recompute", "sampler"] = Field(
        "auto", description="what the ratio refers to; auto: fused with one update per batch, else recompute"
    )
    autocast: Literal["auto", "off", "bfloat16"] = Field("auto", description="auto: bfloat16 where the hardware has it (CUDA)")
    shared_prefix: Literal["auto", "on", "off"] = Field("auto", description="compute a group's prompt once in training")
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="what to do about a non-finite loss or gradient, after the dump"
    )
    threads: int = Field(0, ge=0, description="CPU threads; 0: torch's default")


class EvalConfig(Section):
    data: DataConfig = Field(default_factory=DataConfig)
    every: int = Field(0, ge=0, description="steps between evaluations; 0: only before the first and after the last step")
    at_start: bool = Field(True, description="evaluate before the first step")
    at_end: bool = Field(True, description="evaluate after the last step")
    reward: dict[str, PluginChoice] = Field(
        default_factory=dict, description="rewards for evaluation; default: the training rewards"
    )
    n: PositiveInt = Field(1, description="samples per prompt")
    k: list[PositiveInt] = Field(default_factory=list, description="pass@k to report besides 1 and n")
    temperature: float = Field(1.0, ge=0, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="1: off")
    top_k: int = Field(0, ge=0, description="0: off")
    min_p: float = Field(0.0, ge=0, lt=1, description="0: off")
    max_new_tokens: PositiveInt | None = Field(None, description="default: as in training")
    seed: int = Field(0, description="fixes the evaluation samples, whatever the run's seed")


class CheckpointConfig(Section):
    every: int = Field(0, ge=0, description="steps between checkpoints; 0: only the last one and on Ctrl-C")
    keep: int = Field(2, ge=0, description="newest checkpoints kept; 0: all")
    best: str | None = Field(None, description="metric whose best checkpoint is kept too, such as eval/pass@1")
    best_mode: Literal["max", "min"] = Field("max", description="whether more or less of it is better")
    final: bool = Field(True, description="write a checkpoint and model/ at the end")


class RayConfig(Section):
    address: str | None = Field(None, description="cluster to join, such as auto or HOST:PORT; default: one made for this run")
    temp_dir: str | None = Field(
        None, description="where a cluster made here keeps its sockets and logs; default: the system's"
    )
    num_cpus: PositiveInt | None = Field(None, description="CPUs a cluster made here counts; default: the machine's")
    num_gpus: int | None = Field(None, ge=0, description="GPUs a cluster made here counts; default: the machine's")
    object_store_mb: int | None = Field(None, ge=80, description="shared memory for batches; default: Ray's own choice")
    runtime_env: dict[str, Any] = Field(
        default_factory=dict, description="Ray's runtime_env of all workers and engines: env_vars, pip, working_dir"
    )
    wait_s: float = Field(60.0, gt=0, description="longest wait for devices that other work holds")
    max_restarts: int = Field(3, ge=0, description="how often an engine that died is started again")


class KLConfig(Section):
    coef: float = Field(0.0, ge=0, description="strength; 0: no reference model is loaded")
    place: Literal["reward", "loss"] = Field("reward", description="per-token reward, or a loss term")
    estimator: Literal["auto", "k1", "k2", "k3", "unbiased"] = Field(
        "auto", description="auto: k1 in the reward, unbiased in the loss"
    )
    force: bool = Field(False, description="allow a biased estimator in the reward")
    aggregation: str = Field(
        "token-mean", description=f"in the loss: {', '.join(AGGREGATIONS)} or sequence-mean-token-sum-over(L)"
    )
    controller: Literal["fixed", "adaptive"] = Field("fixed", description="adaptive: the coefficient follows target")
    target: float = Field(0.01, gt=0, description="adaptive: KL in nats per token")
    horizon: PositiveInt = Field(10000, description="adaptive: trajectories over which the coefficient may double")

    @field_validator("aggregation")
    @classmethod
    def _known(cls, value: str) -> str:
        return check_aggregation(value)


class TrajectoryLog(Section):
    every: int = Field(1, ge=0, description="steps between trajectory files; 0: none")
    max_per_step: int = Field(64, ge=0, description="trajectories written per step; 0: all")
    tokens: bool = Field(False, description="write token ids, log-probabilities and versions too")
    show: int = Field(2, ge=0, description="completions shown in the console table")


class RunConfig(Section):
    """Everything a run is."""

    seed: int = Field(0, description="fixes data order, sampling and initial heads")
    name: str | None = Field(None, description="the run's name; default: from algorithm and reward")
    run_dir: str | None = Field(None, description="default: runs/<time>-<name>")
    roles: dict[str, RoleConfig] = Field(
        default_factory=lambda: {"actor": RoleConfig()}, description="--actor.*, --critic.* are shorthands"
    )
    data: DataConfig = Field(default_factory=DataConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    algo: PluginChoice | None = None
    reward: dict[str, PluginChoice] = Field(default_factory=dict, description="alias → plugin; --reward, repeatable")
    agent: PluginChoice = Field(default_factory=lambda: PluginChoice(plugin="single_turn"))
    extensions: dict[str, PluginChoice] = Field(
        default_factory=dict, description="alias → plugin; --with, repeatable, in order"
    )
    tracker: dict[str, PluginChoice] = Field(
        default_factory=lambda: {name: PluginChoice(plugin=name) for name in ("console", "jsonl")},
        description="--tracker, repeatable; adds to console and jsonl",
    )
    engine: PluginChoice = Field(default_factory=lambda: PluginChoice(plugin="transformers"))
    backend: PluginChoice = Field(default_factory=lambda: PluginChoice(plugin="torch"))
    runtime: PluginChoice = Field(default_factory=lambda: PluginChoice(plugin="local"))
    placement: list[str] = Field(
        default_factory=list,
        description="ROLE+ROLE=[NODESx]DEVICES[:cpu|gpu][:pack|spread]: these share devices; repeatable; for runtimes with several",
    )
    ray: RayConfig = Field(default_factory=RayConfig)
    sync: PluginChoice = Field(default_factory=lambda: PluginChoice(plugin="in_process"))
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    trajectories: TrajectoryLog = Field(default_factory=TrajectoryLog)
    from_trajectories: str | None = Field(
        None, description="train on the rollouts of this file, or of a run's trajectories/, and sample nothing"
    )
    debug: bool = Field(False, description="everything in this process and thread, so that a debugger works in any plugin")
