"""What lm-eval measures of the server: tasks from files here, without a network."""

import json
import os
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp())
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(FOLDER / "hf")}
os.environ["TQDM_DISABLE"] = "1"

import lm_eval  # noqa: E402  (reads the variables when it is imported)
from facts import KEY, MODEL, URL, Facts  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

os.environ["OPENAI_API_KEY"] = KEY
facts = Facts()

CHOICES = [
    {"text": "The capital of France is", "choices": ["Paris", "Rome", "Oslo"], "label": 0},
    {"text": "Two and two make", "choices": ["nine", "four", "a house"], "label": 1},
    {"text": "Water freezes below", "choices": ["zero", "the table", "Monday"], "label": 0},
]
ASKED = [
    {"text": "The sun rises in the", "answer": "east"},
    {"text": "Once upon a", "answer": "time"},
]
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 12, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}


def task(name: str) -> dict[str, object]:
    """A task whose documents are in a file of this machine."""
    file = FOLDER / f"{name}.jsonl"
    documents = CHOICES if name == "choices" else ASKED
    file.write_text("".join(json.dumps(one) + "\n" for one in documents))
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "num_fewshot": 0,
        **TASKS[name],
    }


def evaluated(name: str, kind: str, route: str, **more: object) -> dict[str, object]:
    arguments = {
        "model": MODEL,
        "base_url": f"{URL}/{route}",
        "num_concurrent": 2,
        "max_retries": 1,
    }
    if kind == "local-completions":
        arguments |= {"tokenizer_backend": "huggingface", "tokenizer": os.environ["TOKENIZER"]}
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=[task(name)],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        **more,
    )
    samples = found["samples"][name]
    return {
        "results": {k: v for k, v in found["results"][name].items() if isinstance(v, float | int)},
        "samples": [
            {
                "asked": [a for a in one["arguments"].values()]
                if isinstance(one["arguments"], dict)
                else one["arguments"],
                "got": one["resps"],
                "target": one["target"],
            }
            for one in sorted(samples, key=lambda one: one["doc_id"])
        ],
    }


@facts.fact
def choices():
    return evaluated("choices", "local-completions", "completions")


@facts.fact
def rolling():
    return evaluated("rolling", "local-completions", "completions")


@facts.fact
def written():
    return evaluated("written", "local-completions", "completions")


@facts.fact
def chat():
    return evaluated(
        "written", "local-chat-completions", "chat/completions", apply_chat_template=True
    )


facts.report()
