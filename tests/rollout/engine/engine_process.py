"""A worker process with an engine: updates a mixture of experts, fails an update, recovers, and keeps running.

Writes its report as JSON. Usage: python -m tests.rollout.engine.engine_process <model folder> <report>
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import psutil
import transformers

from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from tests.rollout.engine.engines import Sender, configuration, expected, perturb, picture, prompt, respond


async def main(folder: Path, result: Path) -> None:
    config = configuration(folder)
    config.weights.timeout_seconds = 5.0
    engine = await VLLMEngine.start(config, 0)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    perturb(model, seed=4)
    sender = Sender(model, result.parent)
    await sender.join(engine)
    await sender.send(engine, 1)

    async def gap() -> float:
        answer = await respond(engine, prompt(engine, 1), [picture(0)])
        return float(np.abs(answer.logprobs - expected(model, engine, answer, [picture(0)])).max())

    report: dict = {"experts": await gap()}
    engine._sampling.max_tokens = 1900
    in_flight = asyncio.create_task(engine.generate(None, prompt(engine, 0), []))
    await asyncio.sleep(0)
    try:
        await engine.update_weights(2, 2)  # the trainer does not send it
    except Exception as error:
        report["update"] = f"{type(error).__name__}: {error}"
    report["partially_updated"] = engine.partially_updated
    engine._sampling.max_tokens = 24
    waiting = asyncio.create_task(engine.generate(None, prompt(engine, 0), []))
    for name, call in (("in_flight", in_flight), ("response", waiting)):
        try:
            await asyncio.wait_for(asyncio.shield(call), 3)
            report[name] = "answered"
        except Exception as error:
            report[name] = type(error).__name__
    perturb(model, seed=5)
    await sender.join(engine, "weights/again")
    await sender.send(engine, 2)
    await asyncio.wait_for(waiting, 30)
    report["after_update"] = await gap()
    children = psutil.Process().children(recursive=True)
    report["cores"] = [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    unfinished = result.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(report))
    unfinished.rename(result)  # readers never see an incomplete report
    await asyncio.sleep(120)  # killed long before


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
