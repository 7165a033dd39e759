"""Settings of those that act: rollout.* with its contexts, tasks.* with its sampler, browser.*."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_webrl.config_setting import setting


@dataclass
class ContextConfig:
    policy: str = setting(
        "sliding",
        "sliding: each prompt holds the latest rounds. append: each prompt is the one before, its answer and a new "
        "turn, until the window is full.",
        choices=("sliding", "append"),
    )
    rounds: int = setting(
        4, "Rounds that a prompt holds with their screenshots at most; older ones become summary lines.", low=1
    )
    response_format: str = setting(
        "vanilla",
        "Fields before the tool call: none, Thought and Action, or Progress, Intention and Action.",
        choices=("bare", "vanilla", "progress"),
    )
    compact: bool = setting(False, "Short tool schema for models with a small window.")
    scroll_position: bool = setting(False, "Tell with each screenshot which part of the page it shows.")


@dataclass
class RolloutConfig:
    engines: int = setting(
        1, "Rollout workers, each with one vLLM engine; 0: as many as cluster.* has GPUs for.", low=0
    )
    tensor_parallel: int = setting(1, "GPUs (or CPU processes) of one engine that share each layer.", low=1)
    pipeline_parallel: int = setting(1, "Stages of layers of one engine, each on its own GPUs.", low=1)
    expert_parallel: bool = setting(
        False, "Deal whole experts out over an engine's tensor-parallel ranks; otherwise each expert is cut."
    )
    dtype: str = setting(
        "auto", "Type of the engine's weights; auto: model.dtype.", choices=("auto", "float32", "bfloat16")
    )
    group_size: int = setting(8, "Episodes that share a baseline.", low=1)
    groups_in_flight: int = setting(4, "Groups that one worker runs at a time.", low=1)
    mode: str = setting(
        "async",
        "async: rollout, update and refresh overlap; one_step_off: each batch is made with fixed weights while the "
        "one before is trained; sync: collect, update, refresh in turn (docs/rollout.md).",
        choices=("async", "one_step_off", "sync"),
    )
    max_staleness: int = setting(
        2, "Versions that the oldest token of a trained group may lag behind, in mode async.", low=0
    )
    stepping: str = setting(
        "free", "Agents go on as they have answers, or all of a worker in step.", choices=("free", "lockstep")
    )
    retries: int = setting(1, "Times that an episode is tried again after a browser or an engine failed it.", low=0)
    temperature: float = setting(1.0, "Sampling temperature.", above=0)
    max_new_tokens: int = setting(4096, "Response tokens of one step.", low=1)
    max_model_len: int = setting(16384, "Tokens of prompt and response together.", low=16)
    kv_cache_mib: int = setting(0, "Memory of the engine's KV cache; 0 leaves it to vLLM.", low=0)
    gpu_memory_utilization: float = setting(0.9, "Share of a GPU that vLLM may take.", above=0, high=1)
    step_seconds: float = setting(120.0, "Limit of one operation: a generation, a reset, an action.", above=0)
    episode_seconds: float = setting(2700.0, "Limit of one episode.", above=0)
    context: ContextConfig = field(default_factory=ContextConfig)


@dataclass
class LatencyConfig:
    median: float = setting(0.0, "Median time to an answer of the sites, seconds; 0: none.", low=0)
    sigma: float = setting(1.0, "Heaviness of the tail: standard deviation of the logarithm of that time.", low=0)
    limit: float = setting(30.0, "No answer takes longer, seconds.", above=0, high=600)
    medians: dict[str, float] = setting({}, "Medians of single sites that differ, such as {shop: 0.5}.")


@dataclass
class SamplerConfig:
    name: str = setting(
        "uniform",
        "How often each environment is drawn: equally often, by given weights, by how much there is to learn from its "
        "successes and failures, or by how near its pass rate is to a target.",
        choices=("uniform", "ratio", "curriculum", "near_target"),
    )
    weights: dict[str, float] = setting(
        {}, "ratio: how often environments are drawn relative to others, such as {click-test: 2}; those left out: 1."
    )
    difficulty_weights: dict[str, float] = setting(
        {},
        "ratio: tickets of a difficulty relative to others, such as {easy: 2, medium: 5, hard: 3}, shared equally by "
        "its environments; those left out: 1.",
    )
    alpha: float = setting(0.3, "Weight of the latest group in the moving average of a pass rate.", above=0, high=1)
    epsilon: float = setting(0.1, "Share of the tickets that curriculum and near_target draw uniformly.", low=0, high=1)
    target: float = setting(0.45, "Pass rate that near_target looks for.", low=0, high=1)
    candidates: int = setting(4, "near_target takes the nearest of so many environments drawn uniformly.", low=1)


@dataclass
class TasksConfig:
    source: str = setting("miniwob", "Where tasks come from.", choices=("miniwob", "sites"))
    environments: list[str] = setting(["click-test"], "Environments of the source; tasks.sampler draws them.")
    max_steps: int = setting(10, "Steps of one episode.", low=1)
    max_steps_by_difficulty: dict[str, int] = setting(
        {}, "Steps of one episode where they differ, such as {easy: 10, medium: 20, hard: 30}."
    )
    evaluation_max_steps_by_difficulty: dict[str, int] = setting(
        {}, "The same for tasks of evaluation; those left out are as in training."
    )
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)


@dataclass
class BrowserConfig:
    farm: str = setting(
        "",
        "Addresses of a browser farm's routers or nodes, separated by commas; empty: workers start nodes of their own.",
    )
    processes: int = setting(1, "Nodes that each worker starts, processes with a Chromium each.", low=1)
    executable: str = setting("", "Chromium to run; empty: the first one found.")
    width: int = setting(1280, "Viewport width, pixels.", low=32)
    height: int = setting(768, "Viewport height, pixels.", low=32)
    screenshot: str = setting("jpeg", "Encoding of screenshots.", choices=("jpeg", "png", "webp"))
    quality: int = setting(80, "Quality of JPEG and WebP.", low=1, high=100)
    marks: bool = setting(
        False, "Number the elements in view and act by number (web_interaction) instead of coordinates (computer_use)."
    )
    max_marks: int = setting(100, "Elements numbered in one observation.", low=1)
    actions: list[str] = setting(
        [],
        "Further actions: hover, double_click, right_click, drag, key, select_option, switch_tab, new_tab, close_tab.",
    )
    tabs: int = setting(5, "Tabs open at a time; without switch_tab in browser.actions always one.", low=2)
    page_mib: int = setting(2048, "Memory that a page's process may take; one that wants more crashes.", low=512)
    open_web: bool = setting(
        False, "Let pages reach public addresses; otherwise only the origins that the task source declares."
    )
    allow: list[str] = setting(
        [], "Public hosts that pages may reach: example.com, or *.example.com for all below it too; empty: all."
    )
    deny: list[str] = setting([], "Hosts and addresses that pages may not reach, whatever else permits them.")
    ports: list[int] = setting([80, 443], "Ports of public hosts that pages may reach.")
    record: str = setting("", "Folder to which every episode's answers are recorded; empty: none.")
    replay: str = setting("", "Folder of recorded episodes that pages come from instead of the network; empty: none.")
    max_requests: int = setting(5000, "Requests of one episode; a TLS connection counts as one.", low=1)
    max_mib: int = setting(512, "Bytes that one episode may move, both directions together.", low=1)
    request_seconds: float = setting(60.0, "Limit of one plain HTTP request from its head to its last byte.", above=0)
    browsers: int = setting(0, "Chromiums of one worker; 0: one for every 16 sessions.", low=0)
    keep_pages: int = setting(
        0,
        "Pages kept after their episode for a later one of the same source to begin in, where the source permits it "
        "(MiniWoB++ starts its pages anew in place): less work than a fresh context. 0: every episode has its own.",
        low=0,
    )
    recycle_episodes: int = setting(2000, "Another Chromium takes over after so many episodes.", low=1)
    recycle_mib: int = setting(
        6144,
        "Another Chromium takes over when one, its driver included, has grown by more than this since it began, MiB; "
        "open sessions count.",
        low=1,
    )
