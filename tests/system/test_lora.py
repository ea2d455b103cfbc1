"""Adapters end to end: what they answer, in any company, and how they come and go."""

import contextlib
import json
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from banyan.sim.replay import check
from tests.support.lora import as_gguf, merge, write_adapter
from tests.system.serving import Server, run_to_end, serving, stream_events, wait_until

PROMPT = list(range(5, 45))
PARAMS = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
LONG = {**PARAMS, "max_new_tokens": 300}
ADAPTERS = {
    "a": {"seed": 1},
    "b": {
        "seed": 2,
        "rank": 3,
        "targets": ("q_proj", "v_proj", "down_proj"),
        "use_rslora": True,
        "rank_pattern": {"v_proj": 5},
        "alpha_pattern": {"down_proj": 11},
    },
    "c": {"seed": 3, "rank": 16, "targets": ("k_proj", "o_proj", "up_proj"), "dtype": np.float16},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model) -> dict[str, Path]:
    """Adapter -> its folder; "merged a" -> the checkpoint that it is merged into."""
    root = tmp_path_factory.mktemp("lora")
    found = {name: write_adapter(root / name, **facts) for name, facts in ADAPTERS.items()}
    return found | {
        f"merged {name}": merge(tiny_model, folder, root / f"merged-{name}")
        for name, folder in found.items()
    }


def engine(model: Path, **flags: object) -> Engine:
    own = {"threads": 1, "max_total_tokens": 8192, **flags}
    return Engine(str(model), engine_mode="inprocess", **own)


def named(folders, *names: str) -> list[str]:
    return [f"{name}={folders[name]}" for name in names]


def output(engine: Engine, adapter: str | None, prompt=PROMPT, **fields) -> list[int]:
    return engine.generate(input_ids=prompt, sampling_params=PARAMS, lora_path=adapter, **fields)[
        "output_ids"
    ]


@pytest.fixture(scope="module")
def expected(folders, tiny_model) -> dict[str | None, list[int]]:
    """What the base says, and each checkpoint that an adapter is merged into."""
    models = {None: tiny_model, **{name: folders[f"merged {name}"] for name in ADAPTERS}}
    found = {}
    for name, model in models.items():
        with engine(model) as merged:
            answer = merged.generate(input_ids=PROMPT, sampling_params=PARAMS)
            found[name] = answer["output_ids"]
    assert len({tuple(ids) for ids in found.values()}) == 4
    return found


def test_torch_applies_adapters_when_it_is_named(folders, tiny_model, expected) -> None:
    """And no step is recorded: a recording would keep the adapters of its first run."""
    for backend in ("torch_native", "triton"):
        with engine(tiny_model, lora_paths=named(folders, "a", "b"), lora_backend=backend) as it:
            assert [output(it, name) for name in ("a", "b", None)] == [
                expected[name] for name in ("a", "b", None)
            ]
            facts = it.get_server_info()["facts"]
        lines = str(facts["kernels"]).splitlines()
        if backend == "torch_native":
            assert any(line.startswith("reference") and " adapt " in f"{line} " for line in lines)
            assert facts["steps"] == "eager"


def test_each_adapter_answers_as_weights_that_it_is_merged_into(
    folders, tiny_model, expected
) -> None:
    """Alone, again from the cache, beside the others, by chunks, and by its path."""
    flags = {"lora_paths": named(folders, *ADAPTERS), "chunked_prefill_size": 16}
    with engine(tiny_model, **flags) as served:
        assert served.get_server_info()["facts"]["steps"] == "recorded"
        for name, ids in expected.items():
            assert output(served, name) == ids
        again = served.generate(input_ids=PROMPT, sampling_params=PARAMS, lora_path="a")
        assert (
            again["output_ids"] == expected["a"]
            and again["meta_info"]["cached_tokens"] == len(PROMPT) - 1
        )
        served.flush_cache()
        company = ["a", None, "b", "c", "a", "b", None, str(folders["c"])]
        answers = served.generate(input_ids=[PROMPT] * 8, sampling_params=PARAMS, lora_path=company)
        names = [*company[:-1], "c"]
        assert [a["output_ids"] for a in answers] == [expected[name] for name in names]


