"""The arms: each is `webrl train configs/quickstart.yaml` with other settings. A test validates all of them.

An ablation changes one option of the arm it is compared with, its base. Values are those of the papers where these
give one (docs/algorithm.md), else a usual one; none was tuned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CONFIG = Path("configs/quickstart.yaml")
INITIAL = "initial"  # evaluates the weights that all arms start from, once for each seed; no arm of a table
IMITATION_EPISODES = 2000
"""Demonstrations of the imitation control; recording and imitating them takes about as long as the RL run."""


@dataclass(frozen=True)
class Arm:
    """Settings that differ from CONFIG, those of the base included."""

    settings: tuple[str, ...]
    base: str = ""  # the arm that lacks this option; empty: none
    metric: str = ""  # of an update: says how much the option acts


def _ablations(base: str, settings: Sequence[str], options: Mapping[str, str]) -> dict[str, Arm]:
    """Arms of `base`, which has `settings`. options: name -> settings, those of the trainer without `trainer.`, and
    @METRIC, separated by blanks."""
    arms = {}
    for name, words in options.items():
        given = words.split()
        changed = tuple(_full_name(word) for word in given if not word.startswith("@"))
        metric = "".join(word[1:] for word in given if word.startswith("@"))
        arms[name] = Arm((*settings, *changed), base, metric)
    return arms


def _full_name(setting: str) -> str:
    return setting if setting.startswith(("tasks.", "rollout.")) else f"trainer.{setting}"


_DEMONSTRATIONS = "trainer.warm_start.demonstrations="
_IMITATION = (
    "trainer.updates=0", f"{_DEMONSTRATIONS}{IMITATION_EPISODES}", "trainer.warm_start.epochs=2",
    "trainer.warm_start.samples_per_update=16", "trainer.warm_start.learning_rate=1e-3",
)  # fmt: skip
_PENALTIES = ("trainer.reward.format_penalty=0.2", "trainer.reward.repetition_penalty=0.2")
_CRITIC = ("trainer.advantage.name=critic",)
GRPO = (
    "trainer.loss.name=grpo", "trainer.minibatches=2", "trainer.optimizer.learning_rate=3e-4",
)  # fmt: skip
"""Base of the options that need advantages or ratios. With these steps GRPO learned slowly and steadily; with twice the
learning rate it forgot where elements are."""

CONTROLS = {
    "rewards": Arm((), metric="entropy"),
    "shuffled": Arm(("trainer.loss.shuffle_advantages=true",), "rewards", "entropy"),
    "imitation": Arm((*_IMITATION, "trainer.warm_start.premature_submit_probability=0.6")),
}
CONTEXTS = {
    policy: Arm((*_IMITATION, "rollout.context.history_turns=4", f"rollout.context.policy={policy}"))
    for policy in ("sliding", "append")
}
"""Context policies: imitation, with four screenshots in a prompt. The initial weights are evaluated with one."""

_OF_REWARDS = _ablations("rewards", (), {
    "raft_fresh": "loss.replay_versions=0",
    "raft_plus_plus": "loss.name=raft_plus_plus @clip_fraction",
    "kl_to_reference": "loss.kl_coefficient=0.01 @reference_kl",
    "entropy_bonus": "loss.entropy_coefficient=0.01 @entropy",
    "curriculum": "tasks.sampler.name=curriculum",
    "near_target": "tasks.sampler.name=near_target",
    "ratio": "tasks.sampler.name=ratio tasks.sampler.weights.circle-center=2 tasks.sampler.weights.tic-tac-toe=2",
    "growing_steps": "tasks.max_steps=10 tasks.growing_steps.interval=20 tasks.growing_steps.initial=2"
                     " tasks.growing_steps.max=6 tasks.growing_steps.cap_step=20",
    "sync": "rollout.mode=sync",
    "cooler_sampling": "rollout.temperature=0.8 @entropy",
    "merge_prefixes_none": "merge_prefixes=none",
})  # fmt: skip
_OF_GRPO = _ablations("grpo", GRPO, {
    "gspo": "loss.name=gspo loss.clip_low=3e-4 loss.clip_high=4e-4 @clip_fraction",
    "cispo": "loss.name=cispo loss.clip_low=1 @clip_fraction",
    "sapo": "loss.name=sapo",
    "dppo": "loss.name=dppo @clip_fraction",
    "dppo_kl": "loss.name=dppo loss.dppo_divergence=kl loss.dppo_bound=0.05 @clip_fraction",
    "clip_higher": "loss.clip_high=0.28 @clip_fraction",
    "no_dual_clip": "loss.dual_clip=0",
    "not_decoupled": "loss.decoupled=false @clip_fraction",
    "weight_geometric": "loss.importance_weight_level=geometric @importance_weight_capped",
    "weight_product": "loss.importance_weight_level=product @importance_weight_capped",
    "weight_truncated": "loss.importance_weight_mode=truncate @importance_weight_capped",
    "weight_cap": "loss.importance_weight_cap=2 @importance_weight_capped",
    "weight_band": "loss.importance_weight_floor=0.5 @importance_weight_floored",
    "kl_rejection": "loss.kl_rejection_bound=0.05 @kl_rejected",
    "kl_rejection_k1": "loss.kl_rejection_bound=0.05 loss.kl_rejection_estimator=k1 @kl_rejected",
    "max_token_lag": "loss.max_token_lag=1 @lag_masked",
    "zero_variance_keep": "zero_variance_groups=keep",
    "normalizer_constant": "loss.normalizer=constant loss.normalizer_constant=2",
    "normalizer_per_trajectory": "loss.normalizer=per_trajectory",
    "async_webrl_constant": "loss.normalizer=async_webrl_constant loss.normalizer_constant=2",
    "async_webrl_per_trajectory": "loss.normalizer=async_webrl_per_trajectory",
    "leave_one_out": "advantage.baseline=leave_one_out",
    "scale_none": "advantage.scale=none",
    "scale_batch_std": "advantage.scale=batch_std",
    "discount": "advantage.discount=0.9",
    "anchor_states": "advantage.anchor_weight=1 @anchored_step_rate",
    "overlong_mask": "advantage.overlong=mask @overlong_masked_rate",
})  # fmt: skip
_OF_PENALTIES = _ablations("penalties", (*GRPO, *_PENALTIES), {
    "components_apart": "advantage.name=gdpo",
    "penalties_by_step": "advantage.penalties=step",
})  # fmt: skip
_OF_CRITIC = _ablations("critic", (*GRPO, *_CRITIC), {
    "critic_lambda_1": "advantage.gae_lambda=1 @explained_variance",
    "critic_head_alone": "advantage.train_trunk=false @explained_variance",
    "critic_warmup": "advantage.warmup_updates=4 @explained_variance",
    "critic_all_groups": "zero_variance_groups=keep @explained_variance",
})  # fmt: skip

ABLATIONS = {
    "rewards": CONTROLS["rewards"],
    **_OF_REWARDS,
    "grpo": Arm(GRPO, "rewards", "clip_fraction"),
    **_OF_GRPO,
    "penalties": Arm((*GRPO, *_PENALTIES), "grpo", "format_error_rate"),
    **_OF_PENALTIES,
    "critic": Arm((*GRPO, *_CRITIC), "grpo", "explained_variance"),
    **_OF_CRITIC,
}
ARMS = CONTROLS | CONTEXTS | ABLATIONS
SETS: dict[str, tuple[str, ...]] = {
    "controls": tuple(CONTROLS), "contexts": tuple(CONTEXTS), "ablations": tuple(ABLATIONS)
}  # fmt: skip
"""Names that stand for several arms."""

WITHOUT_ARM = {
    "trainer.distillation.*":
        "needs a teacher in a vLLM server, which reads the same tokens. To run it: make the teacher with the settings "
        "of the arm imitation but premature_submit_probability=0, convert its checkpoint (python -m "
        "tools.megatron_to_hf), serve it (vllm serve FOLDER --enable-scale-out), and train with the settings of the "
        "arm grpo, trainer.distillation.coefficient=1, trainer.distillation.url, and for the teacher alone "
        "trainer.distillation.rewards=false",
    "trainer.reward.length_penalty": "responses are bare calls of about eight tokens, which cannot become shorter",
    "trainer.reward.length_window": "see trainer.reward.length_penalty",
    "trainer.loss.importance_weight_level=token": "what auto means, except with gspo",
    "tasks.max_steps_by_difficulty": "all MiniWoB++ tasks have one difficulty",
    "tasks.sampler.per": "for tasks from files and for websites",
}  # fmt: skip
"""Options without an arm, and why."""

QUICK = (
    "trainer.updates=2", "trainer.groups_per_update=2", "trainer.minibatches=2", "rollout.group_size=4",
    "evaluation.episodes=2",
)  # fmt: skip


def overrides(name: str, seed: int, quick: bool, updates: int | None = None) -> list[str]:
    """The settings of a job that differ from CONFIG; the initial weights are evaluated by INITIAL alone.

    `updates`: of arms that train by rewards, in place of those of CONFIG.
    """
    settings = () if name == INITIAL else ARMS[name].settings
    scale = QUICK if quick else () if updates is None else (f"trainer.updates={updates}",)
    found = [*scale, *settings, f"run.seed={seed}", "tracking.episodes_gib=0"]
    if quick and any(each.startswith(_DEMONSTRATIONS) for each in settings):
        found.append(f"{_DEMONSTRATIONS}24")
    if name == INITIAL:
        return [*found, "trainer.updates=0", "evaluation.before=true", "evaluation.after=false"]
    return [*found, "evaluation.before=false", "evaluation.after=true"]
