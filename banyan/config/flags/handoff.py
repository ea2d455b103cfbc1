"""Flags of servers that share the work: one computes prompts, another one continues them."""

from banyan.config.flags.flag import INT, Elsewhere, Flag

_PARITY = "tests/system/test_handoff.py::test_a_pair_answers_like_one_server"

FLAGS = (
    Flag(
        "disaggregation-mode",
        "handoff.mode",
        "prefill = compute prompts and hand them over; decode = continue prompts that another "
        "server has computed; null = do both",
        choices=("null", "prefill", "decode"),
        proof=_PARITY,
    ),
    Flag(
        "disaggregation-transfer-backend",
        "handoff.transfer",
        "what carries pages from one to the other: tcp; mooncake, nixl or, between Ascend NPUs, "
        "ascend = a transfer engine, which is a package; fake = nothing, for load tests of one "
        "side; or the name of an installed one",
        choices=("tcp", "mooncake", "nixl", "ascend", "fake"),
        plugins="banyan.transfers",
        elsewhere=(
            Elsewhere(
                "mori mooncake_tcp",
                "pages travel over plain connections, from memory of the host",
                "use tcp, or mooncake or nixl",
            ),
        ),
        proof="tests/system/test_handoff.py::test_a_fake_transfer_needs_no_other_server",
    ),
    Flag(
        "disaggregation-bootstrap-port",
        "handoff.port",
        "where a server that computes prompts hands them over; replicas behind the first one take "
        "the ports that follow",
        kind=INT,
        low=1,
        high=65535,
        proof=_PARITY,
    ),
)
