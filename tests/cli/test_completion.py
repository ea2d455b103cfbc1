"""Completion scripts, run by the shells that are here."""

import shutil
import subprocess

import pytest

from banyan.base.errors import ConfigError
from banyan.cli.main import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(script: str, *words: str) -> set[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    code = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _banyan\n"
    code += 'echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes_verbs_flags_models_and_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    assert completed(text, "banyan", "ser") == {"serve"}
    assert completed(text, "banyan", "serve", "--hicache-s") >= {"--hicache-size"}
    assert completed(text, "banyan", "pull", "qwen3-0") == {"qwen3-0.6b"}
    assert completed(text, "banyan", "router", "--worker-u") == {"--worker-urls"}
    assert completed(text, "banyan", "bench", "through") == {"throughput"}
    assert completed(text, "banyan", "bench", "eval", "--agai") == {"--against", "--against-url"}
    assert completed(text, "banyan", "completion", "") == {"bash", "zsh", "fish"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_are_read_without_an_error(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(shell, capsys)
    assert "qwen3-0.6b" in text and "tp-size" in text
    if shutil.which(shell):
        subprocess.run([shell, "-n", "-c", text], check=True)


@pytest.mark.parametrize("words", [[], ["powershell"], ["bash", "zsh"]])
def test_another_shell_is_refused_with_the_choices(words: list[str]) -> None:
    from banyan.cli.completion import completion

    with pytest.raises(ConfigError, match="Choose: bash, zsh, fish"):
        completion(words)
