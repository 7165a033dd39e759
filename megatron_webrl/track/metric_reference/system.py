"""Definitions of the metrics of engines, weight sync, checkpoints and traffic between nodes, and of evaluations."""

from __future__ import annotations

from megatron_webrl.track.metric_reference.definition import section

SECTIONS = (
    section(
        "Engines",
        "trainer/metrics/system_metrics.py",
        "Since the last update, over all workers.",
        ("engine/idle_fraction", "share", "Time in which an engine had no request; see [rollout.md](rollout.md)."),
        ("engine/running_requests", "requests", "Requests in an engine, mean over time."),
        ("engine/running_episodes", "episodes", "Running episodes of a worker, mean over time."),
        (
            "memory/worker_gib",
            "GiB",
            "Private memory of a worker's process and of all that it has started, such as engine and browsers, without "
            "shared memory and files; of the worker that has most, measured every 10 s.",
        ),
        ("memory/worker_peak_gib", "GiB", "The same, most since the worker started."),
    ),
    section(
        "Memory of the trainer",
        "trainer/metrics/system_metrics.py",
        "At the end of the update, of the rank that has most; without its child processes.",
        ("memory/trainer_gib", "GiB", "Private memory of the process, without shared memory and files."),
        (
            "memory/trainer_peak_gib",
            "GiB",
            "Most memory of the process since its start, shared memory and files included.",
        ),
        (
            "memory/trainer_gpu_gib",
            "GiB",
            "Most GPU memory that PyTorch's allocator used in the update; missing without a GPU.",
        ),
    ),
    section(
        "Speed of training",
        "trainer/metrics/system_metrics.py",
        "Over `seconds/train`: packing, all passes and optimiser steps, not the wait for groups. A GPU is a trainer "
        "rank, on the CPU a process. The operations are those of every pass over what is computed, common prefixes and "
        "images once, three times a forward pass where there is a backward pass; recomputed activations are not "
        "counted ([performance.md](performance.md#operations)).",
        ("performance/tokens_per_second_per_gpu", "tokens/s", "Trained tokens, as in `tokens_per_second`, by GPU."),
        ("performance/tflops_per_gpu", "TFLOP/s", "Floating-point operations, by GPU."),
        (
            "performance/mfu",
            "share",
            "The same by the peak of the card in bfloat16; missing on the CPU, in float32 and for cards without an "
            "entry in `placement/performance/cards.py`.",
        ),
    ),
    section(
        "Weight sync",
        "trainer/weight_sync.py",
        "Of the last transfer; [weights.md](weights.md).",
        ("weights/gib", "GiB", "Size of the transfer to all engines."),
        ("weights/gib_per_second", "GiB/s", "Size by the duration of the transfer."),
        ("weights/pause_seconds", "s", "Longest pause of an engine."),
        (
            "weights/in_place_parameters",
            "parameters",
            "Parameters of all engine ranks that are written where they lie.",
        ),
        ("weights/reloaded_parameters", "parameters", "Parameters that the engine's own loader converts."),
        ("weights/engines", "engines", "Engines that were updated."),
        ("weights/engines_with_cuda_graphs", "engines", "Those of them that replay CUDA graphs."),
        (
            "weights/engines_with_async_scheduling",
            "engines",
            "Those of them that schedule a step while the device computes the one before.",
        ),
        ("weights/failed_transfers", "transfers", "Failed transfers since the trainer started."),
    ),
    section(
        "Checkpoints",
        "trainer/checkpoint/checkpointer.py",
        "Of the checkpoint completed since the last update, if any; [checkpoints.md](checkpoints.md).",
        ("checkpoint/blocking_seconds", "s", "Time for which training waited."),
        ("checkpoint/write_seconds", "s", "Time from the start to the end of writing."),
        ("checkpoint/size_mib", "MiB", "Size over all ranks."),
        ("checkpoint/failures", "checkpoints", "Failed checkpoints since the trainer started; missing without one."),
    ),
    section(
        "Nodes",
        "trainer/multi_node/exchange.py",
        "Since the last update, with trainer ranks on several nodes; [packing.md](packing.md#across-nodes).",
        ("nodes/images_mib", "MiB", "Screenshots that the ranks encoded."),
        ("nodes/remote_images_mib", "MiB", "Of these, screenshots from another node."),
        ("nodes/local_fraction", "share", "Share of the screenshots, by size, that were on the node."),
        ("nodes/other_mib", "MiB", "Other traffic of records between nodes."),
    ),
    *(
        section(
            title,
            "track/evaluation/results.py",
            f"{scope} The MLflow step is the evaluated version; [evaluation.md](evaluation.md).",
            (f"{prefix}/success_of_all", "share", "Successes among all requested episodes."),
            (
                f"{prefix}/success_of_reached",
                "share",
                "Successes among the requested episodes that their website did not block.",
            ),
            (f"{prefix}/success_of_judged", "share", "Successes among episodes with a verdict."),
            (f"{prefix}/success_of_judged_low", "share", "Lower end of its 95 % interval."),
            (f"{prefix}/success_of_judged_high", "share", "Upper end of its 95 % interval."),
            (
                f"{prefix}/success_within/<steps>",
                "share",
                "Episodes with a verdict that succeed in at most 5 to 50 steps.",
            ),
            (
                f"{prefix}/success_of_judged/<part>",
                "share",
                "Successes among episodes with a verdict in one environment, or at one difficulty.",
            ),
            (f"{prefix}/pass_at/<k>", "share", "Probability that k samples of a task include a success."),
            (f"{prefix}/episodes", "episodes", "Episodes with a verdict."),
            (f"{prefix}/no_verdict", "episodes", "Episodes without a verdict, such as crashed ones."),
            (f"{prefix}/missing", "episodes", "Episodes without a result."),
            (f"{prefix}/judge_dollars", "US dollars", "Cost of all verdicts, by the configured prices."),
            (f"{prefix}/not_recorded_requests", "requests", "Requests that no recording answered (`browser.replay`)."),
            (f"{prefix}/steps_mean", "steps", "Steps of an episode, mean."),
            (f"{prefix}/response_tokens_mean", "tokens", "Response tokens of a step, mean."),
            (f"{prefix}/seconds_mean", "s", "Wall clock of an episode, mean."),
            (f"{prefix}/wall_seconds", "s", "Wall clock of the evaluation."),
        )
        for prefix, title, scope in (
            ("evaluation", "Evaluation", "Over the tasks of an evaluation before, during or after training."),
            (
                "evaluation/blank_images",
                "Evaluation without images",
                "Over the tasks of the evaluations before and after training with blank images.",
            ),
            (
                "evaluation/greedy",
                "Greedy evaluation",
                "Over the tasks of the greedy evaluations before and after training (`evaluation.greedy`).",
            ),
        )
    ),
)
