"""What `webrl placement --time` predicts for the configurations of clusters, as a table.

    python -m tools.prediction_table [CONFIG ...] [--card H100] [--write]

Without a name all configurations of configs/ and configs/published/ that train on several GPUs. --write replaces the
table of docs/scaling.md, and what the head of each configuration says of it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.placement.hardware import CARDS, Card
from megatron_webrl.placement.placement_table import find_model_config
from megatron_webrl.placement.prediction import EpisodeLengths
from megatron_webrl.placement.throughput import Prediction, limit_name, predict

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- begin: python -m tools.prediction_table --write -->", "<!-- end -->"
COLUMNS = (
    "configuration", "engines : trainers of a node", "training, s", "MFU", "an update every, s", "trajectories/h",
    "a GPU", "trainer waits", "engines' load", "age", "limit",
)  # fmt: skip
HEAD = re.compile(r"^(# `webrl placement .*\n)(?:# Predicted on .*\n(?:#   .*\n)*)?", re.MULTILINE)


def cluster_configurations() -> list[Path]:
    """Configurations of trainings on several GPUs."""
    files = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("configs/published/*.yaml")])
    return [file for file in files if parse_config(str(file), []).cluster.gpus_per_node > 1]


def row(file: Path, config: Config, found: Prediction) -> str:
    """A line of the table."""
    assert found.training is not None
    assert found.job is not None
    job, name = found.job, file.relative_to(ROOT / "configs").with_suffix("")
    cells = (
        f"`{name}`", f"{config.engine_gpus_per_node} : {config.trainer_gpus_per_node}",
        f"{found.training.train_seconds:.0f}", f"{found.training.mfu:.1%}", f"{found.update_seconds:.0f}",
        f"{job.per_hour:,.0f}", f"{found.per_gpu_hour:.0f}", f"{job.waiting:.0%}", f"{job.engines_load:.0%}",
        f"{job.staleness:.1f}", limit_name(config, found),
    )  # fmt: skip
    return f"| {' | '.join(cell.replace('%', ' %') for cell in cells)} |"


def head(config: Config, found: Prediction) -> str:
    """The line in a configuration's head."""
    assert found.training is not None
    assert found.job is not None
    training, hourly = found.training.train_seconds, f"{found.job.per_hour:,.0f} trained trajectories/h"
    return (
        f"# Predicted on {found.card}: {hourly}, {found.per_gpu_hour:.0f} a GPU; an update every "
        f"{found.update_seconds:.0f} s,\n#   of which training takes {training:.0f} s, MFU {found.training.mfu:.1%}; "
        f"limit: {limit_name(config, found)} (docs/scaling.md).\n"
    )


def write(text: str, table: str) -> str:
    """The page with its table replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def predicted(file: Path, card: Card) -> tuple[Config, Prediction]:
    """The configuration and what is predicted for it. Raises ConfigError."""
    config = parse_config(str(file), [])
    description = find_model_config(config)
    if description is None:
        raise ConfigError(f"{file}: model.path={config.model.path} is not named as a released size is")
    return config, predict(config, description, card, EpisodeLengths())


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG", help="(default: all of clusters)")
    parser.add_argument("--card", choices=tuple(CARDS), default="H100", help="the GPU (default: H100)")
    parser.add_argument("--write", action="store_true", help="write docs/scaling.md and the heads; all on H100")
    options = parser.parse_args(arguments)
    if options.write and (options.configs or options.card != "H100"):
        parser.error("--write is for all configurations on H100")
    rows = ["| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 2) + "|---|"]
    print("\n".join(rows), flush=True)
    for file in options.configs or cluster_configurations():
        try:
            config, found = predicted(file, CARDS[options.card])
            rows.append(row(file.absolute(), config, found))
        except (ConfigError, ValueError) as error:
            print(f"prediction_table: {error}", file=sys.stderr)
            return 2
        print(rows[-1], flush=True)
        if options.write:
            file.write_text(HEAD.sub(rf"\g<1>{head(config, found)}", file.read_text(), count=1))
    if options.write:
        PAGE.write_text(write(PAGE.read_text(), "\n".join(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
