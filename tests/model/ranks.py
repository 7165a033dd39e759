"""The two gloo processes of the parity tests; each writes its results to a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.model import platform as platforms
from tests.gloo import layouts
from tests.model import tiny

MODELS = {"untied": tiny.Shape(deepstack=(0, 1)), "tied": tiny.Shape(tie=True)}
LEARNING_RATE = 0.05
EPSILON = 1.0
"""Adam's epsilon, large enough that the step depends on the gradient's magnitude."""


def run(rank: int, folder: str) -> None:
    """Tensor-parallel 2 first, then tensor-parallel 1 with two replicas, in the same processes."""
    for size, platform in layouts(rank, folder):
        from megatron.core import parallel_state

        found = {name: _examine(name, Path(folder), size, platform) for name in MODELS}
        found["logprobs"] = _logprobs(parallel_state.get_tensor_model_parallel_group())
        found["bf16"] = _bf16(Path(folder), platform)
        torch.save(found, f"{folder}/found-{size}-{rank}.pt")


def _examine(name: str, folder: Path, size: int, platform: platforms.Platform) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.compute_options import ComputeOptions
    from megatron_webrl.model.parameter_map import parameter_shapes
    from tests.model.hf_export import hf_manifest, hf_tensors

    [model] = build_model(
        folder / name, dtype="float32", platform=platform, options=ComputeOptions(sequence_parallel=False)
    )
    load_hf([model], folder / name)
    found: dict[str, Any] = {"manifest": hf_manifest([model])}
    found["export"] = {key: tensor.clone() for key, tensor in hf_tensors([model])}
    found["shapes"] = {key: tuple(p.shape) for key, p in model.named_parameters()}
    found["table"] = parameter_shapes(model.mappings, size)
    with torch.no_grad():
        found |= {case: _forward(model, row, targets) for case, (row, targets) in _rows().items()}
    checkpoint = folder / f"{name}-checkpoint-{size}"
    checkpoint.mkdir(exist_ok=True)
    dist_checkpointing.save(model.sharded_state_dict(), str(checkpoint))
    if size == 1:
        found["restored"] = [_restored(name, folder, wrote, platform) for wrote in (2, 1)]
        found["twins"] = _twins(model)
    found["refusals"] = _refusals(model)
    found |= _step(model)
    return found


def _refusals(model: Any) -> list[str]:
    """Errors of the model for inconsistent inputs."""
    row, _ = _rows()["packed"]
    broken = [
        replace(row, cu_seqlens=row.cu_seqlens[:-1]),
        replace(row, cu_seqlens=row.cu_seqlens[[0, 2, 1, 3]]),
        replace(row, grids=row.grids[:-1], pixels=row.pixels[: -int(row.grids[-1].prod())]),
    ]
    messages = []
    for each in broken:
        try:
            model(each)
        except ValueError as error:
            messages.append(str(error))
    return messages


def _rows() -> dict[str, tuple[Any, Tensor]]:
    parts = tiny.samples()
    rows = {case: tiny.pack([sample]) for case, sample in parts.items()}
    rows["packed"] = tiny.pack(list(parts.values()))
    one, three = parts["image"], parts["images"]
    twice, targets = tiny.pack([three, one, three])
    rows["twice"] = twice, targets
    rows["shared"] = (
        replace(
            twice,
            pixels=torch.cat([one.pixels, three.pixels]),
            grids=torch.cat([one.grids, three.grids]),
            image_indices=torch.tensor([1, 2, 3, 0, 1, 2, 3]),
        ),
        targets,
    )
    row, targets = rows["image"]
    rows["other pixels"] = replace(row, pixels=row.pixels.flip(0)), targets
    return rows


def _forward(model: Any, row: Any, targets: Tensor) -> dict[str, Tensor]:
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs

    group = model.pg_collection.tp
    logits = model(row)
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, tiny.TEMPERATURE, tiny.VOCABULARY, group)
    shards = [torch.empty_like(logits) for _ in range(group.size())]
    torch.distributed.all_gather(shards, logits, group=group)
    whole = torch.cat(shards, dim=1)
    return {"logits": whole[:, : tiny.VOCABULARY], "logprobs": logprobs, "entropy": entropy, "width": logits.shape[1]}


def _twins(model: Any) -> tuple[Tensor, Tensor]:
    """Logits with the placeholder token within a response, and with another token of the same embedding."""
    sample = tiny.samples()["image"]
    row, _ = tiny.pack([sample])
    visual = (sample.tokens[: sample.prompt] == tiny.IMAGE).nonzero().squeeze(1)
    weight = model.embedding.word_embeddings.weight
    with torch.no_grad():
        kept = weight[0].clone()
        weight[0] = weight[tiny.IMAGE]
        logits = []
        for token in (tiny.IMAGE, 0):
            tokens = sample.tokens.clone()
            tokens[sample.prompt + 2] = token
            logits.append(model(replace(row, tokens=tokens, image_token_positions=visual)))
        weight[0] = kept
    return logits[0], logits[1]


def _restored(name: str, folder: Path, wrote: int, platform: platforms.Platform) -> dict[str, Tensor]:
    """Logits of a model filled from the checkpoint written at tensor-parallel size `wrote`."""
    from megatron.core import dist_checkpointing

    from megatron_webrl.model.build import build_model

    [model] = build_model(folder / name, dtype="float32", platform=platform)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        loaded = dist_checkpointing.load(model.sharded_state_dict(), str(folder / f"{name}-checkpoint-{wrote}"))
        model.load_state_dict(loaded)
        return _forward(model, *_rows()["packed"])


def _step(model: Any) -> dict[str, Any]:
    """Gradients of the packed samples, divided over the replicas, and the weights after one optimiser step."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_webrl.model.gradients import finalize_gradients
    from tests.model.hf_export import hf_tensors

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(config=model.config, ddp_config=settings, module=model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=0.0,
            adam_eps=EPSILON,
            clip_grad=0.0,
            use_distributed_optimizer=True,
            params_dtype=torch.float32,
        ),
        [wrapped],
    )
    replicas = parallel_state.get_data_parallel_world_size()
    wrapped.zero_grad_buffer()
    # Megatron averages over replicas, and the loss is a sum.
    (_share_of_loss(wrapped, parallel_state.get_data_parallel_rank(), replicas) * replicas).backward()
    finalize_gradients([wrapped])
    gradients = _gradients(model, replicas)
    replicated = {key: p.main_grad.clone() for key, p in model.named_parameters() if "norm" in key or "visual" in key}
    optimizer.step()
    return {"gradients": gradients, "replicated": replicated, "stepped": {k: t.clone() for k, t in hf_tensors([model])}}


