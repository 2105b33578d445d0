"""Settings of vLLM: the table in ``docs/engines.md`` and the code say the same; no vLLM is started."""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rlhf_host.distributed.vllm import startup
from rlhf_host.distributed.vllm.arguments import (
    REFUSED,
    has_draft_model,
    has_unsynced,
    is_exact,
    unknown_argument,
)
from rlhf_host.distributed.vllm.plugin import Vllm
from rlhf_host.distributed.vllm.requests import generation_of
from rlhf_host.errors import RunError, UserError
from rlhf_host.protocols import ServedModel
from rlhf_host.records.episodes import Sampling
from rlhf_host.records.token_sets import unpack_tokens

ROOT = Path(__file__).parents[3]
SOMETIMES = [
    *("async_scheduling", "rejection_sample_method"),
    *("speculative_config", "spec_method", "spec_model", "enable_chunked_prefill"),
]
"""Refused in some cases, which tests below go through."""
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
DRAFT = {"speculative_config": {"model": "small", "num_speculative_tokens": 3}}
TESTED = {
    "tensor_parallel_size": ["test_start.py::test_an_engine_on_two_devices_receives_in_both_of_its_workers"],
    "multiprocess": [
        "test_process.py::test_a_core_in_its_own_process_samples_what_one_in_this_process_does",
        "test_process.py::test_it_ends_with_its_host_and_not_before",
        "test_start.py::test_it_measures_how_full_its_cache_was_and_what_lost_its_place",
    ],
    "kv_cache_bytes": ["test_start.py::test_with_a_version_it_serves_the_directorys_weights_in_the_memory_it_is_given"],
    "max_model_len": ["test_start.py::test_what_it_cannot_serve_it_refuses_at_once"],
    "max_num_seqs": ["test_vllm.py::test_tokens_follow_the_distribution"],
    "enable_prefix_caching": ["test_vllm.py::test_after_every_sync_it_samples_from_the_trainers_weights"],
    "kv_after_sync": [
        "test_vllm.py::test_kept_keys_and_values_are_never_those_of_later_groups",
        "test_vllm.py::test_tokens_of_a_request_in_flight_carry_the_version_they_were_sampled_with",
    ],
    "seeds": [
        "test_vllm.py::test_a_completion_depends_on_its_key_not_on_what_else_runs",
        "test_vllm.py::test_without_seeds_a_key_decides_nothing",
    ],
    "quantization": [
        "test_quantized.py::test_after_every_sync_it_samples_as_an_engine_that_loaded_the_saved_weights",
        "test_quantized.py::test_a_layer_that_keeps_weights_of_one_step_before_is_noticed",
    ],
    "kv_cache_dtype": ["test_start.py::test_with_a_cache_of_fewer_bits_its_log_probabilities_are_not_said_to_be_exact"],
    "async_scheduling": ["test_arguments.py::test_a_core_in_its_own_process_may_be_told_how_to_schedule"],
}
"""Option → the tests of this folder that show it."""


def rows(heading):
    """The cells of the table below ``heading``."""
    text = (ROOT / "docs" / "engines.md").read_text()
    section = text.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(cell):
    return re.findall(r"`(?:extra\.)?([a-z_.]+)`", cell)


