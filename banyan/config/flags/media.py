"""Flags of pictures in prompts: which models take them, limits, sources and decoding."""

from banyan.config.flags.flag import FLOAT, INT, JSON, SWITCH, WORDS, Flag

FLAGS = (
    Flag(
        "enable-multimodal",
        "media.is_enabled",
        "take pictures, or end the start if the model has no tower that runs here; a model with "
        "one takes them in any case",
        kind=SWITCH,
        proof="tests/media/test_flags.py::test_a_model_without_a_tower_cannot_be_multimodal",
    ),
    Flag(
        "language-model-only",
        "media.text_only",
        "serve only the text model of a multimodal checkpoint; its tower is not loaded",
        kind=SWITCH,
        documented=False,
        proof="tests/media/test_flags.py::test_the_text_model_is_served_alone",
    ),
    Flag(
        "mm-max-concurrent-calls",
        "media.max_concurrent",
        "maximum requests whose pictures are fetched and decoded at a time; others wait",
        kind=INT,
        low=1,
        high=4096,
        proof="tests/media/test_preparation.py::test_requests_wait_for_their_turn",
    ),
    Flag(
        "mm-per-request-timeout",
        "media.timeout_s",
        "seconds to fetch and decode the pictures of a request; 0 = ten minutes",
        kind=FLOAT,
        low=0,
        high=600,
        proof="tests/media/test_preparation.py::test_a_request_has_a_time_for_its_pictures",
    ),
    Flag(
        "mm-process-config",
        "media.process",
        'JSON {"image": {...}}: settings that override the model\'s image processor, e.g. '
        "max_pixels; max_image_pixels bounds a file (40 million)",
        kind=JSON,
        proof="tests/media/test_preparation.py::test_settings_of_the_operator_override_the_models",
    ),
    Flag(
        "limit-mm-data-per-request",
        "media.limits",
        'JSON {"image": N}: maximum pictures of a request (256)',
        kind=JSON,
        proof="tests/media/test_preparation.py::test_a_request_has_a_number_of_pictures",
    ),
    Flag(
        "mm-processor-worker-num",
        "media.workers",
        "processes that decode pictures; 0 = one per core but one, at most 4",
        kind=INT,
        low=0,
        high=64,
        documented=False,
        proof="tests/media/test_preparation.py::test_as_many_processes_decode_as_are_asked_for",
    ),
    Flag(
        "mm-preprocess-cache-size-mb",
        "media.cache_mb",
        "memory for decoded pictures that may come again, in MB; 0 = none",
        kind=INT,
        low=0,
        high=1 << 20,
        documented=False,
        proof="tests/media/test_preparation.py::test_a_picture_that_comes_again_is_not_decoded",
    ),
    Flag(
        "media-url-max-file-size-mb",
        "media.max_file_mb",
        "maximum size of the file of a picture in MB",
        kind=INT,
        low=1,
        high=4096,
        documented=False,
        proof="tests/media/test_sources.py::test_a_file_has_a_size",
    ),
    Flag(
        "allowed-media-domains",
        "media.domains",
        "the only hosts that pictures are fetched from, at any address (default: every host with "
        "a public address)",
        kind=WORDS,
        shown="HOST …",
        documented=False,
        proof="tests/media/test_sources.py::test_only_named_hosts_are_asked_if_any_is_named",
    ),
    Flag(
        "allowed-local-media-path",
        "media.folder",
        "folder whose files requests may name as file:// URLs (default: none)",
        shown="FOLDER",
        documented=False,
        proof="tests/media/test_sources.py::test_files_are_read_below_the_allowed_folder_only",
    ),
)
