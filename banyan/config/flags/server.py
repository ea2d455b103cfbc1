"""Flags of the HTTP server: where it listens, who may ask, how answers look."""

from banyan.config.flags.flag import COMMAS, FLOAT, INT, JSON, SWITCH, Flag

FLAGS = (
    Flag(
        "host",
        "server.host",
        "address to listen on",
        proof="tests/server/test_serve.py::test_a_server_listens_where_it_is_told_and_nowhere_else",
    ),
    Flag(
        "port",
        "server.port",
        "port to listen on; 0 = any free one",
        kind=INT,
        low=0,
        high=65535,
        proof="tests/cli/test_mistakes.py::test_a_port_that_is_taken_is_told",
    ),
    Flag(
        "api-key",
        "server.api_key",
        "keys, separated by spaces; every request must carry one as a bearer token",
        proof="tests/system/test_bad_input.py"
        "::test_a_request_without_the_key_is_401_and_probes_are_open",
    ),
    Flag(
        "admin-api-key",
        "server.admin_api_key",
        "key that the administrative routes want instead",
        documented=False,
        proof="tests/server/test_door.py::test_each_route_takes_only_its_own_key",
    ),
    Flag(
        "allowed-hosts",
        "server.allowed_hosts",
        "other names that clients may call the server by, as behind a proxy that keeps the header "
        "Host; * = any",
        kind=COMMAS,
        documented=False,
        proof="tests/server/test_pages_of_others.py::test_a_server_answers_to_a_name_it_was_given",
    ),
    Flag(
        "allowed-origins",
        "server.allowed_origins",
        "web pages that may call the server, as http://localhost:3000; * = any",
        kind=COMMAS,
        documented=False,
        proof="tests/server/test_pages_of_others.py"
        "::test_a_page_of_an_allowed_origin_asks_and_reads_the_answer",
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
        "path prefix that a reverse proxy takes away",
        proof="tests/system/test_flag_effects.py::test_the_prefix_of_a_proxy_is_taken_away",
    ),
    Flag(
        "chat-template",
        "server.chat_template",
        "template instead of the model's own: a name, a Jinja or JSON file, or Jinja text",
        proof="tests/system/test_flag_effects.py::test_a_chat_template_replaces_the_model_s",
    ),
    Flag(
        "completion-template",
        "server.completion_template",
        "how /v1/completions puts prompt and suffix together: a name, or a JSON file",
        proof="tests/system/test_flag_effects.py::test_a_completion_template_fills_gaps",
    ),
    Flag(
        "tool-call-parser",
        "server.tool_parser",
        "format of the model's tool calls; auto = as its chat template writes them, none = text",
        proof="tests/server/test_chat_tools.py"
        "::test_a_parser_that_is_named_reads_calls_of_any_template",
    ),
    Flag(
        "reasoning-parser",
        "server.reasoning_parser",
        "format of the model's thinking; auto = as its chat template marks it, none = text",
        proof="tests/system/test_flag_effects.py"
        "::test_a_reasoning_parser_takes_thoughts_out_of_the_answer",
    ),
    Flag(
        "tool-server",
        "server.tool_servers",
        "whose tools /v1/responses may call: demo, HOST:PORT or URL of MCP servers, with commas",
        kind=COMMAS,
        proof="tests/server/test_tool_servers.py"
        "::test_a_tool_of_a_real_server_is_called_and_its_answer_read",
    ),
    Flag(
        "stream-interval",
        "server.stream_interval",
        "tokens per streamed chunk; higher saves work, lower looks smoother",
        kind=INT,
        low=1,
        proof="tests/system/test_flag_effects.py::test_a_stream_interval_makes_fewer_chunks",
    ),
    Flag(
        "incremental-streaming-output",
        "server.incremental_output",
        "/generate streams only the new text of each chunk",
        kind=SWITCH,
        old=("stream-output",),
        documented=False,
        proof="tests/system/test_flag_effects.py::test_incremental_output_gives_each_token_once",
    ),
    Flag(
        "skip-tokenizer-init",
        "server.skip_tokenizer",
        "token ids in, token ids out; no tokenizer is loaded",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py::test_without_a_tokenizer_ids_go_in_and_come_out",
    ),
    Flag(
        "skip-server-warmup",
        "server.skip_warmup",
        "report ready without a trial request",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py::test_a_skipped_warm_up_sends_no_request",
    ),
    Flag(
        "warmups",
        "server.warmups",
        "what runs before the server is ready, with commas: chunk = a prompt as long as a step, "
        "constraint = an answer that is constrained, or a plug-in's name",
        kind=COMMAS,
        proof="tests/server/test_warmup.py::test_what_is_named_runs_before_the_server_is_ready",
    ),
    Flag(
        "tokenizer-worker-num",
        "server.tokenizer_threads",
        "threads that read and tokenize long requests; default: a few more than there are cores",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/frontend/test_threads.py::test_so_many_threads_work_on_long_texts_as_asked_for",
    ),
    Flag(
        "enable-tokenizer-batch-encode",
        "server.batch_encode",
        "tokenize the texts of one request in one call, several at a time",
        kind=SWITCH,
        proof="tests/frontend/test_native.py::test_texts_of_a_request_are_tokenised_in_one_call",
    ),
    Flag(
        "allow-auto-truncate",
        "server.allow_auto_truncate",
        "cut prompts that are too long instead of answering 400",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py"
        "::test_a_prompt_that_is_too_long_is_cut_when_that_is_allowed",
    ),
    Flag(
        "enable-cache-report",
        "server.cache_report",
        "count the cached prompt tokens in the usage of OpenAI answers",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py::test_the_cache_report_is_given_when_asked_for",
    ),
    Flag(
        "sampling-defaults",
        "server.sampling_defaults",
        "defaults of requests: model = the model's generation_config, openai = the API's",
        choices=("model", "openai"),
        proof="tests/system/test_flag_effects.py"
        "::test_defaults_of_the_model_hold_unless_openai_s_are_wanted",
    ),
    Flag(
        "preferred-sampling-params",
        "server.preferred_sampling",
        'sampling parameters of requests that name none, e.g. {"temperature": 0.7}',
        kind=JSON,
        proof="tests/system/test_flag_effects.py"
        "::test_preferred_parameters_hold_where_a_request_names_none",
    ),
    Flag(
        "random-seed",
        "server.random_seed",
        "where the seeds of requests that bring none start; -1 = anywhere",
        kind=INT,
        low=-1,
        high=2**63 - 1,
        proof="tests/test_llm.py::test_two_starts_with_one_random_seed_sample_the_same",
    ),
    Flag(
        "strict-requests",
        "server.strict_requests",
        "answer 400 to request fields that have no effect, instead of naming them in a header",
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
        "largest request body",
        kind=INT,
        low=1024,
        documented=False,
        proof="tests/server/test_door.py::test_a_body_above_the_limit_is_413_however_it_comes",
    ),
    Flag(
        "file-storage-path",
        "server.storage_path",
        "folder of uploaded files and batches; without it ~/.local/state/banyan/PORT",
        documented=False,
        proof="tests/server/test_files.py::test_files_lie_in_the_folder_that_the_flag_names",
    ),
    Flag(
        "drain-timeout",
        "server.drain_timeout_s",
        "seconds that open requests get after SIGTERM; the process ends 30 s later at the latest",
        kind=FLOAT,
        low=0.0,
        documented=False,
        proof="tests/system/test_processes.py"
        "::test_a_stream_that_outlives_the_drain_timeout_gets_a_final_event",
    ),
    Flag(
        "multi-item-scoring-delimiter",
        "server.score_delimiter",
        "token id that /v1/score puts between query and item; -1 = none",
        kind=INT,
        low=-1,
        proof="tests/system/test_items.py::test_a_delimiter_stands_between_query_and_item",
    ),
)
