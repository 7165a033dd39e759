"""GPUs, shared memory and the environment of roles on GPU nodes."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.launch import gpus
from megatron_webrl.launch.gpus import NvidiaSmiError, query_gpus
from megatron_webrl.launch.roles import CACHE_VARIABLES, gpu_environment, make_cache_folder
from megatron_webrl.launch.run_folder import sweep_engine_segments
from tests.waiting import write_program

ROOT = Path(__file__).parents[2]
GPUS = ("cluster.gpus_per_node=2", "cluster.engine_gpus_per_node=1")


def made(*overrides: str) -> Config:
    return parse_config(None, list(overrides))


def test_visible_gpus_are_read_from_nvidia_smi_or_its_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NvidiaSmiError, match="nvidia-smi is not installed"):
        query_gpus("memory.total")
    write_program(tmp_path / "nvidia-smi", "echo '0, GPU-aa, 81559'; echo '1, GPU-ab, 40960'")
    for visible, sizes in (
        (None, ["81559", "40960"]), ("1", ["40960"]), ("GPU-ab,0", ["40960", "81559"]), ("MIG-1,MIG-2", ["81559"] * 2),
    ):  # fmt: skip
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [row[0] for row in query_gpus("memory.total")] == sizes
    for program, words in (("echo 'no handle' >&2; exit 15", "failed: no handle"), ("exit 0", "lists no GPU")):
        write_program(tmp_path / "nvidia-smi", program)
        with pytest.raises(NvidiaSmiError, match=words):
            query_gpus("memory.total")


def test_only_segments_of_engines_that_no_process_maps_are_removed(tmp_path: Path) -> None:
    free, mapped = (f"vllm_dist_0af3-tp-[0-1]-cpushm_{number}" for number in (0, 1))
    for name in (free, mapped, "vllm_dist_0af3", "webrl-run-0"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    with open(tmp_path / mapped, "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert sweep_engine_segments(tmp_path) == [free]
        assert sorted(os.listdir(tmp_path)) == ["vllm_dist_0af3", mapped, "webrl-run-0"]
    assert sweep_engine_segments(tmp_path) == [mapped]


def test_trainer_ranks_get_expandable_segments_engines_do_not_and_inherited_variables_are_kept(tmp_path: Path) -> None:
    inherited = {"TMPDIR": str(tmp_path)}
    assert gpu_environment(made(), "trainer", inherited) == {}
    assert gpu_environment(made(*GPUS), "control", inherited) == {}
    assert not list(tmp_path.iterdir())
    assert gpu_environment(made("model.platform=cuda"), "rollout", inherited)
    trainer, rollout = (gpu_environment(made(*GPUS), role, inherited) for role in ("trainer", "rollout"))
    assert trainer.pop("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True"
    caches = tmp_path / f"webrl-cache-{os.getuid()}"
    assert rollout == trainer == {name: str(caches / part) for name, part in CACHE_VARIABLES.items()}
    assert gpu_environment(made(*GPUS), "rollout", inherited) == rollout  # kept for the next run
    assert len(rollout) == len(set(rollout.values())) == 4
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        given = {name: "max_split_size_mb:512", "TRITON_CACHE_DIR": "/raid/triton", **inherited}
        added = gpu_environment(made(*GPUS), "trainer", given)
        assert sorted(added) == ["FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"]


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    folder = make_cache_folder(tmp_path)
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert make_cache_folder(tmp_path) is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert make_cache_folder(tmp_path) is None
    assert make_cache_folder(tmp_path / "missing") is None
    assert "VLLM_CACHE_ROOT" not in gpu_environment(made(*GPUS), "trainer", {"TMPDIR": str(tmp_path)})


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["auto", "cuda"])
def test_a_job_on_a_machine_with_gpus_does_not_compute_on_its_cores_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], platform: str
) -> None:
    """The device file of a driver and vLLM's metadata are stand-ins; torch asks the machine itself."""
    monkeypatch.setattr(gpus, "DEVICE_FILES", (tmp_path,))
    metadata = tmp_path / "vllm-0.32.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = ("run.name=run", f"run.directory={tmp_path}/runs", f"model.platform={platform}")
    assert main(["train", str(ROOT / "configs" / "tiny_1gpu.yaml"), *run, f"model.path={ROOT}/models/quickstart"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("webrl: cluster.gpus_per_node=1, but ")
    assert "torch cannot use a GPU" in error
    assert error.endswith("; or set model.platform=cpu to compute on the cores\n")
    assert not (tmp_path / "runs").exists()
