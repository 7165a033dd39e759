"""The vLLM engine of one rollout worker: prompts are tokens and images, weights are updated in flight.

Order of calls: `start`, `join_weight_link`, any number of `generate` (concurrent) and `update_weights` (one at a time),
`close`. An update pauses requests, which continue with the new weights; each token records its version. After a failed
update the engine is partially updated: it stays paused with its requests until a complete update over another link.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_webrl.config.schema import Config
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.model.parameter_map import is_sparse
from megatron_webrl.model.processor import Processor, decode_image
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.rollout.generator import NO_LIMITS, EngineDeadError, Generation, GenerationError, ResponseLimits

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from megatron_webrl.browser.server.client import RemoteSession
    from megatron_webrl.rollout.engine.followers import EngineFollowers


Sampling = tuple[float, float, int]  # temperature, top_p, top_k (0: all tokens)


def sampling_params(
    config: Config, processor: Processor, sampling: Sampling, limits: ResponseLimits = NO_LIMITS
) -> SamplingParams:
    """vLLM's parameters of one response."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    temperature, top_p, top_k = sampling
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=limits.response_tokens(config.rollout.max_new_tokens),
        stop=list(limits.stop),
        stop_token_ids=[processor.eos_token_id],
        logprobs=0,  # of the sampled token only
        detokenize=bool(limits.stop),  # else the processor decodes once, at the end
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def vllm_prompt(token_ids: np.ndarray, images: Sequence[bytes], decoded: Sequence[Any]) -> dict[str, Any]:
    """vLLM's form of a prompt, from tokens with one placeholder per image and the encoded and decoded images."""
    prompt: dict[str, Any] = {"prompt_token_ids": np.asarray(token_ids).tolist()}
    if decoded:
        prompt["multi_modal_data"] = {"image": decoded}
        # Keys of the caches: hashing the encoded images is cheaper than hashing the pixels.
        keys = [hashlib.blake2b(data, digest_size=16).hexdigest() for data in images]
        prompt["multi_modal_uuids"] = {"image": keys}
    return prompt


def to_generation(
    output: RequestOutput, processor: Processor, expanded: np.ndarray, grids: np.ndarray, engine: int, text: Any
) -> Generation:
    """A finished response. Raises GenerationError: it is unusable, or the prompt is not `expanded` (int32 [prompt]).

    `text`: the text model's configuration.
    """
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
        experts=_experts(response, len(prompt) + len(ids) - 1, text),
    )


def _logprobs(response: CompletionOutput) -> np.ndarray:
    """float32 [response], of the sampled tokens."""
    by_position = response.logprobs or []
    if len(by_position) != len(response.token_ids):
        raise GenerationError(f"{len(by_position)} log-probabilities came with {len(response.token_ids)} tokens")
    logprobs = [by_token[token].logprob for by_token, token in zip(by_position, response.token_ids, strict=True)]
    values = np.array(logprobs, np.float32)
    if len(invalid := values[~np.isfinite(values)]):
        raise GenerationError(f"log-probability {invalid[0]} is not finite; the model's weights are damaged")
    return values


def _experts(response: CompletionOutput, tokens: int, text: Any) -> np.ndarray:
    """Experts of the first `tokens` tokens, see types.Step; [0, 0, 0] if the engine records none."""
    if response.routed_experts is None:
        return np.zeros((0, 0, 0), np.uint8)
    recorded: np.ndarray = response.routed_experts[-tokens:]  # those of an earlier computation come before
    if len(recorded) < tokens:
        raise GenerationError(f"the engine gave the experts of {len(recorded)} of {tokens} tokens")
    sparse = [layer for layer in range(recorded.shape[1]) if is_sparse(text, layer)]
    # The largest number of the type means that nothing is recorded; vLLM has experts of this number.
    return recorded[:, sparse].astype(np.uint8 if text.num_experts < np.iinfo(np.uint8).max else np.uint16)


def _versions(response: CompletionOutput) -> np.ndarray:
    """int32 [response], from vLLM's spans of one version each."""
    versions = np.full(len(response.token_ids), -1, np.int32)
    for span in response.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if missing := int((versions < 0).sum()):
        raise GenerationError(f"the engine gave no version for {missing} tokens")
    return versions


