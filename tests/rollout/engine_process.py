"""A worker process with an engine of its own: updates a mixture of experts, fails the next update, and stays.

Writes its report as JSON. Usage: python -m tests.rollout.engine_process <model folder> <report>
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import psutil
import transformers

from megatron_webrl.rollout.engine import Engine
from megatron_webrl.weights.manifest import Manifest
from tests.rollout.test_engine import Sender, configuration, expected, perturb, picture, prompt, respond


async def main(folder: Path, result: Path) -> None:
    engine = await Engine.start(configuration(folder), 0)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    perturb(model, seed=4)
    sender = Sender(model)
    released = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    sender.tensors = {
        n: t.transpose(1, 2).contiguous() if n.endswith(released) else t for n, t in sender.tensors.items()
    }
    sender.manifest = Manifest.from_list((n, t.shape, "float32") for n, t in sender.tensors.items())
    await sender.join(engine)
    await sender.send(engine, 1)
    answer = await respond(engine, prompt(engine, 1), [picture(0)])
    report: dict = {"experts": float(np.abs(answer.logprobs - expected(model, engine, answer, [picture(0)])).max())}

    engine._sampling.max_tokens = 1900
    in_flight = asyncio.create_task(engine.respond(None, prompt(engine, 0), []))
    sender.manifest = Manifest.from_list((n, t.shape, "float32") for n, t in list(sender.tensors.items())[1:])
    try:
        await sender.send(engine, 2)
    except Exception as error:
        report["update"] = str(error)
    for name, call in (("in_flight", in_flight), ("response", engine.respond(None, prompt(engine, 0), []))):
        try:
            await asyncio.wait_for(call, 30)
            report[name] = "answered"
        except Exception as error:
            report[name] = f"{type(error).__name__}: {error}"
    children = psutil.Process().children(recursive=True)
    report["cores"] = [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    unfinished = result.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(report))
    unfinished.rename(result)  # readers never see half of it
    await asyncio.sleep(120)  # killed long before


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