def scores(engine: Engine, adapter: str | None, prompt=PROMPT) -> list[float]:
    fields = {"return_logprob": True, "logprob_start_len": 0}
    answer = engine.generate(input_ids=prompt, sampling_params=PARAMS, lora_path=adapter, **fields)
    meta = answer["meta_info"]
    both = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    return [logprob for logprob, *_ in both]


@pytest.mark.parametrize("flags", [{}, {"disable_cuda_graph": True}], ids=["recorded", "eager"])
def test_numbers_are_the_same_bits_alone_in_a_batch_and_in_chunks(
    folders, tiny_model, flags
) -> None:
    paths = named(folders, *ADAPTERS)
    with engine(tiny_model, lora_paths=paths, **flags) as whole:
        alone = {name: scores(whole, name) for name in (*ADAPTERS, None)}
        with ThreadPoolExecutor(8) as pool:
            company = [*ADAPTERS, None] * 2
            together = list(pool.map(lambda name: scores(whole, name), company))
        assert together == [alone[name] for name in company]
    with engine(tiny_model, lora_paths=paths, chunked_prefill_size=7, **flags) as cut:
        assert {name: scores(cut, name) for name in alone} == alone


def test_speculation_ranks_and_rounded_bases_keep_the_answers(folders, tiny_model) -> None:
    """Each against the same engine without: drafts change nothing, ranks as little as ever."""
    paths = named(folders, *ADAPTERS)
    again = PROMPT * 3
    with engine(tiny_model, lora_paths=paths) as plain:
        expected = {name: output(plain, name, again) for name in (*ADAPTERS, None)}
    with engine(tiny_model, lora_paths=paths, speculative_algorithm="NGRAM") as drafting:
        for _ in range(2):
            assert {name: output(drafting, name, again) for name in expected} == expected
        assert drafting.stats().verify_rows > 0
    with engine(tiny_model, lora_paths=paths, quantization="q8_0") as rounded:
        alone = {name: output(rounded, name) for name in (*ADAPTERS, None)}
        answers = rounded.generate(
            input_ids=[PROMPT] * 4, sampling_params=PARAMS, lora_path=list(alone)
        )
        assert [a["output_ids"] for a in answers] == list(alone.values())
        assert len({tuple(ids) for ids in alone.values()}) == 4


@pytest.mark.parametrize("bound", [{"max_loaded_loras": 2}, {"lora_memory_gib": 0.0045}])
def test_adapters_make_room_come_back_and_leave(bound, folders, tiny_model, expected) -> None:
    flags = {"enable_lora": True, "max_lora_rank": 16, "max_loras_per_batch": 2, **bound}
    with engine(tiny_model, **flags) as served:
        for name in ADAPTERS:
            served.load_lora_adapter(name, str(folders[name]))
        for name in (*ADAPTERS, *ADAPTERS, None):
            assert output(served, name) == expected[name]
        company = [*ADAPTERS, None] * 4
        answers = served.generate(
            input_ids=[PROMPT] * 16, sampling_params=PARAMS, lora_path=company
        )
        assert [a["output_ids"] for a in answers] == [expected[name] for name in company]
        served.load_lora_adapter("file", str(as_gguf(folders["a"], folders["a"] / "a.gguf")))
        assert output(served, "file") == expected["a"]
        served.unload_lora_adapter("file")
        served.unload_lora_adapter("b")
        with pytest.raises(BanyanError, match="'b' is not loaded. There are: a, c"):
            output(served, "b")
        with pytest.raises(BanyanError, match="already"):
            served.load_lora_adapter("c", str(folders["c"]))
        with pytest.raises(BanyanError, match="not a folder"):
            served.load_lora_adapter("d", "/nowhere")
        assert output(served, "a") == expected["a"]
        stats = served.stats()
        assert stats.adapters == 2
        assert 2 << 20 < stats.adapter_bytes <= 0.0045 * (1 << 30)


