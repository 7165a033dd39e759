"""The typed configuration: every setting, its meaning and limits; docs/configuration.md is generated from here."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.cluster import ClusterConfig
from megatron_webrl.config.engine_options import check_engine_options
from megatron_webrl.config.judge import PROTOCOLS, JudgeConfig, OwnProtocolConfig
from megatron_webrl.config.loss import BaselineLossConfig, OffPolicyLossConfig
from megatron_webrl.config.rollout import COMPACT_FORMATS, HarnessConfig, RolloutConfig
from megatron_webrl.config.setting import (
    ConfigError,
    check_sections,
    flatten_config,
    is_import_path,
    setting,
    variants,
)
from megatron_webrl.config.tasks import (
    PAGE_SOURCES,
    SOURCES,
    FileTasksConfig,
    LatencyConfig,
    TasksConfig,
    check_names,
    task_parts,
)
from megatron_webrl.config.trainer import TrainerConfig

SINKS = ("tensorboard", "wandb")  # of metrics besides MLflow; each needs the package of its name
EVALUATION_EPISODES = 4  # that a worker runs at a time during training, beside its groups


@dataclass
class RunConfig:
    name: str = setting("run", "Name of the run; its files are in the folder of this name in run.directory.")
    directory: str = setting("runs", "Folder that holds all runs and the MLflow database.")
    seed: int = setting(0, "Seed of task sampling, of the order of samples and of the engines.", low=0)
    resume: bool = setting(False, "Continue from the newest checkpoint of this run; without one, refuse.")
    startup_timeout_seconds: float = setting(
        600.0,
        "Limit for a process to start, with the weights or a checkpoint that it reads. A checkpoint may take 1.5 times "
        "as long to write; a role without progress for 1.25 times as long, at least 900 s, counts as hung: all "
        "processes write their stacks to their logs, and it is killed.",
        above=0,
    )
    heartbeat_timeout_seconds: float = setting(
        20.0, "A process that sends no heartbeat for this long counts as lost.", above=0
    )
    worker_restarts_per_hour: int = setting(
        6,
        "Restarts of each rollout worker within an hour; one that fails more often is given up (rollout.min_engines).",
        low=0,
    )
    max_trainer_restarts: int = setting(
        3,
        "Restarts of all trainer ranks after a failure, and of a job by Slurm (requeues), in a row from one "
        "checkpoint; a newer one resets the count. 0: the job ends.",
        low=0,
    )

    def check(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"run.name={self.name!r} is not a plain folder name")


@dataclass
class ModelConfig:
    path: str = setting("", "Hugging Face folder of a Qwen3-VL or Qwen3.5 model.")
    checkpoint: str = setting(
        "", "Megatron checkpoint to start from; empty: the weights of model.path. Only its weights are taken."
    )
    dtype: str = setting("float32", "Type of weights and activations.", choices=("float32", "bfloat16"))
    head_dtype: str = setting(
        "model",
        "Type in which trainer and engines compute logits. float32: products of the output layer are accumulated and "
        "returned in float32, weights stay as they are. model: rounded to the type of the weights.",
        choices=("model", "float32"),
    )
    platform: str = setting(
        "auto", "Where to compute; auto takes CUDA if there is a GPU.", choices=("auto", "cpu", "cuda")
    )

    @property
    def float32_head(self) -> bool:
        """Whether the trainer's logits are float32 and its weights are not."""
        return self.head_dtype == "float32" and self.dtype != "float32"


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
    top_p: float = setting(
        1.0, "Sample from the likeliest tokens of this probability together.", above=0, high=1, only_with="temperature"
    )
    top_k: int = setting(0, "Sample from this many likeliest tokens; 0: from all.", low=0, only_with="temperature")
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
    timeout_seconds: float = setting(
        7200.0, "Limit of one evaluation; episodes without a result by then are missing.", above=0
    )
    only: bool = setting(
        False,
        "Run no trainer: engines use every GPU of every node, and workers only evaluate model.path. `webrl eval`"
        " sets it.",
    )

    def check(self) -> None:
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError(
                f"evaluation.samples={self.samples} with evaluation.temperature=0 repeats the same episode; set "
                "temperature above 0, or samples=1"
            )
        for name in ("blank_images", "greedy"):
            if getattr(self, name) and not (self.before or self.after):
                raise ConfigError(
                    f"evaluation.{name}=true repeats evaluations before and after training, of which there is none; "
                    "set evaluation.after=true as well"
                )


