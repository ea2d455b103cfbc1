"""/v1/completions: prompts of every form, echo, log-probabilities, best_of, streams."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from banyan.lora.adapter_files import AdapterPlace
from banyan.requests.request_spec import RequestSpec
from tests.server.fakes import Site, Step, steps
from tests.server.test_chat import events


@pytest.fixture
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(http: httpx.Client, **fields: object) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "ab", **fields})


def echo_prompt(request: RequestSpec) -> list[Step]:
    return steps(bytes(request.prompt[:0]).decode() + str(len(request.prompt)))


def test_a_text_prompt_is_continued(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="ab")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 5)


def test_sixteen_tokens_are_the_default(site: Site, http: httpx.Client) -> None:
    post(http)
    assert site.generator.asked[-1].sampling.max_new_tokens == 16


def test_token_ids_are_taken_as_they_are(site: Site, http: httpx.Client) -> None:
    assert post(http, prompt=[5, 6, 7]).status_code == 200
    assert site.generator.asked[-1].prompt == [5, 6, 7]


@pytest.mark.parametrize("prompt", [["a", "bcd"], [[1], [2, 3, 4]]])
def test_a_batch_answers_in_order_and_counts_each_prompt_once(
    site: Site, http: httpx.Client, prompt: list[object]
) -> None:
    site.generator.script = echo_prompt
    body = post(http, prompt=prompt, n=2).json()
    assert [c["text"] for c in body["choices"]] == ["1", "1", "3", "3"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 4


@pytest.fixture
def site_with_adapters() -> Iterator[Site]:
    with Site().serving() as site:
        site.state.adapters.is_enabled = True
        yield site


def test_each_prompt_of_a_list_may_name_its_own_adapter(site_with_adapters: Site) -> None:
    site, http = site_with_adapters, site_with_adapters.http
    for name in ("a", "b"):
        site.state.adapters.add(AdapterPlace(name, f"/{name}"))

    def named(**fields: object) -> list[str]:
        answer = post(http, prompt=["x", "y", "z"], **fields)
        assert answer.status_code == 200, answer.text
        return [request.message.adapter for request in site.generator.asked[-3:]]

    assert named() == [""] * 3
    assert named(lora_path="b") == ["b"] * 3
    assert named(lora_path=["b", None, "/a"]) == ["b", "", "a"]
    assert named(model="a", lora_path=[None, "a", ""]) == ["a"] * 3
    for wrong, text in (
        (["a"], "1 names for 3 prompts"),
        (["a"] * 4, "4 names for 3 prompts"),
        ([None, "c", None], "'c' is not loaded. There are: a, b."),
    ):
        answer = post(http, prompt=["x", "y", "z"], lora_path=wrong)
        assert answer.status_code == 400 and text in answer.text
    answer = post(http, prompt=["x", "y"], model="a", lora_path=["a", "b"])
    assert answer.status_code == 400 and "another one" in answer.text
    many = post(http, prompt=["x"] * 40_000, lora_path=["c"] * 40_000)
    assert many.status_code == 400 and "prompt" in many.text
    user = [{"role": "user", "content": "hi"}]
    chat = http.post("/v1/chat/completions", json={"messages": user, "lora_path": ["b"]})
    assert chat.status_code == 200 and site.generator.asked[-1].message.adapter == "b"


def test_special_texts_in_a_prompt_are_special(site: Site, http: httpx.Client) -> None:
    post(http, prompt="<|user|>a")
    assert sum(id >= 256 for id in site.generator.asked[-1].prompt) == 1


def test_echo_repeats_the_prompt_also_from_ids(site: Site, http: httpx.Client) -> None:
    ids = site.tokenizer.encode("ab")
    assert post(http, echo=True).json()["choices"][0]["text"] == "abHello"
    assert post(http, prompt=ids, echo=True).json()["choices"][0]["text"] == "abHello"


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="ab", echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == list("abHello")
    assert logprobs.token_logprobs[:2] == [None, -1.0]
    assert logprobs.text_offset == [-1] * 7
    assert logprobs.top_logprobs[2] == {"H": -0.25}


def test_logprobs_without_echo_score_the_output_only(http: httpx.Client) -> None:
    logprobs = post(http, logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("Hello")
    assert logprobs["top_logprobs"] == [None] * 5


def test_best_of_keeps_the_likeliest(site: Site, http: httpx.Client) -> None:
    body = post(http, best_of=3, n=1).json()
    assert len(site.generator.asked) == 3
    assert len(body["choices"]) == 1 and body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 15


def test_a_stream_concatenates_to_the_answer(http: httpx.Client) -> None:
    chunks = events(http, "/v1/completions", prompt="ab", messages=None, echo=True)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abHello"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "stop"]


def test_the_official_client_reads_the_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt=["a", "b"], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens == 10
    ends = [c.choices[0].index for c in chunks if c.choices and c.choices[0].finish_reason]
    assert sorted(ends) == [0, 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [261]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [0] * 1_000_000}, "prompt"),
        ({"prompt": ["a"] * 90_000}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 128}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2**31}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"best_of": "many"}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": -2}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_field_is_a_400_that_names_it(
    http: httpx.Client, fields: dict[str, object], param: str
) -> None:
    answer = post(http, **fields)
    assert answer.status_code == 400, answer.text[:500]
    if param != "prompt" or answer.json()["error"]["code"] != "context_length_exceeded":
        assert answer.json()["param"] == param


def test_parts_of_a_character_are_distinguished_in_log_probabilities(
    site: Site, http: httpx.Client
) -> None:
    site.generator.script = lambda _: steps("日本")
    body = {"prompt": "Hi", "logprobs": 2}
    found = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert found["tokens"][0] == r"bytes:\xe6" and len(set(found["tokens"])) > 3
    assert all(len(top) == 2 for top in found["top_logprobs"])
