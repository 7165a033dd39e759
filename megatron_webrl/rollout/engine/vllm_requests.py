"""Convert between prompts and responses of the agents and those of vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_webrl.config.schema import Config
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.generator import Generation, GenerationError

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams


def sampling_params(config: Config, processor: Processor, temperature: float) -> SamplingParams:
    """vLLM's sampling parameters of one response."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        max_tokens=config.rollout.max_new_tokens,
        stop_token_ids=[processor.eos_token_id],
        logprobs=0,  # of the sampled token only
        detokenize=False,  # the processor decodes once, at the end
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def vllm_prompt(
    config: Config, weights: int, token_ids: np.ndarray, images: Sequence[bytes], decoded: Sequence[Any]
) -> dict[str, Any]:
    """vLLM's form of a prompt, from tokens with one placeholder per image and the encoded and decoded images.

    `weights`: number of the engine's weights. Versions are no keys of a cache: a trainer that resumes repeats them.
    """
    prompt: dict[str, Any] = {"prompt_token_ids": np.asarray(token_ids).tolist()}
    image_salt = ""
    if config.weights.cache_invalidation == "salt":
        prompt["cache_salt"] = str(weights)
        if config.trainer.train_vision:
            image_salt = f"-{weights}"
    if decoded:
        prompt["multi_modal_data"] = {"image": decoded}
        # Keys of the caches: hashing the encoded images is cheaper than hashing the pixels.
        keys = [hashlib.blake2b(data, digest_size=16).hexdigest() + image_salt for data in images]
        prompt["multi_modal_uuids"] = {"image": keys}
    return prompt


def to_generation(
    output: RequestOutput, processor: Processor, expanded: np.ndarray, grids: np.ndarray, engine: int
) -> Generation:
    """A finished response. Raises GenerationError: it is unusable, or the prompt is not `expanded` (int32 [prompt])."""
    prompt = np.asarray(output.prompt_token_ids, np.int32)
    if not np.array_equal(prompt, expanded):
        raise GenerationError(
            f"engine {engine} expanded the prompt to {len(prompt)} tokens with images of "
            f"{processor.image_token_counts(prompt).tolist()} tokens; the processor to {len(expanded)} with "
            f"{processor.image_token_counts(expanded).tolist()}"
        )
    response = output.outputs[0]
    ids = np.asarray(response.token_ids, np.int32)
    if response.finish_reason not in ("stop", "length") or not len(ids):
        raise GenerationError(f"engine {engine} ended a response of {len(ids)} tokens with {response.finish_reason!r}")
    return Generation(
        prompt_token_ids=prompt,
        response_token_ids=ids,
        logprobs=_logprobs(response),
        versions=_versions(response),
        image_grids=grids,
        text=processor.thought_prefix + processor.decode(ids),
        finish_reason=response.finish_reason,
        cached_prompt_tokens=output.num_cached_tokens or 0,
        experts=_experts(response, len(prompt) + len(ids) - 1),
    )


def _logprobs(response: CompletionOutput) -> np.ndarray:
    """float32 [response], of the sampled tokens."""
    by_position = response.logprobs
    if by_position is None or len(by_position) != len(response.token_ids):
        raise GenerationError(f"{len(by_position or ())} log-probabilities came with {len(response.token_ids)} tokens")
    logprobs = [by_token[token].logprob for by_token, token in zip(by_position, response.token_ids, strict=True)]
    values = np.array(logprobs, np.float32)
    if not np.isfinite(values).all():
        raise GenerationError(
            f"log-probability {values[~np.isfinite(values)][0]} is not finite; the model's weights are damaged"
        )
    return values


def _experts(response: CompletionOutput, tokens: int) -> np.ndarray:
    """Experts of the first `tokens` tokens, see types.Step; [0, 0, 0] if the engine records none."""
    recorded = response.routed_experts
    if recorded is None:
        return np.zeros((0, 0, 0), np.uint8)
    # Asynchronous scheduling may compute a token more; the end is missing if it never was.
    missing = max(0, tokens - len(recorded))
    return np.pad(recorded[:tokens], ((0, missing), (0, 0), (0, 0)), constant_values=np.iinfo(recorded.dtype).max)


def _versions(response: CompletionOutput) -> np.ndarray:
    """int32 [response], from vLLM's spans of one version each."""
    versions = np.full(len(response.token_ids), -1, np.int32)
    for span in response.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise GenerationError(f"the engine gave no version for {int((versions < 0).sum())} tokens")
    return versions
