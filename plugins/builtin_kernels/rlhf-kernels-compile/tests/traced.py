"""Compiles the blocks of a model with a backend that only counts, and prints the number of graphs. In a process of its own: torch
keeps what it traced, and whether it traces, for a whole process.
"""

from __future__ import annotations

import torch
import transformers as hf
from rlhf_kernels_compile.blocks import compile_blocks

from rlhf_host.comparison import example_layouts, hidden_states
from rlhf_host.functional import twin
from rlhf_host.internals import blocks_of

model = hf.MistralForCausalLM(
    hf.MistralConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
).eval()
graphs = []
compiled = compile_blocks(twin(model), lambda graph, inputs: (graphs.append(graph), graph.forward)[1], "default")
assert all("forward" in vars(block) for block in blocks_of(compiled).values())
assert not any("forward" in vars(block) for block in blocks_of(model).values())
for length in (64, 48):
    for layout in example_layouts(model, length)[:1]:
        torch.testing.assert_close(hidden_states(compiled, layout), hidden_states(model, layout))
print(len(graphs))
