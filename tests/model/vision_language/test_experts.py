"""Experts that are computed together equal those computed one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.model.vision_language import experts
from tests.gloo import spawn
from tests.model import tiny
from tests.model.vision_language import expert_ranks

IN, OUT = 16, 24
Trained = Callable[[str, str], list[dict[str, Any]]]


def weights(count: int, dtype: torch.dtype, step: int) -> list[torch.Tensor]:
    """Weights [OUT, IN] in one storage, `step` elements apart."""
    buffer = torch.randn(count * abs(step), dtype=dtype, generator=torch.Generator().manual_seed(1))
    found = [buffer[start : start + OUT * IN].view(OUT, IN) for start in range(0, count * abs(step), abs(step))]
    return [each.requires_grad_() for each in (found if step > 0 else reversed(found))]


@pytest.mark.parametrize("counts", [[4, 1, 8], [0, 5, 0], [0, 0, 0], [3]], ids=str)
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """(layout, kernel) -> results of both ranks."""
    folder = tmp_path_factory.mktemp("experts")
    tiny.write_model(folder / "moe", tiny.Shape(experts=4, dense_layers=(1,)), 3)
    spawn(expert_ranks.run, str(folder))
    return lambda name, kernel: [torch.load(Path(folder) / f"{name}-{kernel}-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("other", ["sequential", "megatron"])
@pytest.mark.parametrize("name", expert_ranks.SIZES)
def test_a_step_equals_that_of_experts_one_after_the_other(trained: Trained, name: str, other: str) -> None:
    """Also with Megatron's own dispatcher, which selects tokens by masks."""
    for together, sequential in zip(trained(name, "auto"), trained(name, other), strict=True):
        assert together["stacked"] > 0 == sequential["stacked"]
        for part in ("gradients", "weights"):
            assert list(together[part]) == list(sequential[part])
            for key, wanted in sequential[part].items():
                assert (together[part][key] - wanted).norm() <= 1e-6 * wanted.norm(), f"{part} of {key}"
        wanted = sequential["logits"]
        assert (together["logits"] - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("name", expert_ranks.SIZES)
def test_the_weights_of_a_training_job_are_not_copied(trained: Trained, name: str) -> None:
    assert [found["copies"] for found in trained(name, "auto")] == [0, 0]
