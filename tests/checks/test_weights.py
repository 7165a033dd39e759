"""`webrl check weights`: what the check leaves behind."""

from __future__ import annotations

from pathlib import Path

from megatron_webrl.checks.jobs import weight_sync_config
from megatron_webrl.config.load import parse_config
from megatron_webrl.launch.run_folder import prepared_run_folder
from megatron_webrl.placement.placement import place_processes


def test_the_check_makes_no_folder_for_checkpoints_elsewhere(tmp_path: Path) -> None:
    other = tmp_path / "other"
    settings = [f"run.directory={tmp_path}", f"trainer.checkpoint.fallback_folder={other}", "run.name=here"]
    config = weight_sync_config(parse_config(None, settings))
    with prepared_run_folder(config, place_processes(config), lambda message: None):
        pass
    assert (config.run_folder, list(tmp_path.iterdir())) == (tmp_path / "here-weights", [tmp_path / "here-weights"])
    assert not list(config.run_folder.glob("fallback-*"))
