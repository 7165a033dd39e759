"""Definitions of the metrics of a training batch."""

from __future__ import annotations

from megatron_webrl.track.metric_reference.definition import section

SECTIONS = (
    section(
        "Update",
        "track/metrics.py",
        "Fields of an update; means and shares are over the trainable episodes of its batch.",
        ("groups", "groups", "Trained groups."),
        ("reward_mean", "0..1", "Mean reward: 1 for a success, 0 for a failure."),
        ("steps_mean", "steps", "Steps of an episode, mean."),
        ("response_tokens_mean", "tokens", "Response tokens of a step, mean."),
        ("staleness_mean", "versions", "Updated version less that of the episode's oldest token, mean over episodes."),
        ("staleness_max", "versions", "The same, largest."),
        (
            "clip_fraction",
            "share",
            "Response tokens whose gradient the clip (`dppo`: the bound of the divergence) stopped, or whose ratio "
            "`cispo` bounded, over all passes.",
        ),
        (
            "logprob_mismatch_max",
            "nats",
            "Largest difference between the engine's and the trainer's log-probability of a token that the updated "
            "version produced; missing without such a token (`trainer/metrics/logprob_mismatch.py`).",
        ),
        ("logprob_mismatch_tokens", "tokens", "Tokens that were compared."),
        ("tokens_per_second", "tokens/s", "Trained tokens, prompts and all passes included, by wall clock."),
        ("finished_at", "s", "Unix time at the end of the update."),
        ("seconds/rollout", "s", "From the start of the first to the end of the last episode of the batch."),
        ("seconds/train", "s", "Packing, log-probabilities, gradients, optimiser."),
        ("seconds/sync", "s", "Weight transfer to the engines."),
        ("seconds/wait", "s", "The trainer waiting for groups."),
        ("seconds/image_wait", "s", "Part of `seconds/train`: the longest wait of a rank for images."),
    ),
    section(
        "Log-probability mismatch",
        "trainer/metrics/logprob_mismatch.py",
        "d = log-probability of the trainer, at the start of the update, less the engine's, by how many versions the "
        "engine's weights were older: 0 to 4, and 4 for more. With `trainer.loss.name=raft`, over the first minibatch.",
        ("logprob_mismatch/tokens/lag_<lag>", "tokens", "Tokens compared."),
        ("logprob_mismatch/mean/lag_<lag>", "nats", "Mean size of d; an update warns above 0.05 at lag 0."),
        (
            "logprob_mismatch/kl/lag_<lag>",
            "nats",
            "KL divergence of the trainer from the engine, estimator k3 of d; an update warns above 0.5.",
        ),
        ("logprob_mismatch/largest/lag_<lag>", "nats", "Largest size of d."),
        ("logprob_mismatch/beyond/lag_<lag>", "share", "Tokens whose d is larger than 0.1, up or down."),
    ),
    section(
        "Coordinator",
        "trainer/coordinator.py",
        "Of the update as a whole.",
        ("staleness_min", "versions", "Smallest staleness of a trainable episode; see `staleness_mean`."),
        ("reward_shaped_mean", "reward", "Mean reward with penalties, if `trainer.reward.*` has any."),
        ("replayed_trajectories", "episodes", "Successes of earlier versions in the batch (`replay_versions`)."),
        ("dropped/<reason>", "episodes", "Episodes dropped since the start of the run, by reason."),
    ),
    section(
        "Credit assignment",
        "trainer/metrics/credit_metrics.py",
        "Over the trainable episodes of the batch; [algorithm.md](algorithm.md#credit-assignment).",
        ("overlong_masked_rate", "share", "Episodes masked from the loss, with `trainer.advantage.overlong=mask`."),
        (
            "anchored_step_rate",
            "share",
            "Steps at a state that another step of their group saw as well, with `trainer.advantage.anchor_weight`.",
        ),
    ),
    section(
        "Episodes of the batch",
        "track/metrics.py",
        "Over the trainable episodes of the batch and their steps, unless said otherwise. Zero-variance groups are not "
        "in the batch if they are dropped, so success is near one half whatever the policy does.",
        ("success_rate", "share", "Successes."),
        ("success_rate/<environment>", "share", "Successes in one environment; with task files, in one domain."),
        ("masked_episodes", "episodes", "Masked episodes in the groups of the batch."),
        ("tries_per_episode", "tries", "Mean number of tries, masked episodes included; 1 without retries."),
        (
            "not_recorded_requests_per_episode",
            "requests",
            "Mean number of requests that no recording answered; 0 without `browser.replay`.",
        ),
        ("format_error_rate", "share", "Steps whose response has no valid tool call."),
        ("truncated_rate", "share", "Steps whose response reached `rollout.max_new_tokens`."),
        (
            "page_unchanged_rate",
            "share",
            "Steps after which the screenshot was the same, those without action included.",
        ),
        ("versions_per_step", "versions", "Distinct policy versions in a response, mean."),
        ("seconds_generation_per_step", "s", "Time of a generation, mean."),
        ("seconds_browser_per_step", "s", "Time of an action in the browser, mean."),
        ("prompt_tokens_per_step", "tokens", "Prompt tokens of a step, mean."),
        ("prefix_cache_hit_rate", "share", "Prompt tokens that were in the engine's prefix cache."),
        ("steps_mean/success", "steps", "Steps of a success, mean."),
        ("steps_mean/failure", "steps", "Steps of a failure, mean."),
        ("action_rate/<action>", "share", "Steps with this action."),
        ("leniency/<name>", "share", "Steps whose call needed this leniency (`rollout.lenient_actions`)."),
    ),
    section(
        "Steps of the batch",
        "track/step_metrics.py",
        "Over the steps of the trainable episodes of the batch. Memory exists in the response forms `memory_additive`, "
        "`memory_compressive` and `memory_compact` only; a version is that of the policy that produced a token.",
        ("response_characters_mean", "characters", "Length of the decoded response, mean."),
        ("response_characters_max", "characters", "Length of the decoded response, largest."),
        ("response_tokens_max", "tokens", "Response tokens of a step, largest."),
        ("response_tokens_mean/success", "tokens", "Response tokens of a step of a success, mean."),
        ("response_tokens_mean/failure", "tokens", "Response tokens of a step of a failure, mean."),
        ("memory_characters_mean", "characters", "Length of the Memory, mean over the responses that have one."),
        ("memory_characters_max", "characters", "Length of the Memory, largest."),
        ("memory_missing_rate", "share", "Responses without a Memory."),
        ("memory_empty_rate", "share", "Responses with an empty Memory, such as `{}`."),
        ("page_unchanged_rate/success", "share", "Steps of successes after which the screenshot was the same."),
        ("page_unchanged_rate/failure", "share", "Steps of failures after which the screenshot was the same."),
        ("stuck_rate", "share", "Steps that left the page unchanged by an action other than `wait` and `answer`."),
        ("versions_per_batch", "versions", "Distinct versions over all response tokens of the batch."),
        ("updates_within_step_mean", "versions", "Newest less oldest version in a response, mean."),
        ("updates_within_step_max", "versions", "Newest less oldest version in a response, largest."),
        ("updates_across_steps_mean", "versions", "Newest less oldest version in an episode, mean."),
        ("updates_across_steps_max", "versions", "Newest less oldest version in an episode, largest."),
    ),
)
