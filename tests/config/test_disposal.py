"""Which files of weights may be deleted once they are loaded, and what goes with them."""

from dataclasses import replace
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.config.delete_checkpoint import ANY, OWN, Moment, check_deletion, delete_weight_files
from banyan.config.schema import Config, LoadConfig
from tests.support.configs import MODEL_CONFIG

ASKED = Config(model=LoadConfig("here", tokenizer_path="elsewhere", deletes=OWN))
AGREED = replace(ASKED, model=replace(ASKED.model, deletes=ANY))


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    """A file that a folder of the hub's cache links to."""
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "snapshot" / "config.json").write_text("{}")
    return tmp_path / "blob"


def model_config_of(blob: Path):
    return replace(MODEL_CONFIG, path=str(blob.parent / "snapshot"), format="safetensors")


def test_what_was_here_before_goes_only_when_somebody_agreed(blob: Path) -> None:
    began = Moment(blob.stat().st_ctime, Moment.now().machine_s)
    later = replace(began, wall_s=began.wall_s + 60)
    with pytest.raises(ConfigError, match="was here before this start, and there is no terminal"):
        check_deletion(ASKED, model_config_of(blob), later)
    check_deletion(AGREED, model_config_of(blob), later)
    check_deletion(ASKED, model_config_of(blob), began)


def test_a_clock_that_was_set_makes_nothing_new(blob: Path) -> None:
    now = Moment.now()
    set_forward = Moment(0.0, now.machine_s - 5)  # it said 1970 when the start began
    with pytest.raises(ConfigError, match="was here before this start"):
        check_deletion(ASKED, model_config_of(blob), set_forward)
    still_behind = Moment(blob.stat().st_ctime - 3600, now.machine_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "banyan.config.delete_checkpoint.time.time", lambda: blob.stat().st_ctime - 3599
        )
        with pytest.raises(ConfigError, match="was here before this start"):
            check_deletion(ASKED, model_config_of(blob), still_behind)


def test_a_link_goes_with_what_it_leads_to_and_nothing_else(blob: Path) -> None:
    delete_weight_files(AGREED, model_config_of(blob))
    assert not blob.exists()
    assert [path.name for path in (blob.parent / "snapshot").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (replace(AGREED, model=replace(AGREED.model, source="demo")), "installed package"),
        (replace(AGREED, model=replace(AGREED.model, tokenizer_path="")), "the tokenizer lies in"),
        (replace(AGREED, parallel=replace(AGREED.parallel, tp=2)), "one rank only"),
    ],
)
def test_what_others_need_is_never_deleted(config: Config, why: str, tmp_path: Path) -> None:
    model_config = replace(MODEL_CONFIG, path=str(tmp_path / "model.gguf"))
    (tmp_path / "model.gguf").write_bytes(b"weights")
    with pytest.raises(ConfigError, match=why):
        check_deletion(config, model_config, Moment(0.0, 0.0))


def test_nothing_goes_that_was_not_loaded_or_not_asked_for(blob: Path) -> None:
    delete_weight_files(
        replace(AGREED, model=replace(AGREED.model, load_format="dummy")), model_config_of(blob)
    )
    delete_weight_files(Config(), model_config_of(blob))
    assert blob.exists()
