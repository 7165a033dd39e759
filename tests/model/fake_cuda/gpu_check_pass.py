"""The arithmetic of `webrl check gpu`, section "one GPU", on fake CUDA tensors: a mix of devices raises an error.

Arguments: device.cpp compiled, and a folder for the models' configurations. Prints the names of the results as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])  # before PyTorch looks for devices

import torch
from transformers import AutoModelForImageTextToText

from megatron_webrl.checks import oracles
from megatron_webrl.checks.report import measured
from tests.model.fake_cuda.host_values import HostValues, fake_cuda
from tests.model.fake_cuda.training_pass import join_groups


def main(folder: str) -> None:
    """Expect gradients of transformers' dense model, and take an optimizer step with a small model of each kind.

    transformers' experts use an operation on CUDA integers that a CPU, which finds fake tensors' values, does not have.
    """
    from megatron.core.optimizer import clip_grads

    from megatron_webrl.checks import gpu_model

    configurations = {kind: oracles.configuration(shape) for kind, shape in gpu_model.MODELS.items()}
    for kind, configuration in configurations.items():
        configuration.save_pretrained(Path(folder) / kind)
    real, found = oracles.samples(), list[str]()
    with fake_cuda() as host:
        from megatron_webrl.model import platform as platforms

        platform = platforms.activate("cuda")
        join_groups()
        samples = {name: _fake(sample, host) for name, sample in real.items()}
        with (
            mock.patch.object(oracles, "samples", return_value=samples),
            mock.patch("megatron_webrl.model.build.load_hf"),
            mock.patch.object(clip_grads, "multi_tensor_applier", return_value=(torch.ones(1, device="cuda"), None)),
            mock.patch.object(gpu_model, "_round_trip", lambda *arguments: measured("", arguments[3], "not tried")),
        ):
            transformers_class = _OnCuda(configurations["dense"])
            dense = gpu_model.Variant(Path(folder), "dense", torch.float32, platform)
            expected = gpu_model._expected(transformers_class, dense, list(samples.values()))
            assert {x.device.type for x in (expected.logits, *expected.gradients.values())} == {"cuda"}
            for kind in configurations:
                results = gpu_model._check_step(gpu_model.Variant(Path(folder) / kind, kind, torch.float32, platform))
                found += [each.name for each in results]
    sys.stdout.write(json.dumps(found))


def _fake(sample: oracles.Sample, host: HostValues) -> oracles.Sample:
    values = {each.name: getattr(sample, each.name) for each in fields(sample)}
    return oracles.Sample(
        **{name: host.fake(x, "cpu") if isinstance(x, torch.Tensor) else x for name, x in values.items()}
    )


class _OnCuda:
    """The class of a transformers model, which reads no weights: fake modules are made on their device."""

    def __init__(self, configuration: Any) -> None:
        self.configuration = configuration

    def from_pretrained(self, folder: Path, dtype: torch.dtype, local_files_only: bool) -> Any:
        with torch.device("cuda"):
            model = AutoModelForImageTextToText.from_config(self.configuration, dtype=dtype)
        model.to = lambda device: model
        # It reads values one by one, which fake tensors have not.
        model.model.get_rope_index = lambda input_ids, **_: (
            torch.arange(input_ids.shape[1], device="cuda").expand(3, 1, -1),
            torch.zeros(1, 1, device="cuda"),
        )
        return model


if __name__ == "__main__":
    main(*sys.argv[2:])
