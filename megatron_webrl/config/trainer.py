"""Settings of the trainer: parallel layout, optimizer, warm start, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_webrl.config.advantage import ADVANTAGES, AdvantageConfig, CriticConfig, OwnAdvantageConfig
from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.loss import LOSSES, LossConfig, OwnLossConfig, RewardConfig
from megatron_webrl.config.setting import setting, variants

WARM_START_TIMEOUT_SECONDS = 3600.0  # limit of the whole warm start, demonstrations included


@dataclass
class OptimizerConfig:
    learning_rate: float = setting(5e-6, "Peak learning rate of Adam.", above=0)
    schedule: str = setting("cosine", "Decay after the warm-up.", choices=("cosine", "linear", "constant"))
    warmup_fraction: float = setting(
        0.0167, "Fraction of all optimizer steps with a linearly rising learning rate.", low=0, high=1
    )
    weight_decay: float = setting(0.01, "Decoupled weight decay.", low=0)
    clip_norm: float = setting(1.0, "Gradients are scaled down to this global norm.", above=0)
    implementation: str = setting(
        "torch",
        "Adam implementation: torch's, or a fused one, Transformer Engine's, else apex's.",
        choices=("torch", "fused"),
    )
    keep: str = setting(
        "device",
        "Where main weights and moments are between optimizer steps. host: in pinned memory of the host, so that they "
        "and the activations never need the device's memory at the same time; each step moves them there and back.",
        choices=("device", "host"),
    )


@dataclass
class CheckpointConfig:
    every: int = setting(0, "Updates between checkpoints; 0: only at the end.", low=0)
    last: bool = setting(
        True,
        "Write a checkpoint at the end, also of a run that is stopped; false: of a trial whose weights go nowhere.",
    )
    keep: int = setting(2, "Number of newest checkpoints to keep.", low=1)
    optimizer_shards: str = setting(
        "whole",
        "whole: the optimizer's state is gathered on one rank of each data-parallel group, and resumes in any parallel "
        "layout. ranks: each rank writes its own part, without waiting for others, and the run resumes with the same "
        "tensor, pipeline, context and expert sizes and any number of replicas.",
        choices=("whole", "ranks"),
    )


@dataclass
class WarmStartConfig:
    demonstrations: int = setting(0, "Scripted episodes to imitate before RL; 0: none.", low=0)
    demonstrations_file: str = setting(
        "",
        "File written by `webrl demonstrate`; empty: the first worker makes the demonstrations.",
        only_with="demonstrations",
    )
    premature_submit_probability: float = setting(
        0.0,
        "Probability that a step of a demonstration submits at once where the page has a submit button, or takes any "
        "free square of tic-tac-toe. Above 0, failed episodes are imitated too.",
        low=0,
        high=1,
    )
    epochs: int = setting(1, "Passes over the demonstrations.", low=1)
    samples_per_update: int = setting(32, "Steps of episodes in one optimizer step.", low=1)
    learning_rate: float = setting(1e-3, "Peak learning rate of the warm start.", above=0)


@dataclass
class TrainerConfig:
    tensor_parallel: int = setting(1, "Ranks that share each layer.", low=1)
    pipeline_parallel: int = setting(1, "Stages of layers, each on its own ranks.", low=1)
    virtual_pipeline: int = setting(1, "Chunks of layers per stage; more chunks shorten the pipeline bubble.", low=1)
    expert_parallel: int = setting(1, "Ranks that share the experts, taken from tensor and data parallel.", low=1)
    expert_tensor_parallel: int = setting(1, "Ranks that share each expert.", low=1)
    context_parallel: int = setting(
        1, "Ranks that share the tokens of each packed sequence; in attention, its heads.", low=1
    )
    data_parallel: int = setting(1, "Replicas that share each batch; 0: as many as cluster.* has GPUs for.", low=0)
    recompute: str = setting(
        "auto",
        "Activations that the backward pass recomputes to save memory: none, attention and MLP (selective), or whole "
        "layers (full); auto: the least with which the estimate of `webrl placement --memory` leaves a tenth of each "
        "GPU free, and none without GPUs.",
        choices=("auto", "none", "selective", "full"),
    )
    layers: str = setting(
        "local",
        "Linear layers and norms: megatron-core's (local) or Transformer Engine's.",
        choices=("local", "transformer_engine"),
    )
    attention: str = setting(
        "auto",
        "Attention kernel: PyTorch's for each sample (sdpa) or for variable lengths (varlen: half precision on CUDA), "
        "flash-attn's; auto: varlen where it exists, else sdpa.",
        choices=("auto", "sdpa", "varlen", "flash"),
    )
    routing_replay: str = setting(
        "auto",
        "Replay of the engine's routed experts in the trainer; auto: of a mixture of experts, unless "
        "rollout.pipeline_parallel, speculative decoding or the model runner of the CPU prevent the recording.",
        choices=("auto", "on", "off"),
    )
    updates: int = setting(
        5, "Updates of the whole run, those before a resume included; 0: the warm start alone.", low=0
    )
    groups_per_update: int = setting(8, "Groups trained in one update.", low=1)
    epochs: int = setting(1, "Passes over an update's batch.", low=1)
    minibatches: int = setting(
        1,
        "Optimizer steps in one pass, each over whole groups; without a baseline (raft, raft_plus_plus, "
        "trainer.distillation.rewards=false) over whole trajectories.",
        low=1,
    )
    tokens_per_microbatch: int = setting(16384, "Tokens of one packed sequence.", low=1)
    merge_prefixes: str = setting(
        "auto",
        "Prefixes that a micro-batch computes once: none; trajectory: of steps that extend each other; all: those that "
        "any steps have in common, such as the system prompt, task and first screenshot of a group; auto: all, or "
        "trajectory where linear attention would have to hand its state to several continuations.",
        choices=("auto", "none", "trajectory", "all"),
    )
    train_vision: bool = setting(True, "Train the vision tower; otherwise it is frozen.")
    image_workers: int = setting(
        2,
        "Threads of each trainer rank that decode and patchify screenshots before the packed sequences that "
        "need them; 0: the rank does it itself, before the first packed sequence.",
        low=0,
    )
    zero_variance_groups: str = setting(
        "drop",
        "Groups of one outcome: drop and replace them, or keep them (they carry no gradient of the rewards; with "
        "trainer.advantage.name=gdpo that of their penalties, with critic that of all of their steps).",
        choices=("drop", "keep"),
    )
    profile_updates: list[int] = setting(
        [],
        "Versions whose update torch's profiler records on rank 0, in profiles/ of the run, as a trace of Chrome. A "
        "profiled update is slower, and its file has some tens of MB.",
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = variants("name", LOSSES, OwnLossConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = variants("name", ADVANTAGES, OwnAdvantageConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def critic(self) -> CriticConfig | None:
        """The step critic, if there is one."""
        return self.advantage if isinstance(self.advantage, CriticConfig) else None

    @property
    def has_proximal_policy(self) -> bool:
        """Whether the policy at the start of an update enters its loss."""
        return self.critic is not None or self.loss.name != "raft"

    def scored_minibatches(self, count: int) -> int:
        """Minibatches of an update's `count` that have a pass before the first step, which scores its own itself.

        A critic needs the values of all.
        """
        return count - (self.critic is None) if self.has_proximal_policy else 0

    @property
    def without_baseline(self) -> str:
        """The setting that leaves rewards without a baseline and steps without an advantage of them; empty if none."""
        if self.loss.imitates_successes:
            return f"trainer.loss.name={self.loss.name}"
        return "trainer.distillation.rewards=false" if self.distillation.alone else ""

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run, at most, and one at least."""
        return max(1, self.updates * self.epochs * self.minibatches)
