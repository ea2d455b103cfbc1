"""Other engines' start lines as lines of this one."""

import shlex

import pytest

from banyan.base.errors import ConfigError
from banyan.cli.translate import LEFT_OUT, flags_of, read_line, translate
from banyan.config.cli import parse, value_of
from banyan.config.env import Environment
from banyan.config.flags.table import find, spellings


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "vllm serve a/b --max-model-len=8192 -tp 2 --port 9 --api-key k",
            "serve a/b --context-length 8192 --tp 2 --port 9 --api-key k",
        ),
        (
            "python3 -m vllm.entrypoints.openai.api_server --model a/b --enforce-eager",
            "serve --model-path a/b --disable-cuda-graph --port 8000",
        ),
        (
            "vllm serve a/b --lora_modules x=/x y=/y --enable-lora --task embed",
            "serve a/b --lora-paths x=/x y=/y --enable-lora --is-embedding --port 8000",
        ),
        (
            "vllm serve a/b -tp=4 --enable-expert-parallel",
            "serve a/b --tp 4 --ep-size 4 --port 8000",
        ),
        (
            "./build/bin/llama-server -m x.gguf -c 0 -fa --temp 0.5 --top-k 5",
            "serve --model-path x.gguf "
            """--preferred-sampling-params '{"temperature": 0.5, "top_k": 5}' --port 8080""",
        ),
        (
            "llama-server -hf a/b:Q4_K_M -ctk q8_0",
            "serve --model-path a/b --kv-cache-dtype int8 --port 8080",
        ),
        ("OLLAMA_HOST=http://0.0.0.0:77/ ollama serve", "serve --host 0.0.0.0 --port 77"),
        ("ollama run qwen3:0.6b 'Why is it blue?'", "run qwen3:0.6b 'Why is it blue?'"),
        (
            "docker run -p 1:80 image text-generation-launcher --model-id a/b --cuda-graphs 1,2",
            "serve --model-path a/b --cuda-graph-bs 1 2 --port 80",
        ),
        (
            "CUDA_VISIBLE_DEVICES=0 python -m sglang.launch_server --model-path M --tp 2",
            "serve --model-path M --tp 2",
        ),
        ("python -m sglang.srt.disaggregation.launch_lb --prefill P", "lb --prefill P"),
        ("vllm serve a/b \\\n --port 1", "serve a/b --port 1"),
    ],
)
def test_a_start_line_of_another_engine_becomes_one_of_this_engine(theirs: str, ours: str) -> None:
    verb, line = read_line(theirs)
    assert shlex.join([*verb.split(), *line.words]) == ours


def test_a_flag_without_a_counterpart_is_left_out_by_name(capsys: pytest.CaptureFixture) -> None:
    line = "vllm serve a/b --no-such-flag 3 --speculative-config '{}' --swap-space 4"
    assert translate([line]) == LEFT_OUT
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "banyan serve a/b --port 8000"
    assert "--no-such-flag 3" in text and "has no such flag" in text
    assert "use --speculative-algorithm" in text
    assert "nothing to do: retracted requests recompute" in text


def test_the_words_of_a_line_need_no_quotes(capsys: pytest.CaptureFixture) -> None:
    assert translate(["vllm", "serve", "a/b", "--max-model-len", "512"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("banyan serve a/b --context-length 512 --port 8000\n")
    assert "works on cpu" in text


def test_a_value_that_the_start_refuses_is_reported(capsys: pytest.CaptureFixture) -> None:
    assert translate(["vllm serve a/b --max-model-len many"]) == LEFT_OUT
    assert "--context-length must be" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["", "make coffee", "vllm chat", "vllm serve 'a", "x" * 70_000])
def test_a_line_that_starts_no_known_program_is_refused(line: str) -> None:
    with pytest.raises(ConfigError):
        translate([line])


def test_a_flag_without_its_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-model-len has no value"):
        read_line("vllm serve a/b --max-model-len")


@pytest.mark.parametrize("program", ["vllm", "llama-server", "ollama", "text-generation-launcher"])
def test_every_flag_in_the_table_becomes_flags_that_exist_here(program: str) -> None:
    for spelled, flag in flags_of(program).items():
        for word in flag.ours.split():
            assert not word.startswith("--") or word.removeprefix("--") in spellings(), spelled


def test_the_translated_line_is_one_that_the_parser_takes() -> None:
    _, line = read_line("vllm serve a/b --gpu-memory-utilization 0.5 --max-num-seqs 9 --seed 3")
    config = parse(line.words, Environment())
    assert value_of(config, find("max-running-requests", abbreviate=False)) == 9
