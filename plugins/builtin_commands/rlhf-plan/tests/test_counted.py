"""The plan of memory against bytes that are really there: of passes here, of backends in processes of one rank and of two.

This file, run as a script, is one of the ranks.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from rlhf_plan.footprint import footprint
from rlhf_plan.phases import _counts
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from rlhf_host.distributed import reserved
from rlhf_host.installed import build, find
from rlhf_host.internals import Role, decoder_of, evaluation, meta_model, recorded
from rlhf_host.models import load_model
from rlhf_host.protocols import BackendStart, TrainedModel
from rlhf_host.settings import RoleConfig, TrainConfig

SHAPE: Any = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE, num_hidden_layers=5),
    "qwen2": Qwen2Config(**SHAPE, num_hidden_layers=4, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(
        **SHAPE, num_hidden_layers=4, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
    "gemma2": Gemma2Config(**SHAPE, num_hidden_layers=5, head_dim=32, sliding_window=16),
}
SMALL: dict[str, Any] = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000, "param_persistence_threshold": 0}
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("torch", {}),
    ("torch in 16 bits", {}),
    *(("deepspeed", {"zero_stage": stage, "precision": "fp32"} | SMALL) for stage in (0, 1, 2, 3)),
    *(("deepspeed", {"zero_stage": stage, "precision": "bf16"} | SMALL) for stage in (1, 2, 3)),
    ("fsdp", {"precision": "fp32"}),
    ("fsdp", {"precision": "bf16"}),
    ("fsdp", {"precision": "fp32", "shard": 1}),
]


def written(config, directory):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "two layers": {"gradient_checkpointing": 2},
    "adapter": {"lora": {"rank": 4}, "dtype": "bfloat16"},
    "some": {"train_only": ["*mlp*"]},
}


CASES = [
    *((family, settings) for family in FAMILIES for settings in ("plain", "two layers")),
    *(("llama", settings) for settings in ("checkpointing", "adapter", "some")),
]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(("family", "settings"), CASES)
def test_a_pass_keeps_as_much_as_planned(tmp_path, family, settings, autocast):
    if settings == "adapter":
        pytest.importorskip("peft")
        autocast = True
    role = RoleConfig(model=written(FAMILIES[family], tmp_path), device="cpu", **SETTINGS[settings])
    plain = role.model_copy(update={"gradient_checkpointing": False})
    rows, length = 3, 48
    planned = footprint(meta_model(plain, head="lm", trainable=True, weights=False), width=None, autocast=autocast).passed
    model: Any = load_model(role, trainable=True)
    with recorded(model) as kept, evaluation(model), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        decoder_of(model)(input_ids=torch.ones(rows, length, dtype=torch.int64), use_cache=False)
    counted = sum(kept.values())
    expected = planned.copies + planned.kept(rows, length, 0)
    if settings == "two layers":  # whose copies of weights are not kept by an operation, but by autocast
        expected = planned.kept(rows, length, 2) + planned.copies - sum(layer.fixed for layer in planned.layers[:2])
    if settings == "checkpointing":  # the same of all copies, and one block computes later
        expected = sum(each.of(rows, length) for each in (planned.outside, *planned.inputs))
    assert expected == pytest.approx(counted, rel=0.05)


def test_the_cache_is_counted(tmp_path):
    role = RoleConfig(model=written(FAMILIES["llama"], tmp_path), device="cpu")
    assert footprint(meta_model(role, head="lm", trainable=True), width=None, autocast=False).cached == 2 * 5 * 2 * 32


def test_experts_of_a_block_are_counted(tmp_path):
    for family, numbers in (("experts", 4 * 3 * 64 * 128), ("llama", 0)):
        role = RoleConfig(model=written(FAMILIES[family], tmp_path / family), device="cpu", train_only=["*.0.mlp.*"])
        counted = _counts(role, meta_model(role, head="lm", trainable=True, weights=False))
        assert (counted.experts, counted.trained_experts) == (numbers, numbers)


@pytest.mark.parametrize("ranks", [1, 2])
def test_backends_hold_as_much_as_planned(tmp_path, ranks):
    pytest.importorskip("deepspeed")
    pytest.importorskip("rlhf_backend_fsdp")
    model = written(FAMILIES["llama"], tmp_path)
    place = reserved("127.0.0.1")
    port = str(place.getsockname()[1])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    processes = []
    for rank in range(ranks):
        command: list[str] = [sys.executable, __file__, model, str(rank), str(ranks), port]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=environment, **pipes))
    outputs = [process.communicate(timeout=500) for process in processes]
    place.close()
    assert [process.returncode for process in processes] == [0] * ranks, outputs
    lines = [line for line in outputs[0][0].splitlines() if line.startswith("counted ")]
    print(*lines, sep="\n")
    for line in lines:
        found = json.loads(line.removeprefix("counted "))
        assert found["planned"] == pytest.approx(found["counted"], rel=0.05), found
    assert len(lines) == len(WAYS)


# --- the program of a rank ------------------------------------------------------------------------


def storages() -> dict[int, Any]:
    """The memory of every tensor there is: address → storage, which stays as long as somebody has this."""
    gc.collect()
    found: dict[int, Any] = {}
    for thing in gc.get_objects():
        if not isinstance(thing, torch.Tensor):
            continue
        for each in (thing, thing.grad if thing.is_leaf else None):
            local = getattr(each, "_local_tensor", each)
            if local is not None and local.device.type == "cpu":
                found[local.untyped_storage().data_ptr()] = local.untyped_storage()
    return found


def count(path: str, name: str, options: dict[str, Any], ranks: Any) -> None:
    """Prints the bytes of a step at their most and after it, counted and planned."""
    before = storages()
    role = RoleConfig(model=path, device="cpu")
    model: Any = load_model(role, trainable=True)
    name, _, rounded = name.partition(" in ")
    plugin: Any = build(find("backend", name), options)
    numbers = sum(weight.numel() for weight in model.parameters())
    blocks = [sum(weight.numel() for weight in block.parameters()) for block in model.model.layers]
    outside = numbers - sum(blocks)
    planned = plugin.memory(
        TrainedModel(
            trained=numbers,
            frozen=0,
            frozen_bytes=0,
            block=max(blocks),
            outside=outside,
            trained_block=max(blocks),
            trained_outside=outside,
            processes=ranks.processes,
            device="cpu",
            rounded=bool(rounded),
        )
    )
    head = (model.lm_head.weight,)
    start = BackendStart(model=model, compute=model, head=head, role=role, total_updates=9, ranks=ranks)
    if rounded:
        train, more = TrainConfig(autocast="bfloat16"), {"settings": role, "total_updates": 9, "ranks": ranks}
        backend: Any = Role.of("actor", model, train, backend=plugin, **more).backend
    else:
        backend = plugin.start(start)
    inner = backend.optimizer if hasattr(backend, "optimizer") else backend.engine.optimizer
    inner = getattr(inner, "optimizer", inner)
    usual, seen = inner.step, []

    def held() -> int:
        return sum(storage.nbytes() for address, storage in storages().items() if address not in before)

    def step(*arguments: Any, **named: Any) -> Any:
        result = usual(*arguments, **named)
        seen.append(held())
        return result

    def micro_batch(last: bool) -> None:
        ids = torch.ones(1, 2, dtype=torch.int64)
        out = backend.run_pass(lambda: {"out": model(input_ids=ids, use_cache=False).logits})["out"]
        backend.backward(out.float().sum() * 1e-3, last)

    micro_batch(True)
    backend.step()  # the optimizer's state is there from now on
    inner.step = step
    micro_batch(False)
    seen.append(held())
    micro_batch(True)
    backend.step()
    after = held()
    inner.step = usual
    # Where gradients are not split, the buffers in which they are summed are gone before the step.
    buffers = planned.gradients - 4 * numbers if options.get("zero_stage", 0) == 0 and name != "fsdp" else 0
    most = planned.weights + planned.gradients + planned.optimizer - buffers
    result: Any = {"backend": name, "options": {key: value for key, value in options.items() if key not in SMALL}}
    result |= {"ranks": ranks.processes, "counted": [max(seen), after]}
    between = planned.weights + planned.between + planned.optimizer
    print("counted", json.dumps(result | {"planned": [round(most), round(between)]}), flush=True)
    if name == "deepspeed":
        backend.engine.destroy()


if __name__ == "__main__":
    from rlhf_host.distributed import Ranks

    warnings.simplefilter("ignore")
    rank, size, port = map(int, sys.argv[2:])
    torch.set_num_threads(1)
    joined = Ranks.join(rank, size, "127.0.0.1", port)
    for name, options in WAYS:
        count(sys.argv[1], name, options, joined)
