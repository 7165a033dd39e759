"""Definitions of the metrics of complete groups, verdicts, the sampler and accounting."""

from __future__ import annotations

from megatron_webrl.track.metric_reference.definition import section

SECTIONS = (
    section(
        "Complete groups",
        "trainer/metrics/group_statistics.py",
        "Over all groups completed since the last update, dropped ones included: an estimate of the policy itself. "
        "Finished episodes are all of these groups' episodes. Trainable ones are those that are not masked, without "
        "those of aborted groups, whose short episodes had finished when the others were cut: with many aborted groups "
        "(`masked_rate/aborted`) the estimate favours tasks with short episodes. Rates of groups leave out groups "
        "without a trainable episode.",
        ("finished_episodes", "episodes", "Finished episodes."),
        ("rollout_episodes", "episodes", "Trainable episodes."),
        ("rollout_success_rate", "share", "Successes among trainable episodes: the metric to watch."),
        ("rollout_success_rate/<environment>", "share", "The same in one environment; with task files, in one domain."),
        (
            "success_within/<steps>",
            "share",
            "Trainable episodes that succeed in at most 5, 8, 10, 15, 20, 30 or 50 steps.",
        ),
        (
            "rollout_pass_at/<k>",
            "share",
            "Probability that k episodes of a group include a success, mean over the groups with at least k trainable "
            "episodes; unbiased; k is the group size, and half of it.",
        ),
        ("group_rate/all_succeeded", "share", "Groups whose trainable episodes all succeed."),
        ("group_rate/all_failed", "share", "Groups whose trainable episodes all fail."),
        ("group_reward_variance", "reward^2", "Population variance of a group's rewards, mean over groups."),
        ("masked_rate", "share", "Masked episodes among finished ones."),
        (
            "masked_rate/<reason>",
            "share",
            "Finished episodes masked for this reason, such as `blocked` (the website refused the agent) and "
            "`judge_error` (no usable verdict), which are there even at 0; `teacher_error`: no scores of the teacher.",
        ),
        ("difficulty/<difficulty>/episodes", "episodes", "Finished episodes of tasks of this difficulty."),
        (
            "difficulty/<difficulty>/crash_rate",
            "share",
            "Finished episodes of this difficulty that a fault of browser or engine masked after all retries.",
        ),
        ("difficulty/<difficulty>/success_rate", "share", "Successes among the trainable episodes of this difficulty."),
        ("filtered_steps", "steps", "Steps of the groups dropped since the last update."),
        ("filtered_steps/<reason>", "steps", "The same by the reason for which the group was dropped."),
    ),
    section(
        "Verdicts",
        "trainer/metrics/group_statistics.py",
        "Over the evaluated episodes of all groups completed since the last update. The judge is the name of the "
        "evaluator and of its protocol. Cost is there if a judge model was asked.",
        ("verdict/<judge>/episodes", "episodes", "Verdicts."),
        ("verdict/<judge>/rate/<outcome>", "share", "Verdicts with this outcome."),
        ("verdict/<judge>/dollars_total", "US dollars", "Cost of all verdicts, by the configured prices."),
        ("verdict/<judge>/calls", "requests", "Requests to judge models for a verdict, failed ones included, mean."),
        ("verdict/<judge>/prompt_tokens", "tokens", "Prompt tokens of a verdict, mean."),
        ("verdict/<judge>/response_tokens", "tokens", "Response tokens of a verdict, mean."),
        ("verdict/<judge>/dollars", "US dollars", "Cost of a verdict, mean."),
        ("verdict/<judge>/seconds", "s", "Wall clock of a verdict, waiting included, mean."),
        ("verdict/<judge>/calls/<outcome>", "requests", "`calls` of the verdicts with this outcome."),
        ("verdict/<judge>/prompt_tokens/<outcome>", "tokens", "`prompt_tokens` of the verdicts with this outcome."),
        ("verdict/<judge>/response_tokens/<outcome>", "tokens", "`response_tokens` of the verdicts with this outcome."),
        ("verdict/<judge>/dollars/<outcome>", "US dollars", "`dollars` of the verdicts with this outcome."),
        ("verdict/<judge>/seconds/<outcome>", "s", "`seconds` of the verdicts with this outcome."),
        ("judge_stage/<stage>/questions", "questions", "Questions of this stage to a judge model."),
        ("judge_stage/<stage>/undecided_rate", "share", "Questions without a usable reply."),
        ("judge_stage/<stage>/error_rate/<error>", "share", "Attempts at a question that failed with this error."),
    ),
    section(
        "Sampler",
        "trainer/data/task_sampler.py",
        "Of samplers that adapt; [tasks.md](tasks.md).",
        ("sampler/probability/<environment>", "share", "Probability with which the next tickets draw it."),
        (
            "sampler/pass_rate/<unit>",
            "share",
            "Estimated pass rate of an environment; of a difficulty with `tasks.sampler.per=difficulty`.",
        ),
        ("sampler/closed_tickets/<environment>", "tickets", "Closed tickets since the start of the run."),
        (
            "sampler/step_limit",
            "steps",
            "Growing step limit of the next tickets, of any sampler, with `tasks.growing_steps.interval`.",
        ),
    ),
    section(
        "Draws of task files",
        "trainer/data/task_sampler.py",
        "Over all closed tickets since the start of the run.",
        ("sampler/tasks_seen", "tasks", "Different tasks drawn."),
        ("sampler/websites_seen", "websites", "Different websites of these tasks."),
        ("sampler/duplicate_tasks", "tickets", "Tickets whose task had been drawn before."),
    ),
    section(
        "Block list",
        "trainer/data/task_sampler.py",
        "Of task files; [tasks.md](tasks.md#block-list).",
        ("blocked_websites", "websites", "Websites of which training draws no task at present."),
        ("block_list/added", "websites", "Websites blocked since the last update."),
    ),
    section(
        "Accounting",
        "trainer/accounting.py",
        "Over all closed episodes since the start of the run.",
        ("wasted_token_fraction", "share", "Response tokens that were not trained, those of replaced tries included."),
        (
            "wasted_token_fraction/<reason>",
            "share",
            "Response tokens that were not trained, by the reason of the drop; `retried`: those of replaced tries.",
        ),
    ),
)
