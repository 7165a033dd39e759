"""How a worker keeps its engine's weights fresh: announce, join the trainer's link, take what is offered.

    trainer there -> announce engine/<worker> -> wait for weights/link/<link_id> -> join -> receive each offer to this life
        ^                                                                                       |
        +--------------- joining or a transfer failed, or another trainer is there -------------+

An engine whose transfer failed is paused until a whole transfer over another link has come.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import ControlClient, JobFailed
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine, WeightUpdateError
from megatron_webrl.weights.engine_map import EngineSizes

log = logging.getLogger(__name__)


class WeightClient:
    """One engine's side of all weight updates. `step` never blocks for longer than a transfer or the joining."""

    def __init__(self, config: Config, control: ControlClient, engine: VLLMEngine, worker: int, name: str) -> None:
        """`name` is that of this life of the worker: <role>.<number>."""
        self.config, self.control, self.engine = config, control, engine
        self._worker, self._name = worker, name
        self._links = 0
        self._known: object = None  # the trainer that there was at the last look
        self._trainer: object = None  # the trainer that was announced to; None: nobody
        self._linked = False
        self._transfer = 0  # the last one over this link
        self._source: object = None  # the trainer that the engine's weights are of
        self._since = time.monotonic()  # of waiting for the trainer

    @property
    def link_id(self) -> str:
        """Names the link that the engine wants or has."""
        return f"{self._name}.{self._links}"

    def has_offer(self) -> bool:
        """Whether the trainer offers this engine weights that it has not taken."""
        return self._linked and self._offer() is not None

    @property
    def from_old_trainer(self) -> bool:
        """Whether another trainer has come than the one that the engine's weights are of."""
        return self._source is not None and self._known != self._source

    def newest_version(self) -> int:
        """The version that the trainer offered last, to whomever; -1 before the first."""
        offer: Any = self.control.get_json("weights/offer")
        return offer["version"] if offer else -1

    async def poll(self) -> None:
        """Do what is to be done next, if anything. Raises EngineDeadError, JobFailed."""
        self.engine.check_alive()
        trainer = self._known = self.control.get_json("weights/trainer")
        try:
            if trainer != self._trainer:
                self._announce(trainer)
            elif not self._linked:
                await self._join()
            else:
                await self._take()
        except WeightUpdateError as error:
            log.warning("%s; waiting for the weights anew", error)
            self.control.put_json(
                f"weights/failed/rollout-{self._worker}", {"link_id": self.link_id, "reason": str(error)}
            )
            self._trainer = None

    def _announce(self, trainer: object) -> None:
        self._links += 1
        self._trainer, self._linked, self._since = trainer, False, time.monotonic()
        rollout, nodes = self.config.rollout, self.engine.rank_hosts
        sizes = EngineSizes(rollout.tensor_parallel, rollout.pipeline_parallel, rollout.expert_parallel)
        announcement = {"link_id": self.link_id, "instance_id": self._name, "trainer": trainer, "nodes": nodes}
        self.control.put_json(f"engine/rollout-{self._worker}", announcement | {"sizes": asdict(sizes)})

    async def _join(self) -> None:
        if self._trainer is None or self.control.get_json(f"weights/link/{self.link_id}") is None:
            if time.monotonic() - self._since > self._patience:
                raise JobFailed(f"{self._name} waited {self._patience:.0f} s for the trainer to offer its weights")
            return
        description = self.control.get_json("weights/description")
        assert isinstance(description, dict)  # it comes before the first link
        await self.engine.join_weight_link(self.control.host, self.control.port, f"weights/{self.link_id}", description)
        self._linked, self._transfer = True, 0

    @property
    def _patience(self) -> float:
        """The longest time that a trainer in good health may need to come, seconds."""
        warm_start = self.config.trainer.warm_start
        first = warm_start.timeout_seconds if warm_start.demonstrations else 0.0
        return self.config.run.startup_timeout_seconds + first + self.config.trainer.batch_timeout_seconds

    async def _take(self) -> None:
        if self.control.get_json(f"weights/link/{self.link_id}") is False:
            raise WeightUpdateError(f"the trainer left link weights/{self.link_id}")
        if (offer := self._offer()) is None:
            return
        version = offer["version"]
        paused = await self.engine.update_weights(version, offer["transfer"])
        self._transfer, self._source = offer["transfer"], self._trainer
        log.info("version %d in place, engine paused for %.3f s", version, paused)
        taken = {"link_id": self.link_id, "version": version, "pause_seconds": paused}
        self.control.put_json(f"weights/applied/rollout-{self._worker}", taken)

    def _offer(self) -> Any:
        """What is offered to this life of the link and not taken; None: nothing."""
        offer: Any = self.control.get_json("weights/offer")
        if not offer or offer["links"].get(f"rollout-{self._worker}") != self.link_id:
            return None
        return None if self._transfer == offer["transfer"] else offer
