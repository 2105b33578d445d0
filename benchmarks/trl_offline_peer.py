"""TRL's side of ``offline_vs_trl.py``: runs in TRL's own environment and prints one JSON object last.

    python trl_offline_peer.py --algo dpo --model DIR --rows rows.jsonl --batch 4 --per-device 1 --steps 3 --lr 1e-6 --threads 2

``rows.jsonl`` has tokens: ``prompt_ids``, and ``completion_ids`` (``kto``: and ``label``) or ``chosen_ids`` and ``rejected_ids``.
"""

import argparse
import json
import os
import tempfile

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", required=True, choices=["sft", "dpo", "kto", "rm"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True)
    for name in ("batch", "per-device", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument(
        "--precomputed", action="store_true", help="dpo, kto: the reference's log-probabilities before the steps"
    )
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled", TQDM_DISABLE="1", OMP_NUM_THREADS=str(options.threads))

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

TRAINERS = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "rm": (RewardTrainer, RewardConfig),
}


def columns(algo, rows, per_device):
    """The rows under the names of the trainer's tokens."""
    if algo == "sft":
        labels = [[-100] * len(row["prompt_ids"]) + row["completion_ids"] for row in rows]
        return {"input_ids": [row["prompt_ids"] + row["completion_ids"] for row in rows], "labels": labels}
    if algo == "rm":
        return {name: [row["prompt_ids"] + row[name] for row in rows] for name in ("chosen_ids", "rejected_ids")}
    named = {name: [row[name] for row in rows] for name in rows[0]}
    if algo == "kto":  # as KTOTrainer._prepare_dataset: a micro-batch's completions, rotated by one
        ids = named["completion_ids"]
        parts = [ids[begin : begin + per_device] for begin in range(0, len(ids), per_device)]
        named["KL_completion_ids"] = [completion for part in parts for completion in [part[-1], *part[:-1]]]
        named["label"] = [bool(label) for label in named["label"]]
    return named


def trainer(algo, model, rows, *, batch, per_device, steps, lr, callbacks=(), **settings):
    """A trainer over these rows in this order, each step on ``batch`` of them; ``losses`` are those of its micro-batches, which a
    step sums."""
    parent, config = TRAINERS[algo]

    class Trainer(parent):
        def __init__(self, **arguments):
            self.losses = []
            super().__init__(**arguments)

        def _prepare_dataset(self, dataset, *_, **__):
            return dataset

        def training_step(self, *arguments, **more):
            loss = super().training_step(*arguments, **more)
            self.losses.append(float(loss))
            return loss

    loader = AutoModelForSequenceClassification if algo == "rm" else AutoModelForCausalLM
    return Trainer(
        model=loader.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_dict(columns(algo, rows, per_device)),
        callbacks=list(callbacks),
        args=config(
            output_dir=tempfile.mkdtemp(),
            max_steps=steps,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=batch // per_device,
            learning_rate=lr,
            lr_scheduler_type="constant",
            warmup_steps=0,
            weight_decay=0.0,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_epsilon=1e-8,
            max_grad_norm=1.0,
            max_length=None,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            train_sampling_strategy="sequential",
            dataloader_pin_memory=False,
            disable_tqdm=True,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            **settings,
        ),
    )


def step_losses(losses, parts):
    """Of micro-batches → of steps."""
    return [sum(losses[begin : begin + parts]) for begin in range(0, len(losses), parts)]


def main():
    from trl_steps import Clock

    torch.set_num_threads(options.threads)
    with open(options.rows) as lines:
        rows = [json.loads(line) for line in lines]
    clock = Clock()
    settings = {"precompute_ref_log_probs": True} if options.precomputed else {}
    sizes = {"batch": options.batch, "per_device": options.per_device, "steps": options.steps}
    training = trainer(options.algo, options.model, rows, **sizes, lr=options.lr, callbacks=[clock], **settings)
    training.train()
    losses = step_losses(training.losses, options.batch // options.per_device)
    print(json.dumps({"seconds": clock.seconds, "losses": losses}))


if __name__ == "__main__":
    main()
