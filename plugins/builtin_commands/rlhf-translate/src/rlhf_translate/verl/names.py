"""Names of verl that need no setting here or have no counterpart."""

from __future__ import annotations

_MODELS = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model", "critic", "critic.model")


def _of_models(names: str) -> str:
    return " ".join(f"{model}.{name}" for model in _MODELS for name in names.split())


NEEDLESS = {
    "hydra's own settings": "hydra.* hydra/* --cfg --multirun",
    "it names verl's own class": "*._target_ _target_ trainer.use_legacy_worker_impl trainer.use_v1",
    "micro-batches follow from train.max_tokens_per_microbatch": (
        "critic.ppo_micro_batch_size* critic.ppo_max_token_len_per_gpu critic.forward_max_token_len_per_gpu "
        "critic.forward_micro_batch_size* critic.use_dynamic_bsz reward_model.micro_batch_size* reward_model.use_dynamic_bsz "
        "reward_model.forward_max_token_len_per_gpu data.micro_batch_size* data.max_token_len_per_gpu data.use_dynamic_bsz "
        "data.balance_dp_token data.pad_mode"
    ),
    "rows are packed by tokens": (
        "*.use_remove_padding use_remove_padding *.pad_to_length* *.use_prefix_grouper actor_rollout_ref.rollout.prompt_length "
        "actor_rollout_ref.rollout.response_length reward_model.rollout.*_length"
    ),
    "it changes the speed or the memory, not the result": (
        "*.use_torch_compile *.forward_prefetch *.wrap_policy* *.use_fused_kernels "
        "*.fused_kernel_options* *.entropy_from_logits_* *.entropy_checkpointing *.enable_activation_offload *.use_shm "
        "*.use_orig_params *.use_no_sync_for_gradient_accumulation *.tiled_mlp* "
        "*.forward_only *.load_weight *.calculate_sum_pi_squared *.sum_pi_squared_checkpointing "
        "actor_rollout_ref.rollout.layered_summon actor_rollout_ref.rollout.cudagraph_capture_sizes "
        "actor_rollout_ref.rollout.multi_stage_wake_up actor_rollout_ref.rollout.mode actor_rollout_ref.rollout.disable_log_stats "
        "actor_rollout_ref.rollout.checkpoint_engine* actor_rollout_ref.rollout.agent.num_workers data.datagen* "
        "actor_rollout_ref.rollout.skip_tokenizer_init data.filter_overlong_prompts_workers data.num_workers "
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes *.nccl_timeout data.validation_shuffle"
    ),
    "the critic and the reference are trained and split like the actor": (
        "critic.strategy actor_rollout_ref.ref.strategy reward_model.strategy *.rollout_n critic.fsdp.* critic.model.fsdp_config.* "
        "actor_rollout_ref.ref.fsdp_config.* critic.kl_ctrl.* actor_rollout_ref.ref.model actor_rollout_ref.ref.param_offload"
    ),
    "engines get the trainer's weights": (
        "actor_rollout_ref.rollout.load_format *.layer_name_map* actor_rollout_ref.hybrid_engine"
    ),
    "it changes what is shown or measured, not what is trained": (
        "*profile* *profiler* *nsight* actor_rollout_ref.actor.calculate_entropy trainer.log_val_generations "
        "trainer.val_generations_to_log_to_wandb actor_rollout_ref.rollout.moe_load_balance_metrics_interval prometheus* "
        "actor_rollout_ref.rollout.prometheus* actor_rollout_ref.rollout.trace* transfer_queue.metrics*"
    ),
    "answers and their rewards are kept in trajectories/": "trainer.rollout_data_dir trainer.validation_data_dir",
    "every checkpoint has every trained model and can be resumed from": (
        "*.checkpoint.* checkpoint.* trainer.max_critic_ckpt_to_keep trainer.del_local_ckpt_after_load trainer.esi_redundant_time "
        "trainer.remove_previous_ckpt_in_save"
    ),
    "rlhf train starts its processes itself": (
        "ray_init* ray_kwargs* trainer.ray_wait_register_center_timeout trainer.nccl_timeout transfer_queue.*"
    ),
    "the model's processor sizes pictures": "data.image_patch_size",
    "all columns are kept, for rewards and agents": (
        "data.return_* data.reward_fn_key data.tools_key data.multiturn.tools_key"
    ),
    "rewards are called for each finished group, beside sampling": (
        "reward_model.reward_manager reward.reward_manager.* reward_manager.* reward_model.launch_reward_fn_async "
        "reward.num_workers reward_model.num_workers reward_model.use_reward_loop reward_model.reward_loop_* "
        "reward_model.reward_kwargs.overlong_buffer_cfg.log reward.reward_kwargs.overlong_buffer_cfg.log "
        "reward_model.overlong_buffer.log"
    ),
    "it is about verl's own tokens of turns": "data.ignore_input_ids_mismatch",
    "adapters begin so here": "*.lora.lora_A_init_method",
    "the number of steps follows from the run": "*.optim.total_training_steps optim.total_training_steps",
    "the KL penalty is not in the loss of a critic": "critic.loss_agg_mode critic.loss_scale_factor",
}
"""Reason for needing no setting → names, or patterns of names."""

