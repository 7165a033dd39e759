"""Settings of verdicts: evaluators, and the models of the judge."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from megatron_webrl.config.setting import ConfigError, check_sections, own_options, setting

TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
"""Arguments of chat.completions that limit a reply; endpoints know one of them or both."""
_OWN_ARGUMENTS = ("model", "messages", "response_format", "n", "stream", "stop")  # on which reading replies relies


def _check_options(options: dict[str, Any]) -> str:
    if own := [name for name in _OWN_ARGUMENTS if name in options]:
        return f".{own[0]} is an argument that the judge itself sets or relies on; leave it out"
    try:
        text = json.dumps(options, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f" cannot be sent as JSON: {error}"
    if secret := re.search(r'"([^"]*(?:api[-_]?key|authorization|password|secret)[^"]*)":', text, re.IGNORECASE):
        return f" hold {secret[1]}, and are stored and logged; put a key into the variable that key_variable names"
    limits = {name: limit for name in TOKEN_LIMITS if (limit := {TOKEN_LIMITS[0]: 1, **options}.get(name)) is not None}
    if len(limits) != 1 or any(type(limit) is not int or limit < 1 for limit in limits.values()):
        return (
            f" leaves the limits of a reply {limits}; one of {' and '.join(TOKEN_LIMITS)} must be a number of at least "
            "1, and the other null"
        )
    return ""


def check_url(url: str) -> str:
    """Addresses are logged and saved with the configuration: one with a secret is refused, and not repeated."""
    if "@" in url or "?" in url or "#" in url:
        return (
            " must hold no user, password, query or fragment, since it is logged; expected an address such as "
            "http://host:8000/v1, and the key in the variable that key_variable names"
        )
    if url and not re.match(r"https?://[^/\s]", url):
        return f"={url} is not an endpoint; expected an address such as http://host:8000/v1"
    return ""


def check_key_variable(name: str) -> str:
    """The value is not repeated: it may be the key itself."""
    if name and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        return (
            " is not the name of an environment variable (letters, digits, underscores); put the key into a variable, "
            "and its name here"
        )
    return ""


@dataclass
class JudgeModelConfig:
    name: str = setting("", "Model name at the endpoint; empty: that of judge.verdict.")
    url: str = setting(
        "", "OpenAI-compatible endpoint, such as http://node7:8000/v1; empty: that of judge.verdict.", check=check_url
    )
    key_variable: str = setting(
        "",
        "Environment variable with the key of the endpoint; empty: that of judge.verdict if url is empty, too.",
        check=check_key_variable,
    )
    input_price: float = setting(
        0.0, "US dollars for a million prompt tokens; without a name of its own, the prices of judge.verdict.", low=0
    )
    output_price: float = setting(0.0, "US dollars for a million response tokens.", low=0)
    options: dict[str, Any] = setting(
        {},
        "Arguments of each request to this model that replace max_tokens, temperature and top_p or are sent, too, such "
        "as {reasoning_effort: none}; null leaves one out. Without a name of its own, those of judge.verdict.",
        check=_check_options,
    )


@dataclass
class BudgetConfig:
    calls_per_hour: int = setting(0, "Requests to judge models of the whole job in one hour; 0: no limit.", low=0)
    tokens_per_hour: int = setting(0, "Prompt and response tokens of the whole job in one hour; 0: no limit.", low=0)
    dollars_per_hour: float = setting(0.0, "Cost of the whole job in one hour, by the prices; 0: no limit.", low=0)


@dataclass
class JudgeConfig:
    """Settings of every protocol, and all of agenttrek; the classes below add those of one protocol."""

    evaluators: list[str] = setting(
        ["page"],
        "What decides the outcome of an episode: page (the page's reward, else the task's answer), exact_answer, "
        "normalized_answer, judge (a judge model), or the import path of a function, such as my_package.my_module:f.",
        own=True,
    )
    reward_threshold: float = setting(
        0.0, "Least reward of a page that is a success for the evaluator page; 0: any reward above 0.", low=0
    )
    combine: str = setting(
        "first",
        "How several evaluators make one verdict: the first that decides, success by all of them, or by any.",
        choices=("first", "all", "any"),
    )
    protocol: str = setting(
        "rubric",
        "Protocol of the judge; every result names it. webgym and async_webrl are rubric by the rules of the released "
        "codes (docs/judge.md). Or the import path of a protocol (docs/extending.md).",
        choices=("rubric", "webgym", "async_webrl", "webjudge", "webvoyager", "agenttrek"),
        own=True,
    )
    graded: bool = setting(
        False,
        "The reward of a failure is the share of the rubric's requirements (facts, reference answer) that it fulfils, "
        "if its answer is supported; all requirements are asked for then. Success stays all or nothing.",
        only_with=("protocol", "rubric"),
    )
    prompts: str = setting("configs/judge", "Folder with the prompt files of the protocols.")
    verdict: JudgeModelConfig = field(default_factory=JudgeModelConfig)
    voters: list[JudgeModelConfig] = setting(
        [], "Further models that judge each episode, too, such as [{name: o4-mini}]; the keys are those of verdict."
    )
    votes: int = setting(
        1,
        "Verdicts of judge.verdict and of each of judge.voters on an episode. Its outcome is that of more than half of "
        "all of them; without one the episode is masked as judge_error.",
        low=1,
    )
    structured: str = setting(
        "schema",
        "How replies are constrained: a JSON schema, or an exact final line, for endpoints that refuse or ignore "
        "response_format.",
        choices=("schema", "line"),
    )
    concurrency: int = setting(64, "Requests that one worker has in flight.", low=1)
    attempts: int = setting(3, "Replies to one question until one is usable; then the episode is masked.", low=1)
    unusable_replies: str = setting(
        "mask",
        "What a question without a usable reply does: it masks the episode (of rubric's relevance stage: it keeps the "
        "screenshot), or it is decided as in the released codes of WebGym and AsyncWebRL, where a text without a "
        "negative verdict is a success. The latter is for comparisons with their figures only.",
        choices=("mask", "as_released"),
        only_with=("protocol", "webgym", "async_webrl"),
    )
    timeout_seconds: float = setting(120.0, "Limit of one request.", above=0)
    deadline_seconds: float = setting(
        900.0,
        "Limit of one verdict of a judge model, retries included, or of a function; then the episode is masked.",
        above=0,
    )
    budget: BudgetConfig = field(default_factory=BudgetConfig)

    def check(self) -> None:
        for number, voter in enumerate(self.voters):
            check_sections(voter, f"judge.voters[{number}].")
            if not voter.name:
                raise ConfigError(f"judge.voters[{number}].name is empty; more votes of judge.verdict: judge.votes")
        for model in (self.verdict, *self.voters):
            if self.votes > 1 and model.options.get("temperature") == 0:
                raise ConfigError(
                    f"judge.votes={self.votes} repeats the verdicts of {model.name} at temperature 0; raise the "
                    "temperature (judge.verdict.options), or name other models (judge.voters)"
                )

    @property
    def uses_models(self) -> bool:
        """Whether a judge model is among the evaluators."""
        return "judge" in self.evaluators


@dataclass
class WebVoyagerConfig(JudgeConfig):
    max_screenshots: int = setting(48, "Latest relevant screenshots shown to the verdict stages.", low=1)


@dataclass
class WebJudgeConfig(WebVoyagerConfig):
    """rubric and its variants, whose blocked stage asks this model as well, and webjudge."""

    relevance: JudgeModelConfig = field(default_factory=JudgeModelConfig)


@dataclass
class OwnProtocolConfig(WebJudgeConfig):
    """A protocol of the user's own."""

    options: dict[str, Any] = own_options()


PROTOCOLS: dict[str, type[JudgeConfig]] = {
    "rubric": WebJudgeConfig,
    "webgym": WebJudgeConfig,
    "async_webrl": WebJudgeConfig,
    "webjudge": WebJudgeConfig,
    "webvoyager": WebVoyagerConfig,
    "agenttrek": JudgeConfig,
}
"""Settings of each protocol, by judge.protocol."""


def judge_config(protocol: str = "rubric", **settings: Any) -> Any:
    """Settings of one protocol; those that are left out have their defaults."""
    return PROTOCOLS.get(protocol, OwnProtocolConfig)(protocol=protocol, **settings)
