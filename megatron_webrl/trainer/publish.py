"""The trainer's side of a weight update: offer a version, send it, see every worker take it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from megatron_webrl.config import Config
from megatron_webrl.control import Control
from megatron_webrl.model.export import hf_manifest, hf_tensors
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.qwen3_vl import Qwen3VL
from megatron_webrl.weights import transport
from megatron_webrl.weights.manifest import Manifest

GROUP_NAME = "weights"


class Publisher:
    """Sends the model to all engines; every trainer rank takes part, rank 0 talks."""

    def __init__(self, chunks: Sequence[Qwen3VL], config: Config, control: Control, platform: Platform) -> None:
        self.chunks, self.config, self.control = chunks, config, control
        self.manifest = Manifest.from_list(hf_manifest(chunks))
        self.group: transport.Group | None = None
        if torch.distributed.get_rank() == 0:
            control.put("weights/manifest", self.manifest.to_json())
            size = config.transfer_ranks
            self.group = transport.join(control.store, GROUP_NAME, 0, size, config.run.start_seconds, platform.backend)
            self.group.seconds = config.weights.seconds

    def publish(self, version: int) -> float:
        """Send the weights as `version`; returns seconds. Raises JobFailed naming a worker that did not take them."""
        started = time.monotonic()
        tensors = hf_tensors(self.chunks)
        if self.group is None:
            for _ in tensors:  # takes part in gathering; the first rank sends
                pass
            return time.monotonic() - started
        self.control.put("weights/offer", version)
        transport.send(self.group, self.manifest, tensors, self.config.weights.bucket_mib * 2**20)
        deadline = time.monotonic() + self.config.weights.seconds
        for worker in self.config.workers:
            while self.control.value(f"weights/taken/{worker}", -1) != version:
                self.control.check(self.config.workers)
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{worker} did not take version {version} within {self.config.weights.seconds:.0f} s"
                    )
                time.sleep(0.01)
        return time.monotonic() - started
