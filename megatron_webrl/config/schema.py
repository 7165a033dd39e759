"""The typed configuration: every setting, its meaning and limits; docs/configuration.md is generated from here."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.cluster import ClusterConfig
from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.setting import setting
from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.config.trainer import TrainerConfig


@dataclass
class RunConfig:
    name: str = setting("run", "Name of the run; its files are in the folder of this name in run.directory.")
    directory: str = setting("runs", "Folder that holds all runs and the MLflow database.")
    seed: int = setting(0, "Seed of task sampling, of the order of samples and of the engines.", low=0)
    resume: bool = setting(False, "Continue from the newest checkpoint of this run; without one, refuse.")
    startup_timeout_seconds: float = setting(600.0, "Limit for a process to start.", above=0)
    heartbeat_timeout_seconds: float = setting(
        20.0, "A process that sends no heartbeat for this long counts as lost.", above=0
    )
    hang_timeout_seconds: float = setting(
        900.0,
        "A rollout worker that makes no progress for this long, or the trainer if no rank makes any, "
        "counts as hung: all processes write their stacks to their logs, and it is killed. 0: never.",
        low=0,
    )
    worker_restarts_per_hour: int = setting(
        6,
        "Restarts of each rollout worker within an hour; one that fails more often is given up (rollout.min_engines).",
        low=0,
    )
    max_requeues: int = setting(
        3, "Times that Slurm may requeue a job without a newer checkpoint before the job fails.", low=0
    )
    max_trainer_restarts: int = setting(
        3,
        "Restarts of all trainer ranks in a row, from the newest checkpoint, after a failure; a completed"
        " checkpoint resets the count. 0: the job ends.",
        low=0,
    )


@dataclass
class ModelConfig:
    path: str = setting("", "Hugging Face folder of a Qwen3-VL or Qwen3.5 model.")
    checkpoint: str = setting(
        "", "Megatron checkpoint to start from; empty: the weights of model.path. Only its weights are taken."
    )
    dtype: str = setting("float32", "Type of weights and activations.", choices=("float32", "bfloat16"))
    platform: str = setting(
        "auto", "Where to compute; auto takes CUDA if there is a GPU.", choices=("auto", "cpu", "cuda")
    )


@dataclass
class EvaluationConfig:
    episodes: int = setting(
        30, "Held-out tasks of each environment; of task files: rows of the test file, 0 for all of them.", low=0
    )
    skip: int = setting(
        0,
        "Held-out tasks of each environment, or rows of the test file, before the first that is evaluated: results "
        "then come from tasks that no setting was chosen by.",
        low=0,
    )
    samples: int = setting(1, "Episodes of each task; more than one for pass@k.", low=1)
    temperature: float = setting(0.0, "Sampling temperature of evaluations; 0: greedy.", low=0)
    before: bool = setting(False, "Evaluate the initial policy.")
    after: bool = setting(False, "Evaluate the final policy.")
    blank_images: bool = setting(
        False,
        "Repeat the evaluations before and after training with blank screenshots, to measure how much the policy uses "
        "the pixels.",
    )
    greedy: bool = setting(
        False, "Repeat the evaluations before and after training greedily, one episode of each task; temperature > 0."
    )
    every: int = setting(0, "Updates between evaluations during training; 0: none.", low=0)
    concurrency: int = setting(4, "Evaluation episodes that one worker runs at a time during training.", low=1)
    timeout_seconds: float = setting(
        7200.0, "Limit of one evaluation; episodes without a result by then are missing.", above=0
    )
    only: bool = setting(
        False,
        "Run no trainer: engines use every GPU of every node, and workers only evaluate model.path. `webrl eval`"
        " sets it.",
    )


@dataclass
class RingConfig:
    capacity_mib: int = setting(1024, "Size of the shared-memory ring of one node.", low=1)


@dataclass
class WeightsConfig:
    bucket_mib: int = setting(512, "Staging memory of one rank during a transfer.", low=1)
    transport: str = setting(
        "auto",
        "Path of the weights between GPUs. nccl: from GPU to GPU; host: through the memory of the hosts, by gloo; "
        "auto: nccl where every process has GPUs of its own, else host.",
        choices=("auto", "nccl", "host"),
    )
    timeout_seconds: float = setting(300.0, "Limit of one weight transfer, and of joining a link.", above=0)
    cache_invalidation: str = setting(
        "reset",
        "Effect of an update on an engine's caches. reset: drop them; running requests recompute their "
        "context. salt: running requests keep the old entries, later ones cannot reach them.",
        choices=("reset", "salt"),
    )
    verify: bool = setting(False, "Compare checksums of every slice on both sides of each transfer.")


@dataclass
class TrackingConfig:
    experiment: str = setting("megatron_webrl", "MLflow experiment.")
    uri: str = setting("", "MLflow tracking address; empty: MLFLOW_TRACKING_URI, else SQLite in the run directory.")
    episodes_gib: float = setting(
        10.0,
        "Space for finished episodes with screenshots in episodes/ of the run, of all workers; the oldest are deleted "
        "first. 0: none.",
        low=0,
    )
    timeline: bool = setting(
        False,
        "Record what every process does and when, in timeline/ of the run, for `webrl timeline` (docs/timeline.md); at "
        "most 64 MiB for each process, the oldest are deleted first.",
    )
    monitor_port: int = setting(
        8600,
        "Port of 127.0.0.1 at which a job on one machine serves its pages while it runs; if it is taken, any free one. "
        "The address with its token is shown on a terminal; elsewhere WEBRL_MONITOR_TOKEN gives the token, and without "
        "it nothing is served. 0: no pages.",
        low=0,
        high=65535,
    )
    keep_records: bool = setting(
        False, "Store all trained groups of each update in records/ of the run; they are never deleted."
    )
    mismatch_alarm: float = setting(
        0.05,
        "Mean difference, in nats, between the engine's and the trainer's log-probabilities of tokens under the same "
        "weights above which an update warns; 0: never.",
        low=0,
    )
    mismatch_kl_alarm: float = setting(
        0.5,
        "KL divergence, in nats, of the trainer from the engine over the tokens of a version lag above which an update "
        "warns; 0: never. The updates between both count too.",
        low=0,
    )


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    browser: BrowserConfig = field(default_factory=BrowserConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    ring: RingConfig = field(default_factory=RingConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def run_folder(self) -> Path:
        return Path(self.run.directory) / self.run.name

    @property
    def demonstrations_path(self) -> Path:
        """Where the demonstrations of the warm start are, or where the first worker leaves them for the trainer."""
        file = self.trainer.warm_start.demonstrations_file
        return Path(file) if file else self.run_folder / "demonstrations.records"

    @property
    def records_folder(self) -> Path:
        """Where the groups of every update are, a file a version, if they are kept."""
        return self.run_folder / "records"

    @property
    def reference_weights_folder(self) -> Path:
        """Where the weights that a warm start ended with lie, if the loss refers to them."""
        return self.run_folder / "reference"

    @property
    def tracking_uri(self) -> str:
        """tracking.uri, else MLFLOW_TRACKING_URI, else SQLite in the folder of all runs."""
        database = Path(self.run.directory).absolute() / "mlflow.db"
        return self.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database}"

    @property
    def worker_names(self) -> tuple[str, ...]:
        return tuple(f"rollout-{worker}" for worker in range(self.rollout.engines))

    @property
    def staleness_limit(self) -> int:
        """Versions that the oldest token of a trained group may lag behind, by mode."""
        return {"async": self.rollout.max_staleness, "one_step_off": 1, "sync": 0}[self.rollout.mode]

    @property
    def trainer_grace_seconds(self) -> float:
        """Seconds beyond run.heartbeat_timeout_seconds that workers give a silent trainer to be started again."""
        return self.run.startup_timeout_seconds if self.run.max_trainer_restarts else 0.0

    @property
    def weights_through_host(self) -> bool:
        """Whether weights travel through the memory of the hosts; without GPUs they are nowhere else."""
        transport, cluster = self.weights.transport, self.cluster
        return transport == "host" or (transport == "auto" and (cluster.shared_gpus or not cluster.gpus_per_node))

    @property
    def ranks_per_engine(self) -> int:
        return self.rollout.tensor_parallel * self.rollout.pipeline_parallel

    @property
    def sessions_per_worker(self) -> int:
        """The most browser sessions, and requests of its engine, of a worker at a time: its groups and evaluations."""
        rollout, evaluation = self.rollout, self.evaluation
        return rollout.groups_in_flight * rollout.group_size + (evaluation.concurrency if evaluation.every else 0)

    @property
    def requests_per_engine(self) -> int:
        """Requests that an engine computes at a time, at most."""
        return self.rollout.max_num_seqs or self.sessions_per_worker

    @property
    def vision_data_parallel(self) -> bool:
        """Whether every tensor-parallel rank of an engine has the whole vision tower."""
        return self.rollout.tensor_parallel > 1 and self.rollout.mm_encoder_tp_mode == "data"

    @property
    def engine_gpus_per_node(self) -> int:
        """GPUs of each node for engines; all of them if no trainer runs, or if it shares them."""
        every = self.evaluation.only or self.cluster.shared_gpus
        return self.cluster.gpus_per_node if every else self.cluster.engine_gpus_per_node

    @property
    def trainer_gpus_per_node(self) -> int:
        """GPUs of each node for trainer ranks; none if no trainer runs."""
        cluster = self.cluster
        own = cluster.gpus_per_node - (0 if cluster.shared_gpus else cluster.engine_gpus_per_node)
        return 0 if self.evaluation.only else own

    @property
    def trainer_feeds_engines(self) -> bool:
        """Whether a trainer sends engines their first weights; otherwise they read those of model.path."""
        return not self.evaluation.only

    @property
    def engine_dtype(self) -> str:
        """Type of the engine's weights."""
        return self.model.dtype if self.rollout.dtype == "auto" else self.rollout.dtype

    @property
    def trainer_world_size(self) -> int:
        """Number of trainer ranks; 0 if no trainer runs."""
        trainer = self.trainer
        if self.evaluation.only:
            return 0
        replica = trainer.tensor_parallel * trainer.pipeline_parallel * trainer.context_parallel
        return replica * trainer.data_parallel
