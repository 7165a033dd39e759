"""Set up vLLM: environment variables, engine arguments, start."""

from __future__ import annotations

import gc
import math
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron_webrl.config.engine_options import refuse_unknown
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.child_process import collect_garbage
from megatron_webrl.model.vision_language.routing_replay import MODEL_RUNNER, records_experts
from megatron_webrl.util import torchvision_shim

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

CPU_KV_CACHE_MIB = 512  # by default vLLM's CPU build takes nearly all memory of the machine
_SEED_STRIDE = 1_000_003  # a restarted engine samples with another seed
SCHEDULER_MODULE = "megatron_webrl.weights.vllm_scheduler"
NO_WEIGHTS = "webrl"  # load format that weights/vllm_worker.py registers in the workers
WORKER_EXTENSION_CLASS = "megatron_webrl.weights.vllm_worker.WeightReceiver"


@dataclass(frozen=True)
class NodeSpan:
    """One instance of an engine over several nodes, as seen from one of them."""

    node_rank: int  # of this node; 0: the worker's node
    nnodes: int
    master_addr: str  # rendezvous of vLLM's ranks, on the worker's node
    master_port: int
    host_ip: str  # address of this node, for the other nodes


def on_cuda(config: Config) -> bool:
    """Whether the engine runs on a GPU."""
    from megatron_webrl.model.platform import selects_cuda

    return selects_cuda(config.model.platform)


def engine_environment(config: Config, span: NodeSpan | None = None) -> dict[str, str]:
    """Environment variables of this process and its engine (over `span`), to be set before vLLM is imported."""
    path = [str(torchvision_shim.SITECUSTOMIZE_FOLDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.run.startup_timeout_seconds) + 1),
        # A forked child would share this process's locks, ring and browsers, and skip sitecustomize.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Limit for creating the communicator of a weight-transfer link; torch reads it once in a process.
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": os.environ.get(
            "TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(config.weights.timeout_seconds))
        ),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, path))),
        "WEBRL_ENGINE_PARENT": str(os.getpid()),
    }
    if span is not None:
        variables["VLLM_HOST_IP"] = span.host_ip  # vLLM's default is the address of the route to the internet
    if on_cuda(config) and config.engine_dtype == "float32":
        # vLLM's attention in float32 is Triton's, whose products are in TF32 by default: 10 bits of mantissa.
        variables["TRITON_F32_DEFAULT"] = os.environ.get("TRITON_F32_DEFAULT", "ieee")
    if not on_cuda(config):
        # Model runner V2, which vLLM takes on GPUs, needs Triton: on the CPU its interpreter, which is slow.
        variables[MODEL_RUNNER] = os.environ.get(MODEL_RUNNER, "0")
        # Compiling costs more time than it saves; vLLM's own binding would put every engine on the same cores.
        variables |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # The other half of the cores is for browsers and the trainer.
        threads = len(os.sched_getaffinity(0)) // (2 * config.rollout.engines * config.ranks_per_engine)
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, threads)))
    return variables


def engine_arguments(config: Config, worker: int, number: int = 1, span: NodeSpan | None = None) -> AsyncEngineArgs:
    """vLLM's arguments for one engine of instance `number` of a worker, or for its ranks on one node of `span`.

    The variables of `engine_environment` must be set. Raises ConfigError.
    """
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    rollout, cuda, options = config.rollout, on_cuda(config), dict(config.rollout.engine_options)
    refuse_unknown(options, (field.name for field in fields(AsyncEngineArgs)))
    if rollout.expert_parallel and not cuda:
        raise ConfigError("rollout.expert_parallel=true: vLLM's CPU build dies at the first token; set it to false")
    cache = rollout.kv_cache_mib or (0 if cuda else CPU_KV_CACHE_MIB)
    limits: Any = {"image": rollout.context.history_turns, "video": 0}
    vision: Any = "data" if rollout.tensor_parallel > 1 else "weights"  # of one rank both are the whole tower
    extra: dict[str, Any] = {"kv_cache_memory_bytes": cache * 2**20} if cache else {}
    if cuda:
        extra |= {
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            # Computes with the loading form of experts, so that updates write in place. vLLM takes it on Hopper by
            # itself; of its choice on Blackwell every update reloads all experts.
            "moe_backend": options.pop("moe_backend", "triton"),
            # vLLM's choice is FlashInfer's, which a compiler of CUDA builds at its first use.
            "gdn_prefill_backend": options.pop("gdn_prefill_backend", "triton"),
        }
    if span is not None:
        extra |= {name: getattr(span, name) for name in ("nnodes", "node_rank", "master_addr", "master_port")}
    return AsyncEngineArgs(
        model=config.model.path,
        dtype=config.engine_dtype,
        hf_overrides={"head_dtype": config.model.head_dtype},
        # The first update brings all of them.
        load_format=NO_WEIGHTS if not config.evaluation.only else options.pop("load_format", "auto"),
        seed=(config.run.seed + worker + _SEED_STRIDE * (number - 1)) % 2**32,
        tensor_parallel_size=rollout.tensor_parallel,
        pipeline_parallel_size=rollout.pipeline_parallel,
        enable_expert_parallel=rollout.expert_parallel,
        max_model_len=rollout.max_model_len,
        # vLLM warms up its sampler and captures CUDA graphs for this many requests; by default 1024 on large cards.
        max_num_seqs=config.requests_per_engine,
        limit_mm_per_prompt=limits,
        mm_encoder_tp_mode=vision,
        enforce_eager=options.pop("enforce_eager", not cuda),
        enable_prefix_caching=options.pop("enable_prefix_caching", True),
        # Log-probabilities of the sampled distribution: after temperature, as the trainer computes them.
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend="webrl"),
        enable_return_routed_experts=records_experts(config),
        worker_extension_cls=WORKER_EXTENSION_CLASS,
        disable_log_stats=True,
        enable_log_requests=False,
        **extra,
        **options,
    )


