"""Log-probability mismatch of a tiny mixture of experts with and without routing replay, and the bytes that it costs.

    python -m tools.bench.routing_replay [--json FILE] [--dtype float32] [--dtype bfloat16]

A vLLM engine answers conversations of two turns with a screenshot while its weights are updated three times in flight;
the last conversations are all of the last version. One Megatron rank with the last weights scores all of them in the
trainer's packed sequences, once with its own router's experts and once with those that the engine recorded. At lag 0
engine and trainer have the same weights. `equal` compares the recorded experts with the trainer's own, in the
conversations of the last version. Bytes are those of ring records.
"""

from __future__ import annotations

import asyncio
import pickle
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.generator import Generation
from megatron_webrl.trainer.data.batching import TrainingSample, make_samples
from megatron_webrl.types import Group, Step, Trajectory
from tests import gloo, model_runner
from tests.rollout.engine import engines
from tests.trajectories import trajectory
from tools.arguments import make_bench_parser, write_json
from tools.make_tiny_model import make_tiny_model

UPDATES = 3
CONVERSATIONS = 4  # in flight at each update, and after the last
DTYPES = ("float32", "bfloat16")
INSTRUCTION = "Click the button that the picture shows, then say what you see. " * 12  # longer than a cache block
SAMPLES, CLEAN, RESULT = "samples.pickle", "clean.pickle", "result.pt"


def measure(folder: Path, dtype: str) -> dict[str, Any]:
    """Mismatch by lag "without" and "with" replay, share of "equal" experts, tokens and bytes. `folder`: empty."""
    make_tiny_model(folder / "model", experts=16, experts_per_token=4, seed=3)
    trajectories, clean = asyncio.run(converse(folder, dtype))
    for name, part in ((SAMPLES, trajectories), (CLEAN, clean)):
        (folder / name).write_bytes(pickle.dumps(samples_of(part)))
    gloo.spawn(score_rank, str(folder), dtype, ranks=1)
    result: dict[str, Any] = torch.load(folder / RESULT)
    return result | {"dtype": dtype} | record_bytes(trajectories)


async def converse(folder: Path, dtype: str) -> tuple[list[Trajectory], list[Trajectory]]:
    """Conversations during UPDATES updates, and those after the last, whose weights are then in `folder`/final."""
    config = engines.configuration(folder / "model")
    config.model.dtype = dtype
    config.rollout.max_new_tokens, config.run.startup_timeout_seconds = 48, 900.0
    engine = await VLLMEngine.start(config, 0)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "model").eval()
    sender = engines.Sender(model, folder, getattr(torch, dtype))
    found: list[Trajectory] = []
    try:
        await sender.join(engine)
        await sender.send(engine, 0)
        for version in range(1, UPDATES + 1):
            running = [asyncio.create_task(_conversation(engine, config, len(found) + i)) for i in range(CONVERSATIONS)]
            while engines.tokens_in_flight(engine) < 8 and not all(task.done() for task in running):
                await asyncio.sleep(0.01)
            engines.perturb(model, seed=version)
            await sender.send(engine, version)
            found += await asyncio.gather(*running)
        clean = [await _conversation(engine, config, len(found) + i) for i in range(CONVERSATIONS)]
    finally:
        await engine.close()
    shutil.copytree(folder / "model", folder / "final")
    model.save_pretrained(folder / "final")
    return [*found, *clean], clean


