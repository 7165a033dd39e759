"""Episodes of a harness: a program that acts in a browser of its own, with the policy as its model.

Each episode starts the program once. It controls the episode's Chromium over CDP, and asks the policy by OpenAI's chat
completions, at an address and with a key of its own; each call is one step of the episode. The episode ends when the
page says so, when the program reports a result or exits, or by a limit; then the program is killed (docs/harness.md).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from aiohttp import web

from megatron_webrl.browser.server.client import RemoteSession
from megatron_webrl.config.rollout import HarnessConfig
from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import ChildProcess
from megatron_webrl.rollout.agent import Agent, AgentError, Episode, generated_step, reset
from megatron_webrl.rollout.chat import (
    MODEL,
    ChatRequest,
    Conversations,
    RequestRefused,
    completion,
    events,
    parse_request,
)
from megatron_webrl.rollout.contexts import ContextOverflow
from megatron_webrl.rollout.generator import Generator
from megatron_webrl.rollout.stepping import LockstepMember
from megatron_webrl.track import live_rollouts
from megatron_webrl.types import ANSWER, DONE, STEPS_EXHAUSTED, Action, Observation
from megatron_webrl.util.network import NetworkNamespace, listen, start_relay
from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 32 << 20
POLL_SECONDS = 0.05
PASSED_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SSL_CERT_FILE")  # no keys or tokens
FAILED, REFUSED, FLOODED = "harness_failed", "harness_refused", "harness_flooded"


class HarnessError(AgentError):
    """A fault of the program, which masks the episode."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True)
class HarnessAgent(Agent):
    """Runs episodes of a program."""

    settings: HarnessConfig = field(default_factory=HarnessConfig)

    async def act(
        self, generator: Generator, session: RemoteSession, member: LockstepMember | None, episode: Episode
    ) -> str:
        """Run the program until the episode ends; returns the end reason."""
        with episode.phase("reset", live_rollouts.NAVIGATING):
            observation = await reset(session, episode.live.task)
        address = (await session.lease_state()).cdp_address
        assert address is not None, "rollout.agent.name=harness needs browser.cdp"
        calls = _Calls(self, generator, session, episode, observation)
        async with (
            _own_network() as network, calls.served(network) as url, _reachable(address, network) as cdp,
            _program(self.settings, calls.environment(url, cdp), network) as program,
        ):  # fmt: skip
            return await calls.end(program)


