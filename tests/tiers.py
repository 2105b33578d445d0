"""Which tests run at every change, and which only with everything: ``make test`` leaves out what is marked ``slow``.

A row names tests by a pattern over what follows the file, ``test_name[parameters]``, and says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

SLOW = {
    "tests/distributed/split/test_ranks.py": (
        r"^(?!test_two_ranks_have_the_gradient_and_take_the_steps_of_one\[zero-2\]$)",
        "nineteen kinds of backends in two processes; ZeRO-2 has the gradient of one at every change",
    ),
    "tests/config/test_python_settings.py": (
        r"\[all\]",
        "every setting by both ways; one of each section and plugin at every change",
    ),
    "tests/distributed/split/test_offline_ranks.py": ("", "three algorithms on rows in two processes"),
    "tests/distributed/deepspeed/test_ray_autotp.py": ("", "tensor parallelism on Ray"),
    "tests/distributed/ray/test_slices.py": (
        "one_process|agree",
        "sequence parallelism on Ray; what is refused at every change",
    ),
    "tests/distributed/ray/test_nodes.py": ("", "clusters of several machines, and machines that are lost"),
    "tests/distributed/ray/test_growing.py": ("", "clusters to which machines with GPUs are added"),
    "plugins/builtin_commands/rlhf-translate/tests/test_verl_parts.py": (
        r"schedules_of_every_backend\[(?!optim=(megatron|automodel))|with_its_reason\[(?!optim.num)",
        "schedules of verl's five backends; of two of them at every change",
    ),
    "plugins/builtin_sessions/rlhf-session/tests/test_session.py": (
        r"^(?!test_a_loop_gives_the_weights_of_a_run\[rloo\]|.*(by_hand|add_up|refused_and|not_finite|every_token|not_taken|named_loss))",
        "sessions on Ray, with adapters, a critic, averages and rows, saved and interrupted ones; plain ones at every change",
    ),
    "tests/backends/test_masters.py": (
        "adapter|other_optimizers|learns|resumed|tied|does_not_run|class_keeps|backend_keeps",
        "masters of adapters, under other optimizers and of a resumed role; what is rounded and written at every change",
    ),
    "tests/distributed/ray/test_run.py": (
        "",
        "runs on Ray that resume, or that end early; test_whole_stack trains there at every change",
    ),
    "tests/distributed/ray/test_frozen_roles.py": (
        "",
        "frozen models and mixtures on Ray: placed apart, killed, resumed, split and with vLLM; placement at every change",
    ),
    "plugins/builtin_algos/rlhf-plugin-online-dpo/tests/test_on_ray.py": (
        "",
        "algorithms with a second model that answers, on Ray",
    ),
    "plugins/builtin_algos/rlhf-plugin-league/tests/test_on_ray.py": (
        "",
        "a league on Ray: placed apart, killed, resumed, split, with adapters and with vLLM",
    ),
    "tests/distributed/ray/test_whole_stack.py": (
        r"\[2\]",
        "two ranks and an engine over two devices; one of each at every change",
    ),
    "tests/distributed/ray/test_turns.py": ("", "two vLLM engines that sleep beside their workers"),
    "tests/distributed/ray/test_leftovers.py": ("", "what a killed controller leaves"),
    "plugins/builtin_rewards/rlhf-plugin-llm-judge/tests/test_llm_judge.py": ("APITimeoutError", "a judge that is late, twice"),
    "tests/template/test_installed.py": ("", "projects of all kinds of the template, built and installed"),
    "tests/packaging/test_install.py": ("real_uv|brings_uv", "uv and pip, installing from an index served here; a missing uv"),
    "tests/packaging/test_makefile.py": (
        r"interrupted.*\[[34]-|going_back_is_a_change_for",
        "setups interrupted in a later installation; two at every change",
    ),
    "tests/packaging/test_template_built.py": ("", "the template in a wheel of a clone and in one of an sdist"),
    "tests/packaging/test_alone.py": ("", "wheels installed alone"),
    "tests/packaging/test_held.py": ("", "pip, against a package index of a stranger"),
    "tests/packaging/test_release.py": (
        "made_in_a_copy|problems|lacks|are_named",
        "a small release, built and checked; how the version is raised at every change",
    ),
    "tests/packaging/test_constraints.py": (
        "fit_together|are_noticed",
        "versions for GPUs, resolved from the index; that all files agree at every change",
    ),
    "tests/packaging/test_dockerfile.py": ("", "all packages installed by the Dockerfile's own commands"),
    "tests/distributed/ray/test_wait_for_nodes.py": ("joins_late", "a cluster that a machine joins late"),
    "tests/test_notebook.py": ("", "the notebook, executed"),
    "tests/distributed/ray/test_ray.py": ("", "engines that are killed or refuse; two runs on Ray at every change"),
    "tests/distributed/sync/test_delta.py": ("", "the sync delta with vLLM and on Ray"),
    "tests/distributed/vllm/test_start.py": (
        r"^(?!test_with_a_version)",
        "vLLM with experts, in processes of its own, and a run with it; one start at every change",
    ),
    "tests/distributed/vllm/test_quantized.py": ("", "vLLM with weights in 8 bits, synced by every way and on two devices"),
    "tests/distributed/vllm/test_process.py": ("", "vLLM's core in a process of its own, as on GPUs"),
    "tests/training/test_lora.py": (
        "zero_trains|vllm_samples|on_ray|never_stopped",
        "adapters under ZeRO, in vLLM and on Ray, and resumed; runs in one process at every change",
    ),
    "tests/training/test_qlora.py": ("on_ray", "bases in 4 bits on Ray"),
    "tests/training/test_agents.py": ("on_ray", "agents on Ray with vLLM"),
    "tests/training/test_async.py": (
        r"\[(vllm|ray)\]|would_not_be_made_so_now|gives_the_same_values_again|(every_task_once|each_group_once)\[(2|9)\]|another_depth|draws_that_take_long_are_passed",
        "sampling ahead with vLLM and on Ray, kills, and checkpoints of other settings or depths",
    ),
    "tests/cli/test_offline.py": ("under_ray", "rows on Ray"),
    "tests/cli/test_distill.py": ("under_ray|learns_from_its_teacher", "a teacher on Ray, and runs that learn from one"),
    "tests/cli/test_chosen_rows.py": ("under_ray", "chosen rows on Ray"),
    "tests/cli/test_soft_updates.py": (
        "under_ray|apart_from_its_source",
        "roles that follow another, rows beside and scaled rewards, on Ray",
    ),
    "tests/cli/test_recipes.py": ("takes_two_small_steps", "recipes, two small steps of each"),
    "plugins/builtin_commands/rlhf-authoring/tests/test_doctor.py": (
        "reports_on_this_machine|only_these_are|follows_from_the_libraries",
        "all libraries of this machine, imported",
    ),
    "tests/outside/test_outside.py": (
        "keep_their_contracts|box_that_dies|trains_in_the_box",
        "contracts of an outsider's engine, backend and runtime, and a run in them",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/contracts/test_protocol_contracts.py": (
        "reports_the_plugin_that_breaks_it|templates_pass",
        "engines, backends and runtimes: templates that pass, and one rule broken each, some until a deadline",
    ),
    "plugins/builtin_commands/rlhf-plan/tests/test_counted.py": (
        "backends_hold_as_much",
        "bytes of backends, counted beside the plan of memory",
    ),
    "plugins/builtin_commands/rlhf-plan/tests/test_recomputation.py": (
        r"equal_bit_for_bit\[(?!on-auto|off-1\])",
        "weights after steps by numbers of recomputed layers; two of them at every change",
    ),
    "tests/outside/test_evaluations.py": ("", "lm_eval and inspect against rlhf serve, beside lm_eval's own model"),
    "plugins/builtin_kernels/rlhf-kernels-triton/tests/test_kernels.py": (
        "",
        "Triton's kernels, in its interpreter or on a GPU; what is around them at every change",
    ),
    "plugins/builtin_kernels/rlhf-kernels-triton/tests/test_parts.py": ("compiled_whole", "a layer, compiled"),
    "tests/models/test_carried.py": ("no_family|an_adapter", "what every family of transformers carries, and adapters"),
    "tests/models/test_families.py": (
        r"as_transformers_has_it\[(?!(gpt2|llama|phimoe|gemma2-eager|codegen|bert|mamba|deepseek_v4|blt|prophetnet|phi3-long-rope|cpmant|xlnet)\])",
        "every family of models that transformers ships; one or two of each outcome at every change",
    ),
    "tests/training/test_disk.py": (r"run_has_finished\[keep[12]", "what stays of a finished run by further settings"),
    "tests/test_gpu_roofline.py": (
        r"whole_model|than_before\[(?!(3b, kernels triton|1\.5b, no kernels)\])",
        "launches of every kind of pass, and of a whole model, counted; those of two at every change",
    ),
    "tests/models/test_flex.py": ("a_model_shares_prompts", "FlexAttention, compiled"),
    "tests/docs/test_sizing.py": (
        r"deepspeed_has_as_many_bytes|backward_pass\[qwen2",
        "bytes of DeepSpeed, and those that passes of a second family keep; one family's at every change",
    ),
    "plugins/builtin_engines/rlhf-engine-http/tests/test_vllm.py": (
        "",
        "a server of vLLM that is killed and started again in a run",
    ),
    "plugins/builtin_engines/rlhf-engine-http/tests/test_ray.py": ("", "an engine of servers on Ray"),
    "tests/models/test_split_experts.py": (
        r"^(?!.*(\[mixtral\]|dbrx|has_none))",
        "forty-six families of experts whose tokens are exchanged; one at every change",
    ),
    "tests/models/test_expert_adapters.py": (
        r"^(?!.*(\[qwen3_moe-.experts|own_factors))",
        "adapters of experts of six families, and in files; one at every change",
    ),
    "plugins/builtin_backends/rlhf-backend-fsdp/tests/test_expert_parallel.py": ("", "experts on two and four ranks"),
    "plugins/builtin_backends/rlhf-backend-fsdp/tests/test_ranks.py": ("", "one, two and four ranks under FSDP2"),
    "tests/distributed/ray/test_fsdp.py": ("", "FSDP2 on Ray"),
    "plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_forms.py": ("", "rows of public data sets, and all of HumanEval"),
    "tests/docs/test_plugin_pages.py": ("own_tests|trains", "the packages of the pages, built, tested and trained with"),
    "tests/combinations/test_combinations.py": (
        "in_pairs",
        "algorithms, extensions, data and schedules, each with each; a sample at every change",
    ),
    "tests/cli/test_chat.py": (
        "asked_as_in_training|reward_model_writes|ctrl_c",
        "models of runs that are talked to, in processes of their own",
    ),
    "tests/cli/test_start.py": (
        r"\[(replay|data|plan)\]",
        "commands with torch in a new interpreter; one of them at every change",
    ),
    "tests/cli/test_process_rewards.py": ("two_processes", "a process reward model in two processes"),
    "tests/test_gpu_accept.py": (
        r"\[(trl.*|ipc.*|nccl-.*|vllm-.*|mfu-1.5b|mfu-3b-.*)\]|never_returns",
        "parts that start processes, with tiny sizes, and repetitions of others",
    ),
    "tests/cli/test_push.py": ("refusals|hub_that|damaged", "hubs that refuse or are gone; an upload at every change"),
    "tests/engines/test_transformers_engine.py": (
        r"(logprobs_are_those_of_the_trainer|depend_on_the_batch)\[(qwen3|mistral_window|gemma3|bloom|mamba|phi3)\]",
        "families of models; three of them at every change",
    ),
    "tests/engines/test_looks.py": (
        r"eight_steps\[",
        "reads of a device, token for token; their number at every change in test_gpu_roofline",
    ),
    "plugins/builtin_kernels/rlhf-kernels-compile/tests/test_contract.py": ("", "blocks, traced anew for every check"),
    "plugins/builtin_kernels/rlhf-kernels-compile/tests/test_compile.py": (
        "inductors_twin|traced_once",
        "blocks that are compiled; what is refused at every change",
    ),
    "plugins/builtin_kernels/rlhf-kernels-graphs/tests/test_graphs.py": (
        r"are_whole_rows\[(qwen2|gemma3|gpt2)\]",
        "families of models; two of them at every change",
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
        "",
        "all packages built and installed from wheels",
    ),
    "tests/training/test_async_failures.py": ("", "failures and interrupts in every place"),
    "tests/cli/test_outside_commands.py": (
        r"breaks_itself_alone\[(-|def|bad)|nothing_can_reach_is_told\[(train|plain)",
        "commands that are broken in several ways; one at every change",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/test_check.py": (
        "ends_the_process|named_like_a_setting|every_plugin_of_the_name|kernels_have_no_hooks|keeps_the_contract|needs_for_itself|options_reach|more_basic",
        "plugins that are checked in processes of their own; one at every change",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/test_certificates.py": (
        "shown_is_stated|failures_are_in|class_in_a_file",
        "certificates of plugins that are checked and trained with; all of what is refused at every change",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/test_shown.py": (
        "learns_rises|does_not_rise",
        "short runs that learn and that do not; gradients at every change",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/test_bench.py": ("", "measurements of plugins"),
    "plugins/builtin_commands/rlhf-authoring/tests/contracts/test_contracts.py": (
        "each_check_reports",
        "contract suites against plugins that break one rule each; good plugins at every change",
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
    "tests/distributed/ray/test_worker_devices.py": ("share_of_the_machine", "workers on Ray count their CPUs"),
    "tests/distributed/deepspeed/test_deepspeed.py": (r"foreign_pickle.*\[2\]", "a second size of a damaged checkpoint"),
    "tests/distributed/split/test_slices.py": (
        r"about_half|\[heads[12]\]",
        "sequence parallelism: memory, and other numbers of heads",
    ),
    "tests/cli/test_carried.py": ("", "a base with layers that no class has: runs, exports, merges and vLLM"),
    "tests/cli/test_export.py": ("interrupted_run", "a run that is interrupted, then exported"),
    "tests/docs/test_python_pages.py": ("tests_of_the_testing_page|script_of_the_python_page", "scripts of the pages, whole"),
    "tests/training/test_resume.py": (
        r"interrupt_leaves.*\[2\]|in_the_background",
        "signals to commands in processes of their own; SIGTERM at every change",
    ),
    "tests/training/test_session.py": ("talks_and_asks", "a session that samples, talks and asks roles"),
    "tests/distributed/sync/test_remote_engines.py": ("", "engines in other processes, and those that are killed in a sync"),
    "tests/distributed/sync/test_transfer.py": ("receiver_lost", "receivers that hang or are gone"),
    "tests/distributed/sync/test_verify.py": ("broadcast", "a skipped sync, by broadcast"),
    "tests/test_examples.py": ("chain_from", "the examples, one after the other"),
    "plugins/builtin_algos/rlhf-plugin-distill/tests/test_runs.py": (
        r"^(?!test_(a_row_with|runs_that|a_teacher_whose|rows_of_tokens|rows_go_to_the_teacher_that_their_column_names\[distill-true))",
        "runs with teachers of other tokenizers; one with two teachers, and what is refused, at every change",
    ),
    "plugins/builtin_algos/rlhf-plugin-distill/tests/test_sdpo.py": (
        "learns_from_its_own",
        "runs that learn from their own solutions, and resume",
    ),
    "plugins/builtin_algos/rlhf-plugin-entropy/tests/test_entropy.py": (
        r"trains_with_it\[(kl_cov|clip_cov)",
        "runs with kl_cov and clip_cov; one with top_entropy at every change",
    ),
    "plugins/builtin_algos/rlhf-plugin-experts/tests/test_experts.py": (
        r"\[(recompute|ahead)|adapters_leave|adapters_by_name",
        "more runs whose experts are replayed; one at every change",
    ),
    "tests/models/test_replayed_experts.py": (
        r"own_code\S*\[(?!qwen3_moe\]|deepseek_v3\]|gpt_oss\])|by_name\[(?!doge-moe|dbrx)|own_experts\[mixtral",
        "every family with experts; three of them, and two that are refused, at every change",
    ),
    "plugins/builtin_algos/rlhf-plugin-averages/tests/test_averages.py": (
        "trains_an_adapter|resumed_run",
        "averages in runs that resume or train an adapter",
    ),
    "plugins/builtin_agents/rlhf-plugin-mcp/tests/test_mcp.py": (
        r"not_there_stops|that_hangs_fails|given_up_in_time\[(?!one line)|limits_of_a_command\[events-it",
        "servers of tools that hang, do not start or answer without end; one line of the last at every change",
    ),
    "plugins/builtin_agents/rlhf-plugin-textarena/tests/test_textarena.py": (
        "ten_steps",
        "ten steps of self-play; two against an opponent at every change",
    ),
    "plugins/builtin_agents/rlhf-plugin-shell/tests/test_containers.py": (
        r"^(?!test_(a_run_that_is_killed|settings_that|rows_that|archives|which_processes|with_a_real))",
        "episodes and attacks in containers of a stand-in; a killed run at every change",
    ),
    "plugins/builtin_agents/rlhf-plugin-shell/tests/test_machines.py": (
        r"^(?!test_(a_missing_client|who_is_not_root|what_commands_broke))",
        "episodes, attacks, faults and killed runs in machines of a fake service; one machine at every change",
    ),
    "plugins/builtin_agents/rlhf-plugin-shell/tests/test_harness.py": (
        "fails_is_no_zero|is_told|without_end|ends_before",
        "programs that hang, fall or write without end; two that play at every change",
    ),
    "plugins/builtin_agents/rlhf-plugin-shell/tests/test_harbor_containers.py": (
        "built_once|is_pulled|is_asked_for|cannot_be_built|run_beside",
        "tasks in containers of a stand-in; what is read and refused at every change",
    ),
    "plugins/builtin_agents/rlhf-plugin-shell/tests/test_harbor.py": (
        "solutions_are_right|commands_of_the_image",
        "published tasks, solved whole",
    ),
    "plugins/builtin_agents/rlhf-plugin-shell/tests/test_tools.py": (
        "all_tools_work",
        "forty tools in a shell; five at every change",
    ),
    "plugins/builtin_agents/rlhf-plugin-openai-agent/tests/test_openai_agent.py": (
        "holds_the_pipes",
        "programs that end and leave their pipes open",
    ),
    "plugins/builtin_agents/rlhf-plugin-user-simulator/tests/test_user_simulator.py": (
        "policys_tokens_alone|role_of_a_run",
        "runs with a user; conversations, and a run whose user fails, at every change",
    ),
    "plugins/builtin_algos/rlhf-plugin-league/tests/test_league.py": (
        "adapter|members_are_drawn|resumed_run|saved_steps_stay|without_its_opponents|damaged_opponents|other_settings|held_out|rival"
        "|without_an_opponent",
        "more runs against a league; one against the step before at every change",
    ),
    "plugins/builtin_algos/rlhf-plugin-ptx/tests/test_ptx.py": (
        r"goes_on_with_the_rows.*\[more[12]\]|policys_part|rows_are_learnt",
        "more runs with rows beside; a resumed one at every change",
    ),
    "plugins/builtin_algos/rlhf-plugin-replay-buffer/tests/test_replay_buffer.py": (
        r"killed_run|replays_what.*\[more1\]|as_without|corrections_act|left_out|samples_ahead",
        "more runs with replayed groups; a resumed one at every change",
    ),
    "plugins/builtin_tasks/rlhf-plugin-curriculum/tests/test_curriculum.py": (
        r"killed_run|whole_one_does\[pools\]|filter_drops|answers_without|rows_with_answers",
        "more runs with a curriculum; a resumed one, and one that solves everything, at every change",
    ),
    "plugins/builtin_tasks/rlhf-plugin-streaming/tests/test_streaming.py": (
        r"killed_run|settings_that_would|run_leaves|other_data|any_place\[(?!(17|39)-(jsonl|parquet)\])",
        "runs that are killed and resumed, and every format from every place; two formats at every change",
    ),
    "plugins/builtin_tasks/rlhf-plugin-reasoning-gym/tests/test_reasoning_gym.py": (
        "get_harder_resumes",
        "a run with levels, stopped and resumed",
    ),
    "plugins/builtin_algos/rlhf-plugin-remax/tests/test_runs.py": (
        r"likeliest.*\[more1\]|saved_answers",
        "runs with greedy answers, over two updates and of saved answers; one at every change",
    ),
    "plugins/builtin_algos/rlhf-plugin-online-dpo/tests/test_spin.py": ("a_run_makes", "a run against the data's answers"),
    "plugins/builtin_algos/rlhf-plugin-online-dpo/tests/test_a2po.py": ("a_run_trains", "a run beside the reference's answers"),
    "plugins/builtin_algos/rlhf-plugin-kto/tests/test_dro.py": (
        r"a_run_learns.*\[label\]",
        "a run on labels; on rewards at every change",
    ),
    "plugins/builtin_algos/rlhf-plugin-online-dpo/tests/test_rivals.py": (
        "every_second_answer",
        "answers of two models, counted over a run",
    ),
    "plugins/builtin_algos/rlhf-plugin-reward-scaling/tests/test_reward_scaling.py": (
        "resumes_is_the_run",
        "a run that resumes",
    ),
    "plugins/builtin_trackers/rlhf-tracker-tensorboard/tests/test_tensorboard.py": (
        "run_by_command_line",
        "a run by command line with TensorBoard",
    ),
    "plugins/builtin_trackers/rlhf-tracker-prometheus/tests/test_prometheus.py": (
        "taken_port_ends|killed_run|while_it_goes_on",
        "runs that are read, one of them killed, and a port that is taken; names, labels and ends at every change",
    ),
    "plugins/builtin_trackers/rlhf-tracker-prometheus/tests/test_files.py": (
        "real_run",
        "a run on Ray with vLLM that has every metric of the dashboard",
    ),
    "plugins/builtin_trackers/rlhf-gpu-metrics/tests/test_gpu_metrics.py": (
        "every_step_of_a_run|without_nvml",
        "runs by command line with and without GPUs; the numbers at every change",
    ),
    "plugins/builtin_trackers/rlhf-gpu-metrics/tests/test_machines.py": ("", "a Ray cluster of two machines with GPUs"),
    "tests/outside/test_ray_dashboard.py": ("", "a run on a cluster with Ray's dashboard"),
    "tests/outside/test_observers.py": ("", "profiles and metrics that Perfetto and Prometheus read"),
    "plugins/builtin_trackers/rlhf-tracker-wandb/tests/test_wandb.py": (
        "run_by_command_line",
        "a run by command line with wandb",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/test_template.py": (
        "no_name_hides|free_text_arrives",
        "names that authors may choose, in every kind of the template",
    ),
    "tests/learning/test_bandit.py": (
        r"every_algorithm_(climbs|sinks)|every_policy_loss_sinks|policy_loss_climbs\[(?!clip\]|pg\])",
        "every algorithm and policy loss on a bandit, with either sign; two policy losses and the critics at every change",
    ),
    "plugins/builtin_algos/rlhf-plugin-group-methods/tests/test_runs.py": (
        r"two_updates_a_step\[(?!vespo)",
        "runs of group methods; one at every change",
    ),
    "tests/runs/test_directory.py": ("how_runs_end", "runs that end in every way"),
    "plugins/builtin_engines/rlhf-engine-http/tests/test_servers.py": (
        "hangs_is_given_up",
        "a server that hangs until its deadline",
    ),
    "plugins/builtin_engines/rlhf-engine-http/tests/test_membership.py": (
        "whatever_happens",
        "servers that come and go at random; each way by itself at every change",
    ),
    "plugins/builtin_engines/rlhf-engine-http/tests/test_odd_replies.py": (
        "odd_facts|ends_a_run_by_name|full_disk",
        "engines that meet odd servers; replies by themselves at every change",
    ),
    "tests/cli/test_pictures.py": ("saved_pictures", "saved pictures that are trained on"),
    "plugins/builtin_commands/rlhf-samples/tests/test_generate.py": (
        "killed_command",
        "a command that is killed and continued",
    ),
    "plugins/builtin_commands/rlhf-sweep/tests/test_sweep.py": (
        "killed_sweep|tasks_of_ray",
        "sweeps that train, one killed and one on Ray; made-up runs at every change",
    ),
    "plugins/builtin_commands/rlhf-environments/tests/test_environments.py": (
        "played_by_a_process",
        "a written environment, and the process that plays it",
    ),
    "plugins/builtin_commands/rlhf-xray/tests/test_xray.py": (
        r"run\[(?!rloo)|ratios|everything_installed|last_layer|that_sampled|teachers",
        "X-rays with everything installed, of runs, adapters, teachers and later updates; pushes and one gradient at every change",
    ),
    "plugins/builtin_commands/rlhf-profile/tests/test_profile.py": (
        r"resumed|update_torch|have_a_limit|on_rows|that_fails|goes_on",
        "steps of resumed, failed and limited runs, and of one on rows; a whole run's step at every change",
    ),
    "plugins/builtin_commands/rlhf-profile/tests/test_on_ray.py": ("", "two ranks and an engine on Ray, and their timeline"),
    "plugins/builtin_commands/rlhf-tinker/tests/test_server.py": ("killed_server", "a server that is killed, and two more"),
    "plugins/builtin_commands/rlhf-supervisor/tests/test_supervisor.py": (
        r"full_disk|stopped|so_often|threads|asked_for.*\[(sys.exit\([^2]|os)|goes_to_the_run.*\[(?!15)",
        "a full disk, a stopped run, and further signals and exit codes; one of each at every change",
    ),
    "tests/runs/test_supervised.py": (
        "killed|another|at_once",
        "runs that are killed and begin again; what to install at every change",
    ),
    "plugins/builtin_commands/rlhf-samples/tests/test_rollout.py": ("interrupted_rollout", "a rollout that is interrupted"),
    "tests/cli/test_samples.py": ("prompts_of_the_run", "trajectories of an algorithm that writes prompts, scored again"),
    "tests/distributed/vllm/test_in_files.py": (
        "every_version",
        "models with experts in vLLM; names and values at every change",
    ),
    "tests/distributed/vllm/test_vllm.py": (
        r"before_the_first_sync\[untied\]|could_be_drawn\[(1|60)-|could_be_drawn\[5-(\{\}|\{'(min|top)_p': 0.\d\})-",
        "a second kind of model; all ways to truncate, of which one is tried at every change",
    ),
    "tests/training/test_truncated_sampling.py": (
        r"\[(top-k|min-p)\]|resumed|older|softmax|saved|agents|rows_without",
        "runs that resume, sample ahead, play turns or read files; the agreement of sampler and trainer at every change",
    ),
    "tests/distributed/vllm/test_adapters.py": ("every_version", "adapters in vLLM"),
    "tests/training/test_waits.py": (r"\[on-recompute\]", "reads of the device, with old log-probabilities computed again"),
    "tests/training/test_critic.py": (r"never_stopped\[gpt2\]", "a resumed critic of a second family"),
    "plugins/builtin_agents/rlhf-plugin-nemo-gym/tests/test_failures.py": (
        "matrix_of_failures",
        "services that fail in every way",
    ),
    "plugins/builtin_trackers/rlhf-tracker-clearml/tests/test_clearml.py": (
        "killed_run|runs_of_one_process|by_command_line|online_without",
        "runs in the real ClearML, which takes seconds to begin and to end a session",
    ),
    "plugins/builtin_trackers/rlhf-tracker-clearml/tests/test_contract.py": ("", "sessions of ClearML, by the contract"),
    "plugins/builtin_syncs/rlhf-sync-delta/tests/test_runs.py": (
        "bisect|killed_run",
        "runs that break or are killed; one at every change",
    ),
    "plugins/builtin_rewards/rlhf-plugin-reward-model/tests/test_reward_model.py": (
        "resumes_its_statistics",
        "a run that resumes",
    ),
    "plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_containment.py": (
        r"uncontained_the_same_attacks_succeed\[(?!(reads /etc/passwd|opens a socket|changes modes)\])",
        "attacks that succeed where nothing contains them; three of them at every change, and that none does where something does",
    ),
    "plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_hermetic.py": (
        "^(?!.*(some_of_each_kind|any_exception_is))",
        "attacks and right solutions made of parts; some of each kind at every change",
    ),
    "plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_records.py": (
        r"\[(?!(a list|another list)\])",
        "lists and trees of LeetCode; a list at every change",
    ),
    "plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_values.py": (
        "values_of_the_standard_library|values_that_tests_pass",
        "values of the standard library; objects, functions and changes at every change",
    ),
    "plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_shells.py": ("", "commands that are judged in a shell"),
    "plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_right_programs.py": ("", "programs of people, which are right"),
    "plugins/builtin_rewards/rlhf-plugin-math-verifier/tests/test_generated.py": (
        "",
        "answers that are generated or of other people",
    ),
    "plugins/builtin_rewards/rlhf-plugin-math-verifier/tests/test_cost.py": ("event_loop", "answers that processes read"),
    "plugins/builtin_rewards/rlhf-plugin-math-verifier/tests/test_workers.py": ("", "workers that hang or are killed"),
    "tests/proofs/test_proofs.py": ("", "six plugins that prove the doors, each in a run"),
}
"""File → a pattern of its slow tests, empty for all, and why they are slow."""

LONG = {
    "plugins/builtin_agents/rlhf-plugin-openai-agent/tests/test_openai_agent.py": (
        "test_a_program_that_fails_is_no_zero",
        "test_a_late_program_ends_with_all_that_it_started",
    ),
    "plugins/builtin_agents/rlhf-plugin-shell/tests/test_harbor.py": (
        "test_the_smaller_deadline_counts_and_the_task_s_time_is_that_of_all_commands",
    ),
    "plugins/builtin_agents/rlhf-plugin-shell/tests/test_shell_agent.py": ("test_two_steps_of_training",),
    "plugins/builtin_agents/rlhf-plugin-textarena/tests/test_textarena.py": ("test_two_steps_against_a_frozen_opponent",),
    "plugins/builtin_agents/rlhf-plugin-verifiers/tests/test_failures.py": ("test_the_matrix_of_failures",),
    "plugins/builtin_algos/rlhf-plugin-dapo/tests/test_dapo.py": ("test_a_run_drops_groups_says_why_and_corrects",),
    "plugins/builtin_algos/rlhf-plugin-entropy/tests/test_entropy.py": ("test_a_run_trains_with_it",),
    "plugins/builtin_algos/rlhf-plugin-group-methods/tests/test_runs.py": (
        "test_a_run_learns_over_two_updates_a_step",
        "test_gigpo_compares_turns_that_met_the_same_state",
    ),
    "plugins/builtin_algos/rlhf-plugin-off-policy/tests/test_off_policy.py": (
        "test_a_run_shows_the_metrics_of_its_corrections",
    ),
    "plugins/builtin_algos/rlhf-plugin-online-dpo/tests/test_rivals.py": ("test_a_run_trains_on_answers_of_two_models",),
    "plugins/builtin_algos/rlhf-plugin-ptx/tests/test_ptx.py": (
        "test_a_resumed_run_goes_on_with_the_rows_that_come_next",
        "test_the_metric_is_the_likelihood_of_the_rows_alone",
    ),
    "plugins/builtin_algos/rlhf-plugin-replay-buffer/tests/test_replay_buffer.py": (
        "test_a_resumed_run_replays_what_the_whole_one_does",
    ),
    "plugins/builtin_tasks/rlhf-plugin-curriculum/tests/test_curriculum.py": (
        "test_a_resumed_run_draws_what_the_whole_one_does",
    ),
    "plugins/builtin_algos/rlhf-plugin-reward-model-training/tests/test_reward_model_training.py": (
        "test_a_trained_model_has_the_statistics_of_its_scores_in_its_file",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/contracts/test_command_contract.py": (
        "test_each_check_reports_the_command_that_breaks_it",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/contracts/test_contracts.py": (
        "test_a_good_plugin_passes_every_check",
        "test_pytest_names_the_broken_rule",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/test_certificates.py": ("test_every_field_that_is_changed_is_noticed",),
    "plugins/builtin_commands/rlhf-authoring/tests/test_check.py": (
        "test_a_broken_rule_is_told_with_the_rule_and_what_was_wrong",
        "test_an_import_that_dies_or_hangs_is_one_failure",
    ),
    "plugins/builtin_commands/rlhf-authoring/tests/test_doctor.py": ("test_an_import_that_dies_or_hangs_is_told",),
    "plugins/builtin_commands/rlhf-authoring/tests/test_install.py": ("test_a_wheel_comes_and_goes",),
    "plugins/builtin_commands/rlhf-authoring/tests/test_template.py": ("test_every_kind_is_formatted_and_clean",),
    "plugins/builtin_commands/rlhf-plan/tests/test_plan.py": (
        "test_on_one_device_the_cache_is_there_while_answers_are",
        "test_shapes_of_known_models",
        "test_everything_that_is_too_large_is_named",
        "test_as_many_layers_are_recomputed_as_memory_asks_for",
    ),
    "plugins/builtin_kernels/rlhf-kernels-cpu/tests/test_memory.py": (
        "test_tensors_of_later_steps_reuse_the_pages_of_earlier_ones",
    ),
    "plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_containment.py": (
        "test_hostile_programs_in_a_row_leave_nothing_behind",
        "test_limits_are_those_of_a_program_and_not_of_each_of_its_objects",
        "test_no_attack_gets_out_of_a_user_that_is_not_root",
        "test_two_steps_of_training",
    ),
    "plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_folders.py": ("test_another_user_changes_nothing_of_a_job",),
    "plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_values.py": ("test_a_deadline_is_the_policy_s_fault",),
    "plugins/builtin_rewards/rlhf-plugin-code-exec/tests/test_verdicts.py": ("test_the_feedback_says_what_failed",),
    "plugins/builtin_rewards/rlhf-plugin-llm-judge/tests/test_judge.py": (
        "test_a_run_without_labels_writes_its_costs_and_ends_where_the_judge_fails",
        "test_a_model_is_served_beside_the_run_and_ends_with_it",
        "test_a_server_ends_also_where_its_run_is_killed",
        "test_a_server_that_does_not_start_is_told_with_its_last_words",
        "test_what_two_rewards_keep_are_files_of_their_own",
        "test_calls_tokens_costs_and_failures_are_metrics_of_a_step",
    ),
    "plugins/builtin_rewards/rlhf-plugin-llm-judge/tests/test_rubrics.py": (
        "test_a_run_does_not_start_on_wrong_criteria_and_names_file_and_line",
    ),
    "plugins/builtin_rewards/rlhf-plugin-llm-judge/tests/test_tournament.py": (
        "test_strengths_are_the_maximum_of_the_likelihood",
        "test_equal_answers_tie_and_a_group_has_half_a_point_each",
        "test_a_judge_that_likes_the_first_one_says_nothing_when_asked_in_both_orders",
    ),
    "plugins/builtin_rewards/rlhf-plugin-llm-judge/tests/test_llm_judge.py": (
        "test_a_run_trains_on_judgements_and_does_not_start_without_its_judge",
    ),
    "plugins/builtin_syncs/rlhf-sync-delta/tests/test_runs.py": (
        "test_an_adapter_is_not_kept",
        "test_every_step_of_a_run_is_that_of_its_checkpoint",
    ),
    "plugins/builtin_trackers/rlhf-tracker-clearml/tests/test_clearml.py": (
        "test_a_dry_run_writes_nothing",
        "test_odd_metrics_texts_and_settings_are_kept",
    ),
    "tests/cli/test_chat.py": ("test_lines_are_messages_and_an_empty_one_begins_anew",),
    "tests/cli/test_classes_in_files.py": ("test_the_reward_of_the_page_has_options_and_a_state_that_a_resume_goes_on_from",),
    "tests/cli/test_export.py": (
        "test_adapters_are_merged",
        "test_a_reward_model_and_a_critic",
        "test_the_type_of_the_weights",
    ),
    "tests/cli/test_merge_lora.py": ("test_the_merged_model_is_whole_and_the_gap_is_printed",),
    "tests/cli/test_outside_commands.py": (
        "test_a_command_that_nothing_can_reach_is_told",
        "test_metadata_is_read_once_by_a_command",
        "test_one_that_is_broken_breaks_itself_alone",
    ),
    "tests/cli/test_pictures.py": (
        "test_generated_answers_are_data_with_pictures",
        "test_replayed_trajectories_keep_them",
    ),
    "tests/cli/test_serve.py": ("test_a_run_is_served_with_its_settings",),
    "tests/cli/test_serve_reward.py": ("test_rewards_are_those_of_the_model",),
    "tests/distributed/deepspeed/test_deepspeed.py": ("test_a_foreign_pickle_is_refused_in_one_line_and_does_not_run",),
    "tests/docs/test_readme.py": ("test_its_python_learns", "test_the_first_hour_goes_as_the_page_says"),
    "tests/models/test_balance.py": ("test_experts_are_used_more_evenly",),
    "tests/models/test_activation_memory.py": ("test_a_shared_line_needs_no_more_memory_at_once_than_padded_rows_of_its_cost",),
    "tests/distributed/split/test_slices.py": ("test_slices_compute_what_one_process_does",),
    "tests/rollouts/test_stalls.py": ("test_a_deadlock_of_the_host_is_noticed_at_once_and_said",),
    "tests/runs/test_signs.py": ("test_a_run_says_it_in_its_log",),
    "tests/runs/test_view.py": ("test_pieces_are_what_the_files_have_and_only_for_those_with_the_address",),
    "tests/training/test_adapter_dropout.py": ("test_a_resumed_run_is_the_run_that_was_never_stopped",),
    "tests/training/test_agents.py": ("test_what_a_program_said_trains_as_it_was_sampled",),
    "tests/training/test_async.py": ("test_what_is_over_when_a_run_is_interrupted_is_in_its_checkpoint",),
    "tests/training/test_critic.py": (
        "test_a_resumed_critic_is_the_one_that_never_stopped",
        "test_the_critic_learns_what_the_reward_is",
    ),
    "tests/training/test_disk.py": (
        "test_the_final_weights_are_there_once_and_other_files_may_be_edited",
        "test_without_links_there_are_copies",
    ),
    "tests/training/test_foreign_checkpoints.py": ("test_what_no_run_wrote_is_refused_in_one_line",),
    "tests/training/test_lora.py": ("test_a_run_that_begins_with_an_adapter_keeps_a_copy_of_it_as_its_reference",),
    "tests/training/test_offline_resume.py": ("test_kill_9_at_random_moments_changes_nothing",),
    "tests/training/test_precompute.py": (
        "test_an_adapter_is_part_of_the_model",
        "test_they_are_kept_for_the_same_rows_and_model_only",
    ),
    "tests/training/test_qlora.py": ("test_a_resumed_run_is_the_run_that_was_never_stopped",),
    "tests/training/test_resume.py": ("test_an_evaluation_before_the_kill_changes_nothing_after_it",),
    "tests/training/test_rows.py": (
        "test_an_evaluation_of_pairs_is_the_mean_over_pairs_and_changes_nothing",
        "test_lines_padded_rows_and_rows_alone_train_the_same",
    ),
    "tests/training/test_run.py": (
        "test_a_strong_kl_holds_the_policy_back",
        "test_the_three_kinds_of_old_logprobs_agree_on_the_first_update",
        "test_what_a_run_suggests_at_its_end_works",
    ),
    "tests/training/test_saved_config.py": ("test_hook_saved_config_adds_fields_that_come_with_the_model",),
    "tests/training/test_checkpoint_writing.py": (
        "test_a_checkpoint_is_of_one_step_though_training_goes_on",
        "test_a_second_ctrl_c_waits_for_nothing",
        "test_kill_9_while_a_checkpoint_is_written_leaves_the_one_before",
    ),
    "tests/training/test_waits.py": ("test_micro_batches_do_not_wait_for_their_device",),
    "tests/cli/test_plugins_show.py": (
        "test_without_a_name_each_is_imported_and_those_that_cannot_be_used_are_shown",
        "test_one_import_has_a_deadline",
    ),
    "tests/training/test_lost_models.py": (
        "test_a_role_that_needs_the_model_itself_is_named",
        "test_all_that_a_run_needs_is_in_its_checkpoint",
    ),
    "tests/training/test_failures.py": ("test_a_closed_standard_output_does_not_end_the_run",),
    "tests/test_gpu_accept.py": ("test_the_script_of_a_call_joins_its_pieces_and_gives_the_call_the_time_that_is_left",),
}
"""File → its tests that take seconds, mostly whole runs. One of each kind stays at every change."""

CONTRACTS = re.compile(
    r"^Test\w+::test_(import_is_light|loss_|raising_a|entry_point_is_unique|instances_share|nothing_outlives|any_text|cancelling|odd_|ranks_)"
)
"""Checks of contract suites that take most of their time. Those of the packages ``CHECKED`` are made at every change."""
CHECKED = ("rlhf-plugin-rloo", "rlhf-plugin-format", "rlhf-plugin-multi-turn")


def is_slow(nodeid: str) -> bool:
    file, _, name = nodeid.partition("::")
    if name.partition("[")[0] in LONG.get(file, ()) or (file in SLOW and re.search(SLOW[file][0], name)):
        return True
    return file.startswith("plugins/") and file.split("/")[2] not in CHECKED and CONTRACTS.match(name) is not None


def slow_files(root: Path) -> list[str]:
    """Files that may have slow tests: those of the table, and those with the contract of a plugin."""
    suites = [path for path in root.glob("plugins/*/*/tests/test_*.py") if "_contract(" in path.read_text(encoding="utf-8")]
    return sorted({*SLOW, *LONG, *(path.relative_to(root).as_posix() for path in suites)})


def mark_slow(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
