"""What someone looks at, over time."""

from __future__ import annotations

from megatron_webrl.control.liveness import MAX_EPISODES, VIEW_SECONDS, Liveness


def test_a_job_is_looked_at_until_its_last_viewer_stops_asking():
    viewers = Liveness(60.0)
    assert viewers.viewed(0.0) is None
    viewers.look(0.0, ["rollout-0/a"])
    viewers.look(6.0, [])
    assert viewers.viewed(VIEW_SECONDS) == {"episodes": ["rollout-0/a"]}
    assert viewers.viewed(VIEW_SECONDS + 1) == {"episodes": []}
    assert viewers.viewed(VIEW_SECONDS + 7) is None


def test_the_episodes_that_were_asked_for_last_count():
    viewers = Liveness(60.0)
    viewers.look(0.0, [f"rollout-0/{number}" for number in range(MAX_EPISODES)])
    viewers.look(1.0, ["rollout-0/0", "rollout-1/new"])
    fact = viewers.viewed(1.0)
    assert fact is not None
    assert len(fact["episodes"]) == MAX_EPISODES
    assert {"rollout-0/0", "rollout-1/new"} <= set(fact["episodes"])
    assert "rollout-0/1" not in fact["episodes"]


def test_only_workers_that_live_and_report_rollouts_are_shown():
    liveness = Liveness(timeout_seconds=20.0)
    for role in ("rollout-0", "rollout-1", "rollout-2", "trainer-0"):
        liveness.report(role, 0.0, {"sender": role} | ({"rollouts": f"[{role}]"} if role != "trainer-0" else {}))
    assert liveness.rollouts(1.5)["rollout-0"] == (1.5, "[rollout-0]")
    liveness.clear("rollout-1")  # its supervisor restarts it
    liveness.report("rollout-2", 2.0, {"sender": "rollout-2"})  # nobody looks
    assert sorted(liveness.rollouts(2.0)) == ["rollout-0"]
    assert not liveness.rollouts(21.0)