class _Calls:
    """What the program of one episode asks for, and how the episode ends."""

    def __init__(
        self, agent: HarnessAgent, generator: Generator, session: RemoteSession, episode: Episode, first: Observation
    ) -> None:
        """`first`: observation, after the reset."""
        self.key = secrets.token_urlsafe(24)
        self._generator, self._session, self._episode, self._processor = generator, session, episode, agent.processor
        self._max_parallel = agent.settings.max_parallel_calls
        self._max_calls = agent.settings.max_calls or episode.live.task.max_steps
        self._conversations = Conversations(agent.processor)
        self._started = self._running = 0  # calls
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._looking = asyncio.Lock()
        self._images: dict[bytes, int] = {}  # by digest
        episode.browser_images = []
        self._see(first)

    @asynccontextmanager
    async def served(self, network: NetworkNamespace | None) -> AsyncIterator[str]:
        """Answer the program's requests at the address of this context."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/result", self._result)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.0)
        await runner.setup()
        try:
            await web.SockSite(runner, listen(network)).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            if self._end.done():
                self._end.exception()  # it may not have been awaited
            else:
                self._end.cancel()
            await runner.cleanup()

    async def end(self, program: ChildProcess) -> str:
        """Wait for the end of the episode; returns its reason. Raises what masks it."""
        while not self._end.done():
            if program.poll() is not None:
                await self._look()
                if program.returncode:
                    self._fail(HarnessError(FAILED, f"the harness {program.describe_end()}"))
                self._finish(STEPS_EXHAUSTED)
            await asyncio.wait({self._end}, timeout=POLL_SECONDS)
        return self._end.result()

    def environment(self, url: str, cdp: str) -> dict[str, str]:
        """What the program gets to know; not the reference answer of its task."""
        task = self._episode.live.task
        described: dict[str, Any] = {
            "id": task.id, "source": task.source, "environment": task.environment,
            "instruction": self._episode.instruction, "url": self._observation.url, "max_steps": task.max_steps,
        }  # fmt: skip
        return {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ} | {
            "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": self.key, "WEBRL_RESULT_URL": f"{url}/result",
            "WEBRL_CDP_URL": cdp, "WEBRL_MODEL": MODEL, "WEBRL_TASK": json.dumps(described),
        }  # fmt: skip

    # Requests

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            self._check_key(request)
            self._running += 1
            try:
                if self._running > self._max_parallel:
                    limit = f"{self._max_parallel} calls at a time (rollout.agent.max_parallel_calls)"
                    raise HarnessError(FLOODED, f"the harness made more than {limit}")
                body = await request.read()
                chat = await asyncio.to_thread(parse_request, body, self._processor)
                await self._look()
                if self._started == self._max_calls:
                    self._finish(STEPS_EXHAUSTED)
                if self._end.done():
                    return _error(410, "the episode is over")
                self._started += 1
                return await self._respond(request, chat, self._started)
            finally:
                self._running -= 1
        except asyncio.CancelledError:
            self._fail(HarnessError(FAILED, "the harness left a call before its answer"))
            raise
        except (RequestRefused, web.HTTPException) as error:
            self._fail(HarnessError(REFUSED, f"a call was refused: {first_line(error)}"))
            return _error(400, first_line(error))
        except HarnessError as error:
            self._fail(error)
            return _error(429, str(error))
        except Exception as error:  # of engine or browser: it ends the episode, or the worker
            self._fail(error)
            return _error(500, first_line(error))

    async def _respond(self, request: web.Request, chat: ChatRequest, number: int) -> web.StreamResponse:
        episode, processor, settings = self._episode, self._processor, self._episode.settings
        if len(chat.images) > (most := settings.context.history_turns):
            raise RequestRefused(f"{len(chat.images)} images are more than {most} (rollout.context.history_turns)")
        prompt = await asyncio.to_thread(self._conversations.prompt, chat)
        tokens = len(processor.expand_image_tokens(prompt, processor.grids(chat.images)))
        room = settings.max_model_len - chat.limits.response_tokens(settings.max_new_tokens)
        if tokens > room:
            raise ContextOverflow(f"a call has {tokens} tokens, more than {room} (rollout.max_model_len less response)")
        indices = np.array([self._image(image) for image in chat.images], np.int32)
        with episode.phase("generate", live_rollouts.WAITING_FOR_MODEL) as generating:
            generation = await self._generator.generate(self._session, prompt, chat.images, limits=chat.limits)
            generating.facts["tokens"] = len(generation.response_token_ids)
        if self._end.done():
            return _error(410, "the episode is over")
        message, reason = self._conversations.add(chat, prompt, generation)
        seen = self._observation
        # What the harness made of the response is not known.
        step = generated_step(
            generation, indices, seen, generation.text, generating.seconds, action=None,
            not_recorded_requests=seen.not_recorded_requests,
        )  # fmt: skip
        episode.record(step)
        if not chat.stream:
            return web.json_response(completion(message, reason, generation, number))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events(message, reason, generation, number, chat.include_usage):
            await response.write(event)
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "webrl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _result(self, request: web.Request) -> web.Response:
        """{"answer": text, "reward": number}, each optional: ends the episode."""
        try:
            self._check_key(request)
            body = json.loads(await request.read() or b"{}")
            answer, reward = body.get("answer"), body.get("reward")
            if answer is not None and not isinstance(answer, str):
                raise RequestRefused(f"answer={answer!r} is not a text")
            if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
                raise RequestRefused(f"reward={reward!r} is not a finite number")
        except (ValueError, AttributeError, web.HTTPException) as error:
            self._fail(HarnessError(REFUSED, f"a result was refused: {first_line(error)}"))
            return _error(400, first_line(error))
        await self._look()
        episode = self._episode
        if not self._end.done():
            if answer is not None and episode.steps:
                episode.steps[-1] = replace(episode.steps[-1], action=Action("answer", text=answer))
            if episode.page_reward is None:
                episode.page_reward = reward
            self._finish(ANSWER if answer is not None else DONE if reward is not None else STEPS_EXHAUSTED)
        return web.json_response({})

    def _check_key(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            raise RequestRefused("the key is not that of this episode (OPENAI_API_KEY)")

    # The episode

    def _finish(self, reason: str) -> None:
        if not self._end.done():
            self._end.set_result(reason)

    def _fail(self, error: Exception) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    async def _look(self) -> None:
        """Observe the browser, unless another call does; the episode ends if its page says so."""
        if self._looking.locked() or self._end.done():
            return
        async with self._looking:
            try:
                with self._episode.phase("observe", live_rollouts.ACTING):
                    observation = await self._session.step(Action("wait", time=0))
            except Exception as error:  # the browser is lost
                self._fail(error)
                return
            self._see(observation)
            if observation.done:
                self._finish(DONE)

    def _see(self, observation: Observation) -> None:
        self._observation, episode = observation, self._episode
        episode.observe(observation)
        if episode.steps:
            episode.steps[-1] = replace(episode.steps[-1], page_changed=observation.page_changed)
        assert episode.browser_images is not None
        episode.browser_images.append(self._image(observation.screenshot))

    def _image(self, image: bytes) -> int:
        """Index of an image among those of the episode."""
        place = self._images.setdefault(hashlib.sha256(image).digest(), len(self._images))
        if place == len(self._episode.screenshots):
            self._episode.screenshots.append(image)
        return place


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)


@asynccontextmanager
async def _own_network() -> AsyncIterator[NetworkNamespace | None]:
    """A network for a program, without any other; None where this process may not make one."""
    network = None
    try:
        if shutil.which("nsenter"):
            network = await asyncio.to_thread(NetworkNamespace, "harness-network")
    except OSError as error:
        log.info("harnesses run in this machine's own network: %s", error)
    try:
        yield network
    finally:
        if network is not None:
            network.close()


@asynccontextmanager
async def _reachable(address: str, network: NetworkNamespace | None) -> AsyncIterator[str]:
    """The address of this machine, http://host:port, at which a program in `network` reaches `address`."""
    if network is None:
        yield address
        return
    target, listener = urlsplit(address), network.listen()
    async with await start_relay(listener, lambda: asyncio.open_connection(target.hostname, target.port)):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@asynccontextmanager
async def _program(
    settings: HarnessConfig, environment: dict[str, str], network: NetworkNamespace | None
) -> AsyncIterator[ChildProcess]:
    """The running program, in a folder of its own; afterwards neither it nor its children run."""
    enter = ["nsenter", f"--net={network.path}"] if network is not None else []
    function = [sys.executable, "-m", "megatron_webrl.rollout.harness_function"] if settings.function else []
    folder = child_process.make_scratch_folder()
    try:
        environment = environment | {"HOME": str(folder), "TMPDIR": str(folder)}
        program = child_process.start_process(
            [*enter, *function, *settings.command], folder / "output.log", environment, "harness"
        )
        try:
            yield program
        finally:
            await asyncio.to_thread(child_process.terminate_tree, program)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
