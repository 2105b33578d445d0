"""Parts of a run, one by one, for contract suites and the plan of memory: batches, passes, updates, episodes, models and engines
that no whole run surrounds.

Nothing here is promised to plugins: these names may change or go with any minor version. Importing this loads no torch.
"""

from __future__ import annotations

from rlhf_host.lazily import lazily

_NAMES = {
    "backends.ranks": ["Ranks"],
    "backends.weights": ["in_buckets", "named_weights"],
    "config.defaults": ["RunTraits", "refusals", "weight_sync_plugin"],
    "config.tree": ["role_flag"],
    "data.chat": ["task_renderer"],
    "data.sources": ["load_tasks"],
    "engines.plain_path": ["PlainKernels"],
    "engines.loading": ["ModuleLoader", "call_by_path", "copy_weights"],
    "errors": ["beyond"],
    "models.attention": ["enable_shared_rows"],
    "models.heads": ["decoder_of"],
    "models.kept": ["recorded"],
    "models.layouts": ["padded_layout", "shared_layout", "sharing_of", "to_device"],
    "models.loading": ["context_length"],
    "models.logprobs": ["chunk_bytes"],
    "models.modes": ["evaluation"],
    "models.outline": ["outline", "weights_of"],
    "models.pieces": ["InPieces", "load_in_pieces"],
    "models.places": ["find_model"],
    "models.room": ["room"],
    "plugins.manager": ["Loaded", "PluginManager"],
    "plugins.python_objects": ["describe"],
    "plugins.specs": ["PluginSpec"],
    "rollouts.episode_settings": ["EpisodeSettings", "SampledModel"],
    "rollouts.episodes": ["Episodes", "episode_seed"],
    "rollouts.gate": ["Gate"],
    "rollouts.experience": ["apply_masks", "apply_rewards", "make_experience"],
    "runtimes.compute": ["Inline", "OneThread"],
    "runtimes.ports": ["reserved"],
    "training.assemble": ["runtime_plugin", "runtime_start", "start_runtime"],
    "training.batching": ["group_rows"],
    "training.beside": ["no_rows"],
    "training.checkpoints": ["plain_state"],
    "training.corrections": ["correction_weights"],
    "training.made_rows": ["made_rows"],
    "training.reduction": ["Denominators", "Metrics", "Reducer", "reduced"],
    "training.role": ["Role", "rows_of"],
    "training.role_handles": ["completions"],
    "training.run": ["train"],
    "training.trained_roles": ["role_views", "in_backend"],
    "training.update": ["ask"],
    "training.worker": ["Worker"],
    "weight_sync.local_source": ["LocalSource"],
}
"""Module in ``rlhf_host``, imported when one of its names is first asked for → these names."""

_HOME = {name: f"rlhf_host.{home}" for home, names in _NAMES.items() for name in names}

__getattr__, __dir__, __all__ = lazily(__name__, _HOME)