@dataclass
class RingConfig:
    capacity_mib: int = setting(1024, "Size of the shared-memory ring of one node.", low=1)


@dataclass
class WeightsConfig:
    bucket_mib: int = setting(512, "Staging memory of one rank during a transfer.", low=1)
    transport: str = setting(
        "auto",
        "Path of the weights between GPUs. nccl: from GPU to GPU; host: through the memory of the hosts, by shared "
        "memory where a trainer and an engine are on one machine, else by gloo; "
        "auto: nccl where every process has GPUs of its own, else host.",
        choices=("auto", "nccl", "host"),
    )
    timeout_seconds: float = setting(300.0, "Limit of one weight transfer, and of joining a link.", above=0)
    verify: bool = setting(False, "Compare checksums of every slice on both sides of each transfer.")


def _check_sinks(names: list[str]) -> str:
    return next((f": {name!r} is not one of {', '.join(SINKS)}" for name in names if name not in SINKS), "")


@dataclass
class TrackingConfig:
    experiment: str = setting("megatron_webrl", "MLflow experiment.")
    uri: str = setting("", "MLflow tracking address; empty: MLFLOW_TRACKING_URI, else SQLite in the run directory.")
    also: list[str] = setting(
        [],
        "Where metrics go besides MLflow: tensorboard (files in tensorboard/ of the run), wandb (W&B; its project is "
        "WANDB_PROJECT, else tracking.experiment, and WANDB_MODE=offline keeps them in wandb/ of the run). Each needs "
        "the extra of its name: pip install 'megatron_webrl[wandb]'.",
        check=_check_sinks,
    )
    episodes_gib: float = setting(
        10.0,
        "Space for finished episodes with screenshots in episodes/ of the run, of all workers; the oldest are deleted "
        "first. 0: none.",
        low=0,
    )
    timeline: bool = setting(
        False,
        "Record what every process does and when, in timeline/ of the run, for `webrl timeline` (docs/monitor.md); at "
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


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tasks: TasksConfig = variants("source", SOURCES.classes, SOURCES.own)
    browser: BrowserConfig = field(default_factory=BrowserConfig)
    judge: JudgeConfig = variants("protocol", PROTOCOLS, OwnProtocolConfig)
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
    def max_token_lag(self) -> int:
        """trainer.loss.max_token_lag; 0 for a loss without it."""
        return self.trainer.loss.max_token_lag if isinstance(self.trainer.loss, OffPolicyLossConfig) else 0

    @property
    def staleness_limit(self) -> int:
        """Versions that the oldest token of a trained group may lag behind, by mode."""
        return {"async": self.rollout.max_staleness, "one_step_off": 1, "sync": 0}[self.rollout.mode]

    @property
    def trainer_grace_seconds(self) -> float:
        """Seconds beyond run.heartbeat_timeout_seconds that workers give a silent trainer to be started again."""
        return self.run.startup_timeout_seconds if self.run.max_trainer_restarts else 0.0

    @property
    def hang_timeout_seconds(self) -> float:
        """Limit of a role without progress: above every wait in which a healthy one makes none.

        These are the start, and the joining of a weight link: one timeout to form it, one to compare plans.
        """
        return max(1.25 * self.run.startup_timeout_seconds, 2 * self.weights.timeout_seconds + 300)

    @property
    def checkpoint_timeout_seconds(self) -> float:
        """Limit of writing one checkpoint, which holds as much as a start reads; training continues without it."""
        return 1.5 * self.run.startup_timeout_seconds

    @property
    def weights_through_host(self) -> bool:
        """Whether weights travel through the memory of the hosts; without GPUs they are nowhere else."""
        transport, cluster = self.weights.transport, self.cluster
        return transport == "host" or (transport == "auto" and (cluster.colocate or not cluster.gpus_per_node))

    @property
    def ranks_per_engine(self) -> int:
        return self.rollout.tensor_parallel * self.rollout.pipeline_parallel

    @property
    def sessions_per_worker(self) -> int:
        """The most browser sessions, and requests of its engine, of a worker at a time: its groups and evaluations."""
        rollout, evaluation = self.rollout, self.evaluation
        return rollout.groups_in_flight * rollout.group_size + (EVALUATION_EPISODES if evaluation.every else 0)

    @property
    def requests_per_engine(self) -> int:
        """Requests that an engine computes at a time, at most."""
        return self.rollout.max_num_seqs or self.sessions_per_worker

    @property
    def engine_gpus_per_node(self) -> int:
        """GPUs of each node for engines; all of them if no trainer runs, or if it shares them."""
        every = self.evaluation.only or self.cluster.colocate
        return self.cluster.gpus_per_node if every else self.cluster.engine_gpus_per_node

    @property
    def trainer_gpus_per_node(self) -> int:
        """GPUs of each node for trainer ranks; none if no trainer runs."""
        cluster = self.cluster
        own = cluster.gpus_per_node - (0 if cluster.colocate else cluster.engine_gpus_per_node)
        return 0 if self.evaluation.only else own

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


def check_combinations(config: Config) -> None:
    """Check every setting, and settings of different sections against each other. Raises ConfigError.

    A configuration that only evaluates trains nothing: what is of training alone is not checked then.
    """
    check_sections(config)
    check_engine_options(config.rollout.engine_options, in_training=not config.evaluation.only)
    for check in (_check_engines, _check_context, _check_browser, _check_evaluation):
        check(config)
    if not config.evaluation.only:
        for check in (_check_batch, _check_loss, _check_credit, _check_distillation):
            check(config)


def check_head_dtype(config: Config) -> None:
    """Refuse model.head_dtype=float32 if all weights are float32. Raises ConfigError."""
    dtypes = {config.engine_dtype} if config.evaluation.only else {config.engine_dtype, config.model.dtype}
    if config.model.head_dtype == "float32" and dtypes == {"float32"}:
        raise ConfigError(
            "model.head_dtype=float32 has no effect on weights in float32; leave it out, or set model.dtype or "
            "rollout.dtype to bfloat16"
        )


def _check_engines(config: Config) -> None:
    rollout, trainer = config.rollout, config.trainer
    if not config.evaluation.only and rollout.min_engines > rollout.engines:
        raise ConfigError(
            f"rollout.min_engines={rollout.min_engines} is above rollout.engines={rollout.engines}; lower it"
        )
    if rollout.max_new_tokens >= rollout.max_model_len:
        raise ConfigError(
            f"rollout.max_new_tokens={rollout.max_new_tokens} leaves no room for a prompt in "
            f"rollout.max_model_len={rollout.max_model_len}; lower it or raise max_model_len"
        )
    if rollout.max_model_len > trainer.tokens_per_microbatch:
        raise ConfigError(
            f"trainer.tokens_per_microbatch={trainer.tokens_per_microbatch} cannot hold a sample of "
            f"rollout.max_model_len={rollout.max_model_len} tokens; raise it or lower max_model_len"
        )
    check_head_dtype(config)
    kernel = trainer.attention
    if kernel in ("varlen", "flash"):
        for name, value, needed in (
            ("model.dtype", config.model.dtype, "bfloat16"), ("model.platform", config.model.platform, "cuda")
        ):  # fmt: skip
            if value not in (needed, "auto"):
                raise ConfigError(
                    f"trainer.attention={kernel} needs {name}={needed}, not {value}; set it, or trainer.attention=auto"
                )


def _check_context(config: Config) -> None:
    rollout, context = config.rollout, config.rollout.context
    if rollout.mode != "async" and rollout.max_staleness not in (config.staleness_limit, RolloutConfig().max_staleness):
        raise ConfigError(
            f"rollout.max_staleness={rollout.max_staleness} has no meaning with rollout.mode={rollout.mode}, whose "
            f"groups lag {config.staleness_limit} behind; leave it out, or set rollout.mode=async"
        )
    if context.policy == "append" and context.history_turns == 1:
        raise ConfigError(
            "rollout.context.history_turns=1 leaves no room to append to (rollout.context.policy=append); set "
            "history_turns to at least 2, or policy to sliding"
        )
    form = context.response_format
    if context.compact and form not in ("vanilla", *COMPACT_FORMATS) and not is_import_path(form):
        raise ConfigError(
            f"rollout.context.response_format={form} has no effect with "
            "rollout.context.compact=true, whose responses are bare tool calls; set it to bare or memory_compact, or "
            "compact to false"
        )
    if context.compact and context.web_advice:
        raise ConfigError(
            "rollout.context.web_advice has no effect with rollout.context.compact=true, whose system message is the "
            "names of the actions; leave it out, or set compact to false"
        )
    if not context.carry_fields and context.response_format in ("bare", "vanilla"):
        raise ConfigError(
            f"rollout.context.carry_fields has no effect with rollout.context.response_format="
            f"{context.response_format}, which has neither Memory nor Progress; leave it out"
        )


def _check_browser(config: Config) -> None:
    browser, tasks = config.browser, config.tasks
    if browser.marks and config.trainer.warm_start.demonstrations:
        raise ConfigError(
            f"trainer.warm_start.demonstrations={config.trainer.warm_start.demonstrations}, but scripts act by "
            "coordinates; set demonstrations to 0, or browser.marks=false"
        )
    if isinstance(config.rollout.agent, HarnessConfig):
        for key, value, needed in (
            ("browser.cdp", browser.cdp, True), ("browser.servers", browser.servers, ""),
            ("rollout.stepping", config.rollout.stepping, "free"),
        ):  # fmt: skip
            if value != needed:
                shown = str(needed).lower() if isinstance(needed, bool) else needed or "empty"
                raise ConfigError(
                    f"rollout.agent.name=harness needs {key}={shown}: the program controls a browser on this machine, "
                    "at its own pace"
                )
    for name, usual in (("latency", LatencyConfig()), ("offline_websites", False)):
        if browser.servers and getattr(tasks, name) != usual:
            raise ConfigError(
                f"tasks.{name} has no effect with browser.servers={browser.servers}: give it to those servers instead"
            )


def _check_evaluation(config: Config) -> None:
    evaluation, tasks = config.evaluation, config.tasks
    if not evaluation.episodes and not (tasks.from_files or tasks.from_import_path):
        raise ConfigError(
            f"evaluation.episodes=0 means all rows of a test file, which tasks.source={tasks.source} has not; set it "
            "to at least 1"
        )
    for part in task_parts(tasks).values():
        _check_task_files(part, evaluation)
    for name, evaluators in tasks.evaluators.items():
        where = f"tasks.mix: the evaluators of {name}"
        check_names(where, dict.fromkeys(evaluators), config.judge.evaluators, "judge.evaluators")


def _check_task_files(tasks: TasksConfig, evaluation: EvaluationConfig) -> None:
    if not isinstance(tasks, FileTasksConfig) or tasks.from_import_path:
        return
    if not (tasks.train_file or tasks.test_file):
        raise ConfigError(f"tasks.source={tasks.source} needs tasks.train_file, tasks.test_file or both")
    if not tasks.train_file and not evaluation.only:
        raise ConfigError(f"tasks.source={tasks.source} needs tasks.train_file for training; name the file")
    if not tasks.test_file and (evaluation.before or evaluation.after or evaluation.every):
        raise ConfigError(
            f"tasks.source={tasks.source} needs tasks.test_file for evaluations; name the file, or turn "
            "evaluation.before, evaluation.after and evaluation.every off"
        )


def _check_batch(config: Config) -> None:
    """Check the groups of a batch, and the updates that are profiled."""
    rollout, trainer = config.rollout, config.trainer
    if not trainer.without_baseline:
        if rollout.group_size < 2:
            raise ConfigError("rollout.group_size=1 gives no baseline; use at least 2, or trainer.loss.name=raft")
        if trainer.minibatches > trainer.groups_per_update:
            raise ConfigError(
                f"trainer.minibatches={trainer.minibatches} exceeds trainer.groups_per_update="
                f"{trainer.groups_per_update}, and groups stay whole; lower it"
            )
    updates = trainer.profile_updates
    if outside := [version for version in updates if not 1 <= version <= trainer.updates]:
        raise ConfigError(f"trainer.profile_updates={updates}: {outside[0]} is not between 1 and {trainer.updates}")


def _check_loss(config: Config) -> None:
    loss, reward = config.trainer.loss, config.trainer.reward
    oldest, max_token_lag = config.staleness_limit + loss.oldest_replayed, config.max_token_lag
    if config.rollout.stale == "mask":
        if not max_token_lag:
            raise ConfigError(
                "rollout.stale=mask needs trainer.loss.max_token_lag above 0, and a loss that has it: it masks the old "
                "tokens of groups that are not dropped"
            )
    elif max_token_lag and max_token_lag >= oldest:
        raise ConfigError(
            f"trainer.loss.max_token_lag={max_token_lag} masks nothing: no trained token is more than {oldest} "
            "versions old (rollout.max_staleness, rollout.mode, replays of trainer.loss); lower it, or set it to 0"
        )
    if isinstance(loss, BaselineLossConfig) and loss.replay_into_failed_groups:
        cause = "trainer.distillation.rewards=false, which has no groups" if config.trainer.distillation.alone else ""
        if config.tasks.source in PAGE_SOURCES:
            cause = f"tasks.source={config.tasks.source}, whose tasks do not come again"
        if cause:
            raise ConfigError(f"trainer.loss.replay_into_failed_groups has no effect with {cause}; leave it at 0")
    if reward.length_penalty and reward.length_window > config.rollout.max_new_tokens:
        raise ConfigError(
            f"trainer.reward.length_window={reward.length_window} exceeds "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}; lower it"
        )


