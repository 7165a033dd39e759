"""Checkpoints on two gloo processes: contents, layouts in which they load, and saves that fail."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.validation import check_config
from megatron_webrl.trainer import optimizer
from tests.gloo import spawn
from tests.trainer import curve_ranks
from tests.trainer.checkpoint import cross_layout_ranks, save_ranks
from tests.trainer.checkpoint.small_learner import LAYOUTS
from tools.make_tiny_model import make_tiny_model

NAMES = [layout.name for layout in LAYOUTS]
Found = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory: writing a hundred checkpoints to a slow disk would take long."""
    with tempfile.TemporaryDirectory(prefix="webrl-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def layouts(memory: Path) -> Found:
    spawn(cross_layout_ranks.across_layouts, str(memory), seconds=600)
    return [torch.load(memory / f"layouts-{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("saves")
    spawn(save_ranks.saves, str(folder), seconds=600)
    return [torch.load(folder / f"saves-{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_training_resumes_bit_for_bit_in_the_same_layout(layouts: Found, name: str):
    there, here = layouts[0][name], layouts[0][name, name]
    assert there.keys() == here.keys()
    assert sum(key.startswith("optimizer.state.exp_avg_sq.") for key in there) * 4 == len(there)
    different = [key for key, tensor in there.items() if not torch.equal(tensor, here[key])]
    assert not different


@pytest.mark.parametrize("other", NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_training_resumes_in_any_other_layout(layouts: Found, name: str, other: str):
    there, here = layouts[0][other], layouts[0][name, other]
    assert there.keys() == here.keys()
    for key, tensor in there.items():
        assert torch.allclose(tensor, here[key], rtol=1e-5, atol=1e-7), key
    assert layouts[0][(name, other), "rate"] == layouts[0][(other, other), "rate"]


def test_the_layouts_have_dense_and_expert_optimisers_and_several_chunks(layouts: Found):
    assert layouts[0]["replicas", "optimizers"] == 1
    assert layouts[0]["expert", "optimizers"] == 2
    assert layouts[0]["virtual", "chunks"] == 2
    moved = [key for key, tensor in layouts[0]["replicas"].items() if tensor.float().std() > 0]
    assert any("experts" in key for key in moved)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_random_states_are_restored_in_the_same_layout(layouts: Found, name: str, rank: int):
    assert layouts[rank][(name, name), "draws"] == layouts[rank][name, "draws"]


def test_a_checkpoint_has_the_state_at_its_start_although_training_continues(saves: Found):
    for found in saves:
        assert found["snapshot"]["waited for"]
        assert found["snapshot"]["equal"]
        assert found["snapshot"]["tensors"] > 20


def test_the_copies_that_a_forked_process_writes_are_held_until_it_has_written_them(saves: Found):
    made, held, left = saves[0]["held"]  # rank 0 writes for both
    assert made > 20
    assert (held, left) == (made, 0)


def test_a_checkpoint_can_be_converted_on_its_own(saves: Found):
    files = saves[0]["snapshot"]["files"]
    for name in ("hf/config.json", "megatron/metadata.json", "megatron/common.pt", "megatron/.metadata", "state.json"):
        assert f"checkpoints/version-000002/{name}" in files
    assert not any("safetensors" in name for name in files if name.startswith("checkpoints"))


def test_the_metrics_say_how_long_a_checkpoint_took(saves: Found):
    figures = saves[0]["snapshot"]["figures"]
    assert figures["checkpoint/blocking_seconds"] > 0
    assert figures["checkpoint/write_seconds"] > 0
    assert figures["checkpoint/size_mib"] > 0


def test_a_save_without_room_keeps_the_previous_checkpoint_and_the_next_save_succeeds(saves: Found):
    for found in saves:
        limit = found["limit"]
        assert "File too large" in limit["trouble"]
        assert "\n" not in limit["trouble"]
        assert limit["newest"] == 1
        assert limit["figures"]["checkpoint/failures"] == 1
        assert limit["left"] == ["latest", "version-000001"]
        assert limit["then"] == (None, 1, 3)


def test_a_killed_or_late_writer_is_a_failed_save_on_every_rank(saves: Found):
    for found in saves:
        assert found["killed writer"]["failed"] == ("rank 1: the writing process was killed by SIGKILL", None)
        assert found["killed writer"]["then"] == 2
        assert found["late writer"] == "rank 0: not finished within 0 s"


def test_the_last_checkpoints_are_kept(saves: Found):
    names = saves[0]["names"]
    assert names["stay"] == ["latest", "version-000006", "version-000007"]
    assert names["again"] == "version-000007.1"
    assert names["then"] == ["latest", "version-000006", "version-000007.1"]


def test_weights_alone_start_a_model_but_training_cannot_resume_from_them(saves: Found):
    for found in saves:
        assert found["weights"]["equal"]
        assert "holds weights without an optimiser" in found["weights"]["resume"]
        assert "holds no metadata.json" in found["weights"]["none"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "tensor decoder.final_layernorm.weight [16] is missing from"),
        ("misshapen", "tensor decoder.final_layernorm.weight of"),
        ("extra", "tensor decoder.final_layernorm.weight.more of"),
        ("truncated", ".distcp is truncated: it has"),
    ],
)
def test_errors_of_broken_weights_name_tensor_and_file(saves: Found, how: str, message: str):
    for found in saves:
        assert message in found["weights"][how]
        assert "\n" not in found["weights"][how]


def test_updates_below_the_resolution_of_bfloat16_add_up_in_the_main_weights(saves: Found):
    found = saves[0]["bf16"]
    assert found["after one"] == found["without main"] == 1.0
    assert found["types"] == {"torch.float32"}
    assert found["main"] == pytest.approx(1 - 200e-4, abs=1e-5)
    assert found["bf16"] == pytest.approx(1 - 200e-4, abs=2**-8)
    assert found["resumed equal"]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def curves(request: pytest.FixtureRequest, memory: Path) -> dict[Any, Any]:
    folder = memory / f"curves-{request.param}"
    model = make_tiny_model(folder / "model", architecture=request.param)
    spawn(curve_ranks.loss_curves, str(folder), str(model), seconds=600)
    return torch.load(folder / "curves-0.pt", weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "other"), curve_ranks.CONTINUED)
def test_the_loss_curve_continues_in_every_layout(curves: dict[Any, Any], name: str, other: str):
    there, here = curves[other], curves[name, other]
    if name == other:
        assert there == here
    assert [loss for loss, _ in here] == pytest.approx([loss for loss, _ in there], rel=1e-5)
    assert there[0][0] != there[1][0]


def test_gradients_of_several_micro_batches_add_up_to_that_of_one(curves: dict[Any, Any]):
    several, one = curves["rows"][128], curves["rows"][4096]
    assert several["rows"] > one["rows"] == 1
    assert several["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert several["norm"] == pytest.approx(one["norm"], rel=1e-6)
    assert torch.allclose(several["weights"], one["weights"], rtol=0, atol=1e-6)


def test_torch_adam_is_used_although_another_one_is_present(monkeypatch: pytest.MonkeyPatch):
    class Other(torch.optim.Adam):
        """Stands in for the fused Adam that Megatron has found."""

    monkeypatch.setattr(megatron_optimizer, "Adam", Other)
    monkeypatch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    with optimizer._adam("torch"):
        assert megatron_optimizer.Adam is distrib_optimizer.Adam is torch.optim.AdamW
        assert megatron_optimizer.USING_PYTORCH_OPTIMIZER
    assert megatron_optimizer.Adam is Other
    assert not megatron_optimizer.USING_PYTORCH_OPTIMIZER
    with optimizer._adam("auto"):
        assert megatron_optimizer.Adam is Other


@pytest.fixture
def settings(tmp_path: Path, tiny_model: Path) -> Config:
    config = Config()
    config.model.path, config.model.checkpoint = str(tiny_model), str(tmp_path / "start")
    config.ring.capacity_mib, config.rollout.max_model_len, config.rollout.max_new_tokens = 64, 1024, 64
    return config


def test_a_start_without_checkpoint_or_from_another_architecture_is_refused(settings: Config, tiny_model: Path):
    start = Path(settings.model.checkpoint)
    with pytest.raises(ConfigError, match="holds no Megatron checkpoint"):
        check_config(settings)
    (start / "megatron").mkdir(parents=True)
    (start / "megatron" / "metadata.json").write_text("{}")
    check_config(settings)
    (start / "hf").mkdir()
    description = json.loads((tiny_model / "config.json").read_text())
    (start / "hf" / "config.json").write_text(json.dumps(description))
    check_config(settings)
    description["text_config"]["num_hidden_layers"] += 1
    (start / "hf" / "config.json").write_text(json.dumps(description))
    with pytest.raises(ConfigError, match=r"has text_config.num_hidden_layers=5, but model.path=.* has 4"):
        check_config(settings)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_training_continues_on_a_full_and_on_a_read_only_disk(small_disk: Path, tmp_path: Path):
    spawn(save_ranks.full_disk, str(tmp_path), str(small_disk), seconds=120)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"disk-{rank}.json").read_text())
        assert "has 36 MiB free; make room" in found["full"][0]
        assert "Read-only file system" in found["read only"][0]
        assert found["read only"][1] == 2
        assert found["then"] == [None, 2, 3]