MISSING = {
    "sampling ahead of training: --async-depth": "trainer.v1.* async_training.*",
    "devices of the reward model: --placement reward=N": (
        "reward_model.nnodes reward_model.n_gpus_per_node reward.reward_model.nnodes reward.reward_model.n_gpus_per_node "
        "*.enable_resource_pool"
    ),
    "minibatches in the order of the batch": "*.actor.shuffle critic.shuffle *.data_loader_seed",
    "as many tasks are drawn as a batch needs": "algorithm.filter_groups.max_inflight_gen_batches",
    "one setting for all rows: --data.template-kwargs enable_thinking=false": (
        "data.enable_thinking_* data.multiturn.enable_thinking_key"
    ),
    "another tokenizer for one model": "*.input_tokenizer data.tokenizer critic.model.tokenizer_path",
    "optimizers of the reference, which is not trained": "actor_rollout_ref.ref.optim.*",
    "Megatron": "*megatron* *mbridge* *moe_config*",
    "other backends: torch, deepspeed and fsdp are here": "*veomni* *torchtitan* *turbo_config* *automodel*",
    "Megatron, which keeps its optimizer in parts": (
        "*.override_optimizer_config.optimizer_* *.override_optimizer_config.overlap_* "
        "*.override_optimizer_config.use_precision_*"
    ),
    "another optimizer: --backend.optimizer and --backend.optimizer-args": (
        "*.optim.muon* *.optim.override_optimizer_config* *.optim.*_dtype *.optim.use_precision_aware_optimizer "
        "*.optim.use_layer_wise_* *.optim.use_checkpoint_opt_param_scheduler *.optim.weight_decay_incr_style"
    ),
    "rows are computed in parts by all roles that share devices: --actor.sequence-parallel": (
        "*fsdp_config.ulysses_sequence_parallel_size *.ref.ulysses_sequence_parallel_size "
        "reward_model.ulysses_sequence_parallel_size *.context_parallel_size engine.ulysses_* *.fsdp.ulysses_*"
    ),
    "video and sound": "data.video_* data.audio_key",
    "a limit for the pictures of a prompt, which has those of its row": "*limit_images*",
    "arguments of the model's processor: write them into its preprocessor_config.json": "data.mm_processor_kwargs*",
    "parts of a model that are not trained: --actor.freeze PATTERN": "*.freeze_vision* *freeze_language_model",
    "losses that are not here": "*.policy_loss.*_* algorithm.pf_ppo* algorithm.use_pf_ppo",
    "the teacher computes with its weights in the trainer here, without an engine": (
        "distillation.teacher_models.teacher_model.* distillation.teacher_model.* distillation.teacher_[!m]*"
    ),
    "several teachers: --algo.teachers names roles, and --algo.teacher-key a column with the role of each row": (
        "distillation.teacher_models.*"
    ),
    "--algo on_policy_distill has no such option": "distillation.* actor_rollout_ref.rollout.distill*",
    "an option of another engine": "*.engine_kwargs.sglang* *.engine_kwargs.trtllm*",
    "vLLM's own options: --engine.extra": (
        "actor_rollout_ref.rollout.engine_kwargs* actor_rollout_ref.rollout.*parallel_size*"
    ),
    "a scheme of a file: --engine.quantization is fp8 or int8": "actor_rollout_ref.rollout.quantization_config_file",
    "training of quantized weights": "*.qat.* *quantization*",
    "heads that predict several tokens": "*.mtp* *mtp.*",
    "replaying the choices of a router: --with router_replay": "*.router_replay* *routing_replay*",
    "an agent of your own: --agent FILE.py": (
        "actor_rollout_ref.rollout.agent.* actor_rollout_ref.rollout.multi_turn.* actor_rollout_ref.rollout.chat_scheduler "
        "data.tool_config_path data.function_tool_path data.continuous_token*"
    ),
    "programs run in --reward code_exec's own jail": "*sandbox_fusion*",
    "another chat template: --data.template FILE": "data.chat_template *.custom_chat_template",
    "code of your own: --data FILE.py:FUNCTION": "data.custom_cls* data.sampler*",
    "storage outside the run directory": "trainer.default_hdfs_dir",
    "to go on with a run: rlhf train --resume RUN_DIR": "trainer.resume_from_path trainer.resume_path",
    "keyword arguments of the model's class": "*.override_config* *.external_lib *.hf_config_path",
    "sampling tokens beyond the end of an answer": "actor_rollout_ref.rollout.ignore_eos",
    "skipping rollouts: --from-trajectories": "skip.*",
    "Megatron's names of linear maps: --actor.lora.targets has those of transformers": "*.lora.target_modules",
    "adapters have the type that --actor.dtype and --train.autocast give them": "*.lora.dtype",
    "adapters of other kinds": "*.lora.* *.lora_adapter_path *.exclude_modules critic.model.target_modules",
    "arguments of the reward function: give them as defaults in its file": "*custom_reward_function.reward_kwargs.*",
    "a reward model scores with its weights in a role of the run here, without an engine": (
        "reward.reward_model.* reward_model.rollout.* reward_model.*"
    ),
}
"""Meaning → names, or patterns of names. The first match counts."""
