"""Where models are looked for."""

from pathlib import Path

import pytest

from specgw import model_files
from specgw.errors import ConfigError
from specgw.model_files import resolve_model


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_bundled_model_is_found_by_its_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_TINY_MODELS", tmp_path)
    (tmp_path / "target").mkdir()

    assert resolve_model("tiny/target") == tmp_path / "target"


def test_the_refusal_of_a_short_name_lists_the_bundled_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_TINY_MODELS", tmp_path)
    (tmp_path / "draft").mkdir()
    (tmp_path / "target").mkdir()

    with pytest.raises(ConfigError, match="tiny/huge: the bundled models are draft, target"):
        resolve_model("tiny/huge")


@pytest.mark.parametrize("path", ["/no/such/model", "./no-such-model", "~/no-such-model"])
def test_a_path_to_nowhere_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="there is no such directory"):
        resolve_model(path)


@pytest.mark.parametrize("name", ["not a hub id", "a/b/c/d"])
def test_what_cannot_be_a_hub_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="neither a directory nor a model"):
        resolve_model(name)
