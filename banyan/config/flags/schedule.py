"""Flags of the scheduler: how many requests run, in which order, in which chunks."""

from banyan.config.flags.flag import FLOAT, FOREVER_S, INT, SWITCH, Elsewhere, Flag
from banyan.config.schema import UNSAID

FLAGS = (
    Flag(
        "max-running-requests",
        "schedule.max_running",
        "requests that run at once; default: from the cache size",
        kind=INT,
        low=1,
        high=1 << 16,
        proof="tests/scheduler/test_scheduler.py::test_no_more_requests_run_at_once_than_told",
    ),
    Flag(
        "max-queued-requests",
        "schedule.max_queued",
        "requests that may wait before new ones get 503; default: no bound",
        kind=INT,
        low=1,
        proof="tests/scheduler/test_scheduler.py::test_no_more_requests_wait_than_told",
    ),
    Flag(
        "max-queued-tokens",
        "schedule.max_queued_tokens",
        "prompt tokens that may wait at a replica before new requests get 503; where none waits, "
        "any prompt is taken; default: no bound",
        kind=INT,
        low=1,
        documented=False,
        proof="tests/scheduler/test_scheduler.py::test_no_more_tokens_wait_than_told",
    ),
    Flag(
        "chunked-prefill-size",
        "schedule.chunk_tokens",
        "prompt tokens per step; -1 = whole prompts; default: what suits the device, 512 on a CPU",
        kind=INT,
        low=UNSAID,
        proof="tests/scheduler/test_scheduler.py::test_a_prompt_is_taken_in_chunks_of_the_budget",
    ),
    Flag(
        "max-prefill-tokens",
        "schedule.prefill_tokens",
        "prompt tokens per step over all requests; counts where --chunked-prefill-size is larger "
        "or -1, and then never less than one whole prompt",
        kind=INT,
        low=1,
        proof="tests/scheduler/test_scheduler.py"
        "::test_whole_prompts_share_a_step_up_to_the_budget_and_the_longest_fits",
    ),
    Flag(
        "prefill-max-requests",
        "schedule.prefill_requests",
        "requests whose prompts one step computes; default: no bound",
        kind=INT,
        low=1,
        proof="tests/scheduler/test_scheduler.py"
        "::test_a_step_takes_the_prompts_of_so_many_requests",
    ),
    Flag(
        "schedule-policy",
        "schedule.policy",
        "who goes first: fcfs = first come, lpm = longest cached prefix, dfs-weight = busiest "
        "branch of cached prefixes, lof = longest output, random",
        choices=("fcfs", "lpm", "dfs-weight", "lof", "random"),
        elsewhere=(
            Elsewhere(
                "priority",
                "priorities are a flag of their own, beside any policy",
                "use --enable-priority-scheduling",
            ),
            Elsewhere(
                "routing-key hrrn shortest-prefill-first",
                "there is no such order here",
                "use fcfs, or lpm where prompts share prefixes",
            ),
        ),
        proof="tests/scheduler/test_scheduler.py"
        "::test_longest_prefix_first_serves_cached_prompts_first",
    ),
    Flag(
        "enable-priority-scheduling",
        "schedule.priorities",
        "requests of higher priority go first, and may take the place of running ones",
        kind=SWITCH,
        proof="tests/scheduler/test_priorities.py"
        "::test_requests_are_equal_unless_priorities_are_honoured",
    ),
    Flag(
        "schedule-low-priority-values-first",
        "schedule.low_priority_first",
        "with priorities: lower numbers go first",
        kind=SWITCH,
        proof="tests/scheduler/test_priorities.py::test_lower_numbers_go_first_when_told_so",
    ),
    Flag(
        "priority-scheduling-preemption-threshold",
        "schedule.preemption_gap",
        "with priorities: how far above a running request a waiting one must be to take its place",
        kind=INT,
        low=1,
        proof="tests/scheduler/test_priorities.py"
        "::test_a_request_far_above_takes_the_place_of_the_lowest_that_runs",
    ),
    Flag(
        "disable-priority-preemption",
        "schedule.preemption_gap",
        "with priorities: nobody takes the place of a running request",
        kind=SWITCH,
        sets=0,
        documented=False,
        proof="tests/scheduler/test_priorities.py::test_a_gap_of_zero_never_preempts",
    ),
    Flag(
        "priority-scheduling-max-wait",
        "schedule.max_wait_s",
        "with priorities: seconds after which a request goes before all others, so that nobody "
        "waits for ever; 0 = priorities alone decide",
        kind=FLOAT,
        low=0.0,
        high=FOREVER_S,
        documented=False,
        proof="tests/scheduler/test_fair_queue.py"
        "::test_who_has_waited_longest_goes_before_those_of_higher_priority",
    ),
    Flag(
        "abort-on-priority-when-disabled",
        "schedule.refuse_priorities",
        "refuse requests that bring a priority while priorities are off",
        kind=SWITCH,
        proof="tests/scheduler/test_priorities.py"
        "::test_a_priority_is_refused_where_it_would_be_ignored",
    ),
    Flag(
        "schedule-conservativeness",
        "schedule.conservativeness",
        "above 1 admits fewer requests so that fewer are retracted, below 1 more",
        kind=FLOAT,
        low=0.0,
        high=100.0,
        proof="tests/scheduler/test_scheduler.py::test_the_conservative_admit_fewer_requests",
    ),
    Flag(
        "disable-overlap-schedule",
        "schedule.depth",
        "one step at a time: plan the next only when the last is complete",
        kind=SWITCH,
        sets=1,
        proof="tests/scheduler/test_scheduler.py"
        "::test_one_plan_is_in_flight_when_overlap_is_switched_off",
    ),
    Flag(
        "num-continuous-decode-steps",
        "schedule.multi_step",
        "decode steps that follow each other without planning while nothing waits; a stream then "
        "gets those of 8 ms together; default: what suits the device, 8 on a CPU where they go",
        kind=INT,
        low=1,
        high=64,
        proof="tests/system/test_bursts.py"
        "::test_answers_with_and_without_bursts_are_the_same_and_take_fewer_plans",
    ),
    Flag(
        "watchdog-timeout",
        "schedule.watchdog_s",
        "seconds after which a step that does not end counts as stuck",
        kind=FLOAT,
        low=0.1,
        high=FOREVER_S,
        proof="tests/system/test_processes.py"
        "::test_a_stopped_engine_is_unhealthy_after_the_deadline_and_is_replaced",
    ),
    Flag(
        "soft-watchdog-timeout",
        "schedule.soft_watchdog_s",
        "seconds after which the log is told where a step that does not end stands; 0 = never",
        kind=FLOAT,
        low=0.0,
        high=FOREVER_S,
        proof="tests/system/test_processes.py::test_a_slow_step_is_told_to_the_log_and_ends_nothing",
    ),
    Flag(
        "crash-on-nan",
        "schedule.crashes_on_nan",
        "end the engine where a model gives logits that are not finite, so that it is dumped and "
        "started again; without it the one request fails",
        kind=SWITCH,
        proof="tests/engine/test_loop.py"
        "::test_logits_that_are_not_finite_end_the_engine_when_that_is_asked_for",
    ),
    Flag(
        "check-ledger",
        "schedule.check_ledger",
        "check after every step that each page and slot has exactly one owner (slow; for tests)",
        kind=SWITCH,
        documented=False,
        proof="tests/engine/test_loop.py"
        "::test_the_ledger_is_checked_after_every_step_when_that_is_asked_for",
    ),
    Flag(
        "pp-max-micro-batch-size",
        "schedule.micro_batch",
        "requests of one stage's step, at most; as many times that as there are stages run at once "
        "(left out: all that run are dealt out evenly)",
        kind=INT,
        low=1,
        proof="tests/pipeline/test_micro_batches.py::test_a_step_has_no_more_requests_than_a_micro_batch",
    ),
    Flag(
        "pp-async-batch-depth",
        "schedule.async_depth",
        "with --pipeline-parallel-size: steps that are planned ahead of those that the stages run; "
        "0 plans each when a stage is free for it",
        kind=INT,
        low=0,
        high=64,
        proof="tests/pipeline/test_micro_batches.py::test_each_stage_has_a_step_and_some_wait_behind",
    ),
)
