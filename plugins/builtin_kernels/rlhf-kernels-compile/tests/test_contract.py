"""The host's contract, check by check: blocks that are traced, and not compiled further."""

import transformers as hf
from rlhf_authoring import kernels_contract

SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {"llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))}

TestContract = kernels_contract("compile", options={"backend": "aot_eager"}, models=MODELS)
