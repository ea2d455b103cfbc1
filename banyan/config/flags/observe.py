"""Flags of what people see: logs and the journal."""

from banyan.base.named_code import PATTERN
from banyan.config.flags.flag import FLOAT, FLOATS, FOREVER_S, INT, JSON, SWITCH, WORDS, Flag

FLAGS = (
    Flag(
        "log-level",
        "observe.log_level",
        "least severe log line that is shown",
        choices=("debug", "info", "warning", "error"),
        translate=(("warn", "warning"), ("critical", "error")),
        proof="tests/system/test_flag_effects.py::test_a_log_level_hides_what_is_less_severe",
    ),
    Flag(
        "log-requests",
        "observe.log_requests",
        "one line when a request ends or is refused; --log-requests-level says what it tells",
        kind=SWITCH,
        proof="tests/frontend/test_request_log.py::test_nothing_is_logged_unless_asked_for",
    ),
    Flag(
        "log-requests-format",
        "observe.log_format",
        "json = the lines of --log-requests are JSON objects",
        choices=("text", "json"),
        proof="tests/frontend/test_request_log.py::test_a_line_is_a_json_object_when_that_is_asked_for",
    ),
    Flag(
        "journal",
        "observe.journal",
        "file that records every message, plan and result, for `banyan replay`",
        documented=False,
        proof="tests/system/test_journal.py"
        "::test_replaying_the_journal_of_20_mixed_requests_finds_no_difference",
    ),
    Flag(
        "journal-bytes",
        "observe.journal_bytes",
        "size at which the journal starts over",
        kind=INT,
        low=1 << 20,
        documented=False,
        proof="tests/engine/test_journal.py::test_the_journal_is_as_large_as_the_flag_says",
    ),
    Flag(
        "flight-recorder-bytes",
        "observe.recorder_bytes",
        "memory for the latest messages, plans and results of each engine, for `banyan replay` and "
        "`banyan explain`, also when it is lost; 0 = none",
        kind=INT,
        low=0,
        documented=False,
        proof="tests/system/test_recorder.py::test_nothing_is_recorded_where_that_is_asked_for",
    ),
    Flag(
        "log-requests-level",
        "observe.log_detail",
        "what a line of --log-requests tells: 0 = lengths and times, 1 = sampling parameters too, "
        "2 = the beginning of prompt and answer too, 3 = all of both",
        kind=INT,
        low=0,
        high=3,
        proof="tests/frontend/test_request_log.py::test_a_level_decides_what_a_line_tells",
    ),
    Flag(
        "log-level-http",
        "observe.http_level",
        "info or debug = one line for each HTTP request",
        choices=("debug", "info", "warning", "error"),
        translate=(("warn", "warning"), ("critical", "error")),
        proof="tests/server/test_access_log.py::test_each_request_leaves_a_line_when_asked_for",
    ),
    Flag(
        "decode-log-interval",
        "observe.step_log_interval",
        "steps that generate between two lines about the load: requests, tokens/s, pages, hits; "
        "0 = none",
        kind=INT,
        low=0,
        proof="tests/engine/test_step_log.py::test_so_many_steps_pass_between_two_lines",
    ),
    Flag(
        "enable-request-time-stats-logging",
        "observe.times",
        "one line for each request that ends: its seconds in the queue, and before and after its "
        "first token",
        kind=SWITCH,
        proof="tests/frontend/test_records.py::test_a_line_tells_where_the_time_of_a_request_went",
    ),
    Flag(
        "export-metrics-to-file",
        "observe.writes_records",
        "write a record of each request into files, one for each hour",
        kind=SWITCH,
        proof="tests/frontend/test_records.py::test_each_request_leaves_a_record_in_the_folder",
    ),
    Flag(
        "export-metrics-to-file-dir",
        "observe.records",
        "folder of the files that --export-metrics-to-file writes",
        proof="tests/frontend/test_records.py::test_each_request_leaves_a_record_in_the_folder",
    ),
    Flag(
        "kv-events-config",
        "observe.kv_events",
        "JSON: tell over ZeroMQ which prefixes the cache holds, for routers that go by it "
        "(docs/cache.md)",
        kind=JSON,
        proof="tests/system/test_kv_events.py::test_a_reader_knows_what_the_cache_holds",
    ),
    Flag(
        "crash-dump-folder",
        "observe.dumps",
        "folder that gets the requests of the last five minutes, prompts included, when an engine "
        "is lost",
        proof="tests/system/test_self_healing.py"
        "::test_the_requests_before_a_loss_are_dumped_when_that_is_asked_for",
    ),
    Flag(
        "custom-sigquit-handler",
        "observe.sigquit_handler",
        "module:function of your own that the server calls on SIGQUIT, and before it ends because "
        "its engines stay lost",
        pattern=PATTERN,
        shown="MODULE:FUNCTION",
        proof="tests/system/test_signals.py::test_sigquit_calls_the_function_that_was_named",
    ),
    Flag(
        "enable-metrics",
        "observe.metrics",
        "count requests, tokens and latencies, and tell them to Prometheus at /metrics",
        kind=SWITCH,
        proof="tests/server/test_metrics.py::test_metrics_are_there_when_they_are_asked_for",
    ),
    Flag(
        "tokenizer-metrics-allowed-custom-labels",
        "observe.label_names",
        "labels that requests may bring for what is counted of them, in a header; at most 100 sets "
        "of values are told apart",
        kind=WORDS,
        proof="tests/server/test_metric_labels.py::test_a_request_counts_under_the_labels_it_brings",
    ),
    Flag(
        "tokenizer-metrics-custom-labels-header",
        "observe.labels_header",
        "header with those labels, a JSON object of texts",
        proof="tests/server/test_metric_labels.py::test_the_header_is_the_one_of_the_flag",
    ),
    Flag(
        "collect-tokens-histogram",
        "observe.length_histograms",
        "count prompts and answers by their length too",
        kind=SWITCH,
        proof="tests/server/test_metrics.py::test_lengths_are_counted_when_that_is_asked_for",
    ),
    Flag(
        "bucket-time-to-first-token",
        "observe.ttft_buckets",
        "upper bounds of the time to the first token, in seconds",
        kind=FLOATS,
        low=0.0,
        proof="tests/server/test_metrics.py::test_bounds_are_those_of_the_flags",
    ),
    Flag(
        "bucket-inter-token-latency",
        "observe.itl_buckets",
        "upper bounds of the time between tokens, in seconds",
        kind=FLOATS,
        low=0.0,
        proof="tests/server/test_metrics.py::test_bounds_are_those_of_the_flags",
    ),
    Flag(
        "bucket-e2e-request-latency",
        "observe.e2e_buckets",
        "upper bounds of the time of a whole request, in seconds",
        kind=FLOATS,
        low=0.0,
        proof="tests/server/test_metrics.py::test_bounds_are_those_of_the_flags",
    ),
    Flag(
        "prompt-tokens-buckets",
        "observe.prompt_buckets",
        "upper bounds of the length of prompts: default, tse MIDDLE BASE COUNT, or custom N …",
        kind=WORDS,
        pattern=r"default|custom|tse|[0-9.]+",
        shown="RULE …",
        proof="tests/server/test_metrics.py::test_lengths_have_the_bounds_of_their_rule",
    ),
    Flag(
        "generation-tokens-buckets",
        "observe.output_buckets",
        "upper bounds of the length of answers: default, tse MIDDLE BASE COUNT, or custom N …",
        kind=WORDS,
        pattern=r"default|custom|tse|[0-9.]+",
        shown="RULE …",
        proof="tests/server/test_metrics.py::test_lengths_have_the_bounds_of_their_rule",
    ),
    Flag(
        "enable-trace",
        "observe.traces",
        "send a span for each request and each of its phases, as OTLP",
        kind=SWITCH,
        proof="tests/system/test_traces.py::test_a_request_is_a_trace_with_its_phases",
    ),
    Flag(
        "oltp-traces-endpoint",
        "observe.traces_endpoint",
        "where spans are sent to: http://HOST:PORT of a collector, or HOST:PORT for gRPC",
        aliases=("otlp-traces-endpoint",),
        proof="tests/system/test_traces.py::test_a_request_is_a_trace_with_its_phases",
    ),
    Flag(
        "otlp-service-name",
        "observe.traces_service",
        "how this server is called in traces",
        documented=False,
        proof="tests/system/test_traces.py::test_a_request_is_a_trace_with_its_phases",
    ),
    Flag(
        "gc-warning-threshold-secs",
        "observe.slow_gc_s",
        "report collections of garbage that take longer; 0 = none",
        kind=FLOAT,
        low=0.0,
        high=FOREVER_S,
        proof="tests/engine/test_slow_gc.py::test_a_collection_that_takes_long_is_reported",
    ),
)
