"""Definitions of the metrics of the loss and the optimiser."""

from __future__ import annotations

from megatron_webrl.track.metric_reference.definition import section

_DISTRIBUTIONS = {
    "behaviour_logprob": ("nats", "Log-probability of a response token under the policy that produced it"),
    "current_logprob": ("nats", "Log-probability of a response token under the current policy"),
    "clipped_logprob": ("nats", "`current_logprob` of the clipped tokens, see `clip_fraction`"),
    "advantage": ("", "Advantage of a response token, that of its step; without that of a teacher"),
    "teacher_kl": (
        "nats",
        "log behave - log teacher of a response token, with a teacher only; the mean is the "
        "unbiased (k1) estimate of the reverse KL(behave, teacher)",
    ),
}
_STATISTICS = {"mean": "mean", "std": "population standard deviation", "min": "smallest", "max": "largest"}

SECTIONS = (
    section(
        "Loss and optimiser",
        "trainer/metrics/token_metrics.py",
        "Over the response tokens of all passes (epochs and minibatches), on all data-parallel and context-parallel "
        "ranks. theta is the policy at the pass, prox that at the start of the update, behave the one that produced "
        "the token; all at the sampling temperature. [algorithm.md](algorithm.md) has the equations.",
        ("loss", "", "The objective that is minimised, mean over optimiser steps."),
        ("gradient_norm", "", "Norm of the gradient before clipping, mean over optimiser steps."),
        ("gradient_clipped", "share", "Optimiser steps whose gradient norm exceeded `clip_norm`."),
        ("learning_rate", "", "Learning rate of the update's optimiser steps, their mean."),
        ("entropy", "nats", "Entropy of theta, mean."),
        ("entropy/success", "nats", "Entropy of theta in successes, mean."),
        ("entropy/failure", "nats", "Entropy of theta in failures, mean."),
        ("dual_clipped", "share", "Tokens whose gradient the dual clip stopped; `grpo` and `gspo` only."),
        ("importance_weight_capped", "share", "Tokens whose importance weight exceeded `importance_weight_cap`."),
        (
            "importance_weight_floored",
            "share",
            "Tokens whose importance weight was below `importance_weight_floor`; with a floor only.",
        ),
        ("kl_rejected", "share", "Tokens of responses masked by `kl_rejection_bound`; with a bound only."),
        (
            "lag_masked",
            "share",
            "Tokens masked by `max_token_lag`, of unknown versions too; with a limit only.",
        ),
        ("policy_ratio", "ratio", "r = theta / prox (theta / behave if not decoupled), mean."),
        ("behaviour_importance_weight", "ratio", "w = prox / behave as used, within its bounds and 0 if masked, mean."),
        ("approx_kl", "nats", "r - 1 - log r, mean: distance of theta from prox (from behave if not decoupled)."),
        (
            "reference_kl",
            "nats",
            "q - 1 - log q, q = reference / theta, mean, beyond q = 10 along its tangent; with `kl_coefficient` only.",
        ),
        ("behaviour_kl_k1", "nats", "log behave - log theta, mean: unbiased estimate of KL(behave, theta)."),
        (
            "behaviour_kl_k3",
            "nats",
            "r - 1 - log r, r = theta / behave, mean: the same with less variance, never negative.",
        ),
        (
            "routing_replayed",
            "share",
            "Computed tokens, prompts included, that go to the experts that the engine chose; the others to those of "
            "the trainer's router. With `trainer.routing_replay` only; missing if no token does.",
        ),
        (
            "value_loss",
            "",
            "Squared error of the step critic's values against the lambda-returns, mean over steps and optimiser "
            "steps; like the next two with `trainer.advantage.name=critic` only.",
        ),
        ("value_mean", "reward", "Value of a step at the start of the update, mean."),
        (
            "explained_variance",
            "share",
            "1 - Var(G - V) / Var(G) over steps, V the value at the start of the update, G the discounted return of "
            "the episode: 1 for a perfect critic, 0 for a constant one; missing where all returns are the same.",
        ),
        ("teacher_missing", "share", "Tokens that the teacher has not scored; with a teacher only."),
        ("teacher_clipped", "share", "Tokens whose teacher's advantage is beyond `distillation.clip`."),
        *(
            (f"{name}_{statistic}", unit, f"{meaning}, {which}.")
            for name, (unit, meaning) in _DISTRIBUTIONS.items()
            for statistic, which in _STATISTICS.items()
        ),
    ),
)