def engine_config(config: Config, worker: int, number: int = 1, span: NodeSpan | None = None) -> VllmConfig:
    """vLLM's configuration from `engine_arguments`; the tokens of a batch are those that vLLM gives a server by card.

    Raises ConfigError for a vLLM of another platform, and for rollout.engine_options that vLLM refuses.
    """
    from vllm.usage.usage_lib import UsageContext

    check_platform(config)
    headless = span is not None and span.node_rank > 0
    try:
        arguments = engine_arguments(config, worker, number, span)
        return arguments.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=headless)
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError) or not config.rollout.engine_options:
            raise
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise ConfigError(
            f"vLLM refuses an engine with rollout.engine_options={config.rollout.engine_options}: {reason}"
        ) from error


def check_platform(config: Config) -> None:
    """Raise ConfigError unless vLLM, which chooses the device by its build, takes the one of model.platform."""
    from vllm.platforms import current_platform

    cuda, found = on_cuda(config), current_platform.device_type or "no device of this machine"
    if not (current_platform.is_cuda() if cuda else current_platform.is_cpu()):
        wanted = "cuda" if cuda else "cpu"
        auto = ", which takes cpu without a GPU and cuda with one" if config.model.platform == "auto" else ""
        raise ConfigError(
            f"model.platform={config.model.platform}{auto}, but the vLLM installed here computes on {found}; install "
            f"vLLM's build for {wanted}, or change model.platform"
        )


def start_engine(config: Config, worker: int, number: int = 1, span: NodeSpan | None = None) -> AsyncLLM:
    """Start vLLM; blocks until it can serve, which over several nodes requires `run_follower` on the others.

    The calling thread must outlive the engine, whose processes request to die with the thread that started them.
    """
    torchvision_shim.install()
    os.environ.update(engine_environment(config, span))
    gc.disable()  # collections of what imports keep are a fifth of their time
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    collect_garbage()

    class Client(AsyncLLM):
        def __del__(self) -> None:
            """No effect: VLLMEngine.close ends the engine; vLLM's destructor fails during interpreter shutdown."""

    vllm_config = engine_config(config, worker, number, span)
    scheduling = "Async" if vllm_config.scheduler_config.async_scheduling else ""
    vllm_config.scheduler_config.scheduler_cls = f"{SCHEDULER_MODULE}.Recomputing{scheduling}Scheduler"
    executor: type[Executor] = Executor.get_class(vllm_config)
    if vllm_config.parallel_config.world_size == 1:
        # vLLM's CPU platform runs even a single rank in a separate process to bind its threads, which is disabled
        # above. Without that process an engine starts in two thirds of the time.
        vllm_config.parallel_config.distributed_executor_backend = "uni"
        executor = UniProcExecutor
    return Client(vllm_config, executor_class=executor, log_stats=False, log_requests=False)


async def prepare_ranks(config: Config, llm: AsyncLLM) -> None:
    """Warm up the ranks of a started engine."""
    if config.rollout.pipeline_parallel > 1 and not on_cuda(config):
        # A dummy batch: without it vLLM's CPU pipeline has no receive buffers and dies at the first request.
        await llm.collective_rpc("execute_dummy_batch")


def run_follower(config: Config, worker: int, number: int, span: NodeSpan) -> None:
    """Run vLLM's ranks of a follower's node, as `vllm serve --headless`, until one ends or the parent kills it."""
    torchvision_shim.install()
    os.environ.update(engine_environment(config, span))
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor(engine_config(config, worker, number, span), monitor_workers=False)
    executor.start_worker_monitor(inline=True)
