from __future__ import annotations

from dataclasses import replace

from megatron_webrl.config.advantage import advantage_config
from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.credit.advantages import is_overlong, step_advantages
from megatron_webrl.trainer.data import batching
from megatron_webrl.trainer.metrics.group_statistics import credit_metrics
from megatron_webrl.types import Group, Trajectory
from tests.trajectories import trajectory


def ended(index: int, *, success: bool = False, end: str = "done", cut: bool = False) -> Trajectory:
    made = trajectory(0, index, reward=float(success), steps=3)
    first = replace(made.steps[0], finish_reason="length" if cut else "stop")
    return replace(made, end_reason=end, steps=(first, *made.steps[1:]))


def test_a_failure_by_a_limit_is_overlong() -> None:
    for success, end, cut, overlong in (
        (False, "steps_exhausted", False, True),
        (False, "done", True, True),
        (False, "done", False, False),  # it failed by itself
        (False, "go_backs", False, False),
        (True, "steps_exhausted", False, False),
        (True, "done", True, False),
    ):
        made = ended(0, success=success, end=end, cut=cut)
        assert is_overlong(made) is overlong, (success, end, cut)
        assert not is_overlong(replace(made, outcome="browser_error"))


def test_overlong_failures_leave_the_loss_and_stay_in_the_statistics() -> None:
    group = Group(0, (ended(0, success=True), ended(1), ended(2, end="steps_exhausted"), ended(3, cut=True)))
    config = Config()
    kept = step_advantages([group], config)[0]
    config.trainer.advantage = advantage_config(overlong="mask")
    (masked,) = step_advantages([group], config)
    assert list(masked) == [0, 1]
    assert all((masked[index] == kept[index]).all() for index in masked)
    samples = batching.training_samples([group], config, 0)
    assert {sample.trajectory_id for sample in samples} == {(0, 0), (0, 1)}
    assert credit_metrics([group], config.trainer.advantage) == {"overlong_masked_rate": 0.5}
