"""Cost of a context policy: prompt tokens computed by the engine, and tokens computed by the trainer.

1. Scripted policies do tasks of the sites in real Chromium, once; observations and actions are recorded.
2. Each context policy makes the prompts of the same episodes. A real vLLM engine with a tiny model answers each prompt
   and reports the tokens found in its prefix cache; then it gets prompt and scripted response, which fills the cache as
   generating the response would. Each policy has an empty cache of its own (by a salt).
3. The trainer's prefix merging makes sequences from the steps of each policy.

Screenshots have 960 tokens, as 1280x768 pixels have for Qwen3-VL. Text has more tokens than there, since the tiny
model's vocabulary is small. The success of a policy is not measured here.
"""

from __future__ import annotations

import asyncio
import os
import platform as machine
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.server.client import BrowserClient
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.config.schema import Config, ModelConfig, RunConfig
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.rollout.contexts import format_response, make_context
from megatron_webrl.rollout.demonstrations import scripted_generation
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.episode_runner import open_browsers
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.tasks.registry import make_source, scripted_environments
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.prefix_merging import merge_prefixes
from megatron_webrl.types import Action, Observation, Task
from tools.arguments import make_bench_parser, write_json
from tools.bench.episodes import make_sample
from tools.make_tiny_model import make_tiny_model

BASE = "sliding, 4 rounds"
CONTESTANTS = {
    BASE: ContextConfig(history_turns=4),
    "sliding, 1 round": ContextConfig(history_turns=1),
    "append, 4 rounds": ContextConfig(policy="append", history_turns=4),
    "append, 8 rounds": ContextConfig(policy="append", history_turns=8),
}
OURS = "append, 4 rounds"
LENGTHS = ((1, 4), (5, 8), (9, 40))  # steps of an episode, from and to, in the second table
MODEL = {
    "hidden": 64, "layers": 1, "heads": 1, "kv_heads": 1, "vision_hidden": 64, "vision_layers": 1, "vision_heads": 1,
}  # fmt: skip
WINDOW, ANSWER = 16384, 256  # tokens: rollout.max_model_len, and its part for the response
MAX_STEPS = 40
SESSIONS = 2
ATTEMPTS = 4


@dataclass(frozen=True)
class RecordedEpisode:
    """Observations and actions of a scripted policy."""

    task: Task
    instruction: str
    observations: tuple[Observation, ...]  # one more than actions; as many if an answer ended the episode
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class PromptStats:
    """The prompt of one step in the engine."""

    prompt: int  # tokens
    cached: int  # tokens found in the prefix cache
    images: int


@dataclass(frozen=True)
class ContextResult:
    """Result of one policy on one episode."""

    task: str
    prompts: tuple[PromptStats, ...]  # one per step
    response_tokens: int
    sequences: int  # after merging
    trained_tokens: int  # after merging
    unmerged_tokens: int  # without merging

    @property
    def computed(self) -> int:
        """Prompt tokens computed by the engine."""
        return sum(step.prompt - step.cached for step in self.prompts)

    @property
    def prompted(self) -> int:
        """Prompt tokens."""
        return sum(step.prompt for step in self.prompts)


def configuration(folder: Path) -> Config:
    """Configuration of the engine for all policies, and of the sites at the usual size."""
    model = make_tiny_model(folder / "model", max_position_embeddings=WINDOW, max_pixels=2**20, **MODEL)  # type: ignore[arg-type]
    config = Config(
        run=RunConfig(directory=str(folder), name="context", startup_timeout_seconds=300.0),
        model=ModelConfig(path=str(model), platform="cpu", dtype="float32"),
        browser=BrowserConfig(width=1280, height=768),
        tasks=tasks_config(source="sites", environments=list(scripted_environments("sites")), max_steps=MAX_STEPS),
    )
    most = max(settings.history_turns for settings in CONTESTANTS.values())
    config.rollout.context = ContextConfig(history_turns=most)  # largest number of images in a prompt
    config.rollout.max_model_len, config.rollout.max_new_tokens, config.rollout.kv_cache_mib = WINDOW, 1, 512
    return config


async def record_episodes(config: Config, count: int) -> list[RecordedEpisode]:
    """Record scripted episodes of held-out tasks, every environment in turn."""
    source = make_source(config.tasks)
    tasks = [source.held_out_task(number) for number in range(count)]
    try:
        async with open_browsers(config, SESSIONS, "bench") as browsers:
            # More tasks than sessions: the others wait.
            return await asyncio.gather(*(_record_with_retries(browsers, task) for task in tasks))
    finally:
        source.close()


