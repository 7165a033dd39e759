"""Metrics of verdicts: outcomes and cost by evaluator, failed attempts by stage of the judge."""

from __future__ import annotations

from collections import Counter, defaultdict

from megatron_webrl.types import Verdict
from megatron_webrl.util.text import metric_label

FIGURES = ("calls", "prompt_tokens", "response_tokens", "dollars", "seconds")
UNJUDGED = "none"  # evaluator of an episode without a regular end
_Sums = dict[str, float]  # by figure, and "episodes"


class VerdictStatistics:
    """Sums over verdicts by evaluator and outcome. Episodes that ended before they could be judged do not count."""

    def __init__(self) -> None:
        self._by_outcome: defaultdict[str, defaultdict[str, _Sums]]
        self._stages: defaultdict[str, Counter[str]]
        self._errors: defaultdict[str, Counter[str]]
        self._reset()

    def add(self, verdict: Verdict) -> None:
        """Count a verdict."""
        if verdict.evaluator == UNJUDGED:
            return
        judge = metric_label(f"{verdict.evaluator} {verdict.protocol}")
        sums = self._by_outcome[judge][metric_label(verdict.outcome)]
        sums["episodes"] = sums.get("episodes", 0) + 1
        for figure in FIGURES:
            sums[figure] = sums.get(figure, 0.0) + getattr(verdict, figure)
        for stage in verdict.stages:
            name = metric_label(stage.name)
            self._stages[name].update(questions=1, attempts=stage.attempts, undecided=int(stage.decision == "none"))
            self._errors[name].update(map(metric_label, stage.errors))

    def pop_metrics(self) -> dict[str, float]:
        """Metrics since the last call, by MLflow name; cost only of evaluators that asked a judge model."""
        metrics: dict[str, float] = {}
        for judge, outcomes in sorted(self._by_outcome.items()):
            metrics |= _judge_metrics(f"verdict/{judge}", outcomes)
        for stage, counts in sorted(self._stages.items()):
            metrics[f"judge_stage/{stage}/questions"] = float(counts["questions"])
            metrics[f"judge_stage/{stage}/undecided_rate"] = counts["undecided"] / counts["questions"]
            for error, count in sorted(self._errors[stage].items()):
                metrics[f"judge_stage/{stage}/error_rate/{error}"] = count / max(1, counts["attempts"])
        self._reset()
        return metrics

    def _reset(self) -> None:
        self._by_outcome = defaultdict(lambda: defaultdict(dict))
        self._stages, self._errors = defaultdict(Counter), defaultdict(Counter)


def _judge_metrics(prefix: str, outcomes: dict[str, _Sums]) -> dict[str, float]:
    episodes = sum(sums["episodes"] for sums in outcomes.values())
    metrics = {f"{prefix}/episodes": float(episodes)}
    metrics |= {f"{prefix}/rate/{name}": sums["episodes"] / episodes for name, sums in sorted(outcomes.items())}
    totals = {figure: sum(sums[figure] for sums in outcomes.values()) for figure in FIGURES}
    if not totals["calls"]:
        return metrics
    metrics[f"{prefix}/dollars_total"] = totals["dollars"]
    for figure in FIGURES:
        metrics[f"{prefix}/{figure}"] = totals[figure] / episodes
        metrics |= {
            f"{prefix}/{figure}/{name}": sums[figure] / sums["episodes"] for name, sums in sorted(outcomes.items())
        }
    return metrics
