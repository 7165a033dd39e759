"""Predict the seconds of each part of an update, and of generation, for a configuration and a card.

    python -m tools.predict_step --config-name 8b_32node [KEY=VALUE ...] [--card H100]
    python -m tools.predict_step --config-name 8b_32node --search [--show 10]
    python -m tools.predict_step --measure

--config-name: a file in configs/ without .yaml, or a path. --search compares layouts of the trainer: tensor, pipeline
and expert sizes, recomputation and tokens of a micro-batch, among those that fit in memory. Lengths of episodes are
options; docs/performance.md has the assumptions. --measure needs no
configuration: it measures small products on this CPU, predicts an optimizer step of tools/bench/training.py from them,
runs it, and prints the ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python tools/predict_step.py`

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.placement.hardware import CARDS
from megatron_webrl.placement.performance.prediction import (
    WIDTH,
    make_table,
    number,
    predict,
    print_prediction,
)
from megatron_webrl.placement.performance.search import Layout, SearchResult, search_layouts
from megatron_webrl.placement.placement_table import find_model_config
from megatron_webrl.placement.prediction import EpisodeLengths
from tools.arguments import bounded_number, write_json

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = {field.name: field for field in dataclasses.fields(EpisodeLengths)}


def print_search(result: SearchResult, most: int, console: Console) -> None:
    """Print the fastest layouts, `most` of them, in at most WIDTH columns."""
    table = make_table("tp", "pp", "ep", "dp", "recompute", "tokens", "s an update", "MFU", "GiB", left="recompute")
    for layout in result.layouts[:most]:
        table.add_row(*_row(layout))
    console.print(table)
    console.print(f"{len(result.layouts)} of {result.tried} layouts fit; predicted, not measured", highlight=False)


def _row(layout: Layout) -> list[str]:
    trainer, training = layout.config.trainer, layout.prediction.training
    assert training is not None
    sizes = trainer.tensor_parallel, trainer.pipeline_parallel, trainer.expert_parallel, trainer.data_parallel
    return [
        *map(str, sizes), trainer.recompute, str(trainer.tokens_per_microbatch), f"{layout.seconds:.1f}",
        f"{training.mfu or 0:.1%}", f"{layout.prediction.trainer_gib:.0f}",
    ]  # fmt: skip


def _measure(console: Console) -> Any:
    from tools.cpu_prediction.comparison import compare_with_benchmark  # torch takes seconds to import

    found = compare_with_benchmark()
    table = make_table("training on this CPU", "predicted", "measured", "ratio", left="training on this CPU")
    for name, part in (*found.parts.items(), ("sum", found.total)):
        table.add_row(name, number(part.predicted), number(part.measured), f"{part.ratio:.2f}")
    console.print(table)
    rates = asdict(found.rates)
    launch = rates.pop("launch_seconds")
    named = ", ".join(f"{name.replace('_', ' ')} {value / 1e9:.3g}" for name, value in rates.items())
    console.print(f"rates of one thread, G/s: {named}; {1e6 * launch:.0f} us between operations", highlight=False)
    steps = ", ".join(number(seconds) for seconds in found.steps)
    console.print(
        f"CPU s a step of {found.tokens:,} tokens in {len(found.steps)} rounds: {steps}; "
        f"{found.operations:,} operations in its passes",
        highlight=False,
    )
    console.print(f"predicted / measured: {found.total.ratio:.2f}", highlight=False)
    parts = {name: asdict(part) | {"ratio": part.ratio} for name, part in found.parts.items()}
    return asdict(found) | {"parts": parts, "total": asdict(found.total), "ratio": found.total.ratio}


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-name", metavar="NAME", help="configuration")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the file")
    parser.add_argument("--card", choices=tuple(CARDS), help="(default: H100)")
    parser.add_argument("--search", action="store_true", help="compare layouts of the trainer")
    parser.add_argument("--measure", action="store_true", help="compare a prediction for this CPU with the benchmark")
    parser.add_argument("--show", type=bounded_number(int, 1), metavar="N", help="with --search: layouts (default: 10)")
    for field in LENGTHS.values():
        kind: Any = int if field.name == "screenshot_tokens" else float
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=bounded_number(kind, 1), metavar="X",
            help=f"of an episode (default: {field.default:g})",
        )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def run(options: argparse.Namespace, console: Console) -> None:
    """Print the prediction, or the layouts. Raises ConfigError or OSError."""
    if options.show and not options.search:
        raise ConfigError("--show counts the layouts of --search; add --search")
    given = {name: value for name in LENGTHS if (value := getattr(options, name)) is not None}
    if options.measure:
        if options.config_name or options.overrides or options.card or options.search or given:
            raise ConfigError("--measure predicts the benchmark on this CPU: give it no other option than --json")
        write_json(options.json, _measure(console))
        return
    if not options.config_name:
        raise ConfigError("--config-name says which configuration to predict; add it, or --measure")
    named = ROOT / "configs" / f"{options.config_name}.yaml"
    config = parse_config(str(named if named.is_file() else options.config_name), options.overrides)
    description = find_model_config(config)
    if description is None:
        raise ConfigError(f"model.path={config.model.path} has no config.json, and is not named as a released size")
    lengths = EpisodeLengths(**given)
    card = CARDS[options.card or "H100"]
    if options.search:
        result = search_layouts(config, description, card, lengths)
        print_search(result, options.show or 10, console)
        figures: Any = [layout.settings | {"seconds": layout.seconds} for layout in result.layouts]
    else:
        prediction = predict(config, description, card, lengths)
        print_prediction(config, prediction, console)
        figures = asdict(prediction)
    write_json(options.json, figures)


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 2 for a configuration that cannot be predicted or a file that cannot be written."""
    options = make_parser().parse_args(arguments)
    try:
        run(options, Console(width=None if sys.stdout.isatty() else WIDTH))
    except (ConfigError, OSError) as error:
        print(f"predict_step: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
