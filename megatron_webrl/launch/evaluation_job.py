"""An evaluation as a Slurm job: preparation, and conversion of the checkpoint for the engines.

The engines use every GPU of the job's nodes. The first node prepares the run's folder, converts a Megatron checkpoint
into it, which all nodes read, and collects the results.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.checkpoint_evaluation import CheckpointEvaluation
from megatron_webrl.launch.evaluated_checkpoint import EvaluatedCheckpoint, check_output_file, parse_evaluation_config
from megatron_webrl.launch.roles import webrl_command
from megatron_webrl.launch.run_folder import check_ended, config_path
from megatron_webrl.launch.slurm.prepare import describe_processes, make_job_folder, plan_processes
from megatron_webrl.launch.task_validation import check_evaluators, check_tasks_and_browser
from megatron_webrl.launch.validation import check_config
from megatron_webrl.track import summary
from megatron_webrl.track.run_lock import Launch
from megatron_webrl.util import atomic_file

JOB_FILE = "evaluation_job.json"
MODEL_PREFIX = "converted_model-"  # of a folder in the run's folder, until the end of the job


@dataclass(frozen=True)
class EvaluationJob:
    """What the preparation decided, for the later commands of the job."""

    checkpoint: EvaluatedCheckpoint
    output_file: Path | None
    model_folder: str = field(default_factory=lambda: f"{MODEL_PREFIX}{secrets.token_hex(4)}")
    """Name of this launch's folder for the converted checkpoint; a launch that requeues the job has another."""

    def save(self, folder: Path) -> None:
        """Write it to the run's folder."""
        atomic_file.write_text(folder / JOB_FILE, json.dumps(asdict(self), indent=1, default=str) + "\n")

    @classmethod
    def load(cls, folder: Path) -> EvaluationJob:
        """Read it from the run's folder. Raises ConfigError for the folder of another job."""
        path = folder / JOB_FILE
        if not path.is_file():
            raise ConfigError(
                f"{path} does not exist; prepare the evaluation first: webrl node prepare-eval CHECKPOINT"
            )
        fields = json.loads(path.read_text())
        checkpoint = EvaluatedCheckpoint(**{**fields["checkpoint"], "path": Path(fields["checkpoint"]["path"])})
        output_file = Path(fields["output_file"]) if fields["output_file"] else None
        return cls(checkpoint, output_file, fields["model_folder"])


def plan_evaluation(
    path: Path, arguments: Sequence[str], nodes: int, output_file: Path | None
) -> tuple[Config, EvaluationJob]:
    """The configuration of an evaluation on `nodes` nodes, without looking at any machine. Raises ConfigError.

    `path`: of the checkpoint; `arguments`: a configuration file and overrides, as of `webrl eval`.
    """
    checkpoint = EvaluatedCheckpoint.resolve(path)
    config = parse_evaluation_config(checkpoint, arguments, nodes)
    check_output_file(output_file)
    return config, EvaluationJob(checkpoint, output_file and output_file.absolute())


def prepare_evaluation(
    config: Config, job: EvaluationJob, stubbed: bool, report: Callable[[str], None], environment: Mapping[str, str]
) -> Path:
    """Make the run's folder of an evaluation; returns the path of its config.yaml.

    `stubbed`: no worker will run, so model and packages are not checked. Raises ConfigError before anything is made.
    """
    placement = plan_processes(config)
    if not stubbed:
        check_config(config)
        check_tasks_and_browser(config, require_browser=False)
        check_evaluators(config)
    check_ended(config)
    for left in config.run_folder.glob(f"{MODEL_PREFIX}*"):  # by a job that was killed
        shutil.rmtree(left, ignore_errors=True)
    path = make_job_folder(config, placement, report, environment)
    job.save(config.run_folder)
    return path


def describe_evaluation(config: Config, job: EvaluationJob, stub_command: str) -> list[str]:
    """Every process of an evaluation: node, devices, cores, and the full command. Raises ConfigError."""
    placement = plan_processes(config)
    lines = describe_processes(config, placement, stub_command)
    settings = str(config_path(config))
    if job.checkpoint.is_megatron:
        lines.append(f"node 0 conversion: {_command('convert', settings)}")
    return [*lines, f"node 0 evaluation: {_command('control', settings, '--host', 'FIRST_NODE')}"]


def convert_checkpoint(config: Config, launch: Launch | None) -> None:
    """Convert the job's Megatron checkpoint, if it is one, and let config.yaml name the result as the model.

    Raises ConfigError for incomplete weights, and writes it to summary.json. SIGTERM ends it and leaves no weights.
    Raises LaunchLost if another launch has taken over meanwhile, whose config.yaml stays as it is.
    """
    job = EvaluationJob.load(config.run_folder)
    if not job.checkpoint.is_megatron:
        return
    folder = config.run_folder / job.model_folder
    try:
        job.checkpoint.convert(folder)
    except ConfigError as error:
        summary.write_summary(config.run_folder, f"failed: {error}", None)
        raise
    if launch is not None:
        launch.check()
    config.model = replace(config.model, path=str(folder))
    save_config(config, config_path(config))


def _command(*arguments: str) -> str:
    return " ".join(webrl_command(["node", *arguments]))


@contextmanager
def hosted_evaluation(config: Config) -> Iterator[CheckpointEvaluation]:
    """The job's evaluation, for its first node; the converted checkpoint is removed at the end. Raises ConfigError."""
    job = EvaluationJob.load(config.run_folder)
    model_folder = config.run_folder / job.model_folder  # read once: a later launch of the job has another
    try:
        yield CheckpointEvaluation(config, job.checkpoint, job.output_file)
    finally:
        shutil.rmtree(model_folder, ignore_errors=True)
