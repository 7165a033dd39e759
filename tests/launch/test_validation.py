"""What `webrl train` refuses before anything starts, here and on a machine without models, GPUs and packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_webrl.cli import main
from megatron_webrl.model.parameter_counts import config_sections
from tests.tiny_settings import SETTINGS

ROOT = Path(__file__).parents[2]
FOUR = str(ROOT / "configs" / "8b_4node.yaml")
WITHOUT_PACKAGES = """
import sys
for name in ("torch", "vllm", "megatron", "transformers", "playwright"):
    sys.modules[name] = None
from megatron_webrl.cli import main
placed = main(["placement", sys.argv[1], "--memory", "--time"])
sys.exit(placed or main(["train", sys.argv[1], "--check", "--elsewhere"]))
"""
REFUSED = (  # words of the message
    ("no.such.key=1", "unknown setting no"),
    ("ring.capacity_mib=100000000", "ring.capacity_mib=100000000 exceeds"),
    ("tasks.environments=[click-tset]", "near: click-test"),
    *(  # a secret, which is not repeated
        (setting, setting.partition("=")[0])
        for setting in (
            "tracking.uri=http://someone:canary-password@mlflow:5000",
            "tracking.uri=https://canary-password@mlflow",
            "browser.servers=http://someone:canary-password@node7:8700",
            "judge.verdict.url=http://someone:canary-password@judge/v1",
            "judge.verdict.options={extra_headers: {Authorization: canary-password}}",
            "judge.verdict.options={extra_body: {api_key: canary-password}}",
        )
    ),
)


def test_a_bad_configuration_is_refused(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, "model": {"path": str(tiny_model)}}))
    for override, words in REFUSED:
        run = (f"run.directory={tmp_path}", "run.name=here")
        assert main(["train", str(path), *run, override]) == 2, override
        shown = capsys.readouterr()
        assert words in shown.err, override
        assert (shown.err.count("\n"), shown.out) == (1, ""), override
        assert "canary-password" not in shown.err
    assert not (tmp_path / "here").exists()


def test_a_login_node_without_packages_checks_a_configuration() -> None:
    command = [sys.executable, "-c", WITHOUT_PACKAGES, FOUR]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "package" not in done.stderr  # tasks and judge are checked without them
    assert "left to the job's nodes: model.path=" in done.stderr


def test_what_is_wrong_everywhere_is_refused_elsewhere_and_what_is_missing_here_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for override, words in (
        ("trainer.tensor_parallel=16", "tensor_parallel"),
        ("tasks.environments=[shop-find-prices]", "shop-find-prices"),
        ("rollout.max_new_tokens=16384", "rollout.max_new_tokens=16384 leaves no room"),
    ):
        assert main(["train", FOUR, override, "--check", "--elsewhere"]) == 2
        assert words in capsys.readouterr().err
    assert main(["train", FOUR, "--elsewhere"]) == 2
    assert "--elsewhere only checks; add --check" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(config_sections("4B")))  # enough of another model
    assert main(["train", FOUR, f"model.path={tmp_path}", "--check", "--elsewhere"]) == 0
    assert main(["placement", FOUR, f"model.path={tmp_path}", "--memory"]) == 0
    capsys.readouterr()
    monkeypatch.delenv("GEMINI_API_KEY", raising=False)
    webgym = str(ROOT / "configs" / "webgym_8b_4node.yaml")
    assert main(["train", webgym, "--check", "--elsewhere", "tasks.train_file=nowhere/train.jsonl"]) == 0
    left = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left to the job's nodes: ")]
    for word in ("nowhere/train.jsonl", "GEMINI_API_KEY"):
        assert any(word in line for line in left), word