async def _conversation(engine: VLLMEngine, config: Config, number: int) -> Trajectory:
    """Two turns; all have the same instruction, and each two of them the same screenshot."""
    image = engines.picture(number // 2)
    tokens, steps = engines.prompt(engine, 1, INSTRUCTION), []
    for _ in range(2):
        answer = await engines.respond(engine, tokens, [image])
        steps.append(_step(answer))
        tokens = np.concatenate([tokens, answer.response_token_ids, engines.prompt(engine, 0, "Continue.")])
    return replace(trajectory(number, 0), steps=tuple(steps), images=(image,), temperature=config.rollout.temperature)


def _step(answer: Generation) -> Step:
    return Step(
        prompt_token_ids=answer.prompt_token_ids, response_token_ids=answer.response_token_ids,
        logprobs=answer.logprobs, versions=answer.versions, images=np.zeros(1, np.int32),
        image_grids=answer.image_grids, finish_reason=answer.finish_reason, action=None,
        cached_prompt_tokens=answer.cached_prompt_tokens, experts=answer.experts,
    )  # fmt: skip


def samples_of(trajectories: list[Trajectory]) -> list[TrainingSample]:
    """The steps as training samples."""
    return make_samples([Group(t.ticket, (t,)) for t in trajectories], lambda _: {0: 1.0})


def record_bytes(trajectories: list[Trajectory]) -> dict[str, float]:
    """Bytes of a trajectory's record, mean: all, of experts; of experts per token; and the share of cached tokens."""
    steps = [step for each in trajectories for step in each.steps]
    total = sum(sum(map(len, encode_trajectory(each))) for each in trajectories)
    experts, rows = sum(step.experts.nbytes for step in steps), sum(len(step.experts) for step in steps)
    return {
        "record_bytes": total / len(trajectories),
        "expert_bytes": experts / len(trajectories),
        "expert_bytes_per_token": experts / max(1, rows),
        "cached_prompt_tokens": sum(s.cached_prompt_tokens for s in steps)
        / sum(len(s.prompt_token_ids) for s in steps),
    }


def score_rank(rank: int, folder: str, dtype: str) -> None:
    """A Megatron rank: write the mismatch of both ways, and the comparison of experts, to `folder`."""
    platform = gloo.join(rank, 1, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.layout import ParallelSizes
    from megatron_webrl.trainer.metrics.logprob_mismatch import measure_logprob_mismatch

    process_groups.init_process_groups(ParallelSizes(), seed=1)
    [model] = build_model(Path(folder) / "final", dtype=dtype, platform=platform)
    load_hf([model], Path(folder) / "final")
    model.eval()
    result: dict[str, Any] = {}
    for name, replays in (("without", False), ("with", True)):
        batches = _microbatches(Path(folder), SAMPLES, replays)
        logprobs = [_score(model, batch)[0] for batch in batches]
        result[name] = measure_logprob_mismatch(batches, logprobs, UPDATES).metrics()
        result |= {f"{field}_tokens": sum(getattr(b, f"{field}_tokens") for b in batches) for field in ("replayed",)}
        result["tokens"] = sum(batch.token_count for batch in batches)
    equal = []
    pairs = zip(*(_microbatches(Path(folder), CLEAN, replays) for replays in (False, True)), strict=True)
    for batch, replayed in pairs:
        own, recorded = _score(model, batch)[1], replayed.inputs.experts
        known = recorded[:, 0, 0] >= 0
        equal.append((own.sort().values == recorded.sort().values).all(dim=2)[known])
    result["equal"], result["compared"] = torch.cat(equal).float().mean().item(), torch.cat(equal).shape[0]
    torch.save(result, f"{folder}/{RESULT}")
    process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()


def _microbatches(folder: Path, name: str, replays: bool) -> list[Any]:
    from megatron_webrl.model.hf_config import load_hf_config
    from megatron_webrl.model.processor import Processor
    from megatron_webrl.trainer.data.packing import FlopsEstimator
    from megatron_webrl.trainer.data.sequence_packer import SequencePacker

    flops = FlopsEstimator.from_hf_config(load_hf_config(folder / "final"))
    processor, device = Processor.load(folder / "final"), torch.device("cpu")
    packer = SequencePacker(processor, 2048, device, 0, 1, flops, replays_routing=replays)
    return packer.build(pickle.loads((folder / name).read_bytes()), "token_mean", 1)


@torch.no_grad()
def _score(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [tokens], and the experts of all tokens, int16 [T, MoE layers, top_k]."""
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs

    chosen: list[torch.Tensor] = []

    def keep(router: Any, _: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        chosen.append(output[0].topk(router.topk, dim=-1).indices)

    hooks = [layer.mlp.router.register_forward_hook(keep) for layer in model.decoder.layers]
    logits = model(batch.inputs)
    for hook in hooks:
        hook.remove()
    group = model.pg_collection.tp
    logprobs, _ = vocab_parallel_logprobs(logits, batch.targets, batch.temperature, model.unpadded_vocab_size, group)
    return logprobs.float(), torch.stack(chosen, dim=1).short()


def main() -> None:
    """Measure each type and print a table."""
    parser = make_bench_parser(__doc__)
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    arguments = parser.parse_args()
    model_runner.select_v2()  # V1 records no experts
    results = []
    for dtype in arguments.dtype or DTYPES:
        with tempfile.TemporaryDirectory(prefix="webrl-replay-") as folder:
            results.append(measure(Path(folder), dtype))
        for name, value in results[-1].items():
            print(f"{dtype}  {name}: {value}", flush=True)
    if arguments.json:
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()
