"""A reference policy's weights are swapped with a module's, and swapped back exactly."""

from __future__ import annotations

import pytest
import torch

from megatron_webrl.trainer.learner import ReferencePolicy


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_has_the_initial_weights_in_the_context_and_its_own_afterwards(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(dtype)
    start = weights(module)
    places = [parameter.data_ptr() for parameter in module.parameters()]
    reference = ReferencePolicy([module])
    for _ in range(2):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter))
        trained = weights(module)
        with reference.swapped_in():
            assert all(map(torch.equal, weights(module), start))
        assert all(map(torch.equal, weights(module), trained))
        assert not any(map(torch.equal, trained, start))
    assert [parameter.data_ptr() for parameter in module.parameters()] == places


def test_an_error_in_the_context_restores_the_modules_own_weights() -> None:
    module = torch.nn.Linear(4, 4)
    reference = ReferencePolicy([module])
    with torch.no_grad():
        module.weight.fill_(2.0)
    with pytest.raises(RuntimeError, match="interrupted"), reference.swapped_in():
        raise RuntimeError("interrupted")
    assert bool((module.weight == 2.0).all())