def _share_of_loss(model: Any, replica: int, replicas: int) -> Tensor:
    """This replica's terms of `tiny.reference_loss`; a single replica packs all samples into one input."""
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs

    parts = list(tiny.samples().values())
    counts = [len(sample.tokens) - sample.prompt for sample in parts]
    weights = tiny.token_weights(sum(counts)).split(counts)
    mine = range(replica, len(parts), replicas)
    row, targets = tiny.pack([parts[i] for i in mine])
    logprobs, _ = vocab_parallel_logprobs(
        model(row), targets, tiny.TEMPERATURE, tiny.VOCABULARY, model.module.pg_collection.tp
    )
    return (logprobs * torch.cat([weights[i] for i in mine])).sum()


def _gradients(model: Any, replicas: int) -> dict[str, Tensor]:
    """Gradients by Hugging Face name; {} with several replicas, which hold sums of parts of buckets."""
    from megatron_webrl.model.parameter_map import from_megatron

    group = model.pg_collection.tp
    if replicas > 1:
        return {}
    found = {}
    parameters = dict(model.named_parameters())
    for mapping in model.mappings:
        gradient = parameters[mapping.megatron_param].main_grad.contiguous()
        shards = [torch.empty_like(gradient) for _ in range(group.size())]
        torch.distributed.all_gather(shards, gradient, group=group)
        found[mapping.hf_param] = gradient.new_empty(mapping.tensor_shape)
        from_megatron(mapping, shards, found[mapping.hf_param])
    return found


def _bf16(folder: Path, platform: platforms.Platform) -> dict[str, Any]:
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.compute_options import ComputeOptions
    from tests.model.hf_export import hf_manifest, hf_tensors

    settings = ComputeOptions(sequence_parallel=False, train_vision=False)
    [model] = build_model(folder / "untied", dtype="bfloat16", platform=platform, options=settings)
    load_hf([model], folder / "untied")
    found: dict[str, Any] = {"trained": [key for key, p in model.named_parameters() if p.requires_grad]}
    with torch.no_grad():
        found |= _forward(model, *_rows()["packed"])
    return {**found, "manifest": hf_manifest([model]), "export": {k: t.clone() for k, t in hf_tensors([model])}}


def _logprobs(group: Any) -> dict[str, Tensor]:
    """Values and gradients of `vocab_parallel_logprobs` on this rank's slice of given logits."""
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs

    logits, targets, weights = logprob_case()
    mine = logits.chunk(group.size(), dim=1)[group.rank()].clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(mine, targets, tiny.TEMPERATURE, tiny.VOCABULARY, group)
    found = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    for name, loss in logprob_losses(logprobs, entropy, weights).items():
        (gradient,) = torch.autograd.grad(loss, mine, retain_graph=True)
        shards = [torch.empty_like(mine) for _ in range(group.size())]
        torch.distributed.all_gather(shards, gradient, group=group)
        found[name] = torch.cat(shards, dim=1)
    return found


def logprob_losses(logprobs: Tensor, entropy: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Losses of log-probabilities, of entropies and of both, by the name of their gradient at the logits."""
    of_logprobs, of_entropy = (logprobs * weights).sum(), (entropy * weights.flip(0)).sum()
    return {
        "gradient": of_logprobs,
        "gradient of entropy": of_entropy,
        "gradient of both": of_logprobs - 0.3 * of_entropy,
    }


def logprob_case() -> tuple[Tensor, Tensor, Tensor]:
    """Logits [50, 102] of large spread whose last column is padding, targets [50], weights [50]."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(50, tiny.VOCABULARY + 1, generator=generator) * 8
    logits[:, -1] = 1e4  # padding values must not matter
    return (
        logits,
        torch.randint(0, tiny.VOCABULARY, (50,), generator=generator),
        torch.randn(50, generator=generator),
    )
