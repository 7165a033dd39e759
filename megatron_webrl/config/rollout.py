"""Settings of engines and agents."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import Any

from megatron_webrl.config.setting import ConfigError, is_import_path, own_options, setting, variants

COMPACT_FORMATS = ("bare", "memory_compact")
"""Values of rollout.context.response_format that suit rollout.context.compact."""


@dataclass
class ContextConfig:
    policy: str = setting(
        "sliding",
        "sliding: each prompt holds the latest rounds. append: each prompt is the previous one, its "
        "answer and a new turn, until the window is full. Or the import path of a policy (docs/extending.md).",
        choices=("sliding", "append"),
        own=True,
    )
    options: dict[str, Any] = own_options()
    history_turns: int = setting(
        4,
        "Rounds with screenshots in a prompt, at most: past rounds plus the current one. Older rounds become summary "
        "lines.",
        low=1,
    )
    response_format: str = setting(
        "vanilla",
        "Fields before the tool call. bare: none; vanilla: Action; progress: Progress, Action; memory_additive: "
        "Memory (facts are only added), Progress, Intention, Action; memory_compressive: the same, Memory rewritten at "
        "each step; memory_compact: Memory, a line of short notes, also with compact (docs/rollout.md). Or the import "
        "path of a form (docs/extending.md).",
        choices=("bare", "vanilla", "progress", "memory_additive", "memory_compressive", "memory_compact"),
        own=True,
    )
    carry_fields: bool = setting(
        True, "Show the latest Memory and Progress in later prompts, whose window may have lost the response."
    )
    keep_thinking: bool = setting(
        False, "Keep the thoughts of past rounds in the prompts of the sliding policy; append always keeps them."
    )
    user_turns: str = setting(
        "described",
        "described: text and then the screenshot; later turns give the effect of the action, title and URL of the "
        "page. screenshots: the screenshot first, and in later turns neither effect nor title nor URL.",
        choices=("described", "screenshots"),
    )
    web_advice: bool = setting(
        False, "Advise the agent on CAPTCHAs, search engines and addresses with and without www. (system message)."
    )
    compact: bool = setting(False, "Short tool schema for models with a small window.")
    scroll_position: bool = setting(False, "Say with each screenshot which part of the page it shows.")

    def check(self) -> None:
        if self.options and not is_import_path(self.policy):
            raise ConfigError(
                f"rollout.context.options has no effect with rollout.context.policy={self.policy}, which is no import "
                "path; leave it out"
            )


@dataclass
class AgentConfig:
    name: str = setting(
        "tool_calls",
        "tool_calls: each response is one call of the tool; harness: a program that acts in the browser by itself and "
        "has the policy as its model (docs/harness.md); or the import path of an agent (docs/extending.md).",
        choices=("tool_calls", "harness"),
        own=True,
    )


@dataclass
class HarnessConfig(AgentConfig):
    """A program that acts in a browser of its own, with the policy as its model."""

    command: list[str] = setting(
        [],
        "The program with its arguments, started for each episode; or only the import path of a Python function.",
        own=True,
    )
    max_calls: int = setting(
        0, "Calls of the model in one episode, which ends after them; 0: as many as the task has steps.", low=0
    )
    max_parallel_calls: int = setting(8, "Calls of the model at a time; an episode that makes more is masked.", low=1)

    @property
    def function(self) -> str:
        """The import path of a function; empty for a program."""
        return self.command[0] if len(self.command) == 1 and is_import_path(self.command[0]) else ""

    def check(self) -> None:
        if not self.command:
            raise ConfigError("rollout.agent.command is empty; name the program of the harness")
        if not self.function and not shutil.which(self.command[0]):
            raise ConfigError(
                f"rollout.agent.command={self.command[0]} is neither a program of this machine nor an import path such "
                "as my_package.my_module:name"
            )


@dataclass
class OwnAgentConfig(AgentConfig):
    """An agent of the user's own."""

    options: dict[str, Any] = own_options()


