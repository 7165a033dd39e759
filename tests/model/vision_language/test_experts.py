"""Experts that are computed together equal those computed one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_webrl.model.vision_language import experts
from tests import gloo
from tests.model import tiny

IN, OUT = 16, 24


def weights(count: int, dtype: torch.dtype, step: int) -> list[torch.Tensor]:
    """Weights [OUT, IN] in one storage, `step` elements apart."""
    buffer = torch.randn(count * abs(step), dtype=dtype, generator=torch.Generator().manual_seed(1))
    found = [buffer[start : start + OUT * IN].view(OUT, IN) for start in range(0, count * abs(step), abs(step))]
    return [each.requires_grad_() for each in (found if step > 0 else reversed(found))]


@pytest.mark.parametrize("counts", [[4, 1, 8], [0, 5, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("step", [OUT * IN + 64, -OUT * IN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_grouped_product_equals_the_products_of_its_groups(counts: list[int], step: int, dtype: torch.dtype) -> None:
    """Values and gradients, with groups that have no token."""
    given = weights(len(counts), dtype, step)
    tokens = torch.randn(sum(counts), IN, dtype=dtype, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found = experts.grouped_linear(tokens, torch.tensor(counts).cumsum(0, dtype=torch.int32), given)
    wanted = torch.cat([part @ weight.t() for part, weight in zip(tokens.split(counts), given, strict=True)])
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn(wanted.shape, dtype=dtype, generator=torch.Generator().manual_seed(3))
    pairs = (torch.autograd.grad(each, [tokens, *given], gradient) for each in (found, wanted))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_only_weights_at_equal_distances_in_one_storage_are_not_copied() -> None:
    beside = weights(4, torch.float32, OUT * IN + 64)
    for given, copied in (
        (beside, False), (beside[:1], False), (beside[::2], False), (beside[::-1], True),
        ([*beside[:2], beside[3]], True), ([beside[0], beside[1].detach().clone()], True),
    ):  # fmt: skip
        detached = [each.detach() for each in given]
        found = experts._stacked(detached)
        assert torch.equal(found, torch.stack(detached))
        assert (found.data_ptr() != detached[0].data_ptr()) is copied


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype", "together"),
    [
        ("auto", (24, 16), torch.float32, True),
        ("auto", (24, 16), torch.bfloat16, True),
        ("auto", (24, 20), torch.bfloat16, False),  # rows of 40 bytes
        ("auto", (24, 16), torch.float64, False),
        ("sequential", (24, 16), torch.bfloat16, False),
    ],
)
def test_experts_are_computed_together_where_a_kernel_exists(
    kernel: Any, shape: tuple[int, int], dtype: torch.dtype, together: bool
) -> None:
    assert experts.computes_together(kernel, torch.empty(shape, dtype=dtype)) is together


# -- two processes that train a mixture of experts ----------------------------------------------------------------

SIZES = {"expert": {"expert": 2}, "expert_tensor": {"tensor": 2, "expert_tensor": 2}}
KERNELS = ("auto", "sequential", "megatron")  # the last one: sequential, with Megatron's own dispatcher


def run(rank: int, folder: str, name: str) -> None:
    """Write the results of each kernel in a layout to KERNEL-RANK.pt."""
    platform = gloo.join(rank, 2, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    process_groups.init_process_groups(ParallelSizes(**SIZES[name]), seed=1)
    for kernel in KERNELS:
        torch.save(_train(Path(folder) / "moe", kernel, platform), f"{folder}/{kernel}-{rank}.pt")
    torch.distributed.destroy_process_group()


def _train(folder: Path, kernel: Any, platform: Any) -> dict[str, Any]:
    """Logits, gradients and weights after a step of this rank; how often weights were stacked, and copied for it."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_webrl.config.trainer import OptimizerConfig
    from megatron_webrl.model import schedule
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.compute_options import ComputeOptions
    from megatron_webrl.model.vision_language import layers
    from megatron_webrl.model.vision_language.experts import TokenDispatcher
    from megatron_webrl.trainer.optimizer import make_optimizer, wrap_ddp

    own = kernel != "megatron"
    options = ComputeOptions(experts=kernel if own else "sequential")
    with mock.patch.object(layers, "TokenDispatcher", TokenDispatcher if own else MoEAlltoAllTokenDispatcher):
        [model] = build_model(folder, dtype="float32", platform=platform, options=options)
    load_hf([model], folder)
    wrapped = wrap_ddp([model])
    optimizer = make_optimizer(wrapped, OptimizerConfig(implementation="torch", learning_rate=0.01), 1, torch.float32)
    packed, targets = tiny.pack(list(tiny.samples().values()))
    copied: list[bool] = []  # of each time that the weights of all experts were stacked
    stack = experts._stacked

    def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = stack(weights)
        copied.append(whole.data_ptr() != weights[0].data_ptr())
        return whole

    def loss(_: int, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        row = logits[torch.arange(len(targets)), targets % logits.shape[1]]
        return (row * tiny.token_weights(len(targets))).sum(), {"logits": logits.detach()}

    with mock.patch.object(experts, "_stacked", stacked):
        [result] = schedule.forward_backward(wrapped, [packed], loss, forward_only=False)
    found: dict[str, Any] = {"stacked": len(copied), "copies": sum(copied), "logits": result["logits"]}
    found["gradients"] = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    found["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


@pytest.mark.parametrize("name", SIZES)
def test_a_step_equals_that_of_experts_one_after_the_other_and_copies_no_weights(tmp_path: Path, name: str) -> None:
    """Also with Megatron's own dispatcher, which selects tokens by masks."""
    tiny.write_model(tmp_path / "moe", tiny.Shape(experts=4, dense_layers=(1,)), 3)
    gloo.spawn(run, str(tmp_path), name)
    for rank in range(2):
        together, *others = (torch.load(tmp_path / f"{kernel}-{rank}.pt") for kernel in KERNELS)
        assert together["copies"] == 0
        for sequential in others:
            assert together["stacked"] > 0 == sequential["stacked"]
            assert (together["logits"] - sequential["logits"]).norm() <= 1e-6 * sequential["logits"].norm()
            for part in ("gradients", "weights"):
                assert list(together[part]) == list(sequential[part])
                for key, wanted in sequential[part].items():
                    assert (together[part][key] - wanted).norm() <= 1e-6 * wanted.norm(), f"{part} of {key}"