_OF_ADVANTAGES = ("advantage.", "reward.", "zero_variance_groups")  # settings of the trainer


def _check_credit(config: Config) -> None:
    """Check trainer.advantage, and what a loss or a teacher without advantages of rewards leaves without effect."""
    trainer, advantage, judge = config.trainer, config.trainer.advantage, config.judge
    if judge.graded and (trainer.without_baseline or not judge.uses_models):
        cause = trainer.without_baseline or f"judge.evaluators={judge.evaluators}"
        raise ConfigError(f"judge.graded has no effect with {cause}: it is the reward of failures; set it to false")
    if cause := trainer.without_baseline:
        usual = flatten_config(TrainerConfig())
        for name, value in flatten_config(trainer).items():
            if name.startswith(_OF_ADVANTAGES) and value != usual.get(name):
                raise ConfigError(
                    f"trainer.{name}={value} has no effect with {cause}, which has no advantages; leave it out"
                )
        if trainer.distillation.alone and trainer.loss.shuffle_advantages:
            raise ConfigError(f"trainer.loss.shuffle_advantages has no effect with {cause}; leave it at false")
        return
    if not trainer.reward.has_penalties and (advantage.name == "gdpo" or getattr(advantage, "penalties", "") == "step"):
        name = "name=gdpo" if advantage.name == "gdpo" else "penalties=step"
        raise ConfigError(
            f"trainer.advantage.{name} has no effect with no penalty: all of trainer.reward.* are 0; leave it out"
        )
    if advantage.overlong == "mask" and trainer.zero_variance_groups == "keep":
        raise ConfigError(
            "trainer.advantage.overlong=mask could leave nothing to train of the groups that "
            "trainer.zero_variance_groups=keep keeps; set the latter to drop"
        )
    if trainer.critic and trainer.loss.shuffle_advantages:
        raise ConfigError(
            "trainer.loss.shuffle_advantages has no effect with a critic (trainer.advantage.name), which computes the "
            "advantages after the samples are made; leave it at false"
        )


def _check_distillation(config: Config) -> None:
    settings, loss = config.trainer.distillation, config.trainer.loss
    if settings.coefficient and loss.imitates_successes:
        raise ConfigError(
            f"trainer.distillation.coefficient={settings.coefficient} gives each token an advantage, and "
            f"trainer.loss.name={loss.name} has none; choose another loss, or set the coefficient to 0"
        )
    if settings.coefficient and not isinstance(loss, OffPolicyLossConfig):
        raise ConfigError(
            f"trainer.distillation.coefficient={settings.coefficient} compares the teacher with the policy that the "
            f"loss does, which trainer.loss.name={loss.name} does not tell; choose a loss of the package, or set the "
            "coefficient to 0"
        )
    if settings.coefficient and config.rollout.temperature != 1:
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature} differs from the temperature of the teacher's "
            "log-probabilities, which is 1 (trainer.distillation); set it to 1"
        )
