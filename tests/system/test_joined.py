"""Joined replicas behind the whole engine and server: --enable-dp-attention."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import banyan
from banyan.base.errors import BanyanError, ConfigError
from tests.models.families import tiny
from tests.support.draft_models import like
from tests.support.hidden_drafts import with_words
from tests.support.streams import ENDLESS, ends_in_one_error, load
from tests.system.serving import CALL_S, status_of, wait_until
from tests.system.test_block_drafts import BLOCKS
from tests.system.test_block_drafts import with_words as with_blocks
from tests.system.test_handoff_kinds import VARIANTS

PROMPTS = [[(5 * i * i + 3 * i + shift) % 97 for i in range(9 + 13 * shift)] for shift in range(4)]
GREEDY = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
JOINED = {"dp_size": 2, "tp_size": 2, "enable_dp_attention": True}
FLAGS = ("--enable-dp-attention", "--dp-size", "2")
OUTER = pytest.mark.skipif(not os.environ.get("PARALLEL"), reason="make test-parallel")


def answers(path, prefill=16, **flags) -> tuple[list[tuple[list[int], list[float]]], int]:
    """Tokens and log-probabilities of the prompts, and how many processes gave them."""
    with banyan.Engine(
        model_path=str(path),
        skip_tokenizer_init=True,
        cpu_activations="fp32",
        threads=1,
        chunked_prefill_size=prefill,
        max_total_tokens=1024,
        max_running_requests=4,
        log_level="error",
        **flags,
    ) as engine:
        processes = len(psutil.Process().children(recursive=True))
        found = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)
    return [
        (a["output_ids"], [value for value, *_ in a["meta_info"]["output_token_logprobs"]])
        for a in found
    ], processes


@pytest.mark.parametrize("variant", ["mistral", "qwen3 moe"])
def test_joined_replicas_give_the_tokens_of_one_rank(variant, tmp_path):
    tiny(variant, tmp_path)
    one, alone = answers(tmp_path)
    two, processes = answers(tmp_path, **JOINED)
    assert processes == alone + 1
    for (tokens, values), (same, close) in zip(two, one, strict=True):
        assert tokens == same
        assert max(abs(a - b) for a, b in zip(values, close, strict=True)) <= 1e-5


@pytest.mark.full
def test_dense_blocks_that_cannot_be_cut_are_whole_on_every_rank(tmp_path):
    """81 columns cannot be cut in two; the experts beside them can."""
    tiny("deepseek v3", tmp_path, intermediate_size=81)
    with pytest.raises(ConfigError, match="81 MLP columns"):
        answers(tmp_path, tp_size=2)
    one, _ = answers(tmp_path)
    for flags in ({"tp_size": 2}, JOINED | {"ep_size": 2}):
        two, _ = answers(tmp_path, moe_dense_tp_size=1, **flags)
        assert [tokens for tokens, _ in two] == [tokens for tokens, _ in one]


def test_rows_that_are_sent_to_their_experts_give_the_same_bits(tmp_path):
    """Prompts in chunks, answers, and a replica that has nothing left to do."""
    tiny("qwen2 moe, some dense", tmp_path)
    plain, _ = answers(tmp_path, ep_size=2, **JOINED)
    sent, _ = answers(tmp_path, moe_a2a_backend="deepep", deepep_mode="low_latency", **JOINED)
    assert sent == plain
    with pytest.raises(BanyanError, match="4096 prompt tokens and 4 decode tokens, which is 4100"):
        flags = {"moe_a2a_backend": "deepep", "deepep_mode": "low_latency", **JOINED}
        answers(tmp_path, prefill=4096, **flags)


def test_an_engine_in_a_thread_cannot_be_joined(tmp_path):
    tiny("mistral", tmp_path)
    with pytest.raises(ConfigError, match="joined replicas have processes of their own"):
        answers(tmp_path, engine_mode="inprocess", **JOINED)


def ask(running, at: int) -> list[int]:
    body = {"input_ids": [5 + at, 6, 7], "sampling_params": GREEDY | {"max_new_tokens": 40}}
    return running.generate(**body)["output_ids"]


def test_a_server_shares_requests_out_among_joined_replicas(server):
    """Company changes no token; each replica has half of the requests and a cache of its own."""
    with server("--tp-size", "2", *FLAGS) as running:
        alone = [ask(running, at) for at in range(6)]
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(lambda at: ask(running, at), range(6)))
        assert together == alone

        def finished() -> list[int]:
            states = running.facts()["internal_states"]
            return [state["stats"]["finished"] for state in states]

        wait_until(lambda: min(finished()) >= 6, CALL_S, "half of the requests in each replica")
        assert sum(finished()) <= 13, "one more warms it up"
        running.signal(signal.SIGTERM)
        assert running.exit_code(60.0) == 0
        assert "Traceback" not in running.log.read_text()


@OUTER
def test_when_a_rank_of_joined_replicas_dies_all_end_with_its_name(server):
    flags = ("--tp-size", "4", *FLAGS, *ENDLESS, "--engine-restarts", "0")
    with server(*flags) as running:
        streams = load(running, count=2)
        (rank,) = psutil.Process(running.engine_pids()[0]).children()
        os.kill(rank.pid, signal.SIGKILL)
        wait_until(lambda: status_of(running, "/health") == 503, 60.0, "/health to be 503")
        for stream in streams:
            assert ends_in_one_error(stream.end(60.0))
        assert running.exit_code(60.0) != 0
        wait_until(lambda: running.members() == [], 60.0, "the children to end")
        output = running.log.read_text()
        assert re.search("replica [01] has ended", output)
        assert "rank1" in output and "SIGKILL" in output


@pytest.mark.slow
def test_joined_replicas_of_which_one_dies_are_started_again_together(server):
    with server("--tp-size", "2", *FLAGS, *ENDLESS) as running:
        before, answer = running.engine_pids(), ask(running, 1)
        streams = load(running, count=2)
        os.kill(before[0], signal.SIGKILL)
        for stream in streams:
            assert ends_in_one_error(stream.end(60.0))
        wait_until(lambda: status_of(running, "/readyz") == 200, CALL_S, "the replicas to be back")
        assert not set(before) & set(running.engine_pids())
        assert [ask(running, 1) for _ in range(2)] == [answer] * 2
        # Whoever notices first, the one beside it or the server.
        ends = "(replica|rank) [01] has ended|was killed by SIGKILL"
        assert re.search(ends, running.log.read_text())


DRAFTS = {
    "NGRAM": {"speculative_algorithm": "NGRAM"},
    "NGRAM trees": {"speculative_algorithm": "NGRAM", "speculative_ngram_min_bfs_breadth": 3},
    "NGRAM, heads apart": {"speculative_algorithm": "NGRAM", "enable_dp_lm_head": True},
    "STANDALONE": {"speculative_algorithm": "STANDALONE"},
    "NEXTN": {"speculative_algorithm": "NEXTN", "enable_dp_lm_head": True},
    "EAGLE": {"speculative_algorithm": "EAGLE", "enable_dp_lm_head": True},
    "EAGLE3": {"speculative_algorithm": "EAGLE3", "enable_dp_lm_head": True},
    "DFLASH": {"speculative_algorithm": "DFLASH", "enable_dp_lm_head": True},
}


@OUTER
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_of_joined_replicas_change_no_token(kind, ranks, tiny_model, tmp_path):
    """More requests than replicas: rows with drafts, prompts in pieces, and replicas that wait."""
    flags = {**DRAFTS[kind], "disable_adaptive_drafts": True}
    algorithm = flags["speculative_algorithm"]
    model = tiny_model
    if algorithm in VARIANTS:
        model = with_words(VARIANTS[algorithm], tmp_path / "model", tiny_model)
    if algorithm == "DFLASH":
        model = with_blocks("qwen3", tmp_path / "model", tiny_model)
        flags["speculative_draft_model_path"] = str(model / BLOCKS)
    if algorithm == "STANDALONE":
        flags["speculative_draft_model_path"] = str(like(tiny_model, tmp_path / "draft", 0.1))
    if algorithm in ("EAGLE", "EAGLE3"):
        flags["speculative_draft_model_path"] = str(model / "eagle")
    prompts = [[(x % 9) * 11 + 20 + at for x in range(20 + 30 * at)] for at in range(6)]
    params = [
        {"temperature": 0, "max_new_tokens": 40 - 5 * at, "ignore_eos": True} for at in range(3)
    ] + [{"temperature": 1.0, "sampling_seed": at, "max_new_tokens": 30} for at in range(3)]
    common = {"threads": 1, "max_total_tokens": 2048, "log_level": "error"}
    with banyan.Engine(model_path=str(model), **common) as engine:
        right = [
            x["output_ids"] for x in engine.generate(input_ids=prompts, sampling_params=params)
        ]
    joined = {**JOINED, "tp_size": ranks, "chunked_prefill_size": 32, "max_running_requests": 2}
    with banyan.Engine(model_path=str(model), **common, **joined, **flags) as engine:
        found = engine.generate(input_ids=prompts, sampling_params=params)
    assert [x["output_ids"] for x in found] == right
    assert sum(x["meta_info"]["spec_num_correct_drafts"] for x in found) > 10
