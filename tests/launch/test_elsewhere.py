"""Validation of cluster configurations on a machine without their models, GPUs and packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
from megatron_webrl.model.parameter_counts import config_sections, size_from_path

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if size_from_path(parse_config(path).model.path)]
WITHOUT_PACKAGES = """
import sys
for name in ("torch", "vllm", "megatron", "transformers", "playwright"):
    sys.modules[name] = None
from megatron_webrl.cli import main
sys.exit(main(["train", sys.argv[1], "--check", "--elsewhere"]))
"""


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_every_cluster_configuration_is_valid_elsewhere_and_fits_its_gpus(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(path), "--check", "--elsewhere"]) == 0
    shown = capsys.readouterr()
    assert "left to the job's nodes: model.path=" in shown.err
    assert yaml.safe_load(shown.out)["run"]["name"] == parse_config(path).run.name
    assert main(["placement", str(path), "--memory"]) == 0


def test_a_login_node_without_packages_checks_a_configuration() -> None:
    command = [sys.executable, "-c", WITHOUT_PACKAGES, str(ROOT / "configs" / "8b_4node.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "package" not in done.stderr  # tasks and judge are checked without them


def test_of_another_model_the_config_file_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_sections("4B")))
    config, model = str(ROOT / "configs" / "8b_4node.yaml"), f"model.path={tmp_path}"
    assert main(["train", config, model, "--check", "--elsewhere"]) == 0
    assert main(["placement", config, model, "--memory"]) == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.tensor_parallel=16", "tensor_parallel"),
        ("tasks.environments=[shop-find-prices]", "shop-find-prices"),
        ("model.path=models/unknown", "model.path=models/unknown is not a folder"),
        ("rollout.max_new_tokens=16384", "rollout.max_new_tokens=16384 leaves no room"),
    ],
)
def test_what_is_wrong_everywhere_is_refused_elsewhere(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(ROOT / "configs" / "8b_4node.yaml")
    assert main(["train", config, *override.split(), "--check", "--elsewhere"]) == 2
    assert message in capsys.readouterr().err


def test_files_and_keys_that_are_missing_here_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEMINI_API_KEY", raising=False)
    config = str(ROOT / "configs" / "webgym_8b_4node.yaml")
    assert main(["train", config, "--check", "--elsewhere", "tasks.train_file=nowhere/train.jsonl"]) == 0
    left = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left to the job's nodes: ")]
    assert any("nowhere/train.jsonl" in line for line in left)
    assert any("GEMINI_API_KEY" in line for line in left)


def test_a_run_is_not_started_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(ROOT / "configs" / "8b_4node.yaml"), "--elsewhere"]) == 2
    assert "--elsewhere only checks; add --check" in capsys.readouterr().err