async def _record_with_retries(browsers: BrowserClient, task: Task) -> RecordedEpisode:
    """Record an episode.

    Retries: on a busy machine a script may see a moving page. Raises BrowserError
    or ScriptedPolicyError.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return await _record(browsers, task)
        except (BrowserError, ScriptedPolicyError) as error:
            print(f"{task.id}: retrying after {error}", file=sys.stderr)
    return await _record(browsers, task)


async def _record(browsers: BrowserClient, task: Task) -> RecordedEpisode:
    actions: list[Action] = []
    async with browsers.session() as session:
        seen = [await session.reset(task)]
        while not seen[-1].done and len(actions) < task.max_steps:
            actions.append(await session.demonstration())
            if actions[-1].kind == "answer":
                break
            seen.append(await session.step(actions[-1]))
    return RecordedEpisode(task, seen[0].instruction or "", tuple(seen), tuple(actions))


async def _replay(engine: VLLMEngine, settings: ContextConfig, episode: RecordedEpisode, number: int) -> ContextResult:
    processor = engine.processor
    context = make_context(processor, settings, WINDOW - ANSWER)
    context.start_episode(episode.instruction, episode.observations[0])
    prompts: list[PromptStats] = []
    samples: list[TrainingSample] = []
    for step, action in enumerate(episode.actions):
        prompt = context.build_prompt()
        images = [context.screenshots[i] for i in prompt.image_indices]
        answer = scripted_generation(processor, prompt.token_ids, images, format_response(action, settings))
        generation = await engine.generate(None, prompt.token_ids, images)
        prompts.append(PromptStats(len(generation.prompt_token_ids), generation.cached_prompt_tokens, len(images)))
        # After generating a response, all of its tokens but the last have been computed.
        await engine.generate(None, np.append(prompt.token_ids, answer.response_token_ids[:-1]), images)
        samples.append(make_sample(answer, images, len(episode.actions), (number, 0)))
        if step + 1 < len(episode.observations):
            context.add_step(answer, action, None, episode.observations[step + 1])
    video = int(processor.tokenizer.convert_tokens_to_ids("<|video_pad|>"))
    chains = merge_prefixes(samples, (processor.image_token_id, video))
    return ContextResult(
        task=episode.task.id,
        prompts=tuple(prompts),
        response_tokens=sum(len(sample.response) for sample in samples),
        sequences=len(chains),
        trained_tokens=sum(chain.length for chain in chains),
        unmerged_tokens=sum(sample.length for sample in samples),
    )


async def measure(config: Config, count: int) -> dict[str, list[ContextResult]]:
    """Measure all policies on the same episodes, one after the other."""
    episodes = await record_episodes(config, count)
    alone = replace(config, evaluation=replace(config.evaluation, only=True))
    engine = await VLLMEngine.start(alone, 0)  # no trainer sends it weights
    found = {}
    try:
        for name, settings in CONTESTANTS.items():
            await engine._llm.reset_prefix_cache()  # no policy finds the cache entries of another
            found[name] = [await _replay(engine, settings, episode, i) for i, episode in enumerate(episodes)]
    finally:
        await engine.close()
    return found


def show(found: dict[str, list[ContextResult]]) -> None:
    """Print one line per policy, relative to the first; then the ratio by episode length."""
    base = found[BASE]
    steps = sum(len(each.prompts) for each in base)
    lengths = sorted(len(each.prompts) for each in base)
    print(
        f"{len(base)} episodes, {steps} steps ({lengths[0]} to {lengths[-1]}, median {lengths[len(lengths) // 2]}), "
        f"{sum(each.response_tokens for each in base) / steps:.0f} tokens an answer\n"
    )
    columns = (
        "prompt tokens", "computed", "hit rate", "fewer computed", "sequences", "trained tokens / answer token",
        "fewer trained",
    )  # fmt: skip
    print("| per trajectory | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name, results in found.items():
        prompted, computed, trained = (_total(results, field) for field in ("prompted", "computed", "trained_tokens"))
        answers, count = _total(results, "response_tokens"), len(results)
        print(
            f"| {name} | {prompted / count:.0f} | {computed / count:.0f} | {1 - computed / prompted:.1%} | "
            f"{_total(base, 'computed') / computed:.2f} | {_total(results, 'sequences') / count:.1f} | "
            f"{trained / answers:.1f} | {_total(base, 'trained_tokens') / trained:.2f} |"
        )
    print(f"\n| steps | episodes | computed, {BASE} | computed, {OURS} | ratio |")
    print("|---|" + "---:|" * 4)
    for low, high in LENGTHS:
        pairs = [
            (one.computed, other.computed)
            for one, other in zip(base, found[OURS], strict=True)
            if low <= len(one.prompts) <= high
        ]
        if pairs:
            one, other = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
            print(f"| {low} to {high} | {len(pairs)} | {one:.0f} | {other:.0f} | {one / other:.2f} |")


def _total(found: Sequence[ContextResult], name: str) -> int:
    return sum(getattr(each, name) for each in found)


def main(arguments: list[str] | None = None) -> None:
    parser = make_bench_parser(__doc__, "three episodes")
    parser.add_argument("--episodes", type=int, default=30, help="one of each environment in turn (default: 30)")
    options = parser.parse_args(arguments)
    print(f"{os.cpu_count()} CPUs, {machine.machine()}, load {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory(prefix="webrl-bench-") as temporary:
        config = configuration(Path(temporary))
        found = asyncio.run(measure(config, 3 if options.quick else options.episodes))
    show(found)
    if options.json:
        figures = {
            name: [asdict(each) | {"computed": each.computed} for each in results] for name, results in found.items()
        }
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
