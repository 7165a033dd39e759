"""Predicted times of a configuration on a card, with the memory that it needs, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.placement.hardware import Card, Rates
from megatron_webrl.placement.memory_estimate import GIB, estimate_memory
from megatron_webrl.placement.performance.training import TrainingPrediction, predict_training
from megatron_webrl.placement.prediction import EpisodeLengths, GenerationPrediction, predict_generation

WIDTH = 100  # columns of the tables


@dataclass(frozen=True)
class Prediction:
    """Trainer, engines and memory of a configuration."""

    card: str
    training: TrainingPrediction | None  # None without a trainer
    generation: GenerationPrediction
    trainer_gib: float  # of the GPU that needs most
    engine_gib: float

    @property
    def update_seconds(self) -> float:
        """Wall clock of an update in mode async: the slower of trainer with weight sync, and engines."""
        if self.training is None:
            return self.generation.update_seconds
        return max(self.training.train_seconds + self.training.sync_seconds, self.generation.update_seconds)


def predict(config: Config, description: Mapping[str, Any], card: Card, lengths: EpisodeLengths) -> Prediction:
    """Predict a configuration. `description`: the model's config.json.

    Raises ConfigError without GPUs, in float32, or if the mean sequence exceeds trainer.tokens_per_microbatch.
    """
    if not config.cluster.gpus_per_node:
        raise ConfigError("a prediction needs GPUs, but cluster.gpus_per_node=0; set it")
    if config.model.dtype != "bfloat16":
        raise ConfigError(f"model.dtype={config.model.dtype} has no prediction: cards' rates are those of bfloat16")
    rates, estimate = Rates.of_card(card), estimate_memory(config, description)
    try:
        training = (
            predict_training(config, description, rates, lengths, card.peak_tflops)
            if config.trainer_world_size
            else None
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Prediction(
        card=card.name,
        training=training,
        generation=predict_generation(config, description, rates, lengths),
        trainer_gib=max((use.total for use in estimate.trainer), default=0) / GIB,
        engine_gib=estimate.engine.total / GIB,
    )


def print_prediction(config: Config, prediction: Prediction, console: Console) -> None:
    """Print the prediction in at most WIDTH columns."""
    training, generation = prediction.training, prediction.generation
    if training is not None:
        console.print(_parts_table(f"training, {prediction.card}", "s an update", training.parts))
        for line in training_lines(prediction):
            console.print(line, highlight=False)
    milliseconds = {name: 1000 * seconds for name, seconds in generation.parts.items()}
    console.print(_parts_table("generation", "ms a step of an episode", milliseconds))
    for line in generation_lines(prediction):
        console.print(line, highlight=False)
    console.print("predicted, not measured; docs/performance.md lists the assumptions", style="dim")


def training_lines(prediction: Prediction) -> list[str]:
    """Figures of the trainer, a line each."""
    training = prediction.training
    if training is None:
        return []
    checkpoint = f"a checkpoint holds training for {number(training.checkpoint_seconds)} s"
    if training.checkpoint_every:
        checkpoint += f", every {training.checkpoint_every} updates"
    mfu = "" if training.mfu is None else f"MFU {training.mfu:.1%}, "
    return [
        f"{mfu}{training.tokens_per_second_per_gpu:,.0f} trained tokens/s a GPU, "
        f"{training.operations / training.train_seconds / training.ranks / 1e12:.0f} TFLOP/s a GPU",
        f"{training.microbatches} micro-batches of {training.microbatch_tokens:,.0f} tokens a replica and minibatch, "
        f"{training.tokens:,.0f} tokens an update",
        f"collectives behind computation {number(training.hidden_seconds)} s; "
        f"weight sync {number(training.sync_seconds)} s",
        checkpoint,
        f"memory {prediction.trainer_gib:.0f} GiB of a trainer's GPU, {prediction.engine_gib:.0f} GiB of an engine's",
    ]


def generation_lines(prediction: Prediction) -> list[str]:
    """Figures of the engines and of the update as a whole, a line each."""
    generation = prediction.generation
    return [
        f"{generation.requests:.1f} requests an engine at a time, {1000 * generation.decode_seconds:.1f} ms a token, "
        f"prefix cache {generation.hit_rate:.0%} of {generation.prompt_tokens:,.0f} prompt tokens",
        f"all engines {generation.response_tokens_per_second:,.0f} response tokens/s, the episodes of an update in "
        f"{number(generation.update_seconds)} s",
        f"an update in mode async {number(prediction.update_seconds)} s",
    ]


def number(value: float) -> str:
    """Three significant digits at least, none after the point from 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _parts_table(title: str, unit: str, parts: Mapping[str, float]) -> Table:
    """A table of parts with their shares and their sum."""
    table, total = make_table(title, unit, "share", left=title), sum(parts.values())
    for name, value in parts.items():
        table.add_row(name, number(value), f"{value / total:.1%}")
    table.add_row("sum", number(total), "")
    return table


def make_table(*columns: str, left: str) -> Table:
    """An empty table; column `left` holds words, the others numbers."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=False)
    for name in columns:
        table.add_column(name, justify="left" if name == left else "right")
    return table
