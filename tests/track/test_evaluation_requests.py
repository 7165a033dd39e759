"""Evaluations via a real control service: distribution, collection, retries after lost workers, time limits."""

from __future__ import annotations

import errno
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
    ResultCollector,
    evaluation_name,
)
from megatron_webrl.track.mlflow_upload import MLflowTracker
from megatron_webrl.trainer.evaluation_scheduler import EvaluationScheduler
from megatron_webrl.types import BUDGET_SPENT, PREEMPTED
from megatron_webrl.util import atomic_file
from megatron_webrl.util.history import History
from tests.job_control import control_service
from tests.waiting import until

LIMIT = 60.0
FIRST_TASK = 2
BEFORE = ["before", "before_blank_images", "before_greedy"]
AFTER = ["after", "after_blank_images", "after_greedy"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("control") / "control.json"
    with control_service(path.parent):
        yield path


def connect(address: Path, role: str) -> ControlClient:
    return ControlClient(address, role)


def request(number: int, tasks: int = 4, samples: int = 2) -> EvaluationRequest:
    return EvaluationRequest(number, "during", tasks, samples, 1.0, version=0)


def result(index: int, sample: int, instance_id: str, outcome: str = "success") -> EvaluationResult:
    return EvaluationResult(
        index, sample, f"t/{index}", "miniwob", "click-test", "easy", outcome, 1, 5, 0.1, (0, 0), instance_id
    )


def work(control: ControlClient, asked: EvaluationRequest, instance_id: str, count: int) -> list[int]:
    """Run up to `count` episodes; returns their numbers."""
    done = []
    while len(done) < count and (claimed := claim(control, asked, instance_id)):
        evaluations.submit_result(control, asked, result(*asked.task_and_sample(claimed[0]), instance_id), claimed[0])
        done += claimed
    return done


def claim(control: ControlClient, asked: EvaluationRequest, instance_id: str) -> list[int]:
    return [episode for episode, *_ in control.claim(evaluations.queue_name(asked), instance_id, 1)]


def test_workers_share_the_episodes_and_retry_those_of_a_lost_worker(address: Path):
    trainer = connect(address, "trainer-0")
    workers = [connect(address, f"rollout-{number}") for number in range(2)]
    assert [worker.register_instance() for worker in workers] == [1, 1]
    asked = request(1001)
    evaluations.submit_request(trainer, asked)
    assert evaluations.current_request(workers[0]) == asked
    collector = ResultCollector(trainer, asked)
    assert not collector.poll()
    assert not collector.has_started
    assert work(workers[0], asked, "rollout-0.1", 2) == [0, 1]
    assert [claim(workers[0], asked, "rollout-0.1") for _ in range(2)] == [[2], [3]]
    assert work(workers[1], asked, "rollout-1.1", 100) == [4, 5, 6, 7]
    assert not collector.poll()
    assert (collector.has_started, collector.missing_count) == (True, 2)
    assert claim(workers[1], asked, "rollout-1.1") == []
    assert workers[0].register_instance() == 2
    assert not collector.poll()
    assert sorted(work(workers[0], asked, "rollout-0.2", 1) + work(workers[1], asked, "rollout-1.1", 9)) == [2, 3]
    late = result(2, 0, "rollout-0.1", "failure")  # must not count a second time
    evaluations.submit_result(workers[0], asked, late, 2)
    assert collector.poll()
    assert [(r.index, r.sample) for _, r in sorted(collector.results.items())] == [
        (index, sample) for sample in range(2) for index in range(4)
    ]
    assert all(r.outcome == "success" for r in collector.results.values())
    evaluations.withdraw_request(trainer)
    assert evaluations.current_request(workers[0]) is None


def test_concurrent_workers_claim_every_episode_once(address: Path):
    asked, done = request(1002, tasks=50), [[], [], []]  # type: EvaluationRequest, list[list[int]]
    evaluations.submit_request(connect(address, "trainer-0"), asked)

    def run(number: int) -> None:
        control = connect(address, f"other-{number}")
        control.register_instance()
        done[number] += work(control, asked, f"other-{number}.1", 1000)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(episode for part in done for episode in part) == list(range(100))


class Engines:
    """A fake WeightSyncer with one new engine."""

    def __init__(self) -> None:
        self.waiting, self.served, self.version = 1, [], 0  # type: int, list[int], int

    def has_new_engines(self) -> bool:
        return self.waiting > 0

    def sync(self, version: int, new_engines_only: bool = False) -> None:
        if new_engines_only:
            self.waiting -= 1
            self.served.append(version)
        else:
            self.version = version


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = Config()
    config.run.directory, config.trainer.updates = str(tmp_path), 4
    config.evaluation.episodes, config.evaluation.every = 3, 1
    config.evaluation.before = config.evaluation.after = config.evaluation.blank_images = True
    config.evaluation.temperature, config.evaluation.greedy, config.evaluation.skip = 1.0, True, FIRST_TASK
    config.evaluation.samples = 2
    config.run_folder.mkdir()
    save_config(config, config.run_folder / "config.yaml")
    return config


class Worker(threading.Thread):
    """Runs evaluations once its engine has weights, up to the `last`. Later versions succeed at more tasks, on blank
    images three times later. `asked`: the requests, by name.
    """

    def __init__(self, address: Path, name: str, engines: Engines, last: str = "after_greedy") -> None:
        super().__init__(daemon=True)
        self.engines, self.last = engines, last
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
                    index, sample = asked.task_and_sample(episode)
                    good = asked.version > (index - FIRST_TASK) * (3 if asked.variant == "blank_images" else 1)
                    found = result(index, sample, self.instance_id, "success" if good else "failure")
                    evaluations.submit_result(self.control, asked, found, episode)
                self.asked[asked.name] = asked
            time.sleep(0.02)


def test_a_run_is_evaluated_before_during_and_after_training(address: Path, config: Config, one_rank: None):
    tracker = MLflowTracker(config)
    engines: Any = Engines()
    evaluation_log = EvaluationLog(config.run_folder)
    evaluation = EvaluationScheduler(config, connect(address, "trainer-0"), evaluation_log, restart_epoch=0)
    worker = Worker(address, "rollout-9", engines)
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
    assert {name: (asked.temperature, asked.samples) for name, asked in worker.asked.items()} == {
        name: (0.0, 1) if name.endswith("greedy") else (1.0, 2) for name in worker.asked
    }
    found = evaluations.summarise(config.run_folder, 4)
    assert [found[name]["success_of_judged"] for name in (*BEFORE, *AFTER)] == [0, 0, 0, 1, pytest.approx(2 / 3), 1]
    gains = {"gain": 1, "blind_gain": 2 / 3, "seeing_gain": 1 / 3, "image_gain": 1 / 3, "greedy_gain": 1}
    assert {name: found[name]["mean"] for name in gains} == pytest.approx(gains)
    lines = evaluations.read_evaluations(config.run_folder)
    assert [(line["kind"], line["version"], line["success_of_judged"]) for line in lines][3] == ("during", 1, 1 / 3)
    assert {result.index for result in evaluations.read_results(config.run_folder, lines[1])} == {2, 3, 4}
    until(lambda: not tracker.uploader.pending(), "metrics in MLflow")
    history = tracker.uploader.client.get_metric_history(tracker.run_id, "evaluation/success_of_judged/click-test")
    assert {metric.step: metric.value for metric in history} == {0: 0.0, 1: 1 / 3, 4: 1.0}
    blank = tracker.uploader.client.get_metric_history(tracker.run_id, "evaluation/blank_images/success_of_judged")
    assert {metric.step: metric.value for metric in blank} == {0: 0.0, 4: pytest.approx(2 / 3)}

    # A resume from version 1 keeps the evaluations before training, and drops those after version 1.
    resumed = EvaluationLog(config.run_folder, version=1)
    again = EvaluationScheduler(config, connect(address, "trainer-0"), resumed, restart_epoch=1)
    again.run_before_training(1, engines)
    assert recorded(config) == [*BEFORE, "during"]


class EnginesOfAKilledTrainer(Engines):
    """The trainer is killed once the run has `count` evaluations."""

    def __init__(self, config: Config, count: int) -> None:
        super().__init__()
        self.waiting, self.config, self.count = 0, config, count

    def has_new_engines(self) -> bool:
        if len(recorded(self.config)) == self.count:
            raise SystemExit("killed")
        return False


def recorded(config: Config) -> list[str]:
    lines = evaluations.read_evaluations(config.run_folder)
    return [evaluation_name(line["kind"], line["variant"]) for line in lines]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("names", [BEFORE, AFTER], ids=["before", "after"])
def test_a_trainer_that_was_killed_between_variants_repeats_none_that_is_complete(
    address: Path, config: Config, one_rank: None, names: list[str], count: int
):
    version, evaluation_log = 0 if names is BEFORE else 4, EvaluationLog(config.run_folder)

    def run(restart_epoch: int, engines: Any, *workers: Worker) -> None:
        evaluation = EvaluationScheduler(config, connect(address, "trainer-0"), evaluation_log, restart_epoch)
        for worker in workers:  # once the request of the killed trainer is withdrawn
            worker.start()
        (evaluation.run_after_training if version else evaluation.run_before_training)(version, engines)

    killed: Any = EnginesOfAKilledTrainer(config, count)
    engines: Any = EnginesOfAKilledTrainer(config, count=-1)
    with pytest.raises(SystemExit, match="killed"):
        run(0, killed, Worker(address, f"rollout-killed-{version}-{count}", killed, last=names[count - 1]))
    assert recorded(config) == names[:count]
    worker = Worker(address, f"rollout-again-{version}-{count}", engines, last=names[-1])
    run(1, engines, worker)
    worker.join(LIMIT)
    assert list(worker.asked) == names[count:]
    assert recorded(config) == names
    run(2, engines)  # without a worker
    assert recorded(config) == names


def test_variants_of_the_initial_policy_are_not_added_once_it_has_been_trained(
    address: Path, config: Config, one_rank: None
):
    config.evaluation.greedy = config.evaluation.blank_images = False
    engines: Any = EnginesOfAKilledTrainer(config, count=-1)
    Worker(address, "rollout-initial", engines, last="before").start()
    control, evaluation_log = connect(address, "trainer-0"), EvaluationLog(config.run_folder)
    EvaluationScheduler(config, control, evaluation_log, restart_epoch=0).run_before_training(0, engines)
    config.evaluation.greedy = config.evaluation.blank_images = True
    config.evaluation.timeout_seconds = 0.5  # without a worker
    EvaluationScheduler(config, control, evaluation_log, restart_epoch=1).run_before_training(2, engines)
    assert recorded(config) == ["before"]
    assert evaluations.summarise(config.run_folder, 2)["before_greedy"] is None


@pytest.fixture
def stopped(address: Path) -> Iterator[ControlClient]:
    """A job that ends because the judge's budget is spent."""
    control = connect(address, "trainer-0")
    control.request_stop(BUDGET_SPENT)
    yield control
    control.put_json("stop", None)


def test_an_evaluation_that_a_spent_budget_ends_is_not_recorded_and_runs_again(
    config: Config, one_rank: None, stopped: ControlClient
):
    engines: Any = Engines()
    evaluation = EvaluationScheduler(config, stopped, EvaluationLog(config.run_folder), restart_epoch=0)
    evaluation.run_before_training(0, engines)
    assert evaluations.read_evaluations(config.run_folder) == []
    assert evaluations.current_request(stopped) is None
    assert all(evaluation._is_due("before", variant, 0) for variant in VARIANTS)
    assert not any(evaluation._is_due("before", variant, 2) for variant in VARIANTS)  # no longer the initial policy


@pytest.mark.parametrize("running", [False, True])
def test_a_final_evaluation_that_an_early_end_costs_is_known(
    address: Path, config: Config, one_rank: None, running: bool
):
    control, engines = connect(address, "trainer-0"), Engines()  # type: ControlClient, Any
    engines.waiting, engines.version = 0, 4
    evaluation = EvaluationScheduler(config, control, EvaluationLog(config.run_folder), restart_epoch=0)
    stop = threading.Timer(0.5 if running else 0, lambda: control.request_stop(PREEMPTED))
    stop.start()
    if not running:
        stop.join()
    evaluation.run_after_training(4, engines)
    stop.join()
    control.put_json("stop", None)
    assert evaluation.cut_short
    assert recorded(config) == []


def test_an_evaluation_of_engines_that_lag_behind_waits_for_the_weights(address: Path, config: Config, one_rank: None):
    """Mode one_step_off: the last update's weights are sent for the evaluation alone."""
    control, engines = connect(address, "trainer-0"), Engines()  # type: ControlClient, Any
    engines.waiting, engines.version, config.evaluation.after = 0, 3, False
    evaluation = EvaluationScheduler(config, control, EvaluationLog(config.run_folder), restart_epoch=0)
    worker = Worker(address, "rollout-lagging", engines, last="during")
    worker.start()
    evaluation.run_after_training(4, engines)
    worker.join(LIMIT)
    assert (engines.version, worker.asked["during"].version) == (4, 4)
    assert (recorded(config), evaluation.cut_short) == (["during"], False)


def test_a_failing_run_folder_costs_the_lines_of_evaluations_alone(
    address: Path, config: Config, one_rank: None, monkeypatch: pytest.MonkeyPatch
):
    control, engines = connect(address, "trainer-0"), Engines()  # type: ControlClient, Any
    engines.waiting, engines.version, config.evaluation.after = 0, 4, False
    evaluation = EvaluationScheduler(config, control, EvaluationLog(config.run_folder), restart_epoch=0)

    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(atomic_file, "write_text", fail)
    monkeypatch.setattr(History, "_write", fail)
    worker = Worker(address, "rollout-failing", engines, last="during")
    worker.start()
    evaluation.poll_during_training(4)
    first = evaluations.current_request(control)
    evaluation.run_after_training(4, engines)
    worker.join(LIMIT)
    assert first is not None
    assert worker.asked == {"during": first}  # made once, although no line says so
    assert recorded(config) == []
    assert evaluation._is_due("during", "", 8)


def test_the_evaluation_of_a_checkpoint_ends_without_a_result_when_the_budget_is_spent(
    config: Config, stopped: ControlClient
):
    config.judge.budget.calls_per_hour = 12
    evaluation = CheckpointEvaluation(config, EvaluatedCheckpoint(Path("model"), is_megatron=False, version=0))
    outcome = evaluation.run(stopped, lambda: None, lambda progress: None)
    assert outcome == BUDGET_SPENT
    assert "has no result, because its verdicts need more than judge.budget (calls_per_hour=12); raise it" in (
        evaluation.describe_outcome(outcome)
    )
    assert evaluation.describe_outcome("failed: rollout-0") == "failed: rollout-0"
    assert evaluations.read_evaluations(config.run_folder) == []


def test_without_workers_an_evaluation_ends_at_its_time_limit_and_during_training_at_once(
    address: Path, config: Config, one_rank: None
):
    evaluation_log = EvaluationLog(config.run_folder)
    engines: Any = Engines()
    control = connect(address, "trainer-0")
    evaluation = EvaluationScheduler(config, control, evaluation_log, restart_epoch=0)
    config.evaluation.timeout_seconds = 3600.0
    began = time.monotonic()
    evaluation.poll_during_training(1)
    evaluation.poll_during_training(2)  # skipped: the one of version 1 is running
    evaluation.run_after_training(3, engines)  # the run was stopped before its last update
    assert time.monotonic() - began < 10
    assert evaluations.read_evaluations(config.run_folder) == []
    assert evaluations.current_request(control) is None
    config.evaluation.timeout_seconds = 0.5
    config.evaluation.after, engines.version = False, 4
    evaluation.poll_during_training(4)
    evaluation.run_after_training(4, engines)
    [line] = evaluations.read_evaluations(config.run_folder)
    assert (line["kind"], line["episodes"], line["missing"], line["success_of_judged"]) == ("during", 0, 6, None)
