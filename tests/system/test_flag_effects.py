"""What a flag does, seen from outside: one server with many flags beside one without."""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from banyan.base.errors import BanyanError, ConfigError
from banyan.llm import Engine
from banyan.ops import reference
from banyan.runner.batch import Batch
from banyan.runner.forward import EagerForward
from banyan.server.lifecycle.startup import READY_LINE
from tests.system.serving import Server, serving, stream_events

CHANGED = (
    *("--served-model-name", "oak", "--weight-version", "w7", "--fastapi-root-path", "/deep"),
    *("--chat-template", "{{ messages[0]['content'] }}", "--stream-interval", "4"),
    *("--incremental-streaming-output", "--enable-cache-report", "--sampling-defaults", "openai"),
    *("--preferred-sampling-params", '{"max_new_tokens": 3}', "--allow-auto-truncate"),
    *("--context-length", "256", "--skip-server-warmup", "--log-level", "warning"),
    *("--reasoning-parser", "deepseek-r1", "--completion-template", "qwen_coder", "--dp-size", "2"),
    *("--grammar-backend", "none", "--enable-profile-cuda-graph", "--trust-remote-code"),
)
PROMPT = list(range(5, 45))
EIGHT = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": "One two three"}],
    "max_tokens": 16,
    "ignore_eos": True,
}


@dataclass(frozen=True)
class Pair:
    """Two servers on one model that recommends greedy sampling."""

    plain: Server
    changed: Server
    finished_at_start: tuple[int, int]


