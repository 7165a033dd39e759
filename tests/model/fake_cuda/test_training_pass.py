"""A training pass on CUDA mixes no devices, and waits for the device only where HOST_SYNCS says so.

At each entry the device idles until the host has read a value and launched the next kernels. Run as a process with
device.cpp compiled and the folder of the models, it trains tiny models on fake CUDA tensors, as on a
GPU, and prints the host syncs of each pass as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])  # before PyTorch looks for devices

import pytest
import torch
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor

from megatron_webrl.config.advantage import CriticConfig, advantage_config
from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.loss import LossConfig, loss_config
from megatron_webrl.model.compute_options import ComputeOptions, ValueHeadKind
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.model.vision_language.packed_input import HOST_FIELDS
from tests.model.fake_cuda.host_values import HostValues, fake_cuda
from tests.trainer.growing_prompts import episode
from tools.make_tiny_model import make_tiny_model

pytestmark = pytest.mark.slow  # a compiler, and operations that are traced one by one

METRICS = {"megatron_webrl/trainer/learner.py:_reduce device to host": 1}  # once for all micro-batches
HOST_SYNCS = {
    "pixels": {},
    "dense score": {},
    "dense train": METRICS,
    "moe score": {},
    "moe train": METRICS,
    **{f"dense {name}": METRICS for name in ("gspo", "cispo", "dppo", "teacher", "critic", "float32 head")},
    "dense critic score": {},
    # Once an update, before its first step, for all micro-batches.
    "dense critic credit": {"megatron_webrl/trainer/credit/step_critic.py:gather_values device to host": 1},
}


NUMBERS = torch.arange(4)
LOSSES = [
    loss_config(
        name="gspo", importance_weight_level="product", importance_weight_floor=0.5, kl_rejection_bound=0.1,
        max_token_lag=1, entropy_coefficient=0.1,
    ),
    loss_config(name="cispo", importance_weight_mode="truncate"),
    loss_config(name="dppo", dppo_divergence="kl", decoupled=False),
]  # fmt: skip
ENTROPY = loss_config(entropy_coefficient=0.1)
TEACHER, CRITIC = DistillationConfig(coefficient=1.0), advantage_config("critic", coefficient=0.5)
MODELS = {"dense": 0, "moe": 4}  # number of experts


def main(folder: str) -> None:
    found, processor = {}, Processor.load(Path(folder) / "dense")
    real = _microbatch(processor, Path(folder) / "dense")
    patches = torch.zeros(4 * processor.patchifier.patch_bytes, dtype=torch.uint8)
    with fake_cuda() as host:
        from megatron_webrl.model import platform as platforms

        platform = platforms.activate("cuda")
        found["each kind"] = _every_kind(host)
        found["pixels"] = _normalize(host, processor, patches)
        join_groups()
        for name in MODELS:
            learner, microbatches = _learner(Path(folder) / name, platform), [_on_cuda(real, host)]
            found |= _syncs(host, {"score": _score, "train": _train}, learner, microbatches, name)
            if name == "dense":
                runs = {loss.name: partial(_train, loss=loss) for loss in LOSSES}
                runs["teacher"] = partial(_train, loss=ENTROPY, distillation=TEACHER)
                found |= _syncs(host, runs, learner, microbatches)
                learner = _learner(Path(folder) / name, platform, "shared")
                runs = {"critic score": _score_steps, "critic credit": _read_values}
                runs["critic"] = partial(_train, loss=ENTROPY, distillation=TEACHER, critic=CRITIC)
                found |= _syncs(host, runs, learner, microbatches)
                learner = _learner(Path(folder) / name, platform, float32_head=True)
                found |= _syncs(host, {"float32 head": _train}, learner, microbatches)
    sys.stdout.write(json.dumps(found))


def _syncs(
    host: HostValues, runs: dict[str, Callable[..., None]], learner: Any, microbatches: list[Any], model: str = "dense"
) -> dict[str, dict[str, int]]:
    found = {}
    for name, run in runs.items():
        host.syncs.clear()
        run(learner, microbatches)
        found[f"{model} {name}"] = dict(host.syncs)
    return found


def join_groups() -> None:
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    # Objects travel as bytes of a tensor, which a fake tensor has not; of one rank they need not travel.
    torch.distributed.all_gather_object = lambda objects, value, group=None: objects.__setitem__(0, value)
    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=1)
    process_groups.init_process_groups(ParallelSizes())


def _learner(folder: Path, platform: Any, value_head: ValueHeadKind = "none", float32_head: bool = False) -> Any:
    from megatron_webrl.config.trainer import OptimizerConfig
    from megatron_webrl.model.build import build_model
    from megatron_webrl.model.vision_language import experts
    from megatron_webrl.trainer.learner import Learner
    from megatron_webrl.trainer.optimizer import make_optimizer, wrap_ddp

    # A parameter of a buffer keeps a fake storage of its own, which holds no other expert.
    experts._stacked = lambda weights: torch.stack(list(weights))
    options = ComputeOptions(recompute="full", value_head=value_head, float32_head=float32_head)
    chunks = build_model(folder, dtype="bfloat16", platform=platform, options=options)
    wrapped = wrap_ddp(chunks)
    optimizer = make_optimizer(wrapped, OptimizerConfig(implementation="torch"), 10, torch.bfloat16)
    return Learner(wrapped, chunks[0].unpadded_vocab_size, optimizer)


def _normalize(host: HostValues, processor: Processor, patches: Tensor) -> dict[str, int]:
    """Syncs of normalising the patches of image workers, which is done on the device."""
    on_device = host.fake(patches, "cuda")
    host.syncs.clear()
    assert processor.normalize_patches(on_device).device.type == "cuda"
    return dict(host.syncs)


def _every_kind(host: HostValues) -> dict[str, int]:
    """Syncs of known lines of this file, to show that each kind is found, and that a mix of devices is refused."""
    numbers, on_host = host.fake(NUMBERS, "cuda"), host.fake(NUMBERS, "cpu")
    host.syncs.clear()
    assert numbers.tolist() == [0, 1, 2, 3]
    assert int(numbers.sum()) == 6
    assert len(numbers[numbers > 1]) == 2
    torch.tensor([1], device="cuda")
    on_host.to("cuda")
    on_host.pin_memory().to("cuda", non_blocking=True)  # no sync
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="to be on the same device"):
        numbers + on_host
    return dict(host.syncs)


def _microbatch(processor: Processor, folder: Path) -> Any:
    """A micro-batch of real tensors, before Megatron is imported; the last sequence begins as the first."""
    from megatron_webrl.trainer.data.packing import FlopsEstimator
    from megatron_webrl.trainer.data.sequence_packer import SequencePacker

    cost = FlopsEstimator.from_hf_config(load_hf_config(folder))
    packer = SequencePacker(processor, 2000, torch.device("cpu"), 0, 1, cost, merge_prefixes="all", min_shared_tokens=2)
    first, second = episode(processor, 0, (9, 7))
    other = replace(first, response=first.response[::-1].copy(), trajectory_id=(0, 1))
    [batch] = packer.build([first, second, other], "token_mean", 1)
    assert batch.inputs.parents is not None
    teacher = torch.zeros(len(batch.targets)).index_fill(0, torch.tensor([3]), torch.nan)
    return replace(batch, value_targets=torch.ones(3), teacher_logprobs=teacher)


def _on_cuda(microbatch: Any, host: HostValues) -> Any:
    def device_of(name: str) -> str:
        return "cpu" if name in HOST_FIELDS else "cuda"

    def moved(record: Any) -> Any:
        values = {each.name: getattr(record, each.name) for each in fields(record)}
        tensors = {name: x for name, x in values.items() if isinstance(x, Tensor)}
        return replace(record, **{name: host.fake(x, device_of(name)) for name, x in tensors.items()})

    return replace(moved(microbatch), inputs=moved(microbatch.inputs))


def _score(learner: Any, microbatches: list[Any]) -> None:
    found = learner.compute_logprobs(microbatches)
    assert [logprobs.device.type for logprobs in found] == ["cuda"]


def _score_steps(learner: Any, microbatches: list[Any]) -> None:
    [found] = learner.score(microbatches)
    assert {name: x.device.type for name, x in found.items()} == {"logprobs": "cuda", "values": "cuda"}


def _read_values(learner: Any, microbatches: list[Any]) -> None:
    """What an update needs on the host once, before its first step: of two micro-batches and one of padding."""
    from megatron_webrl.trainer.credit.step_critic import gather_values

    [first] = microbatches
    second = replace(first, step_ids=tuple((1, episode, step) for _, episode, step in first.step_ids))
    padding = replace(second, value_weight=torch.zeros_like(second.value_weight))
    values = [torch.full_like(first.value_weight, value) for value in (0.1, 0.2, 0.3)]
    found = gather_values([first, second, padding], values)
    tenths = {step: round(value * 10) for step, value in found.items()}
    assert tenths == dict.fromkeys(first.step_ids, 1) | dict.fromkeys(second.step_ids, 2)


def _train(
    learner: Any,
    microbatches: list[Any],
    loss: LossConfig | None = None,
    distillation: DistillationConfig | None = None,
    critic: CriticConfig | None = None,
) -> None:
    from megatron_webrl.trainer.loss.objective import make_objective

    objective = make_objective(loss or loss_config(), None, 1, distillation, critic)
    metrics, _ = learner.forward_backward(microbatches, None, objective)
    assert ("teacher_kl/count" in metrics, "value_loss" in metrics) == (distillation is not None, critic is not None)
    for parameter in learner.models[0].parameters():
        assert parameter.main_grad.device.type == "cuda"


def _library(folder: Path) -> Path:
    if torch.version.cuda is not None:
        pytest.skip("needs torch's CPU build: the CUDA build registers a device of its own")
    compiler, torch_folder = shutil.which("g++"), Path(torch.__file__).parent
    if compiler is None:
        pytest.skip("needs g++")
    source, library = Path(__file__).with_name("device.cpp"), folder / "device.so"
    libraries = [f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"]
    command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch_folder}/include", str(source)]
    subprocess.run([*command, "-o", str(library), *libraries], check=True, timeout=300)
    return library


def test_a_pass_waits_for_the_device_only_where_listed(tmp_path: Path) -> None:
    for name, experts in MODELS.items():
        make_tiny_model(tmp_path / name, layers=2, experts=experts)
    command = [sys.executable, "-m", __name__, str(_library(tmp_path)), str(tmp_path)]
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    kinds = {"device to host": 2, "shape from values": 1, "host to device": 2, "synchronize": 1}
    each = {"each kind": {f"elsewhere {kind}": count for kind, count in kinds.items()}}
    assert json.loads(done.stdout) == each | HOST_SYNCS


if __name__ == "__main__":
    main(*sys.argv[2:])
