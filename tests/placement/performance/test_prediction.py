"""Cards, the search over layouts, and the commands that print predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
from megatron_webrl.model import parameter_counts
from megatron_webrl.placement.hardware import CARDS, find_card
from megatron_webrl.placement.memory_estimate import check_memory, estimate_memory
from megatron_webrl.placement.prediction import EpisodeLengths, predict, search_layouts

CONFIGS = Path(__file__).parents[3] / "configs"
EIGHT = str(CONFIGS / "8b_1node.yaml")


def placed(file: Path, *words: str) -> dict[str, Any]:
    """What `webrl placement` writes."""
    assert main(["placement", *words, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_devices_name_leads_to_its_card() -> None:
    for device, name in {
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA GH200 480GB": "GH200",
        "NVIDIA B200": "B200", "NVIDIA H100 PCIe": None,  # slower than the SXM form
        "NVIDIA H100 NVL": None, "NVIDIA GB200": None, "NVIDIA L40S": None,
    }.items():  # fmt: skip
        found = find_card(device)
        assert (found.name if found else None) == name


def test_card_and_lengths_of_a_prediction_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "placed.json"
    h200 = placed(file, EIGHT, "--time", "--card", "H200")["time"]
    assert "training, H200" in capsys.readouterr().out
    assert h200["card"] == "H200"
    short = placed(file, EIGHT, "--time", "--card", "H200", "--lengths", "steps=4", "response_tokens=180")["time"]
    assert short["training"]["tokens"] < h200["training"]["tokens"]


def test_what_cannot_be_predicted_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--card", "H100"], "--card is for --time; add --time"),
        (["--time", "model.dtype=float32"], "model.dtype=float32 has no prediction"),
        (["--time", "model.path=somewhere"], "--time: model.path=somewhere is no folder"),
        (["--time", "--lengths", "response_tokens=20000"], "exceeds trainer.tokens_per_microbatch=16384"),
        (["--time", "--lengths", "pages=3"], "--lengths pages=3"),
        (["--time", "--lengths", "steps=few"], "'few' is no number"),
        (["--time", "--search", "3", "evaluation.only=true"], "a search needs a trainer"),
    ):
        options = [word for word in words if "." not in word]
        assert main(["placement", EIGHT, *[word for word in words if "." in word], *options]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert message in line
    assert main(["placement", str(CONFIGS / "quickstart.yaml"), "--time"]) == 2
    assert "cluster.gpus_per_node=0" in capsys.readouterr().err


def test_the_search_finds_the_fastest_layout_that_fits() -> None:
    config, card, lengths = parse_config(str(CONFIGS / "30b_a3b_32node.yaml"), []), CARDS["H100"], EpisodeLengths()
    description = parameter_counts.config_sections("30B-A3B")
    layouts, tried = search_layouts(config, description, card, lengths)
    seconds = [layout.seconds for layout in layouts]
    assert seconds == sorted(seconds)
    assert 1 < len(seconds) < tried
    own = predict(config, description, card, lengths).training
    assert own is not None
    assert own.train_seconds + own.sync_seconds in seconds  # the configuration's own layout is among them
    for layout in layouts:
        trainer = layout.config.trainer
        assert trainer.tensor_parallel * trainer.pipeline_parallel * trainer.data_parallel == 128
        check_memory(layout.config, estimate_memory(layout.config, description))
    assert len({tuple(layout.settings.values()) for layout in layouts}) == len(layouts)
    assert config.trainer.tensor_parallel == 4  # the search leaves the configuration alone


def test_the_command_shows_the_fastest_layouts_and_engines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["placement", EIGHT, "--time", "--search", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("layouts fit; predicted, not measured")
    assert len([line for line in lines[-4:] if "%" in line]) == 2
    assert main(["placement", EIGHT, "evaluation.only=true", "--time"]) == 0
    shown = capsys.readouterr().out
    assert ("response tokens/s" in shown, "MFU" in shown) == (True, False)
