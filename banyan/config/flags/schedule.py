"""Scheduler flags: number of requests, order and chunks."""

from banyan.config.flags.flag import FLOAT, FOREVER_S, INT, SWITCH, Elsewhere, Flag
from banyan.config.schema import UNSAID

FLAGS = (
    Flag(
        "max-running-requests",
        "schedule.max_running",
        "maximum number of running requests; default: from the KV cache size",
        kind=INT,
        low=1,
        high=1 << 16,
        proof="tests/scheduler/test_scheduler.py::test_no_more_requests_run_at_once_than_allowed",
    ),
    Flag(
        "max-queued-requests",
        "schedule.max_queued",
        "maximum number of waiting requests; more get 503; default: no limit",
        kind=INT,
        low=1,
        proof="tests/scheduler/test_scheduler.py::test_no_more_requests_wait_than_allowed",
    ),
    Flag(
        "max-queued-tokens",
        "schedule.max_queued_tokens",
        "maximum prompt tokens of waiting requests per replica; more get 503, but an empty queue "
        "accepts any prompt; default: no limit",
        kind=INT,
        low=1,
        documented=False,
        proof="tests/scheduler/test_scheduler.py::test_no_more_tokens_wait_than_allowed",
    ),
    Flag(
        "chunked-prefill-size",
        "schedule.chunk_tokens",
        "maximum prompt tokens per step (chunked prefill); -1 = whole prompts; default: the "
        "device's own, 512 on a CPU",
        kind=INT,
        low=UNSAID,
        proof="tests/scheduler/test_scheduler.py::test_a_prompt_is_taken_in_chunks_of_the_budget",
    ),
    Flag(
        "enable-dynamic-chunking",
        "schedule.shrinks_chunks",
        "with --pipeline-parallel-size: later chunks of a prompt are smaller, so that all take the "
        "same time",
        kind=SWITCH,
        proof="tests/scheduler/test_scheduler.py::test_chunks_shrink_on_demand_with_stages_alone",
    ),
    Flag(
        "max-prefill-tokens",
        "schedule.prefill_tokens",
        "maximum prompt tokens per step over all requests when --chunked-prefill-size is larger or "
        "-1; one whole prompt always fits",
        kind=INT,
        low=1,
        proof="tests/scheduler/test_scheduler.py"
        "::test_whole_prompts_share_a_step_up_to_the_budget_and_the_longest_fits",
    ),
    Flag(
        "prefill-max-requests",
        "schedule.prefill_requests",
        "maximum number of requests that one step prefills; default: no limit",
        kind=INT,
        low=1,
        proof="tests/scheduler/test_scheduler.py"
        "::test_a_step_takes_the_prompts_of_so_many_requests",
    ),
    Flag(
        "schedule-policy",
        "schedule.policy",
        "order of waiting requests: fcfs = arrival, lpm = longest cached prefix, dfs-weight = most "
        "requests under the same cached prefix, lof = longest output, random",
        choices=("fcfs", "lpm", "dfs-weight", "lof", "random"),
        elsewhere=(
            Elsewhere(
                "priority",
                "priorities have their own flag, which works with any policy",
                "use --enable-priority-scheduling",
            ),
            Elsewhere(
                "routing-key hrrn shortest-prefill-first",
                "this policy is not supported",
                "use fcfs, or lpm if prompts share prefixes",
            ),
        ),
        proof="tests/scheduler/test_scheduler.py"
        "::test_longest_prefix_first_serves_cached_prompts_first",
    ),
    Flag(
        "enable-priority-scheduling",
        "schedule.priorities",
        "schedule requests by priority; a higher priority may preempt running requests",
        kind=SWITCH,
        proof="tests/scheduler/test_priorities.py"
        "::test_requests_are_equal_unless_priorities_are_honoured",
    ),
    Flag(
        "schedule-low-priority-values-first",
        "schedule.low_priority_first",
        "treat lower priority numbers as more urgent",
        kind=SWITCH,
        proof="tests/scheduler/test_priorities.py::test_lower_numbers_go_first_when_configured",
    ),
    Flag(
        "priority-scheduling-preemption-threshold",
        "schedule.preemption_gap",
        "minimum priority difference for a waiting request to preempt a running one",
        kind=INT,
        low=1,
        proof="tests/scheduler/test_priorities.py"
        "::test_a_request_far_above_takes_the_place_of_the_lowest_that_runs",
    ),
    Flag(
        "disable-priority-preemption",
        "schedule.preemption_gap",
        "schedule by priority but never preempt running requests",
        kind=SWITCH,
        sets=0,
        documented=False,
        proof="tests/scheduler/test_priorities.py::test_a_gap_of_zero_never_preempts",
    ),
    Flag(
        "priority-scheduling-max-wait",
        "schedule.max_wait_s",
        "seconds of waiting after which a request precedes all priorities, against starvation; 0 = "
        "never",
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
        "reject requests that set a priority while priority scheduling is off",
        kind=SWITCH,
        proof="tests/scheduler/test_priorities.py"
        "::test_a_priority_is_refused_where_it_would_be_ignored",
    ),
    Flag(
        "schedule-conservativeness",
        "schedule.conservativeness",
        "above 1 admits fewer requests, so fewer are retracted; below 1 admits more",
        kind=FLOAT,
        low=0.0,
        high=100.0,
        proof="tests/scheduler/test_scheduler.py::test_the_conservative_admit_fewer_requests",
    ),
    Flag(
        "disable-overlap-schedule",
        "schedule.depth",
        "plan the next step only after the last one is complete",
        kind=SWITCH,
        sets=1,
        proof="tests/scheduler/test_scheduler.py"
        "::test_one_plan_is_in_flight_when_overlap_is_switched_off",
    ),
    Flag(
        "num-continuous-decode-steps",
        "schedule.multi_step",
        "decode steps per scheduler call while the queue is empty; streamed tokens are then sent "
        "in 8 ms batches; default: the device's own, 8 on a CPU when supported, else 1",
        kind=INT,
        low=1,
        high=64,
        proof="tests/system/test_bursts.py"
        "::test_answers_with_and_without_bursts_are_the_same_and_take_fewer_plans",
    ),
    Flag(
        "watchdog-timeout",
        "schedule.watchdog_s",
        "seconds after which an unfinished step counts as stuck and the engine is restarted",
        kind=FLOAT,
        low=0.1,
        high=FOREVER_S,
        proof="tests/system/test_processes.py"
        "::test_a_stopped_engine_is_unhealthy_after_the_deadline_and_is_replaced",
    ),
    Flag(
        "scheduler-recv-interval",
        "schedule.receive_interval",
        "steps after which waiting requests are read, while steps run; more cost latency, and save "
        "reading",
        kind=INT,
        low=1,
        high=1 << 20,
        proof="tests/engine/test_loop.py::test_messages_are_read_every_so_many_steps",
    ),
    Flag(
        "soft-watchdog-timeout",
        "schedule.soft_watchdog_s",
        "seconds after which the stacks of an unfinished step are logged; 0 = never",
        kind=FLOAT,
        low=0.0,
        high=FOREVER_S,
        proof="tests/system/test_processes.py::test_a_slow_step_is_reported_to_the_log_and_ends_nothing",
    ),
    Flag(
        "crash-on-nan",
        "schedule.crashes_on_nan",
        "stop the engine (crash dump and restart) on NaN or infinite logits; without it only the "
        "request fails",
        kind=SWITCH,
        proof="tests/engine/test_loop.py"
        "::test_logits_that_are_not_finite_end_the_engine_when_that_is_asked_for",
    ),
    Flag(
        "check-ledger",
        "schedule.check_ledger",
        "check after every step that each page and slot has exactly one owner (slow, for tests)",
        kind=SWITCH,
        documented=False,
        proof="tests/engine/test_loop.py"
        "::test_the_ledger_is_checked_after_every_step_when_that_is_asked_for",
    ),
    Flag(
        "pp-max-micro-batch-size",
        "schedule.micro_batch",
        "maximum requests per micro-batch; default: running requests divided evenly over the "
        "stages",
        kind=INT,
        low=1,
        proof="tests/pipeline/test_micro_batches.py::test_a_step_has_no_more_requests_than_a_micro_batch",
    ),
    Flag(
        "pp-async-batch-depth",
        "schedule.async_depth",
        "steps to plan in addition to one per pipeline stage; 0 = plan a step when a stage is free",
        kind=INT,
        low=0,
        high=64,
        proof="tests/pipeline/test_micro_batches.py::test_each_stage_has_a_step_and_some_wait_behind",
    ),
)
