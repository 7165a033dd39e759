"""The engine of one rollout worker: vLLM, fed with tokens and images, updated in flight.

Life: `start` -> `join_weights` -> any number of `respond` (concurrently) and `receive_weights` (one at a
time) -> `close`. Responses go on over an update: the request is paused and goes on with the new weights, and
each token records the version that produced it. An engine whose update failed is torn: it may hold half of the
new weights, so it stays paused, with its requests kept, until a whole update over another link has come.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import JobFailed
from megatron_webrl.model.processor import Processor, decode_image
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.rollout.engine.errors import EngineDeadError
from megatron_webrl.rollout.generator import Generation, GenerationError

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from megatron_webrl.farm.client import RemoteSession
    from megatron_webrl.rollout.engine.engine_leader import EngineFollowers

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_SECONDS = 20.0
_CONTROL_SECONDS = 30.0
"""Limit of pausing, resuming and the like, beyond the transfer itself."""
FOLLOWER_POLL_SECONDS = 0.5  # between two looks at the parts of an engine on other nodes


class WeightUpdateError(RuntimeError):
    """Joining the trainer or an update failed. The engine lives, does not serve, and may join and receive again."""


class VLLMEngine:
    """One vLLM engine. Implements Responder; all methods belong to the event loop that started it."""

    def __init__(
        self,
        config: Config,
        worker: int,
        llm: AsyncLLM,
        thread: ThreadPoolExecutor,
        processor: Processor,
        parts: EngineFollowers | None = None,
    ) -> None:
        self.version = -1  # that it serves; -1: none yet
        self.partially_updated = False
        self.processor = processor
        ranks = config.ranks_per_engine
        self.rank_hosts = parts.rank_hosts(ranks) if parts is not None else [socket.gethostname()] * ranks  # names
        self._config, self._worker, self._thread = config, worker, thread
        self._llm: Any = llm
        self._sampling = _sampling(config, processor, config.rollout.temperature)
        self._numbers = itertools.count()
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._update = asyncio.Lock()
        self._paused_seconds, self._paused_since = 0.0, None  # type: float, float | None
        self._closed = False
        self._watching = asyncio.create_task(self._watch(parts)) if parts is not None else None

    @classmethod
    async def start(
        cls, config: Config, worker: int, life: int = 1, parts: EngineFollowers | None = None
    ) -> VLLMEngine:
        """Start vLLM for the given life of the given worker. `parts`: those of an engine over several nodes.

        Raises EngineDeadError if it is not up within run.startup_timeout_seconds, or if a part of it is lost.
        """
        # A thread of its own, kept to the end: see vllm_environment.start. The event loop stays free meanwhile.
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"engine-{worker}")
        loop = asyncio.get_running_loop()
        span = None if parts is None else parts.span
        starting = loop.run_in_executor(thread, vllm_environment.start_engine, config, worker, life, span)
        try:
            processor = await asyncio.to_thread(Processor.load, config.model.path)
            async with asyncio.timeout(config.run.startup_timeout_seconds):
                while parts is not None and not starting.done():
                    if lost := parts.failure():
                        raise EngineDeadError(f"engine {worker} did not start: {lost}")
                    await asyncio.wait((starting,), timeout=FOLLOWER_POLL_SECONDS)
                llm = await asyncio.shield(starting)
                await vllm_environment.warm_up_pipeline(config, llm)
            engine = cls(config, worker, llm, thread, processor, parts)
            await engine._llm.engine_core.set_weight_version_async("0")  # what tokens of the folder's weights say
        except BaseException as error:
            _kill_cores()
            thread.shutdown(wait=False)
            if isinstance(error, TimeoutError):
                over = f" over {', '.join(parts.hosts)}" if parts is not None else ""
                raise EngineDeadError(
                    f"engine {worker}{over} was not up within {config.run.startup_timeout_seconds:g} s (run.startup_timeout_seconds)"
                ) from error
            raise
        return engine

    async def serve_initial_weights(self, version: int) -> None:
        """Serve the weights of model.path as `version`, where no trainer sends others."""
        self.check_alive()
        async with asyncio.timeout(_CONTROL_SECONDS):
            await self._llm.engine_core.set_weight_version_async(str(version))
        self.version = version

    async def generate(
        self,
        session: RemoteSession | None,
        token_ids: np.ndarray,
        images: Sequence[bytes],
        temperature: float | None = None,
    ) -> Generation:
        """Answer one prompt: int32 tokens with one placeholder per image. `session` is not looked at.

        `temperature`: another than rollout.temperature; 0 takes the likeliest token.

        Raises GenerationError for a prompt that cannot be answered or an answer that takes longer than
        rollout.operation_timeout_seconds (pauses for updates not counted), EngineDeadError if the engine is gone.
        """
        self.check_alive()
        try:
            grids = self.processor.grids(images)
            expanded = self.processor.expand_image_tokens(token_ids, grids)
            pictures = await asyncio.to_thread(lambda: [decode_image(data) for data in images])
        except ValueError as error:
            raise GenerationError(str(error)) from error
        limit = self._config.rollout.max_model_len
        if len(expanded) >= limit:
            raise GenerationError(
                f"the prompt has {len(expanded)} tokens; rollout.max_model_len={limit} leaves no room for a response"
            )
        prompt: dict[str, Any] = {"prompt_token_ids": np.asarray(token_ids).tolist()}
        image_salt = ""
        if self._config.weights.cache_invalidation == "salt":
            prompt["cache_salt"] = str(self.version)
            if self._config.trainer.train_vision:
                image_salt = f"-{self.version}"
        if pictures:
            prompt["multi_modal_data"] = {"image": pictures}
            # Names for the caches, cheaper than hashing the pixels.
            prompt["multi_modal_uuids"] = {
                "image": [hashlib.blake2b(data, digest_size=16).hexdigest() + image_salt for data in images]
            }
        sampling = self._sampling
        if temperature is not None:
            sampling = _sampling(self._config, self.processor, temperature)
        output = await self._finish(self._generate(prompt, sampling))
        return self._generation(output, expanded, grids)

    async def join_weight_link(self, host: str, port: int, name: str, description: dict[str, Any]) -> None:
        """Join the trainer's link `name` at the store on host:port; `description` is the trainer's.

        Raises WeightsError if the link is not formed within weights.timeout_seconds, or if the two sides' plans differ.
        """
        self.check_alive()
        seconds = self._config.weights.timeout_seconds
        info = description | {
            "host": host,
            "port": port,
            "name": name,
            "engine": self._worker,
            "timeout_seconds": seconds,
            "join_timeout_seconds": seconds,
        }
        async with self._weights(f"engine {self._worker} could not join link {name}", 2 * seconds + _CONTROL_SECONDS):
            await self._on_ranks("init", info)

    async def update_weights(self, version: int, transfer: int) -> float:
        """Take part in a transfer and serve `version` from then on; returns the seconds of the pause.

        Requests in flight are paused and go on afterwards. Raises WeightsError if the transfer fails: the engine stays
        paused. Raises EngineDeadError if nothing can be done with it any more.
        """
        self.check_alive()
        info = {"transfer": transfer, "version": version, "verify": self._config.weights.verify}
        limit = self._config.weights.timeout_seconds + 3 * _CONTROL_SECONDS
        what = f"engine {self._worker} did not take version {version}"
        async with self._update, self._weights(what, limit):
            self._paused_since = self._paused_since or time.monotonic()
            # Caches are cleared one by one below: vLLM's cache of processed images does not depend on the weights,
            # and clearing its two halves apart loses images of requests that arrive in between.
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            self.partially_updated = True
            await self._on_ranks("start")
            await self._on_ranks("update", info)
            await self._on_ranks("finish")
            if self._config.weights.cache_invalidation == "reset":
                # What was computed with the old weights. Running requests lose theirs too and compute it again.
                await self._llm.reset_prefix_cache(reset_running_requests=True)
                await self._llm.reset_encoder_cache()
            await self._llm.engine_core.set_weight_version_async(str(version))
            await self._llm.resume_generation()
            self.version, self.partially_updated = version, False
            seconds = time.monotonic() - self._paused_since
            self._paused_seconds, self._paused_since = self._paused_seconds + seconds, None
        return seconds

    async def weight_load_paths(self) -> list[dict[str, Any]]:
        """How weights reach each rank's parameters: by way, the number of parameters and their bytes. After joining."""
        self.check_alive()
        async with asyncio.timeout(_CONTROL_SECONDS):
            return await self._llm.collective_rpc("webrl_load_paths")

    async def weight_checksums(self) -> list[list[int | None]]:
        """Of each rank: checksums of the slices as they are in its memory, None for those that its kernels changed."""
        self.check_alive()
        async with asyncio.timeout(_CONTROL_SECONDS):
            return await self._llm.collective_rpc("webrl_live_checksums")

    async def close(self) -> None:
        """End the engine and its processes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._die("it was closed")
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # it would report the end of the engine core as an error
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(
                loop.run_in_executor(self._thread, self._llm.shutdown, SHUTDOWN_TIMEOUT_SECONDS),
                SHUTDOWN_TIMEOUT_SECONDS + 5,
            )
        except TimeoutError:
            log.error("engine %d did not end within %g s and is killed", self._worker, SHUTDOWN_TIMEOUT_SECONDS)
            _kill_cores()
        self._thread.shutdown(wait=False)

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine cannot answer any more."""
        if not self._died.done() and self._llm.errored:
            self._die("its engine core ended")
        if self._died.done():
            raise EngineDeadError(f"engine {self._worker} is dead: {self._died.result()}")

    def _die(self, reason: str) -> None:
        if not self._died.done():
            self._died.set_result(reason)

    async def _watch(self, parts: EngineFollowers) -> None:
        """Die with a part of the engine on another node: vLLM would wait for its ranks without limit."""
        with suppress(JobFailed):  # the worker itself hears of that, too
            while not self._died.done():
                if lost := parts.failure():
                    self._die(lost)
                await asyncio.wait((self._died,), timeout=FOLLOWER_POLL_SECONDS)

    async def _on_ranks(self, step: str, info: dict[str, Any] | None = None) -> None:
        """A step of vLLM's weight-transfer protocol on all ranks. Raises RuntimeError with what the ranks say."""
        calling = asyncio.ensure_future(self._llm.collective_rpc("webrl_weight_update", args=(step, info)))
        try:
            await asyncio.wait((calling, self._died), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                self.check_alive()
            said = calling.result()
        finally:
            calling.cancel()
        if wrong := [f"rank {rank}: {words}" for rank, words in enumerate(said) if words is not None]:
            raise RuntimeError("; ".join(wrong))

    @asynccontextmanager
    async def _weights(self, what: str, seconds: float) -> AsyncIterator[None]:
        """Something about weights, with a limit. What goes wrong is a WeightsError while the engine core lives."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            # The engine core is still at it, and nobody knows when it will listen again.
            self._die(f"{what} within {seconds:g} s")
            raise EngineDeadError(f"{what} within {seconds:g} s") from error
        except Exception as error:
            self.check_alive()
            raise WeightUpdateError(f"{what}: {error or type(error).__name__}") from error

    async def _generate(self, prompt: dict[str, Any], sampling: SamplingParams) -> RequestOutput:
        request = f"{self._worker}-{next(self._numbers)}"
        async for output in self._llm.generate(prompt, sampling, request):
            if output.finished:
                return output
        raise GenerationError(f"engine {self._worker} gave no output for request {request}")

    async def _finish(self, generating: Any) -> RequestOutput:
        """The result of `generating`, unless the engine dies or the time is up first."""
        task = asyncio.ensure_future(generating)
        began, paused = time.monotonic(), self._pauses()
        limit = self._config.rollout.operation_timeout_seconds
        try:
            while not task.done():
                left = limit + self._pauses() - paused - (time.monotonic() - began)
                if left <= 0:
                    raise GenerationError(
                        f"engine {self._worker} gave no answer within {limit:g} s (rollout.operation_timeout_seconds)"
                    )
                await asyncio.wait((task, self._died), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if self._died.done():
                    self.check_alive()
            return task.result()
        except (GenerationError, EngineDeadError, asyncio.CancelledError):
            raise
        except Exception as error:
            self.check_alive()
            cause = error.__cause__ or error
            raise GenerationError(
                f"engine {self._worker} failed on a request: {cause or type(cause).__name__}"
            ) from error
        finally:
            task.cancel()  # aborts the request within vLLM

    def _pauses(self) -> float:
        running = time.monotonic() - self._paused_since if self._paused_since is not None else 0.0
        return self._paused_seconds + running

    def _generation(self, output: RequestOutput, expanded: np.ndarray, grids: np.ndarray) -> Generation:
        prompt = np.asarray(output.prompt_token_ids, np.int32)
        if not np.array_equal(prompt, expanded):
            raise GenerationError(
                f"engine {self._worker} expanded the prompt to {len(prompt)} tokens with images of "
                f"{self.processor.image_token_counts(prompt).tolist()} tokens; the processor to {len(expanded)} with "
                f"{self.processor.image_token_counts(expanded).tolist()}"
            )
        answer = output.outputs[0]
        tokens = np.asarray(answer.token_ids, np.int32)
        if answer.finish_reason not in ("stop", "length") or not len(tokens):
            raise GenerationError(
                f"engine {self._worker} ended a response of {len(tokens)} tokens with {answer.finish_reason!r}"
            )
        return Generation(
            prompt_token_ids=prompt,
            response_token_ids=tokens,
            logprobs=_logprobs(answer),
            versions=_versions(answer),
            image_grids=grids,
            text=self.processor.decode(tokens),
            finish_reason=answer.finish_reason,
            cached_prompt_tokens=output.num_cached_tokens or 0,
        )


def _sampling(config: Config, processor: Processor, temperature: float) -> SamplingParams:
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


def _logprobs(answer: CompletionOutput) -> np.ndarray:
    """float32 [response], of the sampled tokens."""
    found = answer.logprobs
    if found is None or len(found) != len(answer.token_ids):
        raise GenerationError(f"{len(found or ())} log-probabilities came with {len(answer.token_ids)} tokens")
    values = np.array([place[token].logprob for place, token in zip(found, answer.token_ids, strict=True)], np.float32)
    if not np.isfinite(values).all():
        raise GenerationError(
            f"log-probability {values[~np.isfinite(values)][0]} is not finite; the model's weights are damaged"
        )
    return values


def _versions(answer: CompletionOutput) -> np.ndarray:
    """int32 [response], from vLLM's spans of one version each."""
    versions = np.full(len(answer.token_ids), -1, np.int32)
    for span in answer.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise GenerationError(f"the engine does not say which version produced {int((versions < 0).sum())} tokens")
    return versions


def _kill_cores() -> None:
    for child in multiprocessing.active_children():
        if child.name.startswith("EngineCore"):
            child.kill()
            child.join(5)
