"""What an update computes: episodes, steps, tokens and images, and how they share micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_webrl.config.schema import Config
from megatron_webrl.placement.performance.shapes import MicrobatchShape, ModelShape

PACKED_SHARE = 0.95  # of trainer.tokens_per_microbatch that packing fills


@dataclass(frozen=True)
class EpisodeLengths:
    """Lengths of episodes. Defaults: AsyncWebRL, arXiv 2606.05597, and a page of 1280x768 for Qwen3-VL."""

    steps: float = 9.0  # of an episode: 5.1 of a success, 12.5 of a failure
    response_tokens: float = 240.0  # of a step
    screenshot_tokens: int = 960
    system_tokens: float = 1000.0  # system prompt, tool schema and task, the same in all steps of a group; assumed
    turn_tokens: float = 150.0  # text of a turn around its screenshot; assumed
    browser_seconds: float = 6.6  # of a step: log-normal, median 4 s and sigma 1 (docs/scaling.md)

    def rounds(self, config: Config) -> float:
        """Screenshots of a prompt, mean over the steps of an episode of the mean length."""
        most = min(config.rollout.context.history_turns, self.steps)
        return most - most * (most - 1) / 2 / self.steps

    def prompt_tokens(self, config: Config) -> float:
        """Tokens of a prompt, mean over steps: past rounds have their responses."""
        rounds = self.rounds(config)
        turn = self.screenshot_tokens + self.turn_tokens
        return self.system_tokens + rounds * turn + (rounds - 1) * self.response_tokens


@dataclass(frozen=True)
class TrainingBatch:
    """Sequences of an update, all alike."""

    sequences: float
    tokens: float  # of a sequence
    scored: float  # response tokens of a sequence
    images: float  # of a sequence that no other sequence of the micro-batch has
    screenshot_patches: int
    shared: float  # first tokens of a sequence that a micro-batch computes once

    @classmethod
    def of_config(cls, config: Config, lengths: EpisodeLengths, model: ModelShape) -> TrainingBatch:
        """The sequences of the groups of an update, with the context policy of `config`, of `resolve_automatic`."""
        context, merge = config.rollout.context, config.trainer.merge_prefixes
        episodes = config.trainer.groups_per_update * config.rollout.group_size
        shared = lengths.system_tokens if merge == "all" else 0.0
        patches = lengths.screenshot_tokens * model.merge
        if context.policy == "append" and merge != "none":  # the steps of a window are one sequence
            steps = min(context.history_turns, lengths.steps)
            turn = lengths.screenshot_tokens + lengths.turn_tokens + lengths.response_tokens
            return cls(
                episodes * lengths.steps / steps,
                lengths.system_tokens + steps * turn,
                steps * lengths.response_tokens,
                steps,
                patches,
                shared,
            )
        # Consecutive steps are in one micro-batch mostly: a screenshot is encoded once, though several prompts have it.
        return cls(
            episodes * lengths.steps,
            lengths.prompt_tokens(config) + lengths.response_tokens,
            lengths.response_tokens,
            1.0,
            patches,
            shared,
        )

    def microbatches(self, config: Config) -> tuple[int, MicrobatchShape]:
        """Micro-batches of a replica in one minibatch, and the mean one. Raises ValueError if no sequence fits one."""
        trainer = config.trainer
        room = PACKED_SHARE * trainer.tokens_per_microbatch
        most = math.floor((room - self.shared) / (self.tokens - self.shared))
        if most < 1:
            raise ValueError(
                f"a sequence of {self.tokens:.0f} tokens exceeds trainer.tokens_per_microbatch="
                f"{trainer.tokens_per_microbatch}; raise it, or lower the lengths"
            )
        each = self.sequences / trainer.minibatches / trainer.data_parallel
        count = math.ceil(each / most)
        multiple = trainer.pipeline_parallel if trainer.virtual_pipeline > 1 else 1
        count = multiple * math.ceil(count / multiple)
        number = each / count  # sequences of a micro-batch
        own = self.tokens - self.shared
        shared_pairs = self.shared * (self.shared + 1) / 2
        return count, MicrobatchShape(
            tokens=self.shared * min(1.0, number) + number * own,
            pairs=min(1.0, number) * shared_pairs + number * (self.tokens * (self.tokens + 1) / 2 - shared_pairs),
            scored=number * self.scored,
            patches=number * self.images * self.screenshot_patches,
            patch_pairs=number * self.images * self.screenshot_patches**2,
        )
