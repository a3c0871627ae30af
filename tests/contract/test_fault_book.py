"""The book of faults: every known fault of the public implementation (spec section 9) and the tests that keep it away, by name;
and every recorded case of Dataflow's as a test that reads it.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"
OURS = "unit/dataflow/test_dataflow_known_faults.py"
ROWS = "unit/dataflow/test_dataflow_known_faults_of_rows.py"
FLEET = "unit/dataflow/test_dataflow_fleet.py"
PROCESS = "flow/test_dataflow_process.py"
TRANSFER = "flow/test_weights_transfer.py"
RANKS = "flow/test_weights_ranks.py"
CHAINS = "flow/test_weights_chains.py"
SOAK = "flow/test_weights_soak.py"
REWARDS = "unit/rewards/test_rewards_api.py"
EXECUTOR = "unit/raas/test_raas_executor.py"
EMBEDDED = "flow/test_raas_embedded_engine.py"
GOLDEN = "unit/workflows/test_workflows_golden.py"

BOOK: dict[int, tuple[str, ...]] = {
    1: (
        f"{OURS}::test_fault_1_a_failed_load_is_no_success_and_is_tried_again",
        f"{TRANSFER}::test_case_g29_a_failed_version_is_never_counted_as_applied",
        "unit/raas/test_raas_sync.py::test_a_failure_leaves_the_old_version_and_the_next_notice_tries_again",
        "unit/raas/test_raas_canary.py::test_the_receipt_moves_when_the_canary_has_passed_and_is_taken_back_when_it_fails",
        f"{EMBEDDED}::test_a_load_that_the_engine_only_claims_takes_the_instance_out_until_one_passes",
    ),
    2: (
        f"{TRANSFER}::test_reads_are_never_torn_while_the_writer_goes_on",
        f"{TRANSFER}::test_a_damaged_byte_on_the_wire_is_noticed_and_never_served",
        f"{SOAK}::test_twenty_versions_with_three_receivers_and_random_kills_serve_what_was_published",
    ),
    3: (
        f"{OURS}::test_faults_3_and_4_a_trainer_re_attaches_at_any_version_and_the_instances_follow_it_down",
        "unit/dataflow/test_dataflow_barrier.py::test_ready_again_is_harmless_and_a_lower_version_bumps_the_timeline",
        f"{CHAINS}::test_faults_3_and_4_a_receiver_follows_a_new_sender_down_and_up_again",
    ),
    4: (
        f"{OURS}::test_faults_3_and_4_a_trainer_re_attaches_at_any_version_and_the_instances_follow_it_down",
        f"{PROCESS}::test_a_trainer_that_comes_back_lower_gets_a_new_timeline_and_its_rows_again",
        "unit/raas/test_raas_sync.py::test_a_new_timeline_rolls_back_with_a_full_pull_and_a_dead_one_is_ignored",
        f"{CHAINS}::test_faults_3_and_4_a_receiver_follows_a_new_sender_down_and_up_again",
    ),
    5: (
        f"{TRANSFER}::test_a_delta_needs_the_very_base_that_is_held",
        "unit/weights/test_weights_chain.py"
        "::test_fault_5_links_of_a_ticket_lead_from_the_base_that_is_held_to_the_version_that_was_asked_for",
    ),
    6: ("unit/weights/test_weights_transfers.py::test_a_transfer_holds_its_half_from_ticket_to_verdict",),
    7: (
        "unit/weights/test_weights_transfers.py::test_a_receiver_that_asks_again_replaces_its_transfer_and_there_is_a_limit",
        f"{CHAINS}::test_fault_7_a_pull_that_runs_out_of_time_is_a_failure_on_both_sides",
    ),
    8: (
        f"{RANKS}::test_fault_8_uneven_shards_give_the_words_of_the_whole_tensor",
        "unit/weights/test_weights_shards.py::test_fault_8_uneven_rows_are_cut_as_torch_cuts_them_and_none_is_left_out_or_written_twice",
    ),
    9: (
        f"{TRANSFER}::test_a_transfer_survives_the_death_of_its_sender",
        f"{TRANSFER}::test_a_sender_that_keeps_dying_stops_the_run",
    ),
    10: (
        "unit/raas/test_raas_engines_base.py::test_any_interruption_pattern_gives_the_same_tokens_as_none",
        f"{EMBEDDED}::test_updates_in_the_middle_of_sixteen_generations_drop_cut_and_mislabel_nothing",
    ),
    11: (
        f"{OURS}::test_fault_11_whoever_dies_the_others_pass_the_barrier_after_its_deadline",
        "unit/dataflow/test_dataflow_eval_run.py::test_a_dead_trainer_leaves_the_barrier_and_a_slow_one_is_named_at_the_deadline",
        "unit/dataflow/test_dataflow_barrier_machine.py::test_max_policy_lead_lets_through_exactly_what_a_brute_force_model_does",
    ),
    12: (
        f"{OURS}::test_fault_12_nothing_is_issued_before_every_trainer_is_ready_and_an_instance_is_current",
        "unit/dataflow/test_dataflow_waits.py::test_before_the_start_submission_waits_for_the_trainers_that_are_missing",
    ),
    13: (
        "flow/test_dataflow_evals.py::test_past_its_deadline_what_is_missing_is_said_and_training_goes_on",
        "flow/test_dataflow_evals.py::test_an_instance_that_is_killed_gives_its_tasks_back_and_training_goes_on",
    ),
    14: (
        f"{ROWS}::test_fault_14_version_0_counts_wherever_it_stands",
        "unit/dataflow/test_dataflow_buffer.py::test_staleness_is_inclusive_and_version_zero_counts",
    ),
    15: ("unit/dataflow/test_dataflow_flow.py::test_fault_15_what_a_filter_takes_out_is_in_the_one_mean_and_not_in_the_other",),
    16: (
        f"{OURS}::test_fault_16_a_reply_that_nobody_read_is_given_again_by_pull_and_by_batch",
        f"{PROCESS}::test_batches_flow_and_the_same_name_is_the_same_bytes",
        f"{PROCESS}::test_kill_of_dataflow_loses_nothing_and_serves_the_same_batch_again",
    ),
    17: (
        f"{ROWS}::test_fault_17_the_overlong_penalty_is_reached_by_every_length_over_its_tail",
        "unit/dataflow/test_dataflow_collate.py::test_shaping_moves_the_shaped_reward_and_leaves_the_raw_one",
    ),
    18: (
        f"{ROWS}::test_fault_18_truncated_is_what_the_engine_said_and_not_who_is_longest",
        "unit/trainer/test_trainer_batch.py::test_masks_come_from_lengths_not_from_token_values",
        f"{EXECUTOR}::test_faults_18_and_26_truncated_is_what_the_engine_says_and_not_what_text_or_padding_counts",
    ),
    19: (
        f"{ROWS}::test_fault_19_every_policys_queue_has_the_whole_sequence_in_its_order_and_its_own_mask",
        "unit/dataflow/test_dataflow_collate.py::test_other_policies_tokens_are_context_only",
        f"{GOLDEN}::test_fault_19_policies_in_one_context_keep_the_order_in_which_they_spoke",
    ),
    20: (
        "unit/raas/test_raas_slots.py::test_accepted_samples_never_exceed_the_slots",
        "unit/raas/test_raas_spawn.py::test_fault_20_any_tree_of_agents_ends_with_one_slot_and_one_place_in_the_engine",
    ),
    21: (
        f"{OURS}::test_fault_21_no_group_id_comes_twice_over_restarts_and_run_directories",
        "unit/dataflow/test_dataflow_admission.py::test_two_data_sets_with_the_same_row_number_stay_two_groups",
    ),
    22: (
        f"{ROWS}::test_fault_22_a_single_scored_row_is_never_normalised",
        f"{ROWS}::test_fault_22_a_group_of_one_is_dropped_at_the_door_and_refused_in_the_configuration",
        "unit/trainer/test_trainer_advantage.py::test_degenerate_groups_carry_no_signal",
    ),
    23: (
        f"{OURS}::test_fault_23_an_instance_whose_answer_is_an_error_is_not_in_the_pool",
        "unit/raas/test_raas_registration.py::test_an_error_reply_is_no_registration_and_is_tried_again",
    ),
    24: (
        f"{OURS}::test_fault_24_no_instance_gets_work_before_it_serves_the_newest_weights",
        "unit/dataflow/test_dataflow_pool.py::test_no_work_before_it_serves_the_newest_weights",
    ),
    25: (f"{FLEET}::test_one_silent_instance_delays_nobody_elses_check",),
    26: (f"{EXECUTOR}::test_faults_18_and_26_truncated_is_what_the_engine_says_and_not_what_text_or_padding_counts",),
    27: (
        f"{ROWS}::test_fault_27_a_sequence_with_one_version_too_few_dies_at_the_door",
        "unit/raas/test_raas_trajectory.py::test_version_spans_agree_with_a_loop_over_tokens",
        f"{GOLDEN}::test_fault_27_what_was_sent_and_sampled_is_what_is_trained_on_token_by_token",
    ),
    28: (
        f"{OURS}::test_fault_28_an_omitted_key_has_a_value_of_its_type",
        "unit/config/test_config_check.py::test_omitted_keys_take_their_declared_defaults_and_never_none",
    ),
    29: (
        "unit/trainer/test_trainer_losses.py::test_m2po_masks_exactly_what_the_definition_says_ties_included",
        "unit/trainer/test_trainer_local.py::test_micro_batches_and_row_order_do_not_change_the_gradient",
        "flow/test_trainer_ranks.py::test_sharded_ranks_take_the_local_backends_steps_and_export_its_words",
    ),
    30: (
        f"{FLEET}::test_a_failed_notice_is_seen_and_sent_again_and_holds_up_nobody",
        "flow/test_trainer_loop.py::test_a_dataflow_that_dies_and_returns_is_attached_to_again_without_losing_a_step",
    ),
    31: ("unit/weights/test_weights_staging.py::test_a_file_in_place_is_never_written_again",),
    32: (
        f"{OURS}::test_fault_32_a_pickled_body_is_refused_on_every_route_and_never_executed",
        "unit/lib/test_lib_wire.py::test_off_loopback_a_token_is_required",
        f"{TRANSFER}::test_strangers_get_nothing_on_http_or_on_a_stream_and_are_counted",
    ),
    33: (f"{TRANSFER}::test_six_streams_are_six_connections",),
    34: (
        f"{OURS}::test_fault_34_nothing_in_memory_grows_with_the_length_of_the_run",
        f"{TRANSFER}::test_nothing_is_left_after_a_normal_end_or_after_kill_9",
        f"{RANKS}::test_fault_34_ranks_that_were_killed_leave_no_shared_memory",
    ),
    35: (
        f"{REWARDS}::test_a_reward_that_spins_for_ever_is_killed_while_others_go_on",
        f"{REWARDS}::test_fault_35_what_a_hanging_reward_has_started_ends_with_it",
        "flow/test_raas_service.py::test_a_reward_that_mostly_fails_is_data_a_metric_and_in_the_end_a_closed_gate",
    ),
    36: (
        "contract/test_fault_book.py::test_fault_36_no_process_of_ours_ends_without_cleaning_up_or_kills_by_name",
        "flow/test_system_run.py::test_every_process_of_the_recipe_ends_with_0_and_the_books_add_up",
    ),
    37: (f"{OURS}::test_fault_37_a_batch_that_waits_holds_up_nobody",),
    38: (
        f"{FLEET}::test_a_failed_notice_is_seen_and_sent_again_and_holds_up_nobody",
        f"{TRANSFER}::test_a_dead_receiver_blocks_neither_another_one_nor_the_writer",
    ),
}
"""Fault → tests."""

OF_DATAFLOW = {1, 3, 4, 11, 12, 13, 14, 15, 16, 17, 18, 19, 21, 22, 23, 24, 25, 27, 28, 30, 32, 34, 36, 37, 38}
"""Faults whose tests stand in Dataflow's part of the tree, and name them."""
OF_WEIGHTS = {1, 2, 3, 4, 5, 6, 7, 9, 31, 32, 33, 34, 38}
"""Faults whose tests stand in the weights' part of the tree, and name them."""

