"""Models that keep states draft as well: a state goes back behind drafts that do not stand, and no
answer changes."""

import os
import shutil
from pathlib import Path

import pytest

from tests.models.drafting import tiny_next
from tests.models.families import tiny
from tests.support.drafts import REPEATS, REQUESTS, answers, output_of, start
from tests.support.hidden_drafts import ahead, given_up

WHOLE = pytest.mark.skipif(os.environ.get("DRAFTS") != "all", reason="make test-drafts runs it")
SIZES = {"vocab_size": 512, "max_position_embeddings": 2048}
FEW = {"page_size": 16, "max_total_tokens": 512, "max_running_requests": 6}


def with_words(make, variant: str, folder: Path, words: Path) -> Path:
    make(variant, folder, **SIZES)
    for file in words.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"chunked_prefill_size": 16}, ("greedy", "drawn")),
        pytest.param({"page_size": 16}, tuple(REQUESTS), marks=WHOLE),
        pytest.param({"tp_size": 2}, tuple(REQUESTS), marks=WHOLE),
        pytest.param({"disable_cuda_graph": True}, ("greedy", "drawn", "schema"), marks=WHOLE),
        pytest.param({"disable_overlap_schedule": True}, tuple(REQUESTS), marks=WHOLE),
        pytest.param({"disable_radix_cache": True}, tuple(REQUESTS), marks=WHOLE),
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_layer_of_the_checkpoint_drafts_next_to_states(tiny_model, tmp_path, flags, names):
    model, correct = with_words(tiny_next, "qwen3 next", tmp_path, tiny_model), 0
    with start(model, is_drafting=False, **flags) as engine:
        right = {
            name: [output_of(each) for each in answers(engine, **REQUESTS[name])] for name in names
        }
    with ahead(model, **flags) as engine:
        for name in names:
            for _ in range(2):  # the second finds its prompt in the cache
                found = answers(engine, **REQUESTS[name])
                assert [output_of(each) for each in found] == right[name], name
                correct += sum(each["meta_info"]["spec_num_correct_drafts"] for each in found)
        assert correct > 10
        given_up(engine)


@pytest.mark.parametrize(
    "variant",
    [
        "lfm2",
        *(
            pytest.param(name, marks=WHOLE)
            for name in ("mamba2", "falcon h1", "jamba", "minimax", "kimi linear", "qwen3.5")
        ),
    ],
)
def test_states_of_all_kinds_go_back_though_requests_are_retracted(tiny_model, tmp_path, variant):
    model = with_words(tiny, variant, tmp_path, tiny_model)
    prompts = [f"{REPEATS} {i}" for i in range(8)]
    with start(model, is_drafting=False) as engine:
        right = [output_of(answers(engine, prompt=prompt)[0]) for prompt in prompts]
    with start(model, disable_adaptive_drafts=True, **FEW) as engine:
        proposed = 0
        for _ in range(2):  # what was answered once is drafted the next time
            found = answers(engine, prompt=prompts)
            assert [output_of(answer) for answer in found] == right
            proposed += sum(each["meta_info"]["spec_num_proposed_drafts"] for each in found)
            correct = sum(each["meta_info"]["spec_num_correct_drafts"] for each in found)
        assert proposed > correct > 10
        given_up(engine)
