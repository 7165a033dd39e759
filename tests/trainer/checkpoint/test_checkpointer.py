"""Saves on two gloo processes: what they contain, what is on disk before what, how they fail."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.validation import check_config
from megatron_webrl.trainer.checkpoint import checkpointer
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
from megatron_webrl.trainer.checkpoint.checkpoint_state import ForkedTask, load_learner, load_weights, sharded_weights
from tests.trainer.checkpoint.small_learner import (
    LAYOUTS,
    checkpoints_in,
    make_learner,
    save,
    scramble,
    state_of,
    step,
    tensors_of,
)
from tests.trainer.ranks import process_groups, results
from tests.waiting import until

REPLICAS = LAYOUTS["replicas"]


def names_in(folder: Path) -> list[str]:
    """All of the checkpoints' folder but the staging folder, and what is in that."""
    checkpoints = folder / "checkpoints"
    return sorted(path.name for path in [*checkpoints.glob("[!.]*"), *checkpoints.glob(".staging-*/*")])


def saves(_: Any, folder: Path) -> dict[str, Any]:
    with process_groups(REPLICAS):
        learner = make_learner(REPLICAS)
        scramble(learner)
        return {
            "snapshot": _snapshot(learner, folder / "snapshot"),
            "synced": _synced(learner, folder / "synced"),
            "limit": _no_room(learner, folder / "limit"),
            "killed writer": _killed_writer(learner, folder / "killed"),
            "weights": _weights_alone(learner, folder / "weights"),
        }