def functions_in(file):
    tree = ast.parse(file.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


# --- the table ----------------------------------------------------------------------------------


def test_every_argument_that_the_table_calls_refused_is_refused_by_name_and_no_other():
    listed = [name for cells in rows("Refused") for name in names(cells[0])]
    assert len(listed) == len(set(listed))
    assert set(listed) - set(SOMETIMES) == set(REFUSED)
    for name in REFUSED:
        with pytest.raises(ValidationError, match=rf"extra\.{name}: "):
            Vllm.Options(extra={name: 1})


def test_every_option_that_the_page_calls_tested_has_tests_that_exist():
    assert [name for row in rows("Passed and tested") for name in names(row[0])] == list(TESTED)
    for option, places in TESTED.items():
        for file, _, test in (place.partition("::") for place in places):
            assert test in functions_in(Path(__file__).parent / file), f"{option}: {file} has no {test}"


def test_every_option_of_the_engine_is_in_the_table():
    listed = {
        name for heading in ("Passed and tested", "Passed, not tested") for row in rows(heading) for name in names(row[0])
    }
    assert set(Vllm.Options.model_fields) - {"extra"} <= listed


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_refused_arguments_are_arguments_of_vllm():
    source = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]) / "engine" / "arg_utils.py"
    (arguments,) = (
        node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    )
    fields = {node.target.id for node in arguments.body if isinstance(node, ast.AnnAssign)}
    assert set(REFUSED) <= fields


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_variables_that_are_set_for_vllm_are_variables_of_vllm(monkeypatch):
    environment = {}
    monkeypatch.setattr(startup.os, "environ", environment)
    startup._set_environment()
    source = (Path(importlib.util.find_spec("vllm").submodule_search_locations[0]) / "envs.py").read_text()
    assert [name for name in environment if name.startswith("VLLM_") and f'"{name}"' not in source] == []


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_name_that_vllm_does_not_have_is_refused_before_anything_is_loaded():
    assert unknown_argument({"kv_cache_dtype": "fp8", "seed": 1}) is None
    with pytest.raises(UserError, match=r"extra\.kv_cache_dtyp: vLLM's EngineArgs has no .*; did you mean 'kv_cache_dtype'"):
        Vllm(Vllm.Options(extra={"kv_cache_dtyp": "fp8"})).check(None, {})


# --- what depends on other settings -------------------------------------------------------------


