"""Gradients, bytes and traffic of a mixture of experts on several ranks, with and without expert parallelism.

    python benchmarks/expert_parallel.py [--width 256] [--experts 32] [--layers 4] [--tokens 64]

The backend ``fsdp`` in float32, ranks in processes on this machine. Every way has the same model, made here, and the same 16 rows,
in one micro-batch per rank. ``gradient`` is the largest difference of a gradient to that of one process with the backend ``torch``,
relative to the largest number of that weight's gradient; ``norm`` is the relative difference of the norm before clipping. Bytes are
those of the rank with the most: ``held`` of weights, gradients and AdamW's averages; ``whole`` of the weights of a block that are
whole in a pass; ``received`` from other ranks in one update, of weights and gradients (FSDP2) and of tokens; ``peak`` is the growth
of the process's resident memory in an update, at its most. Each way is measured with the routers' own experts, and with experts
that are replayed (drawn here).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_experts.routers import routers_of

from rlhf_host.distributed import Ranks, reserved
from rlhf_host.installed import build, find
from rlhf_host.internals import Role, rows_of
from rlhf_host.models import load_model
from rlhf_host.settings import RoleConfig, TrainConfig

WAYS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (2, {"expert_parallel": 2}),
    (4, {}),
    (4, {"expert_parallel": 2}),
    (4, {"expert_parallel": 4}),
    (4, {"expert_parallel": 2, "shard": 2}),
]
ROWS = 16


def write(arguments: argparse.Namespace, directory: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=arguments.width, intermediate_size=arguments.width, num_hidden_layers=arguments.layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=arguments.width // 4, num_experts=arguments.experts,
        num_experts_per_tok=4, moe_intermediate_size=arguments.width // 2, max_position_embeddings=1024, pad_token_id=0,
        initializer_range=0.08, norm_topk_prob=True,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)


def batch(tokens: int, experts: int, layers: int) -> Any:
    rows = make_batch([tokens - row % 8 for row in range(ROWS)], groups=list(range(ROWS)), vocabulary=500, seed=1).batch()
    draw = np.random.default_rng(0)
    sizes = [len(prompt) + int(length) - 1 for prompt, length in zip(rows.prompt_ids, rows.lengths, strict=True)]
    rows.traces = [
        {"routed_experts": draw.random((size, layers, experts)).argsort(-1)[..., :4].astype(np.uint8)} for size in sizes
    ]
    return rows


class Traffic:
    """Bytes that come from other ranks, by kind, under the names that PyTorch 2.13's FSDP2 calls."""

    def __init__(self) -> None:
        self.bytes = {"weights": 0.0, "tokens": 0.0}

    @contextlib.contextmanager
    def counted(self) -> Any:
        gather, scatter, swap = dist.all_gather_single, dist.reduce_scatter_single, dist.all_to_all_single

        def others(group: Any) -> float:
            size = dist.get_world_size(group)
            return (size - 1) / size

        def gathered(output_tensor: Any, input_tensor: Any, group: Any = None, *rest: Any, **more: Any) -> Any:
            self.bytes["weights"] += output_tensor.nbytes * others(group)
            return gather(output_tensor, input_tensor, group, *rest, **more)

        def scattered(output: Any, input: Any, *rest: Any, group: Any = None, **more: Any) -> Any:
            self.bytes["weights"] += input.nbytes * others(group)
            return scatter(output, input, *rest, group=group, **more)

        def swapped(output: Any, input: Any, sizes: Any = None, *rest: Any, group: Any = None) -> Any:
            own = dist.get_rank(group)
            share = others(group) if sizes is None else 1 - sizes[own] / max(1, sum(sizes))
            self.bytes["tokens"] += output.nbytes * share
            return swap(output, input, sizes, *rest, group=group)

        patches = {"all_gather_single": gathered, "reduce_scatter_single": scattered, "all_to_all_single": swapped}
        with mock.patch.multiple(dist, **patches):
            yield


def resident(key: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split(f"{key}:")[1].split()[0]) * 1024


