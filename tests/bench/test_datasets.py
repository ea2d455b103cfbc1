"""Data sets: lengths, sharing, determinism, and files of another form."""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from banyan.base.errors import ConfigError
from banyan.bench.datasets import DATASETS, BareIds, PlainWords, Prompt, load_prompts
from banyan.bench.options import DataOptions

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
IDS = BareIds(5000)


def ids_of(prompt: Prompt) -> list[int]:
    assert prompt.ids is not None
    return prompt.ids


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def mooncake(tmp_path: Path, rows: list[tuple[int, int, int, list[int]]]) -> DataOptions:
    path = tmp_path / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    return DataOptions(dataset_name="mooncake", dataset_path=str(path))


@pytest.mark.parametrize("name", ["random", "random-ids", "generated-shared-prefix"])
def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(name: str) -> None:
    options = DataOptions(dataset_name=name, num_prompts=5, gsp_num_groups=2)
    assert load_prompts(options, IDS) == load_prompts(options, IDS)
    assert load_prompts(replace(options, seed=7), IDS) != load_prompts(options, IDS)


def test_pictures_are_new_ones_of_the_size_that_was_asked_for() -> None:
    options = DataOptions(
        **{"dataset_name": "image", "num_prompts": 4, "image_count": 3, "random_image_count": True},
        image_resolution="24x40",
    )
    for more in ({}, {"image_format": "png", "image_content": "blank"}):
        prompts = load_prompts(replace(options, **more), PlainWords())
        assert {len(p.images) for p in prompts} <= {1, 2, 3} and all(p.text for p in prompts)
        urls = [url for p in prompts for url in p.images]
        assert len(set(urls)) == len(urls)
        picture = Image.open(io.BytesIO(base64.b64decode(urls[0].partition(",")[2])))
        assert picture.size == (40, 24)
        assert picture.format == urls[0][11:].partition(";")[0].upper()