def test_adapters_that_take_more_memory_than_they_may_are_refused_with_the_numbers(
    folders, tiny_model
) -> None:
    paths = named(folders, *ADAPTERS)
    few = {"lora_memory_gib": 0.0045}
    why = (
        r"the 3 adapters of --lora-paths take 6\.\d MiB of memory on a rank, and adapters have 4.6"
    )
    with pytest.raises(BanyanError, match=why), engine(tiny_model, lora_paths=paths, **few):
        pass
    less = {"enable_lora": True, "max_lora_rank": 16, "lora_memory_gib": 0.001}
    with engine(tiny_model, **less) as served:
        with pytest.raises(BanyanError, match=r"takes 2\.\d MiB of memory, and at most 1.0 MiB"):
            served.load_lora_adapter("a", str(folders["a"]))
        assert served.get_server_info()["facts"]["adapters"]["max_bytes"] == (1 << 30) // 1000


def test_a_changed_folder_is_not_taken_for_the_adapter_that_was_named(
    folders, tiny_model, tmp_path, expected
) -> None:
    mine = Path(shutil.copytree(folders["a"], tmp_path / "mine"))
    flags = {"max_lora_rank": 16, "max_loaded_loras": 1, "max_loras_per_batch": 1}
    with engine(tiny_model, lora_paths=[f"mine={mine}"], **flags) as served:
        assert output(served, "mine") == expected["a"]
        served.load_lora_adapter("b", str(folders["b"]))  # takes its place
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(folders["c"] / name, mine / name)
        with pytest.raises(BanyanError, match="not what it was when it was named"):
            output(served, "mine")
        assert output(served, "b") == expected["b"]
        served.unload_lora_adapter("mine")
        served.load_lora_adapter("mine", str(mine))
        assert output(served, "mine") == expected["c"]