NAMED = re.compile(r"dataflow|staleness|buffer|resume|recover|(?<!_)eval|serving|checkpoint")
"""Components of cases that are Dataflow's business (a trainer's checkpoint is the other half of a resume)."""


@functools.cache
def functions_in(path: str) -> dict[str, str]:
    """Test function → its name and docstring."""
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")]
    return {node.name: f"{node.name.replace('_', ' ')} {ast.get_docstring(node) or ''}" for node in found}


@pytest.mark.parametrize("fault", sorted(BOOK))
def test_every_fault_of_the_book_is_kept_away_by_tests_that_exist(fault: int) -> None:
    for test in BOOK[fault]:
        path, _, name = test.partition("::")
        assert name in functions_in(path), f"fault {fault}: {test} does not exist"


@pytest.mark.parametrize("fault", sorted(OF_DATAFLOW))
def test_every_fault_of_dataflow_is_named_in_a_test(fault: int) -> None:
    told = [functions_in(path)[name] for path, _, name in (test.partition("::") for test in BOOK[fault])]
    assert any(fault in faults_in(text) for text in told), f"fault {fault} is named in none of {BOOK[fault]}"


@pytest.mark.parametrize("fault", sorted(OF_WEIGHTS))
def test_every_fault_of_the_weights_is_named_in_a_test_of_theirs(fault: int) -> None:
    told = [functions_in(path)[name] for path, _, name in (test.partition("::") for test in BOOK[fault]) if "weights" in path]
    assert any(fault in faults_in(text) for text in told), f"fault {fault} is named in none of {BOOK[fault]}"