@pytest.mark.parametrize("size", ["0x5", "5", "8k", "1x99999999999", "-1x3"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    options = DataOptions(dataset_name="image", num_prompts=1, image_resolution=size)
    with pytest.raises(ConfigError, match="--image-resolution"):
        load_prompts(options, PlainWords())


def test_random_lengths_fill_the_range_that_was_asked_for() -> None:
    options = DataOptions(
        num_prompts=300, random_input_len=20, random_output_len=10, random_range_ratio=0.5
    )
    prompts = load_prompts(options, IDS)
    assert {p.length for p in prompts} == set(range(10, 21))
    assert {p.output_len for p in prompts} == set(range(5, 11))
    assert all(len(ids_of(p)) == p.length for p in prompts)


def test_a_range_ratio_of_one_makes_all_lengths_equal() -> None:
    options = DataOptions(
        num_prompts=9, random_input_len=20, random_output_len=10, random_range_ratio=1.0
    )
    assert {(p.length, p.output_len) for p in load_prompts(options, IDS)} == {(20, 10)}


def test_plain_words_need_no_tokenizer_and_one_word_is_one_token() -> None:
    options = DataOptions(num_prompts=3, random_input_len=12, random_range_ratio=1.0)
    for prompt in load_prompts(options, PlainWords()):
        assert prompt.ids is None
        assert len(prompt.text.split()) == prompt.length == 12


def test_prompts_of_one_group_share_their_system_prompt_and_nothing_else() -> None:
    options = DataOptions(
        dataset_name="generated-shared-prefix",
        gsp_num_groups=3,
        gsp_prompts_per_group=4,
        gsp_system_prompt_len=50,
        gsp_question_len=20,
        gsp_output_len=5,
        gsp_ordered=True,
    )
    prompts = load_prompts(options, BareIds(1 << 30))
    assert [(p.length, p.output_len) for p in prompts] == [(70, 5)] * 12
    for i, one in enumerate(prompts):
        for j, other in enumerate(prompts[:i]):
            shared = 50 if i // 4 == j // 4 else 0
            assert common(ids_of(one), ids_of(other)) == shared


def test_equal_hash_ids_become_equal_blocks_of_the_length_asked_for(tmp_path: Path) -> None:
    rows = [(0, 1500, 100, [1, 2, 3]), (2000, 1024, 50, [1, 2]), (3500, 900, 8, [1, 9])]
    options = replace(mooncake(tmp_path, rows), trace_block_len=32, trace_output_scale=0.1)
    first, second, third = load_prompts(options, BareIds(1 << 30))
    assert [p.length for p in (first, second, third)] == [94, 64, 56]
    assert [p.output_len for p in (first, second, third)] == [10, 5, 1]
    assert [p.arrival_s for p in (first, second, third)] == [0.0, 2.0, 3.5]
    assert common(ids_of(first), ids_of(second)) == 64
    assert common(ids_of(first), ids_of(third)) == 32


def test_an_azure_trace_gives_lengths_and_times(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    options = DataOptions(dataset_name="azure", dataset_path=str(path), trace_block_len=256)
    first, second = load_prompts(options, IDS)
    assert (first.length, first.output_len, first.arrival_s) == (187, 44, 0.0)
    assert (second.length, second.output_len) == (198, 109)
    assert second.arrival_s == pytest.approx(4.314579)


def test_sharegpt_takes_the_first_two_turns_and_leaves_out_what_is_too_short_or_long(
    tmp_path: Path,
) -> None:
    def talk(question: str, answer: str) -> dict:
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        return {"conversations": [*turns, {"from": "human", "value": "more"}]}

    path = tmp_path / "sharegpt.json"
    good = talk("time year people way day", "man thing woman life child world")
    path.write_text(
        json.dumps(
            [good, talk("hi", "ho"), talk("word " * 90, "word " * 90), {"conversations": []}]
        )
    )
    options = DataOptions(
        dataset_name="sharegpt",
        dataset_path=str(path),
        sharegpt_context_len=100,
        prompt_suffix=" lot",
    )
    (prompt,) = load_prompts(options, PlainWords())
    assert prompt.text == "time year people way day lot"
    assert (prompt.length, prompt.output_len) == (6, 6)
    assert load_prompts(replace(options, sharegpt_output_len=9), PlainWords())[0].output_len == 9


def test_request_bodies_can_be_replayed_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "way day man"}], "max_tokens": 3}\n'
        '{"prompt": "thing woman"}\n'
    )
    options = DataOptions(dataset_name="openai", dataset_path=str(path), random_output_len=17)
    first, second = load_prompts(options, PlainWords())
    assert (first.text, first.output_len) == ("way day man", 3)
    assert (second.text, second.output_len) == ("thing woman", 17)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("sharegpt", '{"a": 1', "ShareGPT"),
        ("sharegpt", '[{"conversations": [{"x": 1}, {"x": 2}]}]', "ShareGPT"),
        ("mooncake", '{"timestamp": 0}', "Mooncake"),
        ("azure", "A,B\n1,2\n", "Azure"),
        ("openai", '{"text": "x"}', "no request"),
        ("sharegpt", "[]", "no prompts"),
    ],
)
def test_a_file_of_another_form_is_refused_by_name(
    tmp_path: Path, name: str, content: str, word: str
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ConfigError, match=word):
        load_prompts(DataOptions(dataset_name=name, dataset_path=str(path)), PlainWords())


def test_an_unknown_data_set_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="generated-shared-prefix"):
        load_prompts(DataOptions(dataset_name="mmlu"), IDS)


@pytest.mark.parametrize("name", ["sharegpt", "mooncake", "azure", "openai"])
def test_a_data_set_of_a_file_says_that_it_needs_one(name: str) -> None:
    assert name in DATASETS
    with pytest.raises(ConfigError, match="--dataset-path"):
        load_prompts(DataOptions(dataset_name=name), IDS)


@pytest.mark.skipif(not SHARED.exists(), reason="the public traces are not beside the repository")
def test_the_public_traces_load_and_share_prefixes() -> None:
    options = DataOptions(
        dataset_name="mooncake",
        dataset_path=str(SHARED / "mooncake_conversation.jsonl"),
        num_prompts=200,
        trace_block_len=16,
    )
    prompts = load_prompts(options, IDS)
    assert len(prompts) == 200
    assert common(ids_of(prompts[0]), ids_of(prompts[1])) == 16
    azure = replace(options, dataset_name="azure", dataset_path=str(SHARED / "azure_conv_2023.csv"))
    times = [p.arrival_s for p in load_prompts(azure, IDS)]
    assert times == sorted(times) and times[0] == 0.0
