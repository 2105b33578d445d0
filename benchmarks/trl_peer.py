"""TRL's side of ``step_vs_trl.py``: runs in TRL's own environment and prints one JSON object last.

python trl_peer.py --model DIR --data prompts.jsonl --prompts 16 --samples 8 --new-tokens 32 --steps 8 --threads 2
"""

import argparse
import importlib.util
import json
import os
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
for name, default in (("prompts", 16), ("samples", 8), ("new-tokens", 32), ("steps", 8), ("threads", 2)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--ragged", action="store_true", help="completions may end by themselves")
parser.add_argument("--vllm", action="store_true", help="sample with vLLM on the same device")
parser.add_argument("--continuous-batching", action="store_true", help="sample with transformers' continuous batching")
parser.add_argument("--liger", action="store_true", help="take Liger's kernels and loss, if they are installed and on a GPU")
options = parser.parse_args()
os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled", OMP_NUM_THREADS=str(options.threads))

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl_steps import Clock  # noqa: E402

torch.set_num_threads(options.threads)
tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
with open(options.data) as lines:
    texts = [json.loads(line)["prompt"] for line in lines]
prompts = [[{"role": "user", "content": text}] for text in texts] if tokenizer.chat_template else texts
counted: list[int] = []


def sevens(completions, completion_ids, **_):
    counted.append(sum(map(len, completion_ids)))
    said = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [text.count("7") / options.new_tokens for text in said]


clock = Clock()
liger = options.liger and options.device == "cuda" and importlib.util.find_spec("liger_kernel") is not None
small = {"num_blocks": 64, "max_batch_tokens": 256} if options.device == "cpu" else {}
sampler = "vLLM" if options.vllm else "continuous batching" if options.continuous_batching else "generate"
if options.ragged:
    shortest = {}
elif options.continuous_batching:  # it does not heed min_new_tokens
    shortest = {"eos_token_id": -1}
else:
    shortest = {"min_tokens" if options.vllm else "min_new_tokens": options.new_tokens}
GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=sevens,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    callbacks=[clock],
    args=GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=options.device == "cpu",
        bf16=options.device == "cuda",
        per_device_train_batch_size=options.prompts * options.samples,
        num_generations=options.samples,
        max_completion_length=options.new_tokens,
        max_steps=options.steps,
        learning_rate=1e-4,
        beta=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        use_vllm=options.vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        use_transformers_continuous_batching=options.continuous_batching,
        transformers_continuous_batching_config=small or None,
        use_liger_kernel=liger,
        generation_kwargs=shortest,
    ),
).train()
memory = torch.cuda.max_memory_allocated() / 1e9 if options.device == "cuda" else 0.0
how = f"{sampler}, {'with' if liger else 'without'} Liger, weights in {next(model.parameters()).dtype} at the end"
print(json.dumps({"seconds": clock.seconds[1:], "tokens": counted[1:], "cuda_gb": memory, "how": how}))