def test_sleep_on_a_cpu_is_said_to_do_nothing(caplog):
    engine, start = Vllm(Vllm.Options(sleep=True)), SimpleNamespace(adapter_rank=0)
    engine.check(start, {"actor": "cuda"})
    assert not caplog.messages
    engine.check(start, {"actor": "cpu"})
    assert caplog.messages == ["engine vllm: engine.sleep has no effect on a CPU"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra": {"async_scheduling": True}}, r"extra\.async_scheduling: needs multiprocess: true"),
        ({"multiprocess": False, "extra": {"async_scheduling": False}}, r"extra\.async_scheduling: needs multiprocess: true"),
        (
            {"extra": {"speculative_config": {**NGRAM["speculative_config"], "rejection_sample_method": "synthetic"}}},
            r"rejection_sample_method: tokens would not be drawn from the trainer's distribution",
        ),
        ({"extra": {"speculative_config": "ngram"}}, r"extra\.speculative_config should be a mapping, not 'ngram'"),
        ({"tensor_parallel_size": 2, "multiprocess": False}, "several devices need multiprocess: true"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        Vllm.Options(**settings)


@pytest.mark.parametrize("settings", [{"multiprocess": True}, {"tensor_parallel_size": 2}])
def test_a_core_in_its_own_process_may_be_told_how_to_schedule(settings):
    assert Vllm.Options(extra={"async_scheduling": False}, **settings).extra == {"async_scheduling": False}


@pytest.mark.parametrize(
    ("on_gpus", "settings", "own"),
    [
        (False, {}, False),
        (True, {}, True),
        (False, {"tensor_parallel_size": 2}, True),
        (False, {"multiprocess": True}, True),
        (True, {"multiprocess": False}, False),
    ],
)
def test_the_core_has_its_own_process_on_gpus_and_with_several_devices(monkeypatch, on_gpus, settings, own):
    monkeypatch.setattr(startup, "on_gpus", lambda: on_gpus)
    options = Vllm.Options(**settings)
    assert startup.in_processes(options) is own
    arguments = startup._arguments(options, version=-1, on_cpu=not on_gpus)
    assert arguments.get("async_scheduling") is (None if own else False), "None: vLLM schedules ahead where it can"


@pytest.mark.parametrize(
    ("extra", "draft"),
    [
        ({}, False),
        (NGRAM, False),
        ({"spec_method": "ngram", "spec_tokens": 3}, False),
        ({"speculative_config": {"model": "ngram"}}, False),
        (DRAFT, True),
        ({"speculative_config": {"method": "mtp"}}, True),
        ({"spec_model": "small"}, True),
    ],
)
def test_a_draft_model_is_one_with_weights(extra, draft):
    assert has_draft_model(extra) is draft
    given = extra.get("speculative_config")
    # Without a version all weights are made up until the first sync, which brings those of the policy alone.
    for version, files in ((-1, draft), (0, False)):
        arguments = startup._arguments(Vllm.Options(extra=extra), version=version, on_cpu=False)
        read = {"draft_load_config": {"load_format": "auto"}} if files else {}
        assert (arguments.get("speculative_config") or {}) == read | (given or {})


def check(extra, device):
    Vllm(Vllm.Options(extra=extra)).check(SimpleNamespace(adapter_rank=0), {"actor": device})


@pytest.mark.parametrize("extra", [NGRAM, DRAFT, {"spec_method": "ngram"}, {"spec_model": "small"}])
def test_speculation_is_refused_on_cpus(extra):
    with pytest.raises(UserError, match=rf"extra\.{next(iter(extra))}: on CPUs vLLM draws speculated tokens from another"):
        check(extra, "cpu")
    check(extra, "cuda")


def test_the_first_chunk_of_a_prompt_is_the_engines_to_choose_on_cpus():
    with pytest.raises(UserError, match=r"extra\.enable_chunked_prefill: on CPUs the engine sets this itself"):
        check({"enable_chunked_prefill": True}, "cpu")
    check({"enable_chunked_prefill": True}, "cuda")


def test_a_draft_model_is_said_not_to_be_synced(caplog):
    check(NGRAM, "cuda")
    assert not caplog.messages
    check(DRAFT, "cuda")
    assert "no sync reaches the draft model" in caplog.text


@pytest.mark.parametrize(
    ("extra", "adapter_rank", "kept"),
    [({}, 0, False), (NGRAM, 0, False), ({}, 8, True), (DRAFT, 0, True), (DRAFT, 8, True)],
)
def test_weights_that_no_sync_brings_must_be_kept_in_sleep(extra, adapter_rank, kept):
    assert has_unsynced(extra, adapter_rank) is kept


@pytest.mark.parametrize(
    ("dtype", "quantization", "cache", "exact"),
    [
        ("float32", None, "auto", True),
        ("bfloat16", None, "auto", False),
        ("float32", "fp8", "auto", False),
        ("float32", None, "fp8", False),
        ("float32", None, "fp8_e5m2", False),
    ],
)
def test_log_probabilities_are_exact_only_where_nothing_has_fewer_bits(dtype, quantization, cache, exact):
    assert is_exact(dtype, quantization, cache) is exact


def test_weights_in_8_bits_are_a_named_value_and_not_an_argument_of_vllm():
    with pytest.raises(ValidationError, match="'fp8' or 'int8'"):
        Vllm.Options(quantization="int4")
    with pytest.raises(ValidationError, match="quantization: activations are in 16 bits then, so leave dtype out"):
        Vllm.Options(quantization="int8", dtype="float32")
    for on_cpu, asked, dtype in ((True, "auto", "bfloat16"), (True, "float16", "float16"), (False, "auto", "auto")):
        arguments = startup._arguments(Vllm.Options(quantization="fp8", dtype=asked), version=-1, on_cpu=on_cpu)
        assert (arguments["quantization"], arguments["dtype"]) == ("online", dtype)
        assert arguments["quantization_config"] == {"linear": "fp8_per_channel_static"}
    assert startup._arguments(Vllm.Options(), version=-1, on_cpu=True)["dtype"] == "float32"


@pytest.mark.parametrize(
    ("corrections", "old_logprobs", "level", "said"),
    [
        ((), "recompute", "WARNING", r"nothing corrects for that \(--with \w+ does\)"),
        (("tis",), "recompute", "INFO", "tis corrects for that, and mismatch/mean says how far they differ"),
        ((), "sampler", "INFO", "ratios are against the sampler"),
    ],
)
def test_the_start_says_that_other_weights_sample_than_are_trained(caplog, corrections, old_logprobs, level, said):
    caplog.set_level("INFO")
    start = SimpleNamespace(
        adapter_rank=0,
        total_updates=1,
        hooks=SimpleNamespace(names=lambda hook: corrections),
        train=SimpleNamespace(old_logprobs=old_logprobs),
    )
    Vllm(Vllm.Options(quantization="int8")).check(start, {"actor": "cpu"})
    (record,) = caplog.records
    assert record.levelname == level
    assert re.search(said, record.getMessage())
    assert "weights in 8 bits (int8)" in record.getMessage()
    caplog.clear()
    Vllm(Vllm.Options(quantization="int8")).check(SimpleNamespace(adapter_rank=0, total_updates=0), {"actor": "cpu"})
    assert not caplog.records


def test_an_adapter_beside_weights_in_8_bits_is_refused():
    with pytest.raises(UserError, match=r"no proof tells that weights in 8 bits have their adapter: leave --sync\.adapter out"):
        Vllm(Vllm.Options(quantization="int8")).check(SimpleNamespace(adapter_rank=8, total_updates=1), {"actor": "cpu"})


def test_a_vllm_that_cannot_quantize_anew_is_refused(monkeypatch):
    monkeypatch.setattr("rlhf_host.distributed.vllm.arguments._source", lambda name: "_ONLINE_SHORTHANDS = {}")
    with pytest.raises(UserError, match=r"engine vllm: engine\.quantization needs vLLM 0\.32: leave it out"):
        Vllm(Vllm.Options(quantization="fp8")).check(SimpleNamespace(adapter_rank=0, total_updates=0), {"actor": "cpu"})


@pytest.mark.parametrize(("device", "width"), [("cpu", 4), ("cuda", 2)])
def test_linear_layers_in_8_bits_take_a_byte_for_each_weight(device, width):
    model = ServedModel(
        numbers=1000,
        cached=8,
        rows=4,
        tokens=16,
        in_place=False,
        rounded=False,
        device=device,
        device_bytes=None,
        linear=700,
    )
    assert Vllm(Vllm.Options()).memory(model).weights == 1000 * width
    assert Vllm(Vllm.Options(quantization="int8")).memory(model).weights == 300 * 2 + 700


def test_starting_makes_no_context_on_any_gpu(monkeypatch):
    touched = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": touched.append(device) or torch.zeros(1).byte())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    with startup._torch_as_it_was():
        pass
    assert touched == []


def test_experts_are_told_by_the_second_model_runner(monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert "enable_return_routed_experts" not in startup._arguments(Vllm.Options(), version=0, on_cpu=False)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert startup._arguments(Vllm.Options(routed_experts=True), version=0, on_cpu=False)["enable_return_routed_experts"]
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0", "whoever has set it has set it"
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    startup._arguments(Vllm.Options(routed_experts=True), version=0, on_cpu=False)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_experts_are_not_told_on_cpus():
    engine, start = Vllm(Vllm.Options(routed_experts=True)), SimpleNamespace(adapter_rank=0)
    with pytest.raises(UserError, match=r"engine vllm: routed_experts needs vLLM's second model runner, and so a GPU"):
        engine.check(start, {"actor": "cpu"})
    engine.check(start, {"actor": "cuda"})


@pytest.mark.parametrize("experts", [None, np.zeros((4, 2, 2), np.uint8)], ids=["silent", "telling"])
def test_an_answer_has_the_experts_that_vllm_tells(experts):
    logprobs = SimpleNamespace(logprobs=[-0.5, -0.25])
    completion = SimpleNamespace(token_ids=[5, 6], logprobs=logprobs, finish_reason="length", routed_experts=experts)
    completion.weight_versions = [SimpleNamespace(version="3", start=0, end=2)]
    answer = generation_of(Sampling(2), SimpleNamespace(outputs=[completion]), version=3)
    assert list(answer.token_ids) == [5, 6]
    assert answer.traces == ({} if experts is None else {"routed_experts": experts})


@pytest.mark.parametrize("ties", [0, 15, 16])
def test_tokens_that_tie_with_the_last_of_top_k_are_told_or_refused(ties):
    """vLLM keeps all that tie. What is more than it was asked for is not known."""
    width = 3 + 16
    values = [-1.0] * (3 + ties) + [-math.inf] * (16 - ties)
    told = SimpleNamespace(logprobs=[-1.0, *values] * 2, token_ids=[7, *range(30, 30 - width, -1)] * 2, end_indices=[width + 1])
    completion = SimpleNamespace(token_ids=[7, 7], logprobs=told, finish_reason="length")
    completion.weight_versions = [SimpleNamespace(version="3", start=0, end=2)]
    output = SimpleNamespace(outputs=[completion], prompt_token_ids=[1, 2])
    answer = generation_of(Sampling(2, top_k=3, support=True), output, version=3)
    if ties >= 16:
        assert isinstance(answer, RunError)
        assert "16 tokens or more tie with the last of top_k 3" in str(answer)
        return
    prompt, *sets = answer.traces["support"]
    assert prompt == b""
    assert [unpack_tokens(one).tolist() for one in sets] == [list(range(28 - ties, 31))] * 2
    assert list(answer.logprobs) == [-1.0, -1.0]
