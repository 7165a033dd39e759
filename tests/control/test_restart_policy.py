"""The budget of restarts, checked against every window of random histories of failures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.control.child_process import JITTER, MAX_DELAY_SECONDS, RestartPolicy, restart_delay

pauses = st.lists(st.floats(0.0, 100.0), max_size=60)


@given(pauses, st.integers(0, 5), st.floats(1.0, 300.0))
def test_no_window_holds_more_restarts_than_the_budget_and_a_refusal_has_a_full_window(
    pauses: list[float], budget: int, window: float
) -> None:
    policy, now, granted = RestartPolicy(budget, window), 1000.0, list[float]()
    for pause in pauses:
        now += pause
        recent = [time for time in granted if now - time < window]
        restart_at = policy.next_restart(now)
        assert (restart_at is None) == (len(recent) >= budget)
        if restart_at is not None:
            granted.append(now)
            assert now <= restart_at <= now + MAX_DELAY_SECONDS
            assert restart_at == now or recent
            assert policy.used == len(recent) + 1
        assert policy.used <= budget


@given(st.integers(1, 10_000), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_delays_grow_to_a_limit_and_chance_takes_off_a_bounded_share(number: int, chance: float, other: float) -> None:
    longest = restart_delay(number, 0.0)
    assert longest <= restart_delay(number + 1, 0.0) <= MAX_DELAY_SECONDS
    assert longest * (1 - JITTER) <= restart_delay(number, chance) <= longest
    assert (restart_delay(1, chance), restart_delay(2, 0.0)) == (0.0, 1.0)
    if number > 1 and chance != other and abs(chance - other) > 1e-6:
        assert restart_delay(number, chance) != restart_delay(number, other)
