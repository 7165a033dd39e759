"""The arithmetic of `webrl gpu-check`, section "one GPU", on fake CUDA tensors: a mix of devices raises an error.

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

from megatron_webrl.checks.gpu import small_models
from megatron_webrl.checks.gpu.results import measured
from tests.model.fake_cuda.host_values import HostValues, fake_cuda
from tests.model.fake_cuda.training_pass import join_groups


def main(folder: str) -> None:
    """Expect gradients of transformers' dense model, and take an optimizer step with a small model of each kind.

    transformers' experts use an operation on CUDA integers that a CPU, which finds fake tensors' values, does not have.
    """
    from megatron.core.optimizer import clip_grads

    from megatron_webrl.checks.gpu import model_section

    configurations = {kind: module.configuration(shape) for kind, (module, shape) in model_section.MODELS.items()}
    for kind, configuration in configurations.items():
        configuration.save_pretrained(Path(folder) / kind)
    real, found = small_models.samples(), list[str]()
    with fake_cuda() as host:
        from megatron_webrl.model import platform as platforms

        platform = platforms.activate("cuda")
        join_groups()
        samples = {name: _fake(sample, host) for name, sample in real.items()}
        with (
            mock.patch.object(small_models, "samples", return_value=samples),
            mock.patch("megatron_webrl.model.load.load_hf"),
            mock.patch.object(clip_grads, "multi_tensor_applier", return_value=(torch.ones(1, device="cuda"), None)),
            mock.patch.object(model_section, "_round_trip", lambda *arguments: measured("", arguments[5], "not tried")),
        ):
            transformers_class = _OnCuda(configurations["dense"])
            arguments = (Path(folder), torch.float32, platform.device, list(samples.values()))
            expected = model_section._expected(transformers_class, *arguments)
            assert {x.device.type for x in (expected.logits, *expected.gradients.values())} == {"cuda"}
            for kind in configurations:
                results = model_section._check_step(Path(folder) / kind, kind, torch.float32, platform)
                found += [each.name for each in results]
    sys.stdout.write(json.dumps(found))


def _fake(sample: small_models.Sample, host: HostValues) -> small_models.Sample:
    values = {each.name: getattr(sample, each.name) for each in fields(sample)}
    return small_models.Sample(
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