def faults_in(text: str) -> set[int]:
    """Numbers that follow `fault` or `faults`: `faults 3 and 4`, `Fault 25:`."""
    lists = re.findall(r"(?i)faults? (\d+(?:(?:,| and|, and) \d+)*)", text)
    return {int(number) for found in lists for number in re.findall(r"\d+", found)}


def test_the_book_knows_every_fault_of_the_list() -> None:
    assert set(BOOK) == set(range(1, 39))
    assert set(BOOK) >= OF_DATAFLOW


def test_every_case_that_names_dataflow_is_a_test() -> None:
    with (TESTS / "data" / "cases.jsonl").open(encoding="utf-8", newline="\n") as file:
        cases = {case["id"]: case["component"] for case in map(json.loads, file)}
    mine = {name for name, component in cases.items() if NAMED.search(component.lower())}
    assert {"G08", "G10", "G21", "G24", "G25", "G32", "G39"} <= mine
    text = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    read = set(re.findall(r"""case\(["'](G\d+)["']\)""", text))
    assert mine <= read, f"no test reads {sorted(mine - read)}"


def test_fault_36_no_process_of_ours_ends_without_cleaning_up_or_kills_by_name() -> None:
    """`os._exit` as the normal end, and processes that are killed by their name."""
    for path in (SOURCE / "astraflow").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                assert not (node.attr == "_exit" and isinstance(node.value, ast.Name) and node.value.id == "os"), path
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 40:
                assert not re.search(r"\b(pkill|killall)\b", node.value), path
