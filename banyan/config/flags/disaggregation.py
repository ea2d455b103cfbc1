"""Prefill/decode disaggregation flags."""

from banyan.config.flags.flag import INT, Elsewhere, Flag

_PARITY = "tests/system/test_handoff.py::test_a_pair_answers_like_one_server"

FLAGS = (
    Flag(
        "disaggregation-mode",
        "handoff.mode",
        "role in prefill/decode disaggregation: prefill, decode, or null = both in one server",
        choices=("null", "prefill", "decode"),
        proof=_PARITY,
    ),
    Flag(
        "disaggregation-transfer-backend",
        "handoff.transfer",
        "how KV cache pages are transferred: tcp, mooncake, nixl or ascend (packages; ascend "
        "between NPUs), fake = nothing (load tests of one side), or the name of an installed "
        "backend",
        choices=("tcp", "mooncake", "nixl", "ascend", "fake"),
        plugins="banyan.transfers",
        elsewhere=(
            Elsewhere(
                "mori mooncake_tcp",
                "this transfer library is not supported",
                "use tcp, mooncake or nixl",
            ),
        ),
        proof="tests/system/test_handoff.py::test_a_fake_transfer_needs_no_other_server",
    ),
    Flag(
        "disaggregation-bootstrap-port",
        "handoff.port",
        "port where a prefill server hands over its KV cache; further replicas use the following "
        "ports",
        kind=INT,
        low=1,
        high=65535,
        proof=_PARITY,
    ),
)
