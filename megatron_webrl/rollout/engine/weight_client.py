"""A worker's side of weight updates: announce the engine, join the trainer's link, receive offered weights.

    trainer present -> announce engine/<worker> -> wait for weights/link/<link_id> -> join -> receive each offer
        ^                                                                                       |
        +--------------- joining or a transfer failed, or another trainer has started ----------+

An engine whose transfer failed is paused until a complete transfer over another link.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.config.trainer import WARM_START_TIMEOUT_SECONDS
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine, WeightUpdateError
from megatron_webrl.track.timeline import OFF, Timeline
from megatron_webrl.weights.engine_map import EngineSizes

log = logging.getLogger(__name__)


class WeightClient:
    """One engine's side of all weight updates. `poll` blocks at most for one transfer or for joining a link."""

    def __init__(
        self, config: Config, control: ControlClient, engine: VLLMEngine, instance_id: str, timeline: Timeline = OFF
    ) -> None:
        """`control`: of the role `rollout-N`; `instance_id`: <role>.<number>."""
        self.config, self.control, self.engine = config, control, engine
        self._worker, self._instance_id = control.role, instance_id
        self._links = 0
        self._current_trainer: object = None  # at the last poll
        self._announced_to: object = None  # the trainer that knows this engine; None: no trainer
        self._linked = False
        self._transfer = 0  # the last one over this link
        self._parameters: dict[str, int] = {}  # of all ranks, by load path
        self._features: dict[str, bool] = {}
        self._weights_of: object = None  # the trainer of the engine's weights
        self._waiting_since = time.monotonic()
        self._timeline = timeline

    @property
    def link_id(self) -> str:
        """The name of the link that the engine waits for or uses."""
        return f"{self._instance_id}.{self._links}"

    def has_offer(self) -> bool:
        """Whether the trainer offers this engine weights that it has not received."""
        return self._linked and self._offer() is not None

    @property
    def from_old_trainer(self) -> bool:
        """Whether the engine's weights are of another trainer than the current one."""
        return self._weights_of is not None and self._current_trainer != self._weights_of

    def newest_version(self) -> int:
        """The version that the trainer offered last to any engine; -1: none."""
        offer: Any = self.control.get_json("weights/offer")
        return offer["version"] if offer else -1

    async def poll(self) -> None:
        """Announce, join or receive, whichever is due. Raises EngineDeadError, JobFailed."""
        self.engine.check_alive()
        trainer = self._current_trainer = self.control.get_json("weights/trainer")
        try:
            if trainer != self._announced_to:
                self._announce(trainer)
            elif not self._linked:
                await self._join()
            else:
                await self._receive()
        except WeightUpdateError as error:
            log.warning("%s; waiting for a new link", error)
            self.control.put_json(f"weights/failed/{self._worker}", {"link_id": self.link_id, "reason": str(error)})
            self._announced_to = None

    def _announce(self, trainer: object) -> None:
        self._links += 1
        self._announced_to, self._linked, self._waiting_since = trainer, False, time.monotonic()
        rollout = self.config.rollout
        sizes = EngineSizes(rollout.tensor_parallel, rollout.pipeline_parallel, rollout.expert_parallel)
        names = {"link_id": self.link_id, "instance_id": self._instance_id, "trainer": trainer}
        announcement = names | {"nodes": self.engine.rank_hosts, "sizes": asdict(sizes)}
        self.control.put_json(f"engine/{self._worker}", announcement)

    async def _join(self) -> None:
        if self._announced_to is None or self.control.get_json(f"weights/link/{self.link_id}") is None:
            if time.monotonic() - self._waiting_since > self._grace_seconds:
                raise JobFailed(
                    f"{self._instance_id} waited {self._grace_seconds:.0f} s for the trainer to offer its weights"
                )
            return
        description = self.control.get_json("weights/description")
        assert isinstance(description, dict)  # published before the first link
        plan = {name: value for name, value in description.items() if name != "workers"}
        plan["engine"] = description["workers"].index(self._worker)  # those given up are not in the plan
        await self.engine.join_weight_link(self.control.address_file, f"weights/{self.link_id}", plan)
        ranks = await self.engine.weight_load_paths()
        self._parameters = {path: sum(rank[path]["parameters"] for rank in ranks) for path in ("in_place", "reload")}
        self._features = await self.engine.features()
        self._linked, self._transfer = True, 0

    @property
    def _grace_seconds(self) -> float:
        """The longest time that a healthy trainer may need before it offers weights."""
        config = self.config
        warm_start_seconds = WARM_START_TIMEOUT_SECONDS if config.trainer.warm_start.demonstrations else 0.0
        update_seconds = config.rollout.episode_timeout_seconds + config.checkpoint_timeout_seconds
        return config.run.startup_timeout_seconds + warm_start_seconds + update_seconds

    async def _receive(self) -> None:
        if self.control.get_json(f"weights/link/{self.link_id}") is False:
            raise WeightUpdateError(f"the trainer left link weights/{self.link_id}")
        if (offer := self._offer()) is None:
            return
        version = offer["version"]
        pause_seconds = await self.engine.update_weights(version, offer["transfer"])
        now = time.monotonic()
        self._timeline.record("pause for weights", now - pause_seconds, now, "engine", version=version)
        self._transfer, self._weights_of = offer["transfer"], self._announced_to
        log.info("version %d in place, engine paused for %.3f s", version, pause_seconds)
        applied = {
            "link_id": self.link_id,
            "version": version,
            "pause_seconds": pause_seconds,
            "parameters": self._parameters,
            **self._features,
        }
        self.control.put_json(f"weights/applied/{self._worker}", applied)

    def _offer(self) -> Any:
        """The offer over the current link that the engine has not received; None: none."""
        offer: Any = self.control.get_json("weights/offer")
        if not offer or offer["links"].get(self._worker) != self.link_id:
            return None
        return None if self._transfer == offer["transfer"] else offer
