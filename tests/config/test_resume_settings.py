"""Resumes that a launch refuses, before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_webrl import cli
from megatron_webrl.launch.validation import load_config
from tests.config.conftest import error


def write_checkpoint(run_folder: Path, **state: Any) -> Path:
    """The newest checkpoint of a run, without tensors."""
    checkpoint = run_folder / "checkpoints" / "version-000001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    (checkpoint / "state.json").write_text(json.dumps(state))
    return checkpoint


def test_a_resume_from_a_checkpoint_that_does_not_fit_is_refused_before_anything_starts(
    config_file: Path, tmp_path: Path
) -> None:
    run = ["run.resume=true", f"run.directory={tmp_path}"]
    sizes = {"ranks": 2, "tensor": 2, "pipeline": 1, "virtual_pipeline": 1, "context": 1, "expert": 1}
    layout = sizes | {"expert_tensor": 1}
    write_checkpoint(tmp_path / "run", layout=layout, optimizer_shards="ranks", has_critic=False)
    assert "optimizer_shards=ranks and tensor size 2, not 1: resume with the same sizes" in error(config_file, *run)
    assert load_config(config_file, [*run, "trainer.tensor_parallel=2", "trainer.data_parallel=3"]).run.resume
    write_checkpoint(tmp_path / "run", layout=layout, optimizer_shards="whole", has_critic=True)
    assert "has a critic, but trainer.advantage.name=group; a run has" in error(config_file, *run)
    checkpoint = write_checkpoint(tmp_path / "run", layout=layout, optimizer_shards="whole", has_critic=False)
    assert load_config(config_file, run).run.resume
    description = json.loads((Path(load_config(config_file).model.path) / "config.json").read_text())
    description["text_config"]["hidden_size"] *= 2
    (checkpoint / "hf").mkdir()
    (checkpoint / "hf" / "config.json").write_text(json.dumps(description))
    assert "version-000001 has text_config.hidden_size=" in error(config_file, *run)
    shutil.rmtree(checkpoint)
    assert "checkpoints/latest names, holds no state.json; write the name of a complete" in error(config_file, *run)
    assert cli.main(["train", str(config_file), *run]) == 2


def test_a_resume_needs_the_initial_weights_only_as_a_reference(config_file: Path, tmp_path: Path) -> None:
    run = ["run.resume=true", f"run.directory={tmp_path}", "model.checkpoint=/deleted"]
    write_checkpoint(tmp_path / "run")
    assert load_config(config_file, run).run.resume
    missing, penalty = "model.checkpoint=/deleted holds no Megatron", "trainer.loss.kl_coefficient=0.1"
    assert missing in error(config_file, *run, penalty)
    assert missing in error(config_file, *run, "run.resume=false")


def test_a_resumed_run_needs_the_reference_that_its_start_stored(config_file: Path, tmp_path: Path) -> None:
    run = ["run.resume=true", f"run.directory={tmp_path}", "trainer.warm_start.demonstrations=5"]
    write_checkpoint(tmp_path / "run")
    assert load_config(config_file, run).run.resume
    penalty = "trainer.loss.kl_coefficient=0.1"
    assert "a run stores them only if it begins with the penalty" in error(config_file, *run, penalty)
    (tmp_path / "run" / "reference" / "megatron").mkdir(parents=True)
    (tmp_path / "run" / "reference" / "megatron" / "metadata.json").touch()
    assert load_config(config_file, [*run, penalty]).trainer.loss.kl_coefficient == 0.1
