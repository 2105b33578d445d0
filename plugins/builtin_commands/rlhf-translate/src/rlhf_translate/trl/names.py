"""Names of TRL, and of the Trainer of transformers, that need no setting here or have no counterpart."""

from __future__ import annotations

NEEDLESS = {
    "rlhf train starts and joins its processes itself": (
        "accelerator_config ddp_* local_rank dataloader_multiprocessing_context "
        "split_batches same_network machine_rank main_process_* rdzv_backend compute_environment main_training_function "
        "downcast_bf16 tpu_* deepspeed_config.deepspeed_multinode_launcher deepspeed_config.zero3_init_flag "
        "deepspeed_config.zero3_save_16bit_model deepspeed_config.gradient_accumulation_steps "
        "deepspeed_config.gradient_clipping ds3_gather_for_generation vllm_group_port enable_cpu_affinity "
        "module no_python quiet tee log_dir role rdzv_conf max_restarts monitor_interval vm num_cpu_threads_per_process "
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter zero3_init_flag "
        "zero3_save_16bit_model deepspeed_moe_layer_cls_names mpirun_* commands command_file"
    ),
    "what DeepSpeed's own file sets beside its stage follows from the other options": (
        "zero_optimization.* bf16.* fp16.* optimizer.* scheduler.* gradient_clipping train_batch_size "
        "train_micro_batch_size_per_gpu steps_per_print wall_clock_breakdown "
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer communication_data_type activation_checkpointing.*"
    ),
    "it changes what is shown, not what is trained": (
        "disable_tqdm log_level* log_on_each_node logging_nan_inf_filter logging_dir log_multimodal log_unique_prompts "
        "wandb_log_unique_prompts include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics "
        "include_for_metrics include_inputs_for_metrics batch_eval_metrics"
    ),
    "rows are read as they are needed": (
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_num_workers "
        "dataset_batch_size dataset_num_proc num_of_sequences chars_per_token"
    ),
    "rlhf train trains, and evaluates where there is evaluation data": "do_train do_eval do_predict prediction_loss_only",
    "evaluation is batched by tokens": (
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object precompute_ref_batch_size eval_packing"
    ),
    "rows are packed by tokens": (
        "packing_strategy pad_to_multiple_of padding_value label_pad_token_id pad_token length_column_name"
    ),
    "checkpoints are resumable, one process writes, and a run directory is not overwritten": (
        "save_on_each_node save_safetensors overwrite_output_dir enable_jit_checkpoint restore_callback_states_from_checkpoint"
    ),
    "it changes the speed, not the result": (
        "torch_compile* torch_empty_cache_steps use_cache liger_kernel_config use_liger_loss use_logits_to_keep "
        "use_num_logits_to_keep activation_offloading use_transformers_paged use_transformers_continuous_batching "
        "transformers_continuous_batching_config cache_implementation gradient_checkpointing_kwargs "
        "gradient_checkpointing_use_reentrant vllm_model_impl dynamo_*"
    ),
    "engines belong to the run": "vllm_server_* vllm_device",
    "models of this kind are loaded by their configuration": (
        "lora_task_type is_encoder_decoder use_ms ignore_bias_buffers base_model_attribute_name"
    ),
    "log-probabilities and the softmax are in float32": "cast_lm_head_to_fp32",
    "losses are means over the whole batch, however it is split": "average_tokens_across_devices",
    "the columns of the data set are recognised": "label_names",
    "4 bits here are NF4 with double quantization": "bnb_4bit_quant_storage",
}
"""Reason for needing no setting → names, or beginnings of names."""

MISSING = {
    "after the run: rlhf push RUN_DIR REPO_ID": (
        "hub_* push_to_hub_* trackio_bucket_id trackio_static_space_id log_completions_hub_repo"
    ),
    "the best checkpoint is kept with --checkpoint.best METRIC": (
        "load_best_model_at_end metric_for_best_model greater_is_better"
    ),
    "optimizers other than those of torch.optim and bitsandbytes": "optim_target_modules",
    "an option of --algo vespo": "vespo_*",
    "losses that are not here": (
        "use_adaptive_entropy entropy_coef_* entropy_target f_divergence_type f_alpha_divergence_coef use_weighting"
    ),
    "tensors of experts: --actor.lora.targets all-linear,experts": "lora_target_parameters",
    "adapters of other kinds": "bias loftq_config use_dora lora_modules_to_save ref_adapter_name model_adapter_name",
    "noise on embeddings": "neftune_noise_alpha",
    "tools belong to the agent: --agent multi_turn, or --agent FILE.py": (
        "max_tool_calling_iterations tools environment_factory rollout_func"
    ),
    "options of sampling that training could not correct for": (
        "generation_kwargs vllm_guided_decoding_regex vllm_structured_outputs_regex"
    ),
    "keyword arguments of the model's class": "ref_model_init_kwargs",
    "the tokenizer and its chat template are those of the model: --data.template FILE for another": (
        "chat_template_path processing_class tokenizer"
    ),
    "evaluation is at the start, at the end and every --eval.every steps": "eval_delay generate_during_eval",
    "the device is that of the machine": "use_cpu no_cuda use_mps_device cpu",
    "rows of like lengths in one batch": "group_by_length",
    "the seed of the run is that of the data too": "data_seed random_state",
    "prompts are streamed with --data streaming, and rows with answers are not": "dataset_streaming",
    "batches are whole, and the last of a pass goes on into the next": (
        "dataloader_drop_last dataloader_in_order ignore_data_skip train_sampling_strategy auto_find_batch_size"
    ),
    "types of numbers other than those of --actor.dtype and --train.autocast": (
        "bf16_full_eval fp16_full_eval tf32 half_precision_backend"
    ),
    "a setting of FSDP that is not here": "fsdp_*",
    "the kernels that DeepSpeed and PyTorch choose": "debug",
    "an object of Python: write its sizes as parallelism_config_... of accelerate": "parallelism_config",
    "Megatron": "megatron_lm_* use_megatron_lm",
    "numbers of 8 bits: --kernels and --backend.precision have what there is here": "fp8_*",
    "weights on a disk: --backend.offload-optimizer cpu or --backend.offload-param cpu": "*offload_*_nvme_path",
    "which devices there are: CUDA_VISIBLE_DEVICES, or the machines of Ray": "gpu_ids",
    "TPUs and the machines of one cloud": "tpu* no_tpu_cluster aws_* ec2_* iam_* image_uri",
    "label smoothing of the Trainer": "label_smoothing_factor",
    "one table of rows: --data FILE.py:FUNCTION makes others of it": ("dataset_kwargs formatting_func data_collator"),
    "code of your own beside training: a plugin of yours": "compute_metrics callbacks",
    "variables of the environment: set them for rlhf train too": "env.*",
    "the reference model is the start of the actor, or --reference.model": "force_use_ref_model ref_model",
    "an option of RLOO before 0.22, whose rewards came from a model alone: --reward reward_model": (
        "reward_model_path rloo_k kl_coef cliprange num_ppo_epochs num_mini_batches response_length total_episodes "
        "local_rollout_forward_batch_size num_sample_generations missing_eos_penalty stop_token* whiten_rewards "
        "normalize_reward normalize_advantage token_level_kl exp_name"
    ),
    "only checkpoints that can be resumed from are written": "save_only_model",
    "4 bits of another kind": "use_bnb_nested_quant",
}
"""Meaning → names, or beginnings of names."""