log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_SECONDS = 20.0
_CONTROL_SECONDS = 30.0  # limit of control calls such as pausing and resuming, in addition to the transfer
FOLLOWER_POLL_SECONDS = 0.5  # between two checks of the followers


class WeightUpdateError(RuntimeError):
    """Joining a link or an update failed. The engine is alive but does not serve; it may join another link."""


class VLLMEngine:
    """One vLLM engine. Implements Generator. All methods must run in the event loop that started it."""

    def __init__(
        self, config: Config, worker: int, llm: AsyncLLM, thread: ThreadPoolExecutor, processor: Processor,
        followers: EngineFollowers | None = None,
    ) -> None:  # fmt: skip
        self.version = -1  # of the served weights; -1: none yet
        self.partially_updated = False
        self.processor = processor
        ranks = config.ranks_per_engine
        self.rank_hosts = [socket.gethostname()] * ranks if followers is None else followers.rank_hosts(ranks)
        self._config, self._worker, self._thread = config, worker, thread
        self._llm: Any = llm
        self._usual_sampling: Sampling = (config.rollout.temperature, 1.0, 0)
        self._sampling = sampling_params(config, processor, self._usual_sampling)
        self._request_numbers = itertools.count()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._update = asyncio.Lock()
        self._paused_seconds, self._paused_since = 0.0, None  # type: float, float | None
        self._closed = False
        self._watching = asyncio.create_task(self._watch(followers))

    @classmethod
    async def start(
        cls, config: Config, worker: int, number: int = 1, followers: EngineFollowers | None = None
    ) -> VLLMEngine:
        """Start vLLM for instance `number` of a worker. Raises EngineDeadError: not ready in time, follower failed."""
        # This thread must outlive the engine (vllm_environment.start_engine), and keeps the event loop free.
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"engine-{worker}")
        loop = asyncio.get_running_loop()
        span = None if followers is None else followers.span
        starting = loop.run_in_executor(thread, vllm_environment.start_engine, config, worker, number, span)
        try:
            processor = await asyncio.to_thread(Processor.load, config.model.path)
            async with asyncio.timeout(config.run.startup_timeout_seconds):
                while followers is not None and not starting.done():
                    if failure := followers.failure():
                        raise EngineDeadError(f"engine {worker} did not start: {failure}")
                    await asyncio.wait((starting,), timeout=FOLLOWER_POLL_SECONDS)
                llm = await asyncio.shield(starting)
                await vllm_environment.prepare_ranks(config, llm)
            engine = cls(config, worker, llm, thread, processor, followers)
            await engine._llm.engine_core.set_weight_version_async("0")  # of the weights that vLLM has loaded
        except BaseException as error:
            _kill_cores()
            thread.shutdown(wait=False)
            if isinstance(error, TimeoutError):
                hosts = f" on {', '.join(followers.hosts)}" if followers is not None else ""
                raise EngineDeadError(
                    f"engine {worker}{hosts} was not ready within {config.run.startup_timeout_seconds:g} s "
                    "(run.startup_timeout_seconds)"
                ) from error
            raise
        return engine

    async def serve_initial_weights(self, version: int) -> None:
        """Serve the weights of model.path as `version`, for evaluation without a trainer."""
        self.check_alive()
        async with asyncio.timeout(_CONTROL_SECONDS):
            await self._llm.engine_core.set_weight_version_async(str(version))
        self.version = version

    async def generate(
        self, session: RemoteSession | None, token_ids: np.ndarray, images: Sequence[bytes],
        sampling: Sampling | None = None, limits: ResponseLimits = NO_LIMITS,
    ) -> Generation:  # fmt: skip
        """Generate one response. `token_ids`: int32 with one placeholder per image; `session` is ignored.

        `sampling` replaces that of training; temperature 0 is greedy. Raises GenerationError for an invalid prompt or
        after rollout.operation_timeout_seconds (without pauses for updates), EngineDeadError if the engine is dead.
        """
        self.check_alive()
        if self.version < 0 and not self._config.evaluation.only:
            raise GenerationError(f"engine {self._worker} has no weights yet; the trainer sends them")
        try:
            grids = self.processor.grids(images)
            expanded = self.processor.expand_image_tokens(token_ids, grids)
            decoded = await asyncio.to_thread(lambda: [decode_image(data) for data in images])
        except ValueError as error:
            raise GenerationError(str(error)) from error
        limit = self._config.rollout.max_model_len
        if len(expanded) >= limit:
            raise GenerationError(
                f"the prompt has {len(expanded)} tokens; rollout.max_model_len={limit} leaves no room for a response"
            )
        prompt = vllm_prompt(token_ids, images, decoded)
        chosen = self._sampling
        if sampling is not None or limits != NO_LIMITS:
            chosen = sampling_params(self._config, self.processor, sampling or self._usual_sampling, limits)
        output = await self._limited(self._request(prompt, chosen))
        text = self._llm.vllm_config.model_config.hf_text_config
        return to_generation(output, self.processor, expanded, grids, self._worker, text)

    async def join_weight_link(self, control: Path, name: str, description: dict[str, Any]) -> None:
        """Join the trainer's link `name`. Raises WeightUpdateError: timeout, plans differ.

        `control`: file with the address of the job's control service. `description`: of the trainer's plan, with the
        index of this "engine" in it.
        """
        self.check_alive()
        seconds = self._config.weights.timeout_seconds
        limits = {"timeout_seconds": seconds, "join_timeout_seconds": seconds}
        info = description | {"control": str(control), "name": name} | limits
        failure = f"engine {self._worker} could not join link {name}"
        async with self._weight_operation(failure, 2 * seconds + _CONTROL_SECONDS):
            await self._call_ranks("init", info)

    async def update_weights(self, version: int, transfer: int) -> float:
        """Receive the weights of a transfer and serve them as `version`; returns the seconds of the pause.

        Raises WeightUpdateError if the transfer fails: the engine stays paused. Raises EngineDeadError if it is lost.
        """
        self.check_alive()
        info = {"transfer": transfer, "version": version, "verify": self._config.weights.verify}
        limit = self._config.weights.timeout_seconds + 3 * _CONTROL_SECONDS
        failure = f"engine {self._worker} did not take version {version}"
        async with self._update, self._weight_operation(failure, limit):
            self._paused_since = self._paused_since or time.monotonic()
            # Each cache is cleared below: vLLM's cache of processed images does not depend on the weights, and clearing
            # its two halves separately would lose images of requests that arrive in between.
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            self.partially_updated = True
            await self._call_ranks("start")
            await self._call_ranks("update", info)
            await self._call_ranks("finish")
            # Cached values of the old weights. Running requests lose theirs, too, and recompute them.
            await self._llm.reset_prefix_cache(reset_running_requests=True)
            await self._llm.reset_encoder_cache()
            await self._llm.engine_core.set_weight_version_async(str(version))
            await self._llm.resume_generation()
            self.version, self.partially_updated = version, False
            seconds = time.monotonic() - self._paused_since
            self._paused_seconds, self._paused_since = self._paused_seconds + seconds, None
        return seconds

    async def features(self) -> dict[str, bool]:
        """Whether every rank captured CUDA graphs, and vLLM schedules a step while the device computes the last."""
        return {
            "cuda_graphs": all(await self._ask_ranks("webrl_captured_graphs")),
            "async_scheduling": bool(self._llm.vllm_config.scheduler_config.async_scheduling),
        }

    async def weight_load_paths(self) -> list[dict[str, Any]]:
        """For each rank: number and bytes of parameters by load path. Valid after joining a link."""
        return await self._ask_ranks("webrl_load_paths")

    async def weight_checksums(self) -> list[list[int | None]]:
        """For each rank: checksums of the slices in its memory, None for slices that its kernels changed."""
        return await self._ask_ranks("webrl_live_checksums")

    async def _ask_ranks(self, method: str) -> list[Any]:
        self.check_alive()
        async with asyncio.timeout(_CONTROL_SECONDS):
            return await self._llm.collective_rpc(method)

    async def close(self) -> None:
        """Shut the engine and its processes down. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._die("it was closed")
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # it would log the end of the engine core as an error
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(
                loop.run_in_executor(self._thread, self._llm.shutdown, SHUTDOWN_TIMEOUT_SECONDS),
                SHUTDOWN_TIMEOUT_SECONDS + 5,
            )
        except TimeoutError:
            log.error("engine %d did not shut down within %g s; killing it", self._worker, SHUTDOWN_TIMEOUT_SECONDS)
            _kill_cores()
        self._thread.shutdown(wait=False)

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine is dead."""
        if not self._death.done() and self._llm.errored:
            self._die("its engine core ended")
        if self._death.done():
            raise EngineDeadError(f"engine {self._worker} is dead: {self._death.result()}")

    def _die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)

    async def _watch(self, followers: EngineFollowers | None) -> None:
        """Declare the engine dead if its core or a follower fails: vLLM's calls would wait for them without limit."""
        with suppress(JobFailed):  # the worker's own check raises it
            while not self._death.done():
                if self._llm.errored:
                    self._die("its engine core ended")
                elif followers is not None and (failure := followers.failure()):
                    self._die(failure)
                await asyncio.wait((self._death,), timeout=FOLLOWER_POLL_SECONDS)

    async def _call_ranks(self, phase: str, info: dict[str, Any] | None = None) -> None:
        """Run a phase of vLLM's weight-transfer protocol on all ranks. Raises RuntimeError with the ranks' errors."""
        errors = await self._llm.collective_rpc("webrl_weight_update", args=(phase, info))
        if messages := [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]:
            raise RuntimeError("; ".join(messages))

    @asynccontextmanager
    async def _weight_operation(self, failure: str, seconds: float) -> AsyncIterator[None]:
        """Limit an operation, end it with the engine, and turn errors of a live one into WeightUpdateError."""
        try:
            async with asyncio.timeout(seconds) as limit:

                def expire(_: object) -> None:
                    limit.reschedule(asyncio.get_running_loop().time())

                self._death.add_done_callback(expire)
                try:
                    yield
                finally:
                    self._death.remove_done_callback(expire)
        except TimeoutError as error:
            self.check_alive()
            # The engine core is still busy, for an unknown time.
            self._die(f"{failure} within {seconds:g} s")
            raise EngineDeadError(f"{failure} within {seconds:g} s") from error
        except Exception as error:
            self.check_alive()
            raise WeightUpdateError(f"{failure}: {error or type(error).__name__}") from error

    async def _request(self, prompt: dict[str, Any], sampling: SamplingParams) -> RequestOutput:
        request = f"{self._worker}-{next(self._request_numbers)}"
        async for output in self._llm.generate(prompt, sampling, request):
            if output.finished:
                return output
        raise GenerationError(f"engine {self._worker} gave no output for request {request}")

    async def _limited(self, request: Coroutine[Any, Any, RequestOutput]) -> RequestOutput:
        """The result of `request`, unless the engine dies or the timeout passes first."""
        task = asyncio.ensure_future(request)
        started, paused = time.monotonic(), self._total_pause()
        limit = self._config.rollout.operation_timeout_seconds
        try:
            while not task.done():
                remaining = limit + self._total_pause() - paused - (time.monotonic() - started)
                if remaining <= 0:
                    raise GenerationError(
                        f"engine {self._worker} gave no answer within {limit:g} s (rollout.operation_timeout_seconds)"
                    )
                await asyncio.wait((task, self._death), timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
                if self._death.done():
                    self.check_alive()
            return task.result()
        except (GenerationError, EngineDeadError, asyncio.CancelledError):
            raise
        except Exception as error:
            self.check_alive()
            why = error.__cause__ or error
            raise GenerationError(f"engine {self._worker} failed on a request: {why or type(why).__name__}") from error
        finally:
            task.cancel()  # aborts the request within vLLM

    def _total_pause(self) -> float:
        """Seconds of all pauses for updates so far."""
        running = time.monotonic() - self._paused_since if self._paused_since is not None else 0.0
        return self._paused_seconds + running


def _kill_cores() -> None:
    for child in multiprocessing.active_children():
        if child.name.startswith("EngineCore"):
            child.kill()
            child.join(5)
