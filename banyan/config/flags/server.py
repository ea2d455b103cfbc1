"""HTTP server flags: address, access, templates, parsers, limits, and structured output."""

from banyan.config.flags.flag import COMMAS, FLOAT, FOREVER_S, INT, JSON, SWITCH, Flag

FLAGS = (
    Flag(
        "host",
        "server.host",
        "address to listen on",
        proof="tests/server/test_serve.py::test_a_server_listens_where_configured_and_nowhere_else",
    ),
    Flag(
        "port",
        "server.port",
        "port to listen on; 0 = any free one",
        kind=INT,
        low=0,
        high=65535,
        proof="tests/cli/test_mistakes.py::test_a_port_that_is_taken_is_reported",
    ),
    Flag(
        "grpc-mode",
        "server.grpc_mode",
        "serve SGLang's gRPC scheduler protocol instead of HTTP, for gateways that tokenize",
        kind=SWITCH,
        aliases=("smg-grpc-mode",),
        proof="tests/server/test_grpc.py::test_tokens_are_generated_whole_and_streamed",
    ),
    Flag(
        "grpc-http-sidecar-port",
        "server.grpc_http_port",
        "with --grpc-mode: serve HTTP on this port too; 0 = any free one (default: no HTTP)",
        kind=INT,
        aliases=("smg-http-sidecar-port",),
        low=0,
        high=65535,
        documented=False,
        proof="tests/system/test_grpc.py::test_http_is_served_next_to_grpc",
    ),
    Flag(
        "api-key",
        "server.api_key",
        "API keys, separated by spaces; every request must send one as a bearer token",
        proof="tests/system/test_bad_input.py"
        "::test_a_request_without_the_key_is_401_and_probes_are_open",
    ),
    Flag(
        "api-key-file",
        "server.api_key_file",
        "YAML file of callers with their keys, weights and limits; reloaded when it changes "
        "(docs/operations.md)",
        documented=False,
        proof="tests/server/test_keys.py::test_a_key_of_the_file_lets_its_caller_in",
    ),
    Flag(
        "admin-api-key",
        "server.admin_api_key",
        "separate key for the administrative routes",
        documented=False,
        proof="tests/server/test_door.py::test_each_route_takes_only_its_own_key",
    ),
    Flag(
        "ssl-certfile",
        "server.ssl_cert",
        "certificate in PEM format; turns on HTTPS",
        documented=False,
        proof="tests/server/test_tls.py::test_a_server_with_a_certificate_speaks_https",
    ),
    Flag(
        "ssl-keyfile",
        "server.ssl_key",
        "private key of the certificate in PEM format; default: in the same file",
        documented=False,
        proof="tests/server/test_tls.py::test_a_server_with_a_certificate_speaks_https",
    ),
    Flag(
        "ssl-keyfile-password",
        "server.ssl_password",
        "password of the private key",
        documented=False,
        proof="tests/server/test_tls.py::test_a_key_may_have_a_password",
    ),
    Flag(
        "ssl-ca-certs",
        "server.ssl_ca",
        "CA certificates in PEM format; clients must present a certificate that one of them signed",
        documented=False,
        proof="tests/server/test_tls.py::test_clients_must_show_a_certificate_when_a_flag_asks_for_it",
    ),
    Flag(
        "enable-ssl-refresh",
        "server.ssl_refresh",
        "reload the certificate and key when their files change; open connections keep the old "
        "ones",
        kind=SWITCH,
        documented=False,
        proof="tests/server/test_tls.py::test_another_certificate_is_taken_without_a_restart",
    ),
    Flag(
        "allowed-hosts",
        "server.allowed_hosts",
        "additional values of the Host header to accept, e.g. behind a proxy; * = any",
        kind=COMMAS,
        documented=False,
        proof="tests/server/test_pages_of_others.py::test_a_server_answers_to_a_name_it_was_given",
    ),
    Flag(
        "allowed-origins",
        "server.allowed_origins",
        "origins of web pages that may call the server (CORS), e.g. http://localhost:3000; * = any",
        kind=COMMAS,
        documented=False,
        proof="tests/server/test_pages_of_others.py"
        "::test_a_page_of_an_allowed_origin_asks_and_reads_the_answer",
    ),
    Flag(
        "disable-console",
        "server.disable_console",
        "serve a page without scripts at / instead of the console",
        kind=SWITCH,
        documented=False,
        proof="tests/server/test_console.py::test_a_server_without_the_console_has_a_plain_page",
    ),
    Flag(
        "require-key",
        "server.require_key",
        "refuse to listen on a non-loopback address without --api-key",
        kind=SWITCH,
        documented=False,
        proof="tests/server/test_serve.py::test_an_open_server_warns_and_require_key_refuses",
    ),
    Flag(
        "fastapi-root-path",
        "server.root_path",
        "path prefix that a reverse proxy strips",
        proof="tests/system/test_flag_effects.py::test_the_prefix_of_a_proxy_is_taken_away",
    ),
    Flag(
        "chat-template",
        "server.chat_template",
        "chat template to use instead of the model's own: a name, a Jinja or JSON file, or Jinja "
        "text",
        proof="tests/system/test_flag_effects.py::test_a_chat_template_replaces_the_model_s",
    ),
    Flag(
        "completion-template",
        "server.completion_template",
        "template for prompt and suffix in /v1/completions (fill in the middle): a name or a JSON "
        "file",
        proof="tests/system/test_flag_effects.py::test_a_completion_template_fills_gaps",
    ),
    Flag(
        "tool-call-parser",
        "server.tool_parser",
        "format of the model's tool calls; auto = detect from the chat template, none = leave them "
        "in the text",
        proof="tests/server/test_chat_tools.py"
        "::test_a_parser_that_is_named_reads_calls_of_any_template",
    ),
    Flag(
        "reasoning-parser",
        "server.reasoning_parser",
        "format of the model's reasoning; auto = detect from the chat template, none = leave it in "
        "the text",
        proof="tests/system/test_flag_effects.py"
        "::test_a_reasoning_parser_takes_thoughts_out_of_the_answer",
    ),
    Flag(
        "tool-server",
        "server.tool_servers",
        "tool servers for /v1/responses, comma-separated: demo, or HOST:PORT or URL of MCP servers",
        kind=COMMAS,
        proof="tests/server/test_tool_servers.py"
        "::test_a_tool_of_a_real_server_is_called_and_its_answer_read",
    ),
    Flag(
        "stream-interval",
        "server.stream_interval",
        "tokens per streamed chunk; larger values cost less, smaller values stream more smoothly",
        kind=INT,
        low=1,
        proof="tests/system/test_flag_effects.py::test_a_stream_interval_makes_fewer_chunks",
    ),
    Flag(
        "incremental-streaming-output",
        "server.incremental_output",
        "/generate streams only the new text of each chunk instead of all text so far",
        kind=SWITCH,
        old=("stream-output",),
        documented=False,
        proof="tests/system/test_flag_effects.py::test_incremental_output_gives_each_token_once",
    ),
    Flag(
        "enable-streaming-session",
        "server.streaming_sessions",
        "allow streaming sessions (POST /open_session): each turn goes on from the latest one",
        kind=SWITCH,
        documented=False,
        proof="tests/server/test_sglang.py::test_a_streaming_session_needs_its_flag_and_only_appends",
    ),
    Flag(
        "tokenizer-mode",
        "server.tokenizer_mode",
        "slow = read tokenizer.model, tekken.json, or vocab.json with merges.txt even if there is "
        "a tokenizer.json, to compare both",
        choices=("auto", "slow"),
        proof="tests/tokenizer/test_vocabulary_files.py"
        "::test_the_older_file_is_read_where_that_is_asked",
    ),
    Flag(
        "skip-tokenizer-init",
        "server.skip_tokenizer",
        "load no tokenizer; requests and answers carry token ids",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py::test_without_a_tokenizer_ids_go_in_and_come_out",
    ),
    Flag(
        "skip-server-warmup",
        "server.skip_warmup",
        "skip the warm-up request at start",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py::test_a_skipped_warm_up_sends_no_request",
    ),
    Flag(
        "warmups",
        "server.warmups",
        "warm-ups to run before the server is ready, comma-separated: chunk = a prompt of one full "
        "chunk, constraint = a constrained answer, or the name of a plug-in",
        kind=COMMAS,
        proof="tests/server/test_warmup.py::test_what_is_named_runs_before_the_server_is_ready",
    ),
    Flag(
        "tokenizer-worker-num",
        "server.tokenizer_workers",
        "number of tokenizer processes; 1 = tokenize on threads of the server process",
        kind=INT,
        low=1,
        high=128,
        proof="tests/system/test_tokenizing.py::test_texts_are_tokenized_in_so_many_processes",
    ),
    Flag(
        "enable-dynamic-batch-tokenizer",
        "server.gathers_texts",
        "tokenize texts of requests that arrive at about the same time in one batch",
        kind=SWITCH,
        proof="tests/tokenizer/test_encode.py::test_texts_of_several_requests_go_in_one_call",
    ),
    Flag(
        "dynamic-batch-tokenizer-batch-size",
        "server.gathered_texts",
        "maximum texts of a tokenizer batch",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/tokenizer/test_encode.py::test_a_call_has_no_more_texts_than_asked_for",
    ),
    Flag(
        "dynamic-batch-tokenizer-batch-timeout",
        "server.gathering_s",
        "maximum seconds that a text waits for its tokenizer batch to fill",
        kind=FLOAT,
        low=0.0,
        high=FOREVER_S,
        proof="tests/tokenizer/test_encode.py::test_a_text_waits_for_others_as_long_as_asked_for",
    ),
    Flag(
        "enable-tokenizer-batch-encode",
        "server.batch_encode",
        "tokenize all texts of one request in one batch",
        kind=SWITCH,
        proof="tests/requests/test_generate_request.py::test_texts_of_a_request_are_tokenised_in_one_call",
    ),
    Flag(
        "allow-auto-truncate",
        "server.allow_auto_truncate",
        "truncate prompts that are too long instead of answering 400",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py"
        "::test_a_prompt_that_is_too_long_is_cut_when_that_is_allowed",
    ),
    Flag(
        "enable-cache-report",
        "server.cache_report",
        "report cached prompt tokens in the usage of each answer, and why no more were cached",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py::test_the_cache_report_is_given_when_asked_for",
    ),
    Flag(
        "sampling-defaults",
        "server.sampling_defaults",
        "source of default sampling parameters: model = generation_config.json, openai = the "
        "OpenAI API's defaults",
        choices=("model", "openai"),
        proof="tests/system/test_flag_effects.py"
        "::test_defaults_of_the_model_hold_unless_openai_s_are_wanted",
    ),
    Flag(
        "preferred-sampling-params",
        "server.preferred_sampling",
        'JSON: default sampling parameters, e.g. {"temperature": 0.7}',
        kind=JSON,
        proof="tests/system/test_flag_effects.py"
        "::test_preferred_parameters_hold_where_a_request_names_none",
    ),
    Flag(
        "random-seed",
        "server.random_seed",
        "base seed for requests without a seed; -1 = random",
        kind=INT,
        low=-1,
        high=2**63 - 1,
        proof="tests/test_llm.py::test_two_starts_with_one_random_seed_sample_the_same",
    ),
    Flag(
        "strict-requests",
        "server.strict_requests",
        "answer 400 to request fields without effect, instead of listing them in a response header",
        kind=SWITCH,
        documented=False,
        proof="tests/server/test_door.py::test_strict_servers_refuse_what_others_report",
    ),
    Flag(
        "enable-custom-logit-processor",
        "server.logit_processors",
        "allow custom_logit_processor in requests: the name of an installed one, never code",
        kind=SWITCH,
        proof="tests/system/test_logit_processors.py"
        "::test_a_processor_decides_with_the_parameters_of_its_request",
    ),
    Flag(
        "enable-return-hidden-states",
        "server.hidden_states",
        "allow return_hidden_states in requests",
        kind=SWITCH,
        proof="tests/system/test_hidden_states.py"
        "::test_states_of_prompt_and_output_equal_those_of_transformers",
    ),
    Flag(
        "max-body-bytes",
        "server.max_body_bytes",
        "maximum size of a request body in bytes",
        kind=INT,
        low=1024,
        documented=False,
        proof="tests/server/test_door.py::test_a_body_above_the_limit_is_413_however_it_comes",
    ),
    Flag(
        "file-storage-path",
        "server.storage_path",
        "folder for uploaded files and batches; default: ~/.local/state/banyan/PORT",
        documented=False,
        proof="tests/server/test_files.py::test_files_lie_in_the_folder_that_the_flag_names",
    ),
    Flag(
        "engine-restarts",
        "server.engine_restarts",
        "how many times in a row to restart an engine that died or is stuck; 0 = never",
        kind=INT,
        low=0,
        documented=False,
        proof="tests/server/test_supervisor.py"
        "::test_a_dead_engine_is_replaced_as_often_in_a_row_as_the_flag_says",
    ),
    Flag(
        "engine-restart-window",
        "server.engine_proof_s",
        "seconds of normal operation after which the count of engine restarts is reset",
        kind=FLOAT,
        low=0.0,
        high=FOREVER_S,
        documented=False,
        proof="tests/server/test_supervisor.py"
        "::test_an_engine_that_has_served_for_the_time_given_begins_the_count_anew",
    ),
    Flag(
        "drain-timeout",
        "server.drain_timeout_s",
        "seconds to finish open requests after SIGTERM; the process exits at most 30 s later",
        kind=FLOAT,
        low=0.0,
        high=FOREVER_S,
        documented=False,
        proof="tests/system/test_shutdown.py"
        "::test_a_stream_that_outlives_the_drain_timeout_gets_a_final_event",
    ),
    Flag(
        "multi-item-scoring-delimiter",
        "server.score_delimiter",
        "token id between query and items for /v1/score; -1 = none",
        kind=INT,
        low=-1,
        proof="tests/system/test_items.py::test_a_delimiter_stands_between_query_and_item",
    ),
)


GRAMMAR_FLAGS = (
    Flag(
        "grammar-backend",
        "grammar.backend",
        "library for structured output: xgrammar, llguidance, outlines, the name of a plug-in, or "
        "none; default: xgrammar if installed, else llguidance",
        proof="tests/system/test_flag_effects.py"
        "::test_without_a_grammar_backend_constraints_are_refused",
    ),
    Flag(
        "constrained-json-disable-any-whitespace",
        "grammar.compact",
        "constrained JSON has no white space between its tokens",
        kind=SWITCH,
        proof="tests/grammar/test_backends.py::test_compact_json_has_no_white_space",
    ),
    Flag(
        "constrained-json-whitespace-pattern",
        "grammar.whitespace",
        "regex of the white space that constrained JSON may contain; default: any, of limited "
        "length",
        proof="tests/grammar/test_backends.py::test_white_space_in_json_follows_the_pattern",
    ),
    Flag(
        "grammar-timeout",
        "grammar.timeout_s",
        "seconds to compile one grammar; longer compilations answer 400",
        kind=FLOAT,
        low=0.1,
        high=FOREVER_S,
        documented=False,
        proof="tests/grammar/test_compiler.py::test_what_takes_too_long_is_refused_alone",
    ),
)