@dataclass
class RolloutConfig:
    engines: int = setting(
        1, "Rollout workers, each with one vLLM engine; 0: as many as cluster.* has GPUs for.", low=0
    )
    min_engines: int = setting(
        1,
        "The job continues without workers that keep failing (run.worker_restarts_per_hour) down to this many.",
        low=1,
    )
    tensor_parallel: int = setting(1, "GPUs (or CPU processes) of one engine that share each layer.", low=1)
    pipeline_parallel: int = setting(1, "Stages of layers of one engine, each on its own GPUs.", low=1)
    expert_parallel: bool = setting(
        False, "Place whole experts on an engine's tensor-parallel ranks; otherwise each expert is split."
    )
    dtype: str = setting(
        "auto", "Type of the engine's weights; auto: model.dtype.", choices=("auto", "float32", "bfloat16")
    )
    group_size: int = setting(8, "Episodes that share a baseline.", low=1)
    groups_in_flight: int = setting(4, "Groups that one worker runs at a time.", low=1)
    mode: str = setting(
        "async",
        "async: rollout, update and weight sync overlap; one_step_off: each batch is made with fixed "
        "weights while the previous one is trained; sync: rollout, update and weight sync in turn "
        "(docs/rollout.md).",
        choices=("async", "one_step_off", "sync"),
    )
    max_staleness: int = setting(
        2, "Versions that the oldest token of a trained group may lag behind in mode async.", low=0
    )
    stale: str = setting(
        "drop",
        "Groups that would become too old. drop: a group with an older token is dropped; mask: only one whose every "
        "token is older than trainer.loss.max_token_lag, which masks single tokens; wait: the update waits for them.",
        choices=("drop", "mask", "wait"),
        only_with=("mode", "async"),
    )
    stepping: str = setting(
        "free",
        "free: each agent continues as soon as it has its answer; lockstep: all agents of a worker step "
        "together, a naive loop to compare with.",
        choices=("free", "lockstep"),
    )
    temperature: float = setting(1.0, "Sampling temperature.", above=0)
    max_new_tokens: int = setting(4096, "Response tokens of one step.", low=1)
    max_model_len: int = setting(16384, "Tokens of prompt and response together.", low=16)
    kv_cache_mib: int = setting(0, "Memory of the engine's KV cache; 0: vLLM decides.", low=0)
    max_num_seqs: int = setting(
        0,
        "Requests that an engine computes at a time, at most; 0: as many as its worker's episodes in flight can make.",
        low=0,
    )
    gpu_memory_utilization: float = setting(0.9, "Fraction of a GPU that vLLM may use.", above=0, high=1)
    engine_options: dict[str, Any] = setting(
        {},
        "Further arguments of vLLM's AsyncEngineArgs by name, such as {kv_cache_dtype: fp8}. Arguments that vLLM does "
        "not know, or that other settings govern, are refused (docs/rollout.md).",
    )
    action_parser: str = setting(
        "strict",
        "strict: exactly one valid tool call. lenient: also digit strings or integral floats for integers, extra "
        "arguments, URLs without https:// and long answers. webgym: also what WebGym's released parser repairs, such "
        "as boxes, coordinates out of range and missing arguments. Each is counted as leniency/... (docs/tasks.md).",
        choices=("strict", "lenient", "webgym"),
    )
    operation_timeout_seconds: float = setting(
        120.0, "Limit of one operation: a generation, a reset, an action.", above=0
    )
    episode_timeout_seconds: float = setting(2700.0, "Limit of one episode.", above=0)
    context: ContextConfig = field(default_factory=ContextConfig)
    agent: AgentConfig = variants("name", {"tool_calls": AgentConfig, "harness": HarnessConfig}, OwnAgentConfig)

    @property
    def has_fp8_cache(self) -> bool:
        """Whether a value of the KV cache takes one byte (rollout.engine_options.kv_cache_dtype)."""
        return str(self.engine_options.get("kv_cache_dtype", "")).startswith("fp8")