@pytest.fixture(scope="module")
def greedy_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("greedy") / "model"))
    (copy / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return copy


@pytest.fixture(scope="module")
def pair(greedy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("pair")
    common = ("--model-path", str(greedy_model), "--threads", "1", "--max-total-tokens", "8192")
    # Steps of so small a model are reported many together otherwise.
    common += ("--num-continuous-decode-steps", "1")
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(serving(logs / "plain.log", *common))
        changed = stack.enter_context(serving(logs / "changed.log", *common, *CHANGED))
        yield Pair(plain, changed, (plain.stats()["finished"], changed.stats()["finished"]))


def engine(model: Path, **flags: object) -> Engine:
    return Engine(str(model), engine_mode="inprocess", threads=1, max_total_tokens=2048, **flags)


def chat(server: Server, **fields: object) -> dict:
    answer = server.http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(server: Server, **params: object) -> list[dict]:
    body = {"input_ids": PROMPT, "sampling_params": EIGHT | params, "stream": True}
    with server.http.stream("POST", "/generate", json=body) as response:
        return list(stream_events(response))


def test_the_served_name_is_the_one_that_clients_see(pair: Pair) -> None:
    names = [s.http.get("/v1/models").json()["data"][0]["id"] for s in (pair.plain, pair.changed)]
    assert names[0] != "oak" and names[1] == "oak"


def test_the_version_of_the_weights_is_shown(pair: Pair) -> None:
    servers = (pair.plain, pair.changed)
    found = [s.http.get("/get_weight_version").json()["weight_version"] for s in servers]
    assert found == ["default", "w7"]


def test_the_prefix_of_a_proxy_is_taken_away(pair: Pair) -> None:
    codes = [s.http.get("/deep/v1/models").status_code for s in (pair.plain, pair.changed)]
    assert codes == [404, 200]


def test_a_chat_template_replaces_the_model_s(pair: Pair) -> None:
    plain, changed = (chat(s)["usage"]["prompt_tokens"] for s in (pair.plain, pair.changed))
    assert changed < plain


def test_a_stream_interval_makes_fewer_chunks(pair: Pair) -> None:
    def count(server: Server) -> int:
        return len(chunks(server, max_new_tokens=96))

    assert count(pair.changed) <= 96 // 4 + 1
    # What waits for a busy reader comes as one chunk: not each time in so few.
    assert any(count(pair.plain) > 96 // 4 + 1 for _ in range(5))


def test_incremental_output_gives_each_token_once(pair: Pair) -> None:
    # Long enough never to come in one chunk, whatever else the machine does.
    plain, changed = (
        [len(c["output_ids"]) for c in chunks(s, max_new_tokens=120)]
        for s in (pair.plain, pair.changed)
    )
    assert plain[-1] == 120 == sum(changed) and len(changed) > 1


def test_the_cache_report_is_given_when_asked_for(pair: Pair) -> None:
    plain, changed = (chat(s)["usage"] for s in (pair.plain, pair.changed))
    assert not plain.get("prompt_tokens_details")
    assert "cached_tokens" in changed["prompt_tokens_details"]


def test_defaults_of_the_model_hold_unless_openai_s_are_wanted(pair: Pair) -> None:
    def texts(server: Server) -> set[str]:
        said = [chat(server)["choices"][0]["message"] for _ in range(3)]
        return {message["content"] or message["reasoning_content"] for message in said}

    assert len(texts(pair.plain)) == 1 < len(texts(pair.changed))


def test_preferred_parameters_hold_where_a_request_names_none(pair: Pair) -> None:
    params = {"ignore_eos": True}
    plain, changed = (
        s.generate(input_ids=PROMPT, sampling_params=params)["meta_info"]["completion_tokens"]
        for s in (pair.plain, pair.changed)
    )
    assert (plain, changed) == (128, 3)


def test_a_prompt_that_is_too_long_is_cut_when_that_is_allowed(pair: Pair) -> None:
    long = {"input_ids": [5] * 3000, "sampling_params": {"max_new_tokens": 1}}
    assert pair.plain.http.post("/generate", json=long).status_code == 400
    assert pair.changed.generate(**long)["meta_info"]["prompt_tokens"] < 256


def test_a_context_length_bounds_prompt_and_answer(pair: Pair) -> None:
    inside = {"input_ids": [5] * 300, "sampling_params": {"max_new_tokens": 1}}
    plain, changed = (
        s.generate(**inside)["meta_info"]["prompt_tokens"] for s in (pair.plain, pair.changed)
    )
    assert plain == 300 and changed < 256


def test_a_reasoning_parser_takes_thoughts_out_of_the_answer(pair: Pair) -> None:
    plain, changed = (chat(s)["choices"][0]["message"] for s in (pair.plain, pair.changed))
    assert plain["content"] and not plain.get("reasoning_content")
    assert changed["reasoning_content"] and not changed["content"]


def test_a_completion_template_fills_gaps(pair: Pair) -> None:
    body = {"model": "default", "prompt": "One", "suffix": "three", "max_tokens": 1}
    codes = [
        s.http.post("/v1/completions", json=body).status_code for s in (pair.plain, pair.changed)
    ]
    assert codes == [400, 200]


def test_without_a_grammar_backend_constraints_are_refused(pair: Pair) -> None:
    if pair.plain.http.get("/get_server_info").json()["grammar_backend"] == "none":
        pytest.skip("no grammar library is installed")
    body = {"input_ids": PROMPT, "sampling_params": {"regex": "[0-9]{2}", "max_new_tokens": 4}}
    plain, changed = (s.http.post("/generate", json=body) for s in (pair.plain, pair.changed))
    assert plain.status_code == 200 and plain.json()["text"].isdigit()
    assert changed.status_code == 400 and "grammar" in changed.text


def test_what_has_no_effect_is_listed_among_the_facts(pair: Pair) -> None:
    plain, changed = (
        s.http.get("/get_server_info").json()["notes"] for s in (pair.plain, pair.changed)
    )
    assert plain == []
    assert [note.split()[0] for note in changed] == [
        "--trust-remote-code",
        "--enable-profile-cuda-graph",
    ]
    assert all(note in pair.changed.log.read_text() for note in changed)


def test_each_replica_is_a_process_of_its_own(pair: Pair) -> None:
    found = [len(s.engine_pids()) for s in (pair.plain, pair.changed)]
    assert found == [1, 2]


def test_a_skipped_warm_up_sends_no_request(pair: Pair) -> None:
    plain, changed = pair.finished_at_start
    assert changed < plain


def test_a_log_level_hides_what_is_less_severe(pair: Pair) -> None:
    assert READY_LINE in pair.plain.log.read_text()
    assert READY_LINE not in pair.changed.log.read_text()


def test_without_the_radix_cache_no_prefix_is_reused(tiny_model: Path) -> None:
    def cached(**flags: object) -> int:
        with engine(tiny_model, **flags) as it:
            it.generate(input_ids=PROMPT, sampling_params=EIGHT)
            answer = it.generate(input_ids=PROMPT, sampling_params=EIGHT)
            return answer["meta_info"]["cached_tokens"]

    assert cached() > 0 == cached(disable_radix_cache=True)


def test_smaller_pages_are_more_and_a_prefix_is_shared_to_the_token_in_all(
    tiny_model: Path,
) -> None:
    def pages(**flags: object) -> int:
        with engine(tiny_model, **flags) as it:
            it.generate(input_ids=PROMPT, sampling_params=EIGHT)
            again = it.generate(input_ids=PROMPT, sampling_params=EIGHT)
            assert again["meta_info"]["cached_tokens"] == len(PROMPT) - 1
            return it.get_server_info()["facts"]["memory"]["groups"][0]["num_pages"] - 1

    assert (pages(), pages(page_size=4), pages(page_size=1)) == (128, 512, 2048)


def test_the_cache_holds_as_many_tokens_as_the_flag_says(tiny_model: Path) -> None:
    with engine(tiny_model) as it:
        assert it.get_server_info()["max_total_num_tokens"] == 2048


def test_without_a_tokenizer_ids_go_in_and_come_out(tiny_model: Path) -> None:
    with engine(tiny_model, skip_tokenizer_init=True) as it:
        assert it.tokenizer is None
        assert len(it.generate(input_ids=PROMPT, sampling_params=EIGHT)["output_ids"]) == 8


def test_a_tokenizer_may_lie_elsewhere(tiny_model: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(tiny_model, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    with pytest.raises(BanyanError, match=r"tokenizer"), engine(bare):
        pass
    with engine(bare, tokenizer_path=str(tiny_model)) as it:
        assert it.tokenizer is not None


def test_functions_and_ways_to_read_reach_the_loader(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_loader.py").write_text("def nothing(tensors):\n    return iter(())\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BanyanError, match="lacks"):
        engine(tiny_model, custom_weight_loader="my_loader:nothing")
    with engine(tiny_model) as it:
        mapped = it.generate(input_ids=PROMPT, sampling_params=EIGHT)["output_ids"]
    monkeypatch.setattr("banyan.formats.mapped._mapped", None)
    with engine(tiny_model, weight_loader_disable_mmap=True) as it:
        assert it.generate(input_ids=PROMPT, sampling_params=EIGHT)["output_ids"] == mapped


def test_downloaded_weights_are_deleted_once_they_are_loaded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object) -> str:
        return str(shutil.copytree(tiny_model, tmp_path / "model"))

    monkeypatch.setattr("banyan.config.resolve.fetch", download)
    with engine(tmp_path / "model", delete_ckpt_after_loading=True) as it:
        assert not (tmp_path / "model" / "model.safetensors").exists()
        assert (tmp_path / "model" / "config.json").exists()
        assert len(it.generate(input_ids=PROMPT, sampling_params=EIGHT)["output_ids"]) == 8


def test_random_weights_need_no_weights_file(tiny_model: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(tiny_model, tmp_path / "bare"))
    (bare / "model.safetensors").unlink()
    with engine(bare, load_format="dummy") as it:
        assert len(it.generate(input_ids=PROMPT, sampling_params=EIGHT)["output_ids"]) == 8


def test_kernels_that_are_forced_are_those_that_run(tiny_model: Path) -> None:
    lines = kernels_of(tiny_model, kernels='{"rms_norm": "reference"}').splitlines()
    (mine,) = (line.split() for line in lines if "rms_norm" in line.split())
    assert mine[0] == "reference"


def test_the_device_is_the_one_that_is_named(tiny_model: Path) -> None:
    with engine(tiny_model, device="cpu") as it:
        assert it.get_server_info()["device"] == "cpu"
    absent = "npu" if torch.cuda.is_available() else "cuda"
    with (
        pytest.raises(BanyanError, match=f"--device {absent}: "),
        engine(tiny_model, device=absent),
    ):
        pass


def test_an_engine_has_as_many_threads_as_the_flag_says(tiny_model: Path) -> None:
    def threads(count: int) -> int:
        with Engine(str(tiny_model), threads=count, max_total_tokens=2048) as it:
            it.generate(input_ids=PROMPT, sampling_params=EIGHT)
            (pid,) = it.get_all_child_pids()
            return len(list(Path(f"/proc/{pid}/task").iterdir()))

    assert threads(5) - threads(1) >= 4


def kernels_of(model: Path, **flags: object) -> str:
    with engine(model, **flags) as it:
        return str(it.get_server_info()["facts"]["kernels"])


def test_the_exact_path_declines_kernels_that_round(tiny_model: Path) -> None:
    declined = "exact ones were asked for"
    assert declined not in kernels_of(tiny_model)
    assert declined in kernels_of(tiny_model, cpu_activations="fp32")


def test_an_exact_head_rounds_no_activations(tiny_model: Path) -> None:
    """Of four-bit weights, and beside projections that go on rounding."""
    rounded, exact, whole = (
        prompt_scores(tiny_model, quantization="q4_0", **flags)
        for flags in ({}, {"enable_fp32_lm_head": True}, {"cpu_activations": "fp32"})
    )
    if np.array_equal(rounded, whole):
        pytest.skip("no compiled kernels here: nothing is rounded")
    assert np.any(rounded != exact) and np.any(exact != whole)


def test_steps_are_recorded_unless_that_is_switched_off(tiny_model: Path) -> None:
    def steps(**flags: object) -> tuple[str, list[int]]:
        with engine(tiny_model, **flags) as it:
            tokens = it.generate(input_ids=PROMPT, sampling_params=EIGHT)["output_ids"]
            return it.get_server_info()["facts"]["steps"], tokens

    recorded, tokens = steps()
    if recorded != "recorded":
        pytest.skip("no compiled kernels here: every step calls the model anew")
    assert steps(disable_cuda_graph=True) == ("eager", tokens)


@pytest.mark.parametrize(
    ("flags", "eager"),
    [
        ({}, False),
        ({"cuda_graph_max_bs": 1}, True),
        ({"cuda_graph_max_bs": 2}, False),
        ({"cuda_graph_bs": [1]}, True),
        ({"cuda_graph_bs": [1, 4]}, False),
        ({"cuda_graph_bs": [1, 4], "disable_cuda_graph_padding": True}, True),
    ],
    ids=str,
)
def test_decode_steps_of_the_named_sizes_are_replayed(
    tiny_model: Path, flags: dict[str, object], eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows decode together; what runs eagerly gives the same tokens."""
    seen, run = list[int](), EagerForward.run

    def watched(forward: EagerForward, batch: Batch) -> None:
        if len(batch.slots) == batch.offsets[-1]:
            seen.append(len(batch.slots))
        run(forward, batch)

    with engine(tiny_model) as it:
        if it.get_server_info()["facts"]["steps"] != "recorded":
            pytest.skip("no compiled kernels here: every step calls the model anew")
        right = it.generate(input_ids=[PROMPT, PROMPT[:9]], sampling_params=EIGHT)
    monkeypatch.setattr(EagerForward, "run", watched)
    with engine(tiny_model, **flags) as it:
        found = it.generate(input_ids=[PROMPT, PROMPT[:9]], sampling_params=EIGHT)
    assert [each["output_ids"] for each in found] == [each["output_ids"] for each in right]
    assert (2 in seen) == eager


def test_kept_weights_are_resumed_without_their_files(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    with engine(model, enable_memory_saver=True, enable_weights_cpu_backup=True) as it:
        before = it.generate(input_ids=PROMPT, sampling_params=EIGHT)["output_ids"]
        (model / "model.safetensors").unlink()
        it.release_memory_occupation()
        it.resume_memory_occupation()
        assert it.generate(input_ids=PROMPT, sampling_params=EIGHT)["output_ids"] == before


def test_torch_samples_when_it_is_named(tiny_model: Path) -> None:
    lines = kernels_of(tiny_model, sampling_backend="pytorch").splitlines()
    assert any(line.split() == ["tensor_sampling", "sample"] for line in lines), lines
    drawn = EIGHT | {"temperature": 1.0, "sampling_seed": 3}
    found = []
    for flags in ({}, {"sampling_backend": "pytorch"}):
        with engine(tiny_model, **flags) as it:
            found.append(it.generate(input_ids=PROMPT, sampling_params=drawn)["output_ids"])
    assert found[0] == found[1]


def test_torch_attends_when_it_is_named(tiny_model: Path) -> None:
    lines = kernels_of(tiny_model, attention_backend="torch_native").splitlines()
    assert any(x.split() == ["torch_attention", "paged_attention"] for x in lines), lines
    if "not compiled" in kernels_of(tiny_model):
        pytest.skip("no compiled kernels here: torch attends anyway")
    lines = kernels_of(tiny_model).splitlines()
    assert not any(x.startswith("torch_attention") for x in lines), lines


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_torch_attends_in_the_phase_that_is_named(
    tiny_model: Path, phase: str, monkeypatch
) -> None:
    rows = dict[bool, None]()
    slow = reference.paged_attention

    def counted(q, k, v, tables, starts, *more, **named):
        rows.update(dict.fromkeys((starts.diff() == 1).tolist()))
        return slow(q, k, v, tables, starts, *more, **named)

    with engine(tiny_model, cpu_activations="fp32", kv_cache_dtype="fp32") as it:
        right = it.generate(input_ids=PROMPT, sampling_params=EIGHT)["output_ids"]
    monkeypatch.setattr(reference, "paged_attention", counted)
    flags = {f"{phase}_attention_backend": "torch_native", "skip_server_warmup": True}
    with engine(tiny_model, cpu_activations="fp32", kv_cache_dtype="fp32", **flags) as it:
        assert it.generate(input_ids=PROMPT, sampling_params=EIGHT)["output_ids"] == right
        assert f"{phase}=torch_attention" in str(it.get_server_info()["facts"]["kernels"])
    assert rows == {phase == "decode": None}


@pytest.mark.parametrize(("size", "is_slow"), [(1, True), (16, False), (512, True)])
def test_pages_that_no_quick_kernel_reads_are_reported_with_those_that_one_does(
    tiny_model: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    is_slow: bool,
) -> None:
    log = logging.getLogger("banyan.ops.bind")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "propagate", False)
    if "not compiled" in kernels_of(tiny_model, page_size=size):
        pytest.skip("no compiled kernels here: all pages are read alike")
    found = [m for m in caplog.messages if m.startswith(f"--page-size {size} is slow: ")]
    assert bool(found) == is_slow
    assert all(m.endswith("these sizes are fast: 16, 32, 64, 128, 256") for m in found)


def test_activations_have_the_number_type_that_was_named(tiny_model: Path) -> None:
    with engine(tiny_model, dtype="bfloat16") as it:
        facts = it.get_server_info()
        answer = it.generate(input_ids=PROMPT, sampling_params=EIGHT)
    assert facts["dtype"] == "bfloat16"
    assert "activations are torch.bfloat16" in facts["facts"]["kernels"]
    assert len(answer["output_ids"]) == 8
    assert "activations are" not in kernels_of(tiny_model)
    with pytest.raises(BanyanError, match="no kernel of a CPU computes on such activations"):
        kernels_of(tiny_model, dtype="half")


def test_no_higher_instructions_are_used_than_allowed(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("banyan.ops.cpu")  # itself: what holds its parents may be set anew
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "propagate", False)
    with caplog.at_level(logging.INFO, log.name):
        kernels_of(tiny_model, cpu_isa="base")
    [built] = [line for line in caplog.messages if line.startswith("compiled CPU kernels: ")]
    assert built.startswith("compiled CPU kernels: base,")


def test_the_compiler_that_is_named_goes_first(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing built yet, and no other compiler, its failure is the reason that is reported."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("banyan.ops.cpu.build.shutil.which", lambda name: None)
    monkeypatch.setattr("banyan.ops.cpu.build.importlib.util.find_spec", lambda name: None)
    assert "my-c++: " in kernels_of(tiny_model, cpu_compiler="my-c++")


def test_half_precision_halves_the_cache(tiny_model: Path) -> None:
    def cache_bytes(kind: str) -> int:
        with engine(tiny_model, kv_cache_dtype=kind) as it:
            return it.get_server_info()["facts"]["memory"]["cache_bytes"]

    half = cache_bytes("fp16")
    assert 2 * half == cache_bytes("fp32")
    # A head of 16 numbers: 32 bytes as halves, 16 and a scale of 4 as bytes.
    assert cache_bytes("int8") * 32 == half * 20
    assert cache_bytes("fp8_e4m3") * 2 == cache_bytes("fp8_e5m2") * 2 == half


def prompt_scores(model: Path, **flags: object) -> np.ndarray:
    with engine(model, **flags) as it:
        asked = {"temperature": 0, "max_new_tokens": 1}
        answer = it.generate(
            input_ids=PROMPT, sampling_params=asked, return_logprob=True, logprob_start_len=0
        )
    return np.array([score for score, *_ in answer["meta_info"]["input_token_logprobs"][1:]])


def test_keys_and_values_of_8_bits_are_kept_in_units_of_the_scales_of_a_file(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A unit that all numbers are small against leaves nothing of them."""
    layers = json.loads((tiny_model / "config.json").read_text())["num_hidden_layers"]
    file = tmp_path / "scales.json"

    def scores(kind: str, scale: float = 0.0) -> np.ndarray:
        of_rank = {str(layer): scale for layer in range(layers)}
        kept = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": of_rank}}
        file.write_text(json.dumps({"kv_cache": kept}))
        flags = {"quantization_param_path": str(file)} if scale else {}
        return prompt_scores(tiny_model, cpu_activations="fp32", kv_cache_dtype=kind, **flags)

    exact = scores("fp32")
    plain, fine, lost = (np.abs(scores("fp8_e4m3", s) - exact) for s in (0.0, 0.03, 1e6))
    assert min(plain.mean(), fine.mean()) > 0
    assert max(plain.mean(), fine.mean()) < lost.mean() / 4


def test_float_weights_are_rounded_at_load(tiny_model: Path) -> None:
    """Coarser rounding moves the scores further; exact activations read the same weights."""
    plain = prompt_scores(tiny_model, cpu_activations="fp32")
    eight, four = (
        np.abs(prompt_scores(tiny_model, cpu_activations="fp32", quantization=name) - plain)
        for name in ("q8_0", "q4_0")
    )
    rounded = np.abs(prompt_scores(tiny_model, quantization="int8") - plain)
    assert 0 < eight.mean() < four.mean() / 4
    assert eight.mean() < rounded.mean() < four.mean()


def test_weights_are_rounded_as_torchao_rounds_them(tiny_model: Path) -> None:
    """Four bits move the scores further than eight."""
    plain = prompt_scores(tiny_model, cpu_activations="fp32")
    eight, four = (
        np.abs(prompt_scores(tiny_model, cpu_activations="fp32", torchao_config=name) - plain)
        for name in ("int8wo", "int4wo-32")
    )
    assert 0 < eight.mean() < four.mean() / 4


def test_a_device_or_kernel_that_is_not_here_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="--device must be one of"):
        engine(tiny_model, device="abacus")
    with pytest.raises(BanyanError, match="op rms_norm has no kernel 'x'"):
        engine(tiny_model, kernels='{"rms_norm": "x"}')