KINDS = {
    "ends": {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "r": 5},
    "saved": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "dora": {"target_modules": "all-linear", "use_dora": True, "r": 3},
    "tokens": {
        "target_modules": ["k_proj"],
        "trainable_token_indices": {"embed_tokens": [300, 7, 20], "lm_head": [9, 350]},
    },
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory, tiny_model) -> dict[str, Path]:
    """As `folders`, of adapters that change embedding, head and whole rows; merged by PEFT."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    root, found = tmp_path_factory.mktemp("wide"), {}
    for name, facts in KINDS.items():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
        config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **facts)
        adapted = peft.get_peft_model(model, config)
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "magnitude" in key:
                    parameter.mul_(torch.rand_like(parameter) + 0.5)
                elif any(part in key for part in ("lora_", "modules_to_save", "tokens_delta")):
                    parameter.copy_(torch.randn_like(parameter) * 0.3)
        adapted.save_pretrained(root / name)
        found[name] = root / name
        merged = Path(shutil.copytree(tiny_model, root / f"merged-{name}"))
        weights = adapted.merge_and_unload().state_dict()
        weights = {key: value.contiguous() for key, value in weights.items()}
        save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
        found[f"merged {name}"] = merged
    return found


def test_adapters_of_embedding_head_and_whole_rows_answer_as_peft_merges_them(
    wide, tiny_model
) -> None:
    exact = {"cpu_activations": "fp32"}
    expected, reported = {}, {}
    for name, model in {None: tiny_model, **{k: wide[f"merged {k}"] for k in KINDS}}.items():
        with engine(model, **exact) as merged:
            expected[name], reported[name] = output(merged, None), scores(merged, None)
    assert len({tuple(ids) for ids in expected.values()}) == 5
    paths = [f"{name}={wide[name]}" for name in KINDS]
    with engine(tiny_model, lora_paths=paths, **exact) as served:
        assert served.get_server_info()["facts"]["steps"] == "recorded"
        alone = {name: scores(served, name) for name in expected}
        for name, ids in expected.items():
            assert output(served, name) == ids
            np.testing.assert_allclose(alone[name], reported[name], atol=2e-3)
        with ThreadPoolExecutor(8) as pool:
            company = [*expected] * 2
            together = list(pool.map(lambda name: scores(served, name), company))
        assert together == [alone[name] for name in company]
        taken, why = served.update_weights_from_disk(str(tiny_model))[:2]
        assert not taken and "cannot be updated while DoRA adapters are served" in why
    some = {"chunked_prefill_size": 7, "num_continuous_decode_steps": 4}
    with engine(tiny_model, lora_paths=paths, **exact, **some) as cut:
        assert {name: scores(cut, name) for name in alone} == alone
        assert {name: output(cut, name) for name in expected} == expected
    with engine(tiny_model, lora_paths=paths, disable_cuda_graph=True, **exact) as called:
        assert {name: output(called, name) for name in expected} == expected
    flags = {"threads": 1, "max_total_tokens": 4096, "tp_size": 2, **exact}
    with Engine(str(tiny_model), lora_paths=paths, **flags) as shared:
        assert {name: output(shared, name) for name in expected} == expected


def test_what_there_is_no_room_for_is_refused_by_name(folders, wide, tiny_model) -> None:
    with engine(tiny_model, enable_lora=True, max_lora_rank=16) as served:
        with pytest.raises(
            BanyanError, match=r"\(DoRA\), and the server was started without memory"
        ):
            served.load_lora_adapter("dora", str(wide["dora"]))
        with pytest.raises(BanyanError, match="--lora-target-modules all lm_head"):
            served.load_lora_adapter("ends", str(wide["ends"]))
        served.load_lora_adapter("a", str(folders["a"]))


def test_without_the_flag_no_adapter_is_taken(folders, tiny_model, expected) -> None:
    with engine(tiny_model) as plain:
        with pytest.raises(BanyanError, match="this server has no adapters"):
            output(plain, "a")
        with pytest.raises(BanyanError, match="start with --enable-lora"):
            plain.load_lora_adapter("a", str(folders["a"]))
        assert output(plain, None) == expected[None]
    with engine(tiny_model, enable_lora=True, max_lora_rank=8) as served:
        served.load_lora_adapter("a", str(folders["a"]))
        assert output(served, "a") == expected["a"]


@pytest.fixture(scope="module")
def site(folders, tiny_model, tmp_path_factory):
    """A server of two ranks with two adapters, which records a journal."""
    root = tmp_path_factory.mktemp("site")
    flags = ("--model-path", str(tiny_model), "--served-model-name", "base", "--threads", "1")
    flags += (
        "--enable-metrics",
        "--max-total-tokens",
        "16384",
        "--tp-size",
        "2",
        "--journal",
        str(root / "journal"),
    )
    flags += ("--max-lora-rank", "16", "--lora-paths", *named(folders, "a", "b"))
    with serving(root / "server.log", *flags) as server:
        yield server, root / "journal"


def ids_of(server: Server, adapter: str | None) -> list[int]:
    return server.generate(input_ids=PROMPT, sampling_params=PARAMS, lora_path=adapter)[
        "output_ids"
    ]


def batch_of(server: Server, bodies: list[dict[str, object]]) -> list[str]:
    """What the lines of a batch are answered with."""
    url = "/v1/chat/completions"
    lines = [
        json.dumps({"custom_id": str(at), "method": "POST", "url": url, "body": body})
        for at, body in enumerate(bodies)
    ]
    file = server.http.post(
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("in.jsonl", "\n".join(lines).encode(), "application/jsonl")},
    ).json()
    asked = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
    batch = server.http.post("/v1/batches", json=asked).json()["id"]

    def state() -> dict[str, object]:
        return server.http.get(f"/v1/batches/{batch}").json()

    wait_until(lambda: state()["status"] in ("completed", "failed"), 60, "the batch to end")
    out = server.http.get(f"/v1/files/{state()['output_file_id']}/content").text
    found = {int(line["custom_id"]): line for line in map(json.loads, out.splitlines())}
    return [
        found[at]["response"]["body"]["choices"][0]["message"]["content"]
        for at in range(len(bodies))
    ]


def test_two_ranks_serve_every_route_and_their_journal_replays(site, folders, expected) -> None:
    server, journal = site
    assert {name: ids_of(server, name) for name in ("a", "b", None)} == {
        name: expected[name] for name in ("a", "b", None)
    }
    body = {"input_ids": PROMPT, "sampling_params": PARAMS, "lora_path": ["a"]}
    assert server.http.post("/generate", json=body).status_code == 400
    unknown = server.http.post("/generate", json={**body, "lora_path": "x"})
    assert unknown.status_code == 400 and "There are: a, b." in unknown.text
    path = server.http.post("/generate", json={**body, "lora_path": str(folders["c"])})
    assert path.status_code == 400 and "is not loaded" in path.text

    def completion(**fields: object) -> str:
        answer = server.http.post(
            "/v1/completions",
            json={
                "prompt": PROMPT,
                "max_tokens": 24,
                "temperature": 0,
                "ignore_eos": True,
                **fields,
            },
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == fields["model"]
        return answer.json()["choices"][0]["text"]

    reported = {m: completion(model=m) for m in ("base", "a", "base:a", "b")}
    assert reported["a"] == reported["base:a"] and len(set(reported.values())) == 3
    assert completion(model="base", lora_path="a") == reported["a"]
    for model in ("base:x", "other:a"):
        answer = server.http.post("/v1/completions", json={"model": model, "prompt": "x"})
        assert answer.status_code == 404, answer.text

    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}

    def said(path: str, model: str, **more: object) -> str:
        answer = server.http.post(path, json={**chat, "model": model, **more})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        if "choices" in found:
            return found["choices"][0]["message"]["content"]
        return found["message"]["content"] if "message" in found else found["content"][0]["text"]

    spoken = {model: said("/v1/chat/completions", model) for model in ("base", "a", "base:b")}
    assert len(set(spoken.values())) == 3
    for model, text in spoken.items():
        assert said("/v1/messages", model) == text
        options = {"options": {"num_predict": 12, "temperature": 0}, "stream": False}
        assert said("/api/chat", model, **options) == text
    asked = {"query": PROMPT[:20], "items": [PROMPT[20:]] * 3, "label_token_ids": [7, 300]}
    several = server.http.post("/v1/score", json={**asked, "lora_path": ["a", None, "b"]}).json()
    for name, found in zip(("a", "base", "base:b"), several["scores"], strict=True):
        answer = server.http.post("/v1/score", json={**asked, "model": name}).json()
        assert answer["scores"] == [found] * 3 and answer["model"] == name
        one = {"max_new_tokens": 1, "temperature": 1}
        logprobs = server.generate(
            input_ids=PROMPT,
            sampling_params=one,
            return_logprob=True,
            token_ids_logprob=[7, 300],
            lora_path={"a": "a", "base": None, "base:b": "b"}[name],
        )["meta_info"]["output_token_ids_logprobs"][0]
        assert np.allclose(found, np.exp([p for p, *_ in logprobs]), rtol=1e-4)
    assert len({tuple(found) for found in several["scores"]}) == 3
    for path, more in (("/v1/score", asked), ("/v1/score", {**asked, "items": []})):
        answer = server.http.post(path, json={**more, "model": "base:x"})
        assert answer.status_code == 404 and "There are: a, b." in answer.text
    model_configs = server.http.get("/v1/models").json()["data"]
    assert [(c["id"], c["parent"]) for c in model_configs] == [
        ("base", None),
        ("a", "base"),
        ("b", "base"),
    ]
    assert server.http.get("/v1/models/b").json()["root"] == str(folders["b"])
    asked = {"model": "base:a", "input": "hi", "max_output_tokens": 12, "temperature": 0}
    responses = {m: server.http.post("/v1/responses", json={**asked, "model": m}) for m in spoken}
    assert {m: r.json()["output"][-1]["content"][0]["text"] for m, r in responses.items()} == spoken
    raw = {"prompt": "hi", "raw": True, "stream": False, "options": {"num_predict": 9}}
    prompts = {"prompt": "hi", "max_tokens": 9, "temperature": 0}
    for model in spoken:
        named = {**raw, "model": model, "options": {"num_predict": 9, "temperature": 0}}
        answer = server.http.post("/api/generate", json=named).json()["response"]
        plain = server.http.post("/v1/completions", json={**prompts, "model": model}).json()
        assert answer == plain["choices"][0]["text"]
    assert batch_of(server, [{**chat, "model": model} for model in spoken]) == [*spoken.values()]
    loads = server.http.get("/v1/loads?include=lora").json()["loads"][0]["lora"]
    assert loads["num_loaded"] == 2 and 4 << 20 <= loads["used_bytes"] < loads["max_bytes"]
    metrics = server.http.get("/metrics").text.splitlines()
    (reported,) = [line for line in metrics if line.startswith("sglang:adapter_used_bytes{")]
    assert float(reported.split()[-1]) == loads["used_bytes"]
    tags = server.http.get("/api/tags").json()["models"]
    assert [tag["name"] for tag in tags] == ["base", "a", "b"]
    report = check(str(journal))
    assert report.ok and report.plans > 10, report


def test_an_adapter_comes_and_leaves_under_load_and_a_new_engine_has_it_too(
    site, folders, expected
) -> None:
    server, _ = site
    come = {"lora_name": "c", "lora_path": str(folders["c"])}
    refused = server.http.post("/load_lora_adapter", json={**come, "lora_path": "/nowhere"})
    assert refused.status_code == 400 and "not a folder" in refused.json()["error_message"]
    stop, wrong = threading.Event(), []

    def keep_asking(name: str | None) -> None:
        while not stop.is_set():
            if ids_of(server, name) != expected[name]:
                wrong.append(name)

    with ThreadPoolExecutor(4) as pool, contextlib.ExitStack() as ending:
        ending.callback(stop.set)
        workers = [pool.submit(keep_asking, name) for name in ("a", "b", None)]
        loaded = server.http.post("/load_lora_adapter", json=come)
        assert loaded.status_code == 200 and set(loaded.json()["loaded_adapters"]) == {*"abc"}
        assert ids_of(server, "c") == expected["c"]
        body = {"input_ids": PROMPT, "sampling_params": LONG, "lora_path": "c"}
        with server.http.stream("POST", "/generate", json={**body, "stream": True}) as running:
            events = stream_events(running)
            next(events)
            name = {"lora_name": "c"}
            leaving = pool.submit(server.http.post, "/unload_lora_adapter", json=name)
            assert len(list(events)[-1]["output_ids"]) == 300
        assert leaving.result().status_code == 200, leaving.result().text
        gone = server.http.post("/generate", json=body)
        assert gone.status_code == 400 and "There are: a, b." in gone.text
        prompt = {"model": "c", "prompt": "hi", "max_tokens": 1}
        gone = server.http.post("/v1/completions", json=prompt)
        assert gone.status_code == 404 and "There are: a, b." in gone.text
        stop.set()
        assert [worker.result() for worker in workers] == [None] * 3 and not wrong
    assert server.http.post("/load_lora_adapter", json=come).status_code == 200
    assert server.http.post("/unload_lora_adapter", json={"lora_name": "b"}).status_code == 200
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_until(lambda: server.http.get("/readyz").status_code == 503, 60, "the loss to be seen")
    wait_until(lambda: server.http.get("/readyz").status_code == 200, 60, "the next engine")
    for name in ("a", "c", None):
        assert ids_of(server, name) == expected[name]
    assert [c["id"] for c in server.http.get("/v1/models").json()["data"]] == ["base", "a", "c"]
    assert server.stats()["leaked"] == 0


def test_a_start_with_an_adapter_that_does_not_fit_says_why(tiny_model, tmp_path) -> None:
    folder = write_adapter(tmp_path / "a", 1)
    model = ("--model-path", str(tiny_model), "--served-model-name", "base")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    log = tmp_path / "log"
    code, text, _ = run_to_end(log, *model, "--lora-paths", f"a={folder}", timeout_s=60)
    assert code == 2 and "never opened" in text and "Traceback" not in text
