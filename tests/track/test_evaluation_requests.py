"""Evaluations via a real control service: distribution, collection, retries after lost workers, time limits."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.launch.evaluation import CheckpointEvaluation, EvaluatedCheckpoint
from megatron_webrl.track import evaluations
from megatron_webrl.track.evaluations import (
    VARIANTS,
    EvaluationLog,
    EvaluationRequest,
    EvaluationResult,
    evaluation_name,
)
from megatron_webrl.track.upload import Tracker
from megatron_webrl.trainer.evaluation_scheduler import EvaluationScheduler
from megatron_webrl.types import BUDGET_SPENT, PREEMPTED
from megatron_webrl.util import atomic_file
from megatron_webrl.util.history import History
from tests.job_control import connect, control_service
from tests.waiting import until

LIMIT = 60.0
FIRST_TASK = 2
BEFORE = ["before", "before_blank_images", "before_greedy"]
AFTER = ["after", "after_blank_images", "after_greedy"]
NAMES = (f"rollout-{number}" for number in itertools.count(9))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with control_service(tmp_path_factory.mktemp("control")) as path:
        yield path


@pytest.fixture
def control(address: Path) -> ControlClient:
    return connect(address, "trainer-0")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = Config()
    config.run.directory, config.trainer.updates = str(tmp_path), 4
    config.evaluation.episodes, config.evaluation.every = 3, 1
    config.evaluation.before = config.evaluation.after = config.evaluation.blank_images = True
    config.evaluation.top_p, config.evaluation.top_k = 0.9, 5
    config.evaluation.temperature, config.evaluation.greedy, config.evaluation.skip = 1.0, True, FIRST_TASK
    config.evaluation.samples = 2
    config.run_folder.mkdir()
    save_config(config, config.run_folder / "config.yaml")
    return config


def finish(control: ControlClient, asked: EvaluationRequest, name: str, episode: int, outcome: str = "success") -> None:
    index, sample = asked.task_and_sample(episode)
    result = EvaluationResult(
        index, sample, f"t/{index}", "miniwob", "click-test", "easy", outcome, 1, 5, 0.1, (0, 0), name
    )
    evaluations.submit_result(control, asked, result, episode)


def claim(control: ControlClient, asked: EvaluationRequest, instance_id: str) -> list[int]:
    return [episode for episode, *_ in control.claim(evaluations.queue_name(asked), instance_id, 1)]


class Engines:
    """A fake WeightSyncer: `waiting` new engines lack weights; the trainer is killed once the run has `killed_at`
    evaluations.
    """

    def __init__(self, config: Config, waiting: int = 0, version: int = 4, killed_at: int = -1) -> None:
        self.config, self.waiting, self.version, self.killed_at = config, waiting, version, killed_at
        self.served: list[int] = []

    def has_new_engines(self) -> bool:
        if len(recorded(self.config)) == self.killed_at:
            raise SystemExit("killed")
        return self.waiting > 0

    def sync(self, version: int, new_engines_only: bool = False) -> None:
        if new_engines_only:
            self.waiting -= 1
            self.served.append(version)
        else:
            self.version = version


class Worker(threading.Thread):
    """Runs evaluations once its engine has weights, up to the `last`. Later versions succeed at more tasks, on blank
    images three times later. `asked`: the requests, by name.
    """

    def __init__(self, address: Path, engines: Engines, last: str) -> None:
        super().__init__(daemon=True)
        self.engines, self.last, name = engines, last, next(NAMES)
        self.control, self.instance_id = connect(address, name), f"{name}.1"
        self.control.register_instance()
        self.asked: dict[str, EvaluationRequest] = {}

    def run(self) -> None:
        deadline = time.monotonic() + LIMIT
        while self.last not in self.asked and time.monotonic() < deadline:
            asked = evaluations.current_request(self.control)
            if asked is not None and not self.engines.waiting and asked not in self.asked.values():
                while claimed := claim(self.control, asked, self.instance_id):
                    [episode] = claimed
                    index, _ = asked.task_and_sample(episode)
                    good = asked.version > (index - FIRST_TASK) * (3 if asked.variant == "blank_images" else 1)
                    finish(self.control, asked, self.instance_id, episode, "success" if good else "failure")
                self.asked[asked.name] = asked
            time.sleep(0.02)


def scheduler(config: Config, control: ControlClient, restart_epoch: int = 0, **resumed: int) -> Any:
    evaluation_log = EvaluationLog(config.run_folder, **resumed)
    return EvaluationScheduler(config, control, evaluation_log, restart_epoch)


def recorded(config: Config) -> list[str]:
    lines = evaluations.read_evaluations(config.run_folder)
    return [evaluation_name(line["kind"], line["variant"]) for line in lines]


def test_a_run_is_evaluated_before_during_after(address: Path, control: ControlClient, config: Config, one_rank: None):
    tracker = Tracker(config)
    engines: Any = Engines(config, waiting=1, version=0)
    evaluation, worker = scheduler(config, control), Worker(address, engines, AFTER[-1])
    worker.start()
    evaluation.run_before_training(0, engines)
    assert engines.served == [0]  # the new engine got its weights meanwhile
    evaluation.poll_during_training(1)
    until(lambda: "during" in worker.asked, "evaluation during training")
    evaluation.poll_during_training(4)  # records the one of version 1; the final one follows
    evaluation.run_after_training(4, engines)
    assert engines.version == 4  # engines that lagged behind are not evaluated
    worker.join(LIMIT)
    assert list(worker.asked) == [*BEFORE, "during", *AFTER]
    assert {name: (each.temperature, each.top_p, each.top_k, each.samples) for name, each in worker.asked.items()} == {
        name: (0.0, 1.0, 0, 1) if name.endswith("greedy") else (1.0, 0.9, 5, 2) for name in worker.asked
    }
    found = evaluations.summarise(config.run_folder, 4)
    assert [found[name]["success_of_judged"] for name in (*BEFORE, *AFTER)] == [0, 0, 0, 1, pytest.approx(2 / 3), 1]
    gains = {"gain": 1, "blind_gain": 2 / 3, "seeing_gain": 1 / 3, "image_gain": 1 / 3, "greedy_gain": 1}
    assert {name: found[name]["mean"] for name in gains} == pytest.approx(gains)
    lines = evaluations.read_evaluations(config.run_folder)
    assert [(line["kind"], line["version"], line["success_of_judged"]) for line in lines][3] == ("during", 1, 1 / 3)
    assert {result.index for result in evaluations.read_results(config.run_folder, lines[1])} == {2, 3, 4}
    until(lambda: not tracker.uploader.pending(), "metrics in MLflow")
    for name, expected in (
        ("success_of_judged/click-test", {0: 0.0, 1: 1 / 3, 4: 1.0}),
        ("blank_images/success_of_judged", {0: 0.0, 4: pytest.approx(2 / 3)}),
    ):
        history = tracker.uploader.client.get_metric_history(tracker.run_id, f"evaluation/{name}")
        assert {metric.step: metric.value for metric in history} == expected

    # A resume from version 1 keeps the evaluations before training, and drops those after version 1.
    scheduler(config, control, 1, version=1).run_before_training(1, engines)
    assert recorded(config) == [*BEFORE, "during"]


@pytest.mark.parametrize(("names", "count"), [(BEFORE, 1), (AFTER, 2)], ids=["before", "after"])
def test_a_trainer_that_was_killed_between_variants_repeats_none_that_is_complete(
    address: Path, control: ControlClient, config: Config, one_rank: None, names: list[str], count: int
):
    def run(engines: Any, *workers: Worker) -> None:
        evaluation = scheduler(config, control)
        for worker in workers:  # once the request of the killed trainer is withdrawn
            worker.start()
        evaluation.run_before_training(0, engines) if names is BEFORE else evaluation.run_after_training(4, engines)

    killed, engines = Engines(config, killed_at=count), Engines(config)
    with pytest.raises(SystemExit, match="killed"):
        run(killed, Worker(address, killed, names[count - 1]))
    assert recorded(config) == names[:count]
    worker = Worker(address, engines, names[-1])
    run(engines, worker)
    worker.join(LIMIT)
    assert list(worker.asked) == names[count:]
    run(engines)  # without a worker
    assert recorded(config) == names


def test_an_evaluation_that_a_spent_budget_ends_runs_again(control: ControlClient, config: Config, one_rank: None):
    control.request_stop(BUDGET_SPENT)
    evaluation = scheduler(config, control)
    evaluation.run_before_training(0, Engines(config, waiting=1))
    assert (recorded(config), evaluations.current_request(control)) == ([], None)
    assert all(evaluation._is_due("before", variant, 0) for variant in VARIANTS)
    assert not any(evaluation._is_due("before", variant, 2) for variant in VARIANTS)  # no longer the initial policy
    config.judge.budget.calls_per_hour = 12
    checkpoint = CheckpointEvaluation(config, EvaluatedCheckpoint(Path("model"), is_megatron=False, version=0))
    assert checkpoint.run(control, lambda: None, lambda progress: None) == BUDGET_SPENT
    assert "judge.budget (calls_per_hour=12)" in checkpoint.describe_outcome(BUDGET_SPENT)
    assert checkpoint.describe_outcome("failed: rollout-0") == "failed: rollout-0"
    assert recorded(config) == []
    control.put_json("stop", None)


@pytest.mark.parametrize("running", [False, True])
def test_an_early_end_costs_a_final_evaluation(control: ControlClient, config: Config, one_rank: None, running: bool):
    evaluation = scheduler(config, control)
    stop = threading.Timer(0.5 if running else 0, lambda: control.request_stop(PREEMPTED))
    stop.start()
    if not running:
        stop.join()
    evaluation.run_after_training(4, Engines(config))
    stop.join()
    control.put_json("stop", None)
    assert (evaluation.cut_short, recorded(config)) == (True, [])


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_evaluation_waits_for_weights_and_a_failing_run_folder_costs_its_line_alone(
    address: Path, control: ControlClient, config: Config, one_rank: None, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    """Mode one_step_off: the last update's weights are sent for the evaluation alone."""
    config.evaluation.after = False
    engines: Any = Engines(config, version=3)
    evaluation, worker = scheduler(config, control), Worker(address, engines, "during")

    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    if fails:
        monkeypatch.setattr(atomic_file, "write_text", fail)
        monkeypatch.setattr(History, "_write", fail)
        evaluation.poll_during_training(4)
    first = evaluations.current_request(control)
    worker.start()
    evaluation.run_after_training(4, engines)
    worker.join(LIMIT)
    assert (engines.version, worker.asked["during"].version, evaluation.cut_short) == (4, 4, False)
    assert recorded(config) == ([] if fails else ["during"])
    if fails:
        assert worker.asked == {"during": first}  # made once, although no line says so
        assert evaluation._is_due("during", "", 8)


def test_without_workers_an_evaluation_ends_at_its_time_limit(control: ControlClient, config: Config, one_rank: None):
    engines: Any = Engines(config)
    evaluation = scheduler(config, control)
    config.evaluation.timeout_seconds = 3600.0
    began = time.monotonic()
    evaluation.poll_during_training(1)
    evaluation.poll_during_training(2)  # skipped: the one of version 1 is running
    evaluation.run_after_training(3, engines)  # the run was stopped before its last update
    assert time.monotonic() - began < 10
    assert (recorded(config), evaluations.current_request(control)) == ([], None)
    config.evaluation.timeout_seconds = 0.5
    config.evaluation.after = False
    evaluation.poll_during_training(4)
    evaluation.run_after_training(4, engines)
    [line] = evaluations.read_evaluations(config.run_folder)
    assert (line["kind"], line["episodes"], line["missing"], line["success_of_judged"]) == ("during", 0, 6, None)
