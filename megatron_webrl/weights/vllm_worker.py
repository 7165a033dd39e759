"""The receiving end of weight transfers inside each vLLM worker process.

vLLM mixes WeightReceiver into its worker class (`worker_extension_cls`); the engine reaches its methods by
`collective_rpc`. Loading goes through vLLM's own reload, which unpacks and packs again whatever kernels made
of the weights at load.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from megatron_webrl.weights import transport
from megatron_webrl.weights.manifest import Manifest


class WeightReceiver:
    """Methods of a vLLM worker; `self` is the worker. All arguments and results can be sent as messages."""

    # vLLM's worker, as far as it is used here.
    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any

    def webrl_join_weights(
        self,
        host: str,
        port: int,
        name: str,
        first_rank: int,
        size: int,
        manifest: str,
        join_seconds: float,
        seconds: float,
    ) -> None:
        """Join transfer group `name` as rank first_rank + this worker's rank. Raises transport.TransferError."""
        # It warns at every update of layers that have no tensor of their own; what was taken is counted below.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=join_seconds))
        backend: Literal["gloo", "nccl"] = "nccl" if self.device.type == "cuda" else "gloo"
        group = transport.join(store, name, first_rank + self.rank, size, join_seconds, backend)
        group.seconds = seconds
        self._webrl_group, self._webrl_manifest = group, Manifest.from_json(manifest)

    def webrl_receive_weights(self, bucket_bytes: int) -> None:
        """Receive one transfer into the model. After an error the weights may be torn: the engine must not serve."""
        manifest = self._webrl_manifest
        tensors = transport.receive(self._webrl_group, manifest, bucket_bytes, self.device)
        counted = _Counted(tensors)
        try:
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                model = self.model_runner.get_model()
                tied = _tied_heads(model)
                if self.device.type == "cpu":
                    _forget_packed_experts(model)
                self.model_runner.reload_weights(weights_iterator=iter(counted))
                _refresh(tied, self.device)
            for _ in counted:  # what the loader had no use for; the transfer ends with its last tensor
                pass
        finally:
            tensors.close()
        if counted.count != len(manifest.entries):
            raise RuntimeError(f"the loader took {counted.count} of {len(manifest.entries)} tensors")

    def webrl_leave_weights(self) -> None:
        """Leave the transfer group, if joined."""
        group = getattr(self, "_webrl_group", None)
        if group is not None:
            group.close()


class _Counted:
    """An iterator that counts what passes."""

    def __init__(self, tensors: Any) -> None:
        self._tensors, self.count = tensors, 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        item = next(self._tensors)
        self.count += 1
        return item


def _forget_packed_experts(model: torch.nn.Module) -> None:
    # A fused-MoE module that holds a kernel keeps computing with the weights that the kernel packed at load,
    # silently; without one, the reload packs again.
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _tied_heads(model: torch.nn.Module) -> list[tuple[ParallelLMHead, VocabParallelEmbedding]]:
    """Output heads that share their weight with an embedding, each with it."""
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    embeddings = [
        m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    ]
    return [(h, e) for h in heads for e in embeddings if h.weight.data_ptr() == e.weight.data_ptr()]


def _refresh(tied: list[tuple[ParallelLMHead, VocabParallelEmbedding]], device: torch.device) -> None:
    # A tied head has no tensor of its own in a transfer, so the reload passes it by. On CPU it would go on with
    # what it packed from the old weights.
    for head, embedding in tied:
        if head.weight.data_ptr() != embedding.weight.data_ptr():
            raise RuntimeError("the output head no longer shares the embedding's memory; its weights would stay old")
        if device.type == "cpu":
            head.quant_method.process_weights_after_loading(head)