@contextlib.contextmanager
def _stopped_writers() -> Iterator[None]:
    """Processes that write a checkpoint stop before they have written any of it."""

    def start(write: Callable[[], Any], timeout_seconds: float) -> ForkedTask:
        task = ForkedTask(lambda: (signal.raise_signal(signal.SIGSTOP), write())[1], timeout_seconds)
        while psutil.Process(task.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        return task

    with mock.patch.object(checkpointer, "ForkedTask", start):
        yield


def _snapshot(learner: Any, folder: Path) -> dict[str, Any]:
    """Weights and moments change while the writer is stopped: the checkpoint must have the earlier ones.

    They are copied to host memory as from a GPU, and the copies counted while the writer is stopped and at the end.
    """
    copies: list[weakref.ref[torch.Tensor]] = []

    def preload(buckets: list[Any], non_blocking: bool) -> list[Any]:
        copied = [
            (name, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for name, key, (data, tensors) in buckets
        ]
        copies.extend(weakref.ref(tensor) for _, _, (_, tensors) in copied for _, tensor in tensors)
        return copied

    def count_alive() -> int:
        gc.collect()
        return sum(reference() is not None for reference in copies)

    checkpoints = checkpoints_in(folder)
    before = tensors_of(save(checkpoints, learner, 1))
    with mock.patch.object(FileSystemWriterAsync, "preload_tensors", staticmethod(preload)), _stopped_writers():
        checkpoints.start_save(learner, state_of(2))
    task, is_early = checkpoints._current.task, torch.distributed.get_rank() == 1
    if is_early:  # writes its share, which is empty, before the other rank
        os.kill(task.pid, signal.SIGCONT)
        until(lambda: task.done, "its share")
    checkpoints.poll()
    waited_for, held = checkpoints._current is not None, [len(copies), count_alive()]
    for _ in range(2):
        step(learner)
    if not is_early:
        os.kill(task.pid, signal.SIGCONT)
    checkpoints.close()
    after = tensors_of(checkpoints.last_completed[1])
    return {
        "equal": [torch.equal(before[name], after[name]) for name in before], "waited for": waited_for,
        "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()),
        "figures": checkpoints.pop_metrics(), "copies": [*held, count_alive()],
    }  # fmt: skip


def _synced(learner: Any, folder: Path) -> list[tuple[str, ...]]:
    """Syncs and renames of all processes while a second checkpoint replaces the first, in order, with their paths."""
    checkpoints, log = checkpoints_in(folder, keep=1), folder.parent / "operations"
    save(checkpoints, learner, 1)
    torch.distributed.barrier()

    def recorded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            paths = [os.readlink(f"/proc/self/fd/{p}") if isinstance(p, int) else os.fspath(p) for p in arguments]
            line = json.dumps(
                [name, *(os.path.relpath(p, folder / "checkpoints") for p in paths if isinstance(p, str))]
            )
            with log.open("a") as file:
                file.write(line + "\n")
            return result

        return operation

    names = ("fsync", "rename", "replace")
    with mock.patch.multiple(os, **{name: recorded(name, getattr(os, name)) for name in names}):
        save(checkpoints, learner, 2)
    torch.distributed.barrier()
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()]


def _no_room(learner: Any, folder: Path) -> dict[str, Any]:
    """One save under a file size limit that the shards exceed, one without."""
    checkpoints = checkpoints_in(folder, keep=1)
    save(checkpoints, learner, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    checkpoints.start_save(learner, state_of(2))
    checkpoints.wait_for_save()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    failed = {
        "trouble": checkpoints.last_error, "newest": checkpoints.last_completed[0],
        "figures": checkpoints.pop_metrics(), "left": names_in(folder),
    }  # fmt: skip
    torch.distributed.barrier()  # the next save creates its folder there
    save(checkpoints, learner, 3)
    return failed | {"then": (checkpoints.last_error, checkpoints.failures, checkpoints.last_completed[0])}


def _killed_writer(learner: Any, folder: Path) -> tuple[str | None, tuple[int, Path] | None, int]:
    checkpoints = checkpoints_in(folder)
    with _stopped_writers():
        checkpoints.start_save(learner, state_of(1))
    is_killed = torch.distributed.get_rank() == 1
    os.kill(checkpoints._current.task.pid, signal.SIGKILL if is_killed else signal.SIGCONT)
    checkpoints.wait_for_save()
    failed = (checkpoints.last_error, checkpoints.last_completed)
    save(checkpoints, learner, 2)
    return (*failed, checkpoints.last_completed[0])


def _weights_alone(learner: Any, folder: Path) -> dict[str, Any]:
    """Load weights without an optimiser, as the conversion tool writes them; then broken ones."""
    norm, rank = "decoder.final_layernorm.weight", torch.distributed.get_rank()

    def write(name: str, change: Callable[[dict[str, Any]], object] = lambda state: None) -> Path:
        state = sharded_weights(learner.chunks)
        change(state["model0"])
        target = folder / name / "megatron"
        target.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state, str(target))
        return target.parent

    def refusal(path: Path, load: Any = None) -> str:
        other = make_learner(REPLICAS)
        with pytest.raises(CheckpointError) as refused:
            load(path, other) if load else load_weights(path, other.chunks)
        return str(refused.value)

    def misshapen(state: dict[str, Any]) -> None:
        state[norm] = ShardedTensor.from_rank_offsets(norm, torch.ones(5), replica_id=rank)

    def extra(state: dict[str, Any]) -> None:
        state["more"] = replace(state[norm], key=f"{norm}.more")

    whole, other = write("whole"), make_learner(REPLICAS)
    load_weights(whole, other.chunks)
    pairs = zip(learner.chunks[0].parameters(), other.chunks[0].parameters(), strict=True)
    found = {"equal": [torch.equal(one, two) for one, two in pairs], "resume": refusal(whole, load_learner)}
    found["none"] = refusal(folder / "nowhere")
    found["missing"] = refusal(write("missing", lambda state: state.pop(norm)))
    found |= {change.__name__: refusal(write(change.__name__, change)) for change in (misshapen, extra)}
    torch.distributed.barrier()
    if rank == 0:
        file = max((whole / "megatron").glob("*.distcp"), key=lambda path: path.stat().st_size)
        os.truncate(file, file.stat().st_size - 100)
    torch.distributed.barrier()
    return found | {"truncated": refusal(whole)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results(saves, tmp_path_factory.mktemp("saves"))


def test_a_checkpoint_has_the_state_at_its_start_although_training_continues(found: list[dict[str, Any]]) -> None:
    for rank in found:
        snapshot = rank["snapshot"]
        assert snapshot["waited for"]
        assert len(snapshot["equal"]) > 20
        assert all(snapshot["equal"])
        for name in ("blocking_seconds", "write_seconds", "size_mib"):
            assert snapshot["figures"][f"checkpoint/{name}"] > 0
    made, held, left = found[0]["snapshot"]["copies"]  # rank 0 writes for both
    assert made > 20
    assert (held, left) == (made, 0)
    # It can be converted on its own.
    for name in ("hf/config.json", "megatron/metadata.json", "megatron/common.pt", "megatron/.metadata", "state.json"):
        assert f"checkpoints/version-000002/{name}" in snapshot["files"]
    assert not any("safetensors" in name for name in snapshot["files"] if name.startswith("checkpoints"))


def test_a_checkpoint_is_on_disk_before_it_is_named_and_named_before_the_old_one_goes(
    found: list[dict[str, Any]],
) -> None:
    operations = found[0]["synced"]
    staging, version = ".staging-000000/000002", "version-000002"
    named = operations.index(("replace", staging, version))
    files = {name.removeprefix("checkpoints/version-000002/") for name in found[0]["snapshot"]["files"]}
    wanted = {"", "megatron", "hf"} | {name for name in files if not name.startswith(("checkpoints", "model"))}
    synced = set()
    for name, path, *target in operations[:named]:  # a file may be renamed after its sync
        if name == "fsync" or os.path.relpath(path, staging) in synced:
            synced.add(os.path.relpath(target[0] if target else path, staging))
    assert {os.path.normpath(name) for name in wanted} <= synced
    (pointed,) = (i for i, (name, *paths) in enumerate(operations) if name == "replace" and paths[-1] == "latest")
    assert ("fsync", ".") in operations[named:pointed]
    assert ("fsync", operations[pointed][1]) in operations[named:pointed]
    removed = operations.index(("rename", "version-000001", ".staging-000000/deleting-version-000001"))
    assert ("fsync", ".") in operations[pointed:removed]


def test_a_save_that_fails_keeps_the_previous_checkpoint_and_the_next_one_succeeds(found: list[dict[str, Any]]) -> None:
    for rank in found:
        limit = rank["limit"]
        assert "File too large" in limit["trouble"]
        assert "\n" not in limit["trouble"]
        assert (limit["newest"], limit["figures"]) == (1, limit["figures"] | {"checkpoint/failures": 1})
        assert limit["left"] == ["latest", "version-000001"]
        assert limit["then"] == (None, 1, 3)
        assert rank["killed writer"] == ("rank 1: the writing process was killed by SIGKILL", None, 2)


def test_weights_alone_start_a_model_and_errors_name_tensor_and_file(found: list[dict[str, Any]]) -> None:
    norm = "tensor decoder.final_layernorm.weight"
    for rank in found:
        assert all(rank["weights"].pop("equal"))
        for case, words in {
            "resume": "holds weights without an optimiser", "none": "holds no metadata.json",
            "missing": f"{norm} [16] is missing from", "misshapen": f"{norm} of", "extra": f"{norm}.more of",
            "truncated": ".distcp is truncated: it has",
        }.items():  # fmt: skip
            assert words in rank["weights"][case]
            assert "\n" not in rank["weights"][case]


def test_a_start_without_checkpoint_or_from_another_architecture_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    config, start = Config(), tmp_path / "start"
    config.model.path, config.model.checkpoint = str(tiny_model), str(start)
    config.ring.capacity_mib, config.rollout.max_model_len, config.rollout.max_new_tokens = 64, 1024, 64
    with pytest.raises(ConfigError, match="holds no Megatron checkpoint"):
        check_config(config)
    (start / "megatron").mkdir(parents=True)
    (start / "megatron" / "metadata.json").write_text("{}")
    check_config(config)
    (start / "hf").mkdir()
    description = json.loads((tiny_model / "config.json").read_text())
    (start / "hf" / "config.json").write_text(json.dumps(description))
    check_config(config)
    description["text_config"]["num_hidden_layers"] += 1
    (start / "hf" / "config.json").write_text(json.dumps(description))
    with pytest.raises(ConfigError, match=r"has text_config.num_hidden_layers=5, but model.path=.* has 4"):
        check_config(config)
