"""Which tests run at every change, and which only with everything: ``make test`` leaves out what is marked ``slow``.

A row names tests by a pattern over what follows the file, ``test_name[parameters]``; ``docs/contributing.md`` shows the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

OFTEN = "torch|zero-2|zero-3|zero-3-offload|zero-2-bf16"
"""Kinds of backends that are compared at every change."""

SLOW = {
    "tests/backends/test_ranks.py": (
        rf"\[(?!({OFTEN})(-True|-False)?\])|split_layers|another_number_of_ranks|another_stage|zero_plus_plus",
        "nineteen kinds of backends in two processes; five of them at every change",
    ),
    "tests/backends/test_offline_ranks.py": (r"\[(?!dpo\])", "three algorithms on rows in two processes; one at every change"),
    "tests/backends/test_ray_autotp.py": ("", "tensor parallelism on Ray"),
    "tests/runtimes/test_ray_slices.py": ("one_process|agree", "sequence parallelism on Ray; what is refused at every change"),
    "tests/runtimes/test_ray_nodes.py": ("", "clusters of several machines, and machines that are lost"),
    "tests/runtimes/test_ray_run.py": (
        "ctrl_c|dies|cannot_hold",
        "runs on Ray that end early; one run that trains and resumes at every change",
    ),
    "tests/runtimes/test_turns.py": ("", "two vLLM engines that sleep beside their workers"),
    "tests/runtimes/test_ray_leftovers.py": ("", "what a killed controller leaves"),
    "tests/template/test_installed.py": ("", "projects of all kinds of the template, built and installed"),
    "tests/packaging/test_alone.py": ("", "wheels installed alone"),
    "tests/packaging/test_constraints.py": (
        "fit_together|are_noticed",
        "versions for GPUs, resolved from the index; that all files agree at every change",
    ),
    "tests/packaging/test_dockerfile.py": ("", "all packages installed by the Dockerfile's own commands"),
    "tests/runtimes/test_wait_for_nodes.py": ("joins_late", "a cluster that a machine joins late"),
    "tests/test_notebook.py": ("", "the notebook, executed"),
    "tests/runtimes/test_ray.py": ("", "engines that are killed or refuse; two runs on Ray at every change"),
    "tests/weight_sync/test_delta.py": ("", "the sync delta with vLLM and on Ray"),
    "tests/engines/test_vllm_start.py": (
        r"two_devices|local_runtime_trains|cache_was.*\[True\]",
        "vLLM in processes of its own, and a run with it",
    ),
    "tests/engines/test_vllm_process.py": ("", "vLLM's core in a process of its own, as on GPUs"),
    "tests/training/test_lora.py": (
        "zero_trains|vllm_samples|on_ray",
        "adapters under ZeRO, in vLLM and on Ray; in one process at every change",
    ),
    "tests/training/test_qlora.py": ("on_ray", "bases in 4 bits on Ray"),
    "tests/training/test_agents.py": ("on_ray", "agents on Ray with vLLM"),
    "tests/training/test_async.py": (
        r"\[(vllm|ray)\]|would_not_be_made_so_now|gives_the_same_values_again|(every_task_once|each_group_once)\[9\]|another_depth",
        "sampling ahead with vLLM and on Ray, kills, and checkpoints of other settings or depths",
    ),
    "tests/cli/test_offline.py": ("under_ray", "rows on Ray"),
    "tests/cli/test_distill.py": ("under_ray", "a teacher on Ray"),
    "tests/cli/test_chosen_rows.py": ("under_ray", "chosen rows on Ray"),
    "tests/cli/test_following_roles.py": ("under_ray", "roles that follow another, rows beside and scaled rewards, on Ray"),
    "tests/cli/test_recipes.py": ("takes_two_small_steps", "recipes, two small steps of each"),
    "plugins/builtin_commands/rlhf-authoring/tests/test_doctor.py": (
        "reports_on_this_machine",
        "all libraries of this machine, imported",
    ),
    "tests/outside/test_outside.py": (
        "keep_their_contracts|box_that_dies|trains_in_the_box",
        "contracts of an outsider's engine, backend and runtime, and a run in them",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/contracts/test_protocol_contracts.py": (
        "reports_the_plugin_that_breaks_it",
        "engines, backends and runtimes with one rule broken each, some until a deadline; templates pass at every change",
    ),
    "plugins/builtin_commands/rlhf-plan/tests/test_counted.py": (
        "backends_hold_as_much",
        "bytes of backends, counted beside the plan of memory",
    ),
    "tests/outside/test_evaluations.py": ("", "lm_eval and inspect against rlhf serve, beside lm_eval's own model"),
    "tests/models/test_flex.py": ("a_model_shares_prompts", "FlexAttention, compiled"),
    "tests/docs/test_sizing.py": ("deepspeed_has_as_many_bytes", "bytes of DeepSpeed, measured"),
    "plugins/builtin_engines/rlhf-engine-http/tests/test_vllm.py": (
        "",
        "a server of vLLM that is killed and started again in a run",
    ),
    "plugins/builtin_engines/rlhf-engine-http/tests/test_ray.py": ("", "an engine of servers on Ray"),
    "plugins/builtin_backends/rlhf-backend-fsdp/tests/test_ranks.py": ("", "one, two and four ranks under FSDP2"),
    "tests/backends/test_ray_fsdp.py": ("", "FSDP2 on Ray"),
    "plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_forms.py": ("human_eval", "all of HumanEval"),
    "tests/docs/test_plugin_pages.py": ("own_tests|trains", "the packages of the pages, built, tested and trained with"),
    "tests/cli/test_chat.py": (
        "asked_as_in_training|reward_model_writes",
        "models of runs that are talked to, in processes of their own",
    ),
    "tests/cli/test_process_rewards.py": ("two_processes", "a process reward model in two processes"),
    "tests/test_gpu_accept.py": (
        r"\[(trl.*|ipc.*|nccl-.*|vllm-.*|colocated-sync)\]|without_a_peer|never_returns",
        "parts that start processes, with tiny sizes",
    ),
    "tests/cli/test_push.py": ("refusals|hub_that", "hubs that refuse or are gone; an upload at every change"),
    "tests/engines/test_transformers_engine.py": (
        r"(logprobs_are_those_of_the_trainer|depend_on_the_batch)\[(qwen3|mistral_window|gemma3|bloom|mamba|phi3)\]",
        "families of models; three of them at every change",
    ),
    "tests/engines/test_embedded_weights.py": (
        r"of_its_version\[(qwen3|mistral_window|gemma3|bloom|mamba|phi3)\]",
        "families of models under updates; the others at every change",
    ),
    "tests/training/test_offline_resume.py": (
        r"random_moments.*\[(preference|unpaired)\]",
        "kills of three kinds of rows; one at every change",
    ),
    "tests/training/test_foreign_checkpoints.py": (
        r"refused_in_one_line\[(?!optimizers/actor/optimizer\.pt-cut_off|model)",
        "damaged checkpoints, a table; two of them at every change",
    ),
    "tests/test_garbage.py": ("notebook_is_not", "a whole run, for what is frozen in it"),
    "tests/packaging/test_wheels.py": (
        "command_line_works",
        "all packages from wheels; the commands of the README at every change",
    ),
    "tests/training/test_async_failures.py": (
        r"\[(raises-(filter|step_finished|sync|update)|interrupts-(agent_in_evaluation|batch|filter|score_in_evaluation|sync)|hangs-(agent_in_evaluation|score_in_evaluation))\]",
        "failures and interrupts in every place; the places that most runs see at every change",
    ),
    "tests/cli/test_outside_commands.py": (
        r"breaks_itself_alone\[(-|def)",
        "commands that are broken in three ways; one at every change",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/test_check.py": (
        "ends_the_process|named_like_a_setting|every_plugin_of_the_name|kernels_have_no_hooks",
        "plugins that are checked in processes of their own",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/test_certificates.py": (
        "shown_is_stated|failures_are_in|class_in_a_file",
        "certificates of plugins that are checked and trained with; all of what is refused at every change",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/test_shown.py": (
        "learns_rises|does_not_rise",
        "short runs that learn and that do not; gradients at every change",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/test_bench.py": (
        "hook_by_hook|own|cannot_be_built",
        "measurements of plugins; one at every change",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/contracts/test_contracts.py": (
        r"\[score_keeps_its_deadline-\d+\]",
        "plugins that miss their deadline",
    ),
    "plugins/builtin_agents/rlhf-plugin-verifiers/tests/test_failures.py": ("start-timeout", "a start that takes too long"),
    "tests/training/test_rows.py": (
        r"train_the_same\[algo0|never_stopped\[algo0",
        "rows under two algorithms; one at every change",
    ),
    "tests/training/test_precompute.py": (
        r"damaged_files|is_part_of_the_model\[--actor",
        "kept log-probabilities that are damaged or of another adapter",
    ),
}
"""File → a pattern of its slow tests, empty for all, and why they are slow."""


def mark_slow(items: Iterable[pytest.Item]) -> None:
    for item in items:
        file, _, name = item.nodeid.partition("::")
        if file in SLOW and re.search(SLOW[file][0], name):
            item.add_marker(pytest.mark.slow)
