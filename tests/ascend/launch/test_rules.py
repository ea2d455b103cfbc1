"""Every rule of a launch on Ascend devices: a case that breaks it, and one that just does not."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from banyan.ascend.launch.expert_rules import MIB, buffer_bytes, buffer_of, tokens_that_fit
from banyan.ascend.launch.facts import (
    ERROR,
    KNOWN,
    SOCS,
    WARNING,
    Breach,
    Launch,
    LaunchModel,
    arguments_of_words,
    breach,
    sentences,
)
from banyan.ascend.launch.rules import RULES, check, left_out, read_pairs
from banyan.config.env import Environment
from tests.support.cases import check_each

V32, V3, R1 = KNOWN
LLAMA = LaunchModel("llama", hidden=4096, is_modelslim=False)
MIXTURE = LaunchModel("mixture", hidden=2048, experts=64, experts_per_token=6, is_modelslim=False)
DEEPEP = "--moe-a2a-backend deepep --tp 16 "
FUSEEP = "--moe-a2a-backend ascend_fuseep --tp 16 "
LOW = DEEPEP + "--deepep-mode low_latency "
SEGMENTS = "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True "
DISPATCH = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK="
TWO = "--nnodes 2 --dist-init-addr 192.0.2.7:6688 "
NAMES = "HCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0 "
ASCEND = "--disaggregation-transfer-backend ascend "
PREFILL = ASCEND + "--disaggregation-mode prefill --disable-cuda-graph "
DECODE = ASCEND + "--disaggregation-mode decode "
STORE = "ASCEND_MF_STORE_URL=tcp://192.0.2.7:6670 "
SPARSE = "--enable-nsa-prefill-context-parallel --max-running-requests 1 "
NEXTN = "--speculative-algorithm NEXTN --speculative-eagle-topk 1 "


@dataclass(frozen=True)
class Case:
    """A launch in short: words of a command line, NAME=VALUE words, and facts."""

    words: str = ""
    variables: str = ""
    soc: str = "A3"
    model: LaunchModel | None = None
    interfaces: dict[str, tuple[str, ...]] | None = None
    packages: frozenset[str] | None = None
    says: str = ""
    """What the sentence must have in it."""

    def launch(self, *, is_relaxed: bool = False) -> Launch:
        pairs = (word.split("=", 1) for word in self.variables.split())
        return Launch(
            arguments=arguments_of_words(self.words.split(), Environment()),
            variables={name: value for name, value in pairs},
            soc=SOCS[self.soc],
            interfaces=self.interfaces,
            packages=self.packages,
            model=self.model,
            is_relaxed=is_relaxed,
        )


HERE = {"eth0": ("192.0.2.7",), "lo": ("127.0.0.1",)}

BROKEN = {
    "1a": Case("--attention-backend triton", says="triton"),
    "1b": Case("--sampling-backend flashinfer", says="flashinfer"),
    "1c": Case("--grammar-backend outlines", says="outlines"),
    "1d": Case("--kv-cache-dtype int8", says="int8"),
    "2a": Case("--page-size 64", says="64"),
    "2b": Case("--page-size 256", model=V32, says="deepseek-v3.2"),
    "3a": Case(
        "--quantization modelslim", model=LLAMA, says="has no quant_model_description.json (name a"
    ),
    "3b": Case("--quantization awq", model=LaunchModel("slim", is_modelslim=True), says="awq"),
    "3c": Case("--quantization fp8", says="fp8"),
    "4a": Case("", "SGLANG_NPU_FUSED_MOE_MODE=3", says="3"),
    "4b": Case("--moe-a2a-backend ascend_fuseep", "SGLANG_NPU_FUSED_MOE_MODE=2", says="none"),
    "4c": Case("--moe-a2a-backend deepep", "SGLANG_NPU_FUSED_MOE_MODE=1", says="deepep"),
    "4d": Case("--moe-a2a-backend ascend_fuseep", soc="A2", says="A2"),
    "4e": Case("--moe-a2a-backend ascend_fuseep --dtype float16", says="--dtype is float16 (give"),
    "5a": Case("", "SGLANG_USE_FIA_NZ=1", says="without SGLANG_NPU_USE_MLAPO=1 (set both)"),
    "5b": Case("", "SGLANG_NPU_USE_MLAPO=1", model=LLAMA, says="SGLANG_NPU_USE_MLAPO"),
    "5c": Case("", "SGLANG_USE_FIA_NZ=1 SGLANG_NPU_USE_MLAPO=1", model=V32, says="deepseek-v3.2"),
    "6a": Case("", "SGLANG_NPU_USE_MULTI_STREAM=1", model=MIXTURE, says="64 experts, 0"),
    "6b": Case("", "SGLANG_USE_AG_AFTER_QLORA=1", model=LLAMA, says="llama"),
    "7a": Case(LOW, DISPATCH + "1025", says="1025"),
    "7b": Case(LOW, DISPATCH + "0", says="low_latency"),
    "7c": Case(LOW, DISPATCH + "300", soc="A2", says="at most 256"),
    "7d": Case(FUSEEP, DISPATCH + "0", says="up to 256"),
    "7e": Case(FUSEEP, DISPATCH + "257", says="MODE=1 takes at most 256 tokens"),
    "8a": Case(
        LOW + "--max-running-requests 64 --dp-size 4 --enable-dp-attention "
        "--speculative-num-draft-tokens 4",
        DISPATCH + "15",
        says="16 requests of 4 tokens on 4 ranks are 16 tokens",
    ),
    "8b": Case(LOW + "--max-running-requests 64", DISPATCH + "63", says="64"),
    "8c": Case(
        FUSEEP + "--max-running-requests 1024",
        DISPATCH + "24",
        says="steps of 64 tokens a rank go in 3 calls",
    ),
    "9a": Case(LOW, DISPATCH + "27 HCCL_BUFFSIZE=200", model=R1, says="need 202 MB; 26 tokens fit"),
    "10a": Case(LOW + PREFILL, STORE, says="on a server of prompts (give normal"),
    "10b": Case(
        DEEPEP + "--deepep-mode normal " + DECODE, STORE, says="on a server of answers with graphs"
    ),
    "11a": Case("", "TASK_QUEUE_ENABLE=3", says="3"),
    "11b": Case("", "TASK_QUEUE_ENABLE=2", says="may disturb the launch of graphs (set 0 or 1"),
    "11c": Case(DECODE, STORE + "TASK_QUEUE_ENABLE=1", says="=1"),
    "12a": Case("", "STREAMS_PER_DEVICE=16", says="16"),
    "13a": Case("", SEGMENTS + "PYTORCH_ALLOC_CONF=x:1", says="are both set (unset PYTORCH_ALLOC"),
    "13b": Case(
        *("", "PYTORCH_NPU_ALLOC_CONF=max_split_size_mb:64"),
        model=MIXTURE,
        says="does not say expandable_segments:True, and the model has experts",
    ),
    "13c": Case("", "PYTORCH_NPU_ALLOC_CONF=expandable:True", says="no key expandable"),
    "13d": Case("", "PYTORCH_NPU_ALLOC_CONF=base_addr_aligned_kb:17", says="0 to 16"),
    "14a": Case(TWO, "HCCL_SOCKET_IFNAME=eth0", says="GLOO_SOCKET_IFNAME"),
    "14b": Case(TWO, NAMES, interfaces={"en1": ("192.0.2.7",)}, says="en1"),
    "14c": Case(TWO, NAMES, interfaces={"eth0": ("192.0.2.9",)}, says="192.0.2.9"),
    "14d": Case("", "HCCL_SOCKET_IFNAME=eth0", says="HCCL_SOCKET_IFNAME"),
    "15a": Case(PREFILL, says="ASCEND_MF_STORE_URL is not set (set tcp://HOST:PORT"),
    "15b": Case(PREFILL, "ASCEND_MF_STORE_URL=192.0.2.7:6670", says="192.0.2.7:6670"),
    "15c": Case(PREFILL + "--port 8998", STORE, says="8998"),
    "15d": Case(PREFILL + "--dist-init-addr 192.0.2.8:6688", STORE, says="192.0.2.8"),
    "15e": Case(PREFILL, STORE, packages=frozenset(), says="pip install memfabric-hybrid"),
    "16a": Case(
        "--speculative-eagle-topk 4",
        "SGLANG_ENABLE_SPEC_V2=1 SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1",
        says="4",
    ),
    "16b": Case("", "SGLANG_ENABLE_SPEC_V2=1", says="without SGLANG_ENABLE_OVERLAP_PLAN"),
    "16c": Case(
        NEXTN + "--speculative-num-steps 3 --speculative-num-draft-tokens 5", says="give 4"
    ),
    "16d": Case(NEXTN, model=LLAMA, says="llama"),
    "16e": Case("--speculative-algorithm EAGLE3", says="(name the draft model)"),
    "16f": Case("", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1", says="without SGLANG_ENABLE_SPEC_V2=1"),
    "17a": Case("--enable-dp-attention --tp 6 --dp 4", says="6 ranks"),
    "17b": Case("--enable-dp-lm-head", says="without --enable-dp-attention (give both"),
    "17c": Case("", "SGLANG_SCHEDULER_SKIP_ALL_GATHER=1", says="without --enable-dp-attention"),
    "17d": Case("--tp 4 --moe-dense-tp-size 1", says="each rank computes the same (leave it"),
    "17e": Case(
        "--tp 4 --dp 2 --enable-dp-attention --load-balance-method total_tokens",
        "SGLANG_SCHEDULER_SKIP_ALL_GATHER=1",
        says="total_tokens",
    ),
    "17f": Case("--tp 4 --ep 3", says="3"),
    "17g": Case("--moe-a2a-backend deepep --tp 4 --ep 2", says="4 ranks"),
    "17h": Case("--tp 5 --ep 5", model=MIXTURE, says="64 experts and 0"),
    "18a": Case(SPARSE, model=R1, says="deepseek-r1"),
    "18b": Case("--attn-cp-size 3 --tp 16", says="16 ranks"),
    "18c": Case(
        "--enable-nsa-prefill-context-parallel --nsa-prefill-cp-mode in-seq-split "
        "--max-running-requests 4",
        says="4",
    ),
    "18d": Case("--nsa-prefill-cp-mode in-seq-split", says="without --enable-nsa-prefill-con"),
    "18e": Case(SPARSE + DECODE, STORE, says="on a server of answers (leave it out there)"),
    "19a": Case(
        ASCEND + "--disaggregation-mode prefill",
        STORE,
        says="captures graphs that it never re",
    ),
    "19b": Case("--cuda-graph-max-bs 8 --max-running-requests 8 --dp 2", says="4 requests"),
    "19c": Case("--chunked-prefill-size -1", says="one step takes prompts of any length"),
    "20a": Case(
        DEEPEP + "--deepep-mode normal --max-prefill-tokens 66000 --nnodes 2",
        NAMES,
        soc="A2",
        says="4125 tokens a rank, normal mode of A2 takes 4096 between machines",
    ),
    "21a": Case(LOW, "DEEP_NORMAL_MODE_USE_INT8_QUANT=1", says="low_latency"),
    "22a": Case("", "HCCL_OP_EXPANSION_MODE=AIV", model=V32, says="deepseek-v3.2"),
    "flag-a": Case("--enable-deterministic-inference", says='"planned"'),
}

OTHERWISE = [
    ("1a", Case("--prefill-attention-backend fa3", says="--prefill-attention-backend fa3 is not")),
    ("1a", Case("--decode-attention-backend fa3", says="--decode-attention-backend fa3 is not")),
    ("2a", Case("--page-size 640", says="640")),
    ("2b", Case("--page-size 256", "SGLANG_USE_FIA_NZ=1", says="a cache in the fractal format")),
    ("5b", Case("", "SGLANG_USE_FIA_NZ=1", model=LLAMA, says="SGLANG_USE_FIA_NZ=1: llama has no")),
    ("9a", Case(LOW, model=R1, says="128 tokens a rank on 16 ranks")),
    (
        "9a",
        Case(
            LOW, "DEEPEP_HCCL_BUFFSIZE=100", model=R1, soc="A2", says="need 452 MB; 27 tokens fit"
        ),
    ),
    ("9a", Case(FUSEEP, DISPATCH + "27", model=R1, says="need 202 MB; 26 tokens fit")),
    (
        "9a",
        Case(
            FUSEEP + "--quantization modelslim",
            "SGLANG_NPU_FUSED_MOE_MODE=2 HCCL_BUFFSIZE=100 " + DISPATCH + "1024",
            model=R1,
            says="need 178 MB; 548 tokens fit",
        ),
    ),
    ("21a", Case("", "DEEP_NORMAL_MODE_USE_INT8_QUANT=1", says="--moe-a2a-backend is none")),
    ("22a", Case(PREFILL, STORE + "HCCL_OP_EXPANSION_MODE=AIV", says="--disaggregation-mode pref")),
]
"""Other ways to break some of them."""

KEPT = {
    "1a": Case("--attention-backend ascend"),
    "1b": Case("--sampling-backend ascend"),
    "1c": Case("--grammar-backend xgrammar"),
    "1d": Case("--kv-cache-dtype bf16"),
    "2a": Case("--page-size 512"),
    "2b": Case("--page-size 128", "SGLANG_USE_FIA_NZ=1 SGLANG_NPU_USE_MLAPO=1", model=R1),
    "3a": Case("--quantization modelslim", model=LaunchModel("slim", is_modelslim=True)),
    "3b": Case("--quantization w8a8_int8", model=LaunchModel("slim", is_modelslim=True)),
    "3c": Case("--quantization modelslim"),
    "4a": Case("--moe-a2a-backend ascend_fuseep", "SGLANG_NPU_FUSED_MOE_MODE=1"),
    "4b": Case(
        "--moe-a2a-backend ascend_fuseep --quantization modelslim", "SGLANG_NPU_FUSED_MOE_MODE=2"
    ),
    "4c": Case("--moe-a2a-backend ascend_fuseep", "SGLANG_NPU_FUSED_MOE_MODE=1"),
    "4d": Case("--moe-a2a-backend ascend_fuseep"),
    "4e": Case("--moe-a2a-backend ascend_fuseep --dtype bfloat16"),
    "5a": Case("", "SGLANG_USE_FIA_NZ=1 SGLANG_NPU_USE_MLAPO=1"),
    "5b": Case("", "SGLANG_NPU_USE_MLAPO=1", model=R1),
    "5c": Case("", "SGLANG_USE_FIA_NZ=1 SGLANG_NPU_USE_MLAPO=1", model=R1),
    "6a": Case("", "SGLANG_NPU_USE_MULTI_STREAM=1", model=R1),
    "6b": Case("", "SGLANG_USE_AG_AFTER_QLORA=1", model=R1),
    "7a": Case(LOW, DISPATCH + "512"),
    "7b": Case(DEEPEP + "--deepep-mode normal", DISPATCH + "0"),
    "7c": Case(LOW, DISPATCH + "256", soc="A2"),
    "7d": Case(FUSEEP, DISPATCH + "1"),
    "7e": Case(FUSEEP, DISPATCH + "256"),
    "8a": Case(
        LOW + "--max-running-requests 64 --dp-size 4 --enable-dp-attention "
        "--speculative-num-draft-tokens 4",
        DISPATCH + "16",
    ),
    "8b": Case(LOW + "--max-running-requests 64", DISPATCH + "64"),
    "8c": Case(FUSEEP + "--max-running-requests 1024", DISPATCH + "64"),
    "9a": Case(LOW, DISPATCH + "26 HCCL_BUFFSIZE=200", model=R1),
    "10a": Case(DEEPEP + PREFILL, STORE),
    "10b": Case(DEEPEP + DECODE, STORE),
    "11a": Case("", "TASK_QUEUE_ENABLE=1"),
    "11b": Case("--disable-cuda-graph", "TASK_QUEUE_ENABLE=2"),
    "11c": Case(DECODE, STORE + "TASK_QUEUE_ENABLE=0"),
    "12a": Case("", "STREAMS_PER_DEVICE=32"),
    "13a": Case("", SEGMENTS),
    "13b": Case("", SEGMENTS, model=MIXTURE),
    "13c": Case("", SEGMENTS),
    "13d": Case(
        "", "PYTORCH_NPU_ALLOC_CONF=base_addr_aligned_kb:16,roundup_power2_divisions:[a:1,b:2]"
    ),
    "14a": Case(TWO, NAMES),
    "14b": Case(TWO, NAMES, interfaces=HERE),
    "14c": Case(TWO, NAMES, interfaces=HERE),
    "14d": Case(),
    "15a": Case(PREFILL, STORE),
    "15b": Case(PREFILL, STORE),
    "15c": Case(PREFILL + "--port 8000 --dist-init-addr 192.0.2.7:6688", STORE),
    "15d": Case(PREFILL + "--dist-init-addr 192.0.2.7:6688", STORE),
    "15e": Case(PREFILL, STORE, packages=frozenset({"memfabric_hybrid"})),
    "16a": Case(NEXTN, "SGLANG_ENABLE_SPEC_V2=1 SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1"),
    "16b": Case(NEXTN, "SGLANG_ENABLE_SPEC_V2=1 SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1"),
    "16c": Case(NEXTN + "--speculative-num-steps 3 --speculative-num-draft-tokens 4"),
    "16d": Case(NEXTN, model=V32),
    "16e": Case("--speculative-algorithm EAGLE3 --speculative-draft-model-path D"),
    "16f": Case("", "SGLANG_ENABLE_SPEC_V2=1 SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1"),
    "17a": Case("--enable-dp-attention --tp 8 --dp 4"),
    "17b": Case("--enable-dp-lm-head --enable-dp-attention --tp 4 --dp 2"),
    "17c": Case("--enable-dp-attention --tp 4 --dp 2", "SGLANG_SCHEDULER_SKIP_ALL_GATHER=1"),
    "17d": Case("--tp 4 --attn-cp-size 4 --moe-dense-tp-size 1"),
    "17e": Case("--tp 4 --dp 2 --enable-dp-attention", "SGLANG_SCHEDULER_SKIP_ALL_GATHER=1"),
    "17f": Case("--tp 4 --ep 4"),
    "17g": Case("--moe-a2a-backend deepep --tp 4 --ep 4"),
    "17h": Case("--tp 4 --ep 4", model=MIXTURE),
    "18a": Case(SPARSE, model=V32),
    "18b": Case("--attn-cp-size 4 --tp 16 --dp 2 --enable-dp-attention"),
    "18c": Case(SPARSE + "--nsa-prefill-cp-mode in-seq-split"),
    "18d": Case(SPARSE + "--nsa-prefill-cp-mode in-seq-split"),
    "18e": Case(SPARSE + PREFILL, STORE),
    "19a": Case(PREFILL, STORE),
    "19b": Case("--cuda-graph-max-bs 4 --max-running-requests 8 --dp 2"),
    "19c": Case("--chunked-prefill-size -1 --max-prefill-tokens 68000"),
    "20a": Case(
        DEEPEP + "--deepep-mode normal --max-prefill-tokens 65536 --nnodes 2", NAMES, soc="A2"
    ),
    "21a": Case(DEEPEP + "--deepep-mode normal", "DEEP_NORMAL_MODE_USE_INT8_QUANT=1"),
    "22a": Case("", "HCCL_OP_EXPANSION_MODE=AIV", model=R1),
    "flag-a": Case("--tool-server demo"),
}
"""Each beside the case of the same name that is broken, and as near to it as can be."""


def test_every_line_of_the_table_has_both_cases() -> None:
    lines = {rule for rule in sentences() if not rule.startswith("23")}
    assert lines == set(BROKEN) == set(KEPT)


def test_the_rules_are_the_twenty_three() -> None:
    numbers = {
        int("".join(c for c in rule if c.isdigit())) for rule in sentences() if rule[0] != "f"
    }
    assert numbers | {23} == set(range(1, 24))


ALL_BROKEN = [*BROKEN.items(), *OTHERWISE]


def test_a_rule_that_is_broken_is_reported_with_its_numbers_and_what_to_do() -> None:
    def is_set(broken: tuple[str, Case]) -> None:
        rule, case = broken
        found = [finding for finding in check(case.launch()) if finding.rule == rule]
        assert found, "nothing was found"
        for finding in found:
            assert finding.severity == sentences()[rule].severity
            assert finding.text and finding.use and finding.source
            assert "{" not in finding.text + finding.use
        assert case.says
        assert any(case.says in finding.line for finding in found), [f.line for f in found]

    check_each(ALL_BROKEN, is_set)


def test_every_place_that_finds_something_has_a_case(monkeypatch) -> None:
    found = set[tuple[str, int]]()

    def noted(rule: str, **numbers: object) -> Breach:
        at = sys._getframe(1)
        found.add((at.f_code.co_filename, at.f_lineno))
        return breach(rule, **numbers)

    modules = {sys.modules[rule.__module__] for rule in RULES}
    for module in modules:
        monkeypatch.setattr(module, "breach", noted)
    for _, case in ALL_BROKEN:
        check(case.launch())
    quiet = [
        f"{Path(file).name}:{call.lineno}"
        for file in (str(module.__file__) for module in modules)
        for call in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "breach"
        if not any((file, at) in found for at in range(call.lineno, call.end_lineno + 1))
    ]
    assert len(modules) > 1 and found and not quiet, f"no case reaches {', '.join(quiet)}"


def test_a_rule_that_is_kept_says_nothing() -> None:
    def is_silent(rule: str) -> None:
        assert rule not in [finding.rule for finding in check(KEPT[rule].launch())]

    check_each(KEPT, is_silent, str)


def test_a_start_that_asks_for_nothing_keeps_every_rule() -> None:
    assert check(Case().launch()) == []


def test_errors_come_before_warnings() -> None:
    case = Case("--page-size 64 --chunked-prefill-size -1", "TASK_QUEUE_ENABLE=5")
    order = [finding.severity for finding in check(case.launch())]
    assert order == [ERROR, ERROR, WARNING]


def test_what_later_releases_take_is_a_warning_where_that_is_wished() -> None:
    (found,) = check(BROKEN["5a"].launch(is_relaxed=True))
    assert (found.rule, found.severity) == ("5a", WARNING)


@pytest.mark.parametrize(("tokens", "ep", "wanted_mb"), [(24, 16, 179), (26, 16, 194), (8, 32, 60)])
def test_the_buffer_is_what_the_documents_figures_come_to(
    tokens: int, ep: int, wanted_mb: int
) -> None:
    assert round(buffer_bytes("A3", tokens, ep, R1) / MIB) == wanted_mb


def test_the_most_tokens_that_fit_a_buffer_fit_and_one_more_does_not() -> None:
    for soc in SOCS:
        fits = tokens_that_fit(soc, 200, 16, R1)
        assert buffer_bytes(soc, fits, 16, R1) <= 200 * MIB < buffer_bytes(soc, fits + 1, 16, R1)


def test_what_ascend_fuseep_takes_is_counted_by_its_mode() -> None:
    for mode, counted in {"1": (1912, 26), "2": (52, 1024)}.items():
        case = Case(FUSEEP, f"SGLANG_NPU_FUSED_MOE_MODE={mode} {DISPATCH}256", model=R1)
        buffer = buffer_of(case.launch())
        assert buffer is not None and (buffer.needed, buffer.fits) == counted
        assert str(buffer.needed) in buffer.line
    assert buffer_of(Case(FUSEEP, DISPATCH + "256", soc="A2", model=R1).launch()) is None
    large = Case(FUSEEP, f"SGLANG_NPU_FUSED_MOE_MODE=2 {DISPATCH}1024").launch()
    assert "7e" not in [finding.rule for finding in check(large)]


def test_the_allocator_s_variable_may_hold_lists() -> None:
    text = "roundup_power2_divisions:[256:1,512:2], expandable_segments:True"
    assert dict(read_pairs(text)) == {
        "roundup_power2_divisions": "[256:1,512:2]",
        "expandable_segments": "True",
    }


def test_what_was_not_looked_at_is_reported() -> None:
    assert len(list(left_out(Case().launch()))) == 3
    whole = Case(model=LLAMA, interfaces=HERE, packages=frozenset())
    assert list(left_out(whole.launch())) == []
