"""The tables, the search over layouts, and the commands that print them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model import parameter_counts
from megatron_webrl.placement.hardware import CARDS
from megatron_webrl.placement.memory_estimate import check_memory, estimate_memory
from megatron_webrl.placement.performance.prediction import WIDTH, predict
from megatron_webrl.placement.performance.search import search_layouts
from megatron_webrl.placement.prediction import EpisodeLengths
from tools import predict_step

CONFIGS = Path(__file__).parents[3] / "configs"
CLUSTERS = sorted(CONFIGS.glob("*node.yaml"))


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_the_prediction_of_each_cluster_is_plausible_and_narrow(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict_step.main(["--config-name", path.stem, "--json", str(tmp_path / "found.json")]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= WIDTH
    found = json.loads((tmp_path / "found.json").read_text())
    seconds = sum(found["training"]["parts"].values())
    mfu = found["training"]["operations"] / seconds / found["training"]["ranks"] / 989e12
    assert f"MFU {mfu:.1%}" in shown
    assert 0.03 < mfu < 0.55
    assert found["trainer_gib"] < 80


def test_placement_prints_the_same_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = str(CONFIGS / "8b_1node.yaml"), tmp_path / "placed.json"
    assert main(["placement", path, "--time", "--card", "H200", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "training, H200" in shown
    assert json.loads(file.read_text())["time"]["card"] == "H200"
    assert predict_step.main(["--config-name", path, "--card", "H200"]) == 0
    assert capsys.readouterr().out.strip() in shown


def test_what_cannot_be_predicted_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "8b_1node.yaml")
    for words, message in (
        (["placement", path, "--card", "H100"], "--card names the GPU of --time; add --time"),
        (["placement", path, "--time", "model.dtype=float32"], "model.dtype=float32 has no prediction"),
        (["placement", path, "--time", "model.path=somewhere"], "--time: model.path=somewhere is no folder"),
    ):
        assert main(words) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert message in line
    for words, message in (
        (["--config-name", "8b_1node", "--show", "3"], "--show counts the layouts of --search"),
        (["--config-name", "8b_1node", "--response-tokens", "20000"], "exceeds trainer.tokens_per_microbatch=16384"),
        (["--config-name", "quickstart"], "cluster.gpus_per_node=0"),
        (["--config-name", "8b_1node", "evaluation.only=true", "--search"], "a search needs a trainer"),
    ):
        assert predict_step.main(words) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert message in line


def test_engines_without_a_trainer_have_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_step.main(["--config-name", "8b_1node", "evaluation.only=true"]) == 0
    shown = capsys.readouterr().out
    assert "response tokens/s" in shown
    assert "MFU" not in shown


def test_the_search_finds_the_fastest_layout_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    config, card, lengths = parse_config(str(CONFIGS / "30b_a3b_32node.yaml"), []), CARDS["H100"], EpisodeLengths()
    description = parameter_counts.config_sections("30B-A3B")
    found = search_layouts(config, description, card, lengths)
    seconds = [layout.seconds for layout in found.layouts]
    assert seconds == sorted(seconds)
    assert 1 < len(seconds) < found.tried
    own = predict(config, description, card, lengths).training
    assert own is not None
    assert own.train_seconds + own.sync_seconds in seconds  # the configuration's own layout is among them
    for layout in found.layouts:
        trainer = layout.config.trainer
        assert trainer.tensor_parallel * trainer.pipeline_parallel * trainer.data_parallel == 128
        check_memory(layout.config, estimate_memory(layout.config, description))
    assert len({tuple(layout.settings.values()) for layout in found.layouts}) == len(found.layouts)
    assert config.trainer.tensor_parallel == 4  # the search leaves the configuration alone
    assert predict_step.main(["--config-name", "30b_a3b_32node", "--search", "--show", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{len(found.layouts)} of {found.tried} layouts fit; predicted, not measured" in lines
    assert len([line for line in lines if "%" in line]) == 2


def test_a_prediction_in_float32_or_without_gpus_is_refused() -> None:
    config = parse_config(str(CONFIGS / "8b_1node.yaml"), ["model.dtype=float32"])
    with pytest.raises(ConfigError, match="float32"):
        predict(config, parameter_counts.config_sections("8B"), CARDS["H100"], EpisodeLengths())