def rank(place: tuple[int, int, int], path: str, options: dict[str, Any], tokens: int, answers: Any) -> None:
    torch.set_num_threads(1)
    number, size, port = place
    ranks = Ranks.join(number, size, "127.0.0.1", port, timeout_s=600.0)
    role = RoleConfig(model=path, device="cpu", lr=1e-4, max_grad_norm=0.1)
    plugin: Any = build(find("backend", "fsdp" if size > 1 else "torch"), options)
    model: Any = load_model(role, trainable=True)
    trained = Role.of("actor", model, TrainConfig(), backend=plugin, settings=role, total_updates=9, ranks=ranks)
    rows = batch(tokens, model.config.num_experts, model.config.num_hidden_layers)
    own = rows.select(list(range(number, ROWS, size)))
    found: dict[str, Any] = {}
    for replay in (False, True):
        found[replay] = update(trained, own, replay)
        if number:
            del found[replay]["gradients"]  # the first rank's are whole
    answers.put((number, found))
    answers.close()
    answers.join_thread()


def update(role: Role, rows: Any, replay: bool) -> dict[str, Any]:
    backend: Any = role.backend
    model: Any = backend.model

    def around(model: Any, lengths: Any, traces: Any) -> Any:
        return routers_of(model).during(lengths, traces) if replay else contextlib.nullcontext()

    role.passes.around = around
    role.passes.prepare(96)
    whole: list[int] = []
    blocks = role.passes.compute.model.layers

    def look(block: Any) -> Any:
        return lambda *_: whole.append(sum(weight.nbytes for weight in block.parameters()))

    hooks = [block.mlp.experts.register_forward_pre_hook(look(block)) for block in blocks]
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM begins anew
    traffic = Traffic()
    with traffic.counted():
        outputs = role.passes.forward(**rows_of(rows))
        backend.backward(outputs.logprobs.sum() / 1000)
    gradients = {}
    spreads = getattr(backend, "_spreads", {})
    for name, weight in model.named_parameters():
        grad = weight.grad
        gradients[name] = spreads[name].around(grad.to_local()).full_tensor() if spreads else grad.clone()
    norm = backend.step().grad_norm
    grown = resident("VmHWM") - before
    for hook in hooks:
        hook.remove()
    pieces = [getattr(weight, "_local_tensor", weight) for weight in model.parameters()]
    averages = [value for state in backend.optimizer.state.values() for value in state.values() if value.dim()]
    held = sum(each.nbytes for each in (*pieces, *averages)) + sum(each.nbytes for each in pieces)
    said = {"norm": norm, "held": held, "whole": max(whole), "peak": grown, **traffic.bytes}
    return said | {"gradients": {name: value.numpy() for name, value in gradients.items()}}


def ranks_of(size: int, *arguments: Any) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    place = reserved("127.0.0.1")
    port = place.getsockname()[1]
    processes = [context.Process(target=rank, args=((number, size, port), *arguments, answers)) for number in range(size)]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()
    place.close()
    return [found[number] for number in range(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    expected: dict[bool, Any] = {}
    print("| ranks | options | experts | gradient | norm | held MB | whole MB | received MB: weights | tokens | peak MB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        write(arguments, Path(directory))
        for size, options in WAYS:
            answers = ranks_of(size, directory, options, arguments.tokens)
            for replay in (False, True):
                own = [answer[replay] for answer in answers]
                first = expected.setdefault(replay, own[0])
                gaps = [
                    float(np.abs(own[0]["gradients"][name] - value).max() / np.abs(value).max())
                    for name, value in first["gradients"].items()
                ]
                if size > 1 and not own[0]["weights"]:
                    raise SystemExit("No weights were counted: this PyTorch exchanges them by calls of another name.")
                most = {key: max(each[key] for each in own) / 1e6 for key in ("held", "whole", "weights", "tokens", "peak")}
                said = ", ".join(f"{key} {value}" for key, value in options.items()) or "-"
                norm = abs(own[0]["norm"] / first["norm"] - 1)
                numbers = " | ".join(f"{value:.1f}" for value in most.values())
                print(
                    f"| {size} | {said} | {'replayed' if replay else 'own'} | {max(gaps):.1e} | {norm:.1e} | {numbers} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
