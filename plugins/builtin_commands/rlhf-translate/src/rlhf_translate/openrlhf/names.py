"""Names of OpenRLHF that need no setting here or have no counterpart."""

from __future__ import annotations

NEEDLESS = {
    "it changes the speed or the memory, not the result": (
        "gradient_checkpointing_use_reentrant actor.gradient_checkpointing_reentrant model.gradient_checkpointing_reentrant "
        "disable_fast_tokenizer data.disable_fast_tokenizer actor_init_on_gpu ds.experts_implementation perf"
    ),
    "models with a scalar head are found by their configuration": "value_head_prefix ds.value_head_prefix value_prefix_head",
    "models and data come from directories or the Hugging Face hub": "use_ms",
    "nodes are those of --placement": "master_addr master_port node_rank hostfile",
}
"""Reason for needing no setting → names, or beginnings of names."""

MISSING = {
    "as many tasks are drawn as a batch needs": "rollout.vllm_generate_batch_size vllm_generate_batch_size",
    "another chat template: --data.template FILE": "tokenizer_chat_template data.tokenizer_chat_template",
    "keeping frozen models in CPU memory": "ref_offload teacher_offload",
}
"""Meaning → names, or beginnings of names."""
