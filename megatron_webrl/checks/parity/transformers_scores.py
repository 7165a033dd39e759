"""Log-probabilities of transformers, one sample at a time; samples missing responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.checks.parity.samples import ParitySample
from megatron_webrl.checks.parity.scoring_process import (
    ProcessScores,
    ScoringJob,
    Stopwatch,
    peak_bytes,
    run_scoring_process,
)
from megatron_webrl.model.processor import Processor
from megatron_webrl.util import torchvision_shim


def score(job: ScoringJob, folder: Path) -> ProcessScores:
    """Load the whole model and score all samples."""
    stopwatch = Stopwatch()
    cuda = job.platform == "cuda" or (job.platform == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu")
    model = _load(job, device)
    processor = Processor.load(job.model)
    stopwatch.lap()
    torch.manual_seed(job.seed)
    logprobs, responses = [], []
    with torch.no_grad():
        for each in job.samples:
            pixels, _ = processor.pixels(each.images)
            visual = {"pixel_values": pixels.to(device, model.dtype), "image_grid_thw": _long(each.image_grids, device)}
            visual = visual if each.images else {}
            response = (
                each.response_token_ids
                if len(each.response_token_ids)
                else _generate(model, job, each, processor, visual)
            )
            logprobs.append(_logprobs(model, each, response, processor, visual))
            responses.append(response)
    return ProcessScores(tuple(logprobs), tuple(responses), stopwatch.lap(), peak_bytes(cuda))


def _load(job: ScoringJob, device: torch.device) -> Any:
    """The model. Raises ValueError unless the folder has exactly the model's tensors."""
    torchvision_shim.install()
    from transformers import AutoModelForImageTextToText

    try:
        model, report = AutoModelForImageTextToText.from_pretrained(
            str(job.model),
            dtype=getattr(torch, job.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError) as error:
        raise ValueError(f"transformers cannot load {job.model}: {error}") from error
    # transformers fills missing tensors with random numbers.
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise ValueError(f"transformers finds {kind} in {job.model}: {', '.join(sorted(map(str, report[kind])))}")
    return model.to(device).eval()


def _generate(
    model: Any, job: ScoringJob, sample: ParitySample, processor: Processor, visual: dict[str, torch.Tensor]
) -> np.ndarray:
    """A response sampled at temperature 1 without image tokens: int32 [up to job.max_new_tokens]."""
    from transformers import GenerationConfig

    ids = _long(sample.prompt_token_ids, model.device)[None]
    config = model.config
    # The folder's generation config may truncate the distribution.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=job.max_new_tokens,
        eos_token_id=processor.eos_token_id,
        pad_token_id=processor.eos_token_id,
        suppress_tokens=[
            config.image_token_id,
            config.video_token_id,
            config.vision_start_token_id,
            config.vision_end_token_id,
        ],
    )
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == processor.image_token_id).int(),
        **visual,
    )
    return output[0, ids.shape[1] :].cpu().numpy().astype(np.int32)


def _logprobs(
    model: Any, sample: ParitySample, response: np.ndarray, processor: Processor, visual: dict[str, torch.Tensor]
) -> np.ndarray:
    """float32 [response]."""
    ids = _long(np.concatenate([sample.prompt_token_ids, response]), model.device)[None]
    images = ids == processor.image_token_id
    logits = model(
        input_ids=ids, mm_token_type_ids=images.int(), use_cache=False, logits_to_keep=len(response) + 1, **visual
    ).logits[0, :-1]
    targets = ids[0, len(sample.prompt_token_ids) :]
    return logits.float().log_softmax(dim=-1).gather(1, targets[:, None]).squeeze(1).cpu().numpy()


def _long(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int64)).to(device)


if __name__ == "__main__":
    run_scoring_process(score)
