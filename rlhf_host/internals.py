"""Parts of a run, one by one, for packages that the project publishes. Contract suites and the plan of memory have batches, passes,
updates, episodes, models and engines that no whole run surrounds; ``rlhf-rows`` has columns and conversations of files.

Nothing here is promised to plugins: these names may change or go with any minor version. Importing this loads no torch.
"""

from __future__ import annotations

from rlhf_host.lazily import lazily

_NAMES = {
    "backends.weights": ["in_buckets", "named_weights"],
    "config.run_dir": ["locked"],
    "config.defaults": ["RunTraits", "refusals", "weight_sync_plugin"],
    "config.tree": ["role_flag"],
    "data.bad_rows": ["BadRows", "Malformed", "check_text", "get", "kind_of"],
    "data.chat": ["render_prompts", "task_renderer"],
    "data.messages": ["THOUGHTS", "TRAINED_BY", "UNTRAINED", "UNTRAINED_BY", "as_list", "messages_of", "sharegpt_message"],
    "data.pictures": ["Origin", "pictured"],
    "data.row_context": [
        *("BESIDE", "HISTORY", "PICTURES", "SYSTEM", "RowContext", "context_of", "is_empty", "system_of", "with_system"),
    ],
    "data.row_values": ["listed", "text_of", "turns_of"],
    "data.templates": ["for_chat"],
    "data.sources": ["load_tasks", "named", "open_source", "share"],
    "directories": ["cache_directory", "content_hash", "flush", "remove_directory", "unwritable_cache"],
    "engines.decoding": ["PlainDecoder"],
    "engines.plain_path": ["PlainKernels"],
    "engines.loading": ["ModuleLoader", "call_by_path", "copy_weights"],
    "errors": ["beyond", "in_one_line"],
    "lazily": ["lazily"],
    "models.attention": ["enable_shared_rows"],
    "models.heads": ["blocks_of", "decoder_of", "find_head"],
    "models.activation_memory": ["recorded"],
    "models.layouts": ["padded_layout", "shared_layout", "sharing_of", "to_device"],
    "models.loading": ["context_length", "load_tokenizer", "sizes"],
    "models.logprobs": ["chunk_bytes", "kept_bytes"],
    "models.precision": ["evaluation"],
    "models.meta_model": ["meta_model", "weights_of"],
    "models.passes": ["WORTHWHILE"],
    "models.locations": ["find_model"],
    "models.available_memory": ["available_memory", "container_memory", "forget_peak", "machine_memory"],
    "phases": ["counted"],
    "plugins.discovery": ["WITHOUT_OPTIONS", "preset_file", "unchosen"],
    "plugins.libraries": ["traits_of"],
    "plugins.manager": ["Loaded", "PluginManager"],
    "plugins.python_objects": ["describe", "has_hooks"],
    "plugins.selection": ["imported"],
    "plugins.specs": ["PluginSpec"],
    "records.episodes": ["Failed"],
    "records.numbers": ["Numbers"],
    "records.pictures": ["pictures_in", "positions_of"],
    "records.ragged": ["RaggedTensor", "Rows"],
    "rollouts.episode_settings": ["EpisodeSettings", "SampledModel"],
    "rollouts.episodes": ["Episodes", "episode_seed"],
    "rollouts.experience": ["apply_masks", "apply_rewards", "make_experience"],
    "rollouts.gate": ["Gate"],
    "rollouts.policy": ["EpisodePolicy"],
    "rollouts.scoring": ["AGENT", "judges", "score_group"],
    "runtimes.compute": ["Inline", "OneThread"],
    "training.assemble": ["runtime_plugin", "runtime_start", "start_runtime"],
    "training.batching": ["group_rows"],
    "training.auxiliary_rows": ["joined", "no_rows"],
    "training.checkpoints": ["load_checkpoint", "plain_state", "point_to", "take_back_replaced"],
    "training.corrections": ["correction_weights"],
    "training.events": ["Interrupted", "event_loop"],
    "training.inputs": ["Inputs", "TaskData", "read_inputs"],
    "training.keeper": ["CheckpointKeeper"],
    "training.made_rows": ["chosen_rows", "made_rows"],
    "training.rehearsal": ["check_inputs"],
    "training.reduction": ["Denominators", "Metrics", "Reducer", "reduced"],
    "training.role": ["Role", "rows_of"],
    "training.role_handles": ["completions"],
    "training.role_settings": ["role_settings"],
    "training.rollout_source": ["add_advantages", "add_extra", "add_outputs", "add_prompts"],
    "training.resuming": ["refuse_foreign", "refuse_lost"],
    "training.run": ["begin_run", "end_run", "started_run", "train"],
    "training.session": ["generations"],
    "training.source": ["timed"],
    "training.trained_roles": ["role_views", "in_backend"],
    "training.update": ["ask"],
    "training.worker": ["Worker"],
    "weight_sync.local_source": ["LocalSource"],
}
"""Module in ``rlhf_host``, imported when one of its names is first asked for → these names."""

_HOME = {name: f"rlhf_host.{home}" for home, names in _NAMES.items() for name in names}

__getattr__, __dir__, __all__ = lazily(__name__, _HOME)
