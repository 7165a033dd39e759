"""Tasks of the service desk."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from functools import partial

from megatron_webrl.tasks.sites.app import InitialSiteState, close_overlay, sign_in
from megatron_webrl.tasks.sites.content_generator import draw_initial_state, format_date, sign_in_instruction
from megatron_webrl.tasks.sites.forms import (
    APPLICATIONS_PER_PAGE,
    Application,
    Forms,
    FormsData,
    Service,
    application_path,
    draw_values,
    form_step_path,
    generate_data,
    office_path,
    review_path,
    send_effect,
    service_list_page,
    service_list_path,
)
from megatron_webrl.tasks.sites.goal import Environment, Goal
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, HighLevelAction, PageLinks, SubmitForm, next_link
from megatron_webrl.tasks.sites.markup import build_path


def find_fee(rng: random.Random) -> Goal:
    world = generate_data(rng)
    service = rng.choice(world.services)
    return Goal(
        f'What is the fee of the service "{service.title}"? Answer with the amount.',
        f"/service/{service.slug}",
        partial(Forms, world, InitialSiteState()),
        lambda app, look: GiveAnswer(f"${service.fee}"),
        answer=f"${service.fee}",
    )


def vote(rng: random.Random) -> Goal:
    world = generate_data(rng)
    question, options = world.poll
    option = rng.choice(options)
    return Goal(
        f'Vote for "{option}" in the poll "{question}"',
        "/poll",
        partial(Forms, world, InitialSiteState()),
        lambda app, look: next_link(look, "/poll") or SubmitForm("/vote", {"option": option}),
        effects=(("vote", option),),
    )


def fastest(rng: random.Random) -> Goal:
    world = generate_data(rng)
    office = rng.choice(world.services).office
    services = world.services_of(office)
    best = min(services, key=lambda service: service.days)
    return Goal(
        f"Of the services of the {office}, which one is decided within the fewest days? Answer with its name.",
        "/",
        partial(Forms, world, draw_initial_state(rng)),
        lambda app, look: (
            close_overlay(app)
            or next((
                next_link(look, "/offices", office_path(office), f"/service/{service.slug}")
                for service in services if f"/service/{service.slug}" not in app.visited_paths
            ), None)
            or GiveAnswer(best.title)
        ),
        answer=best.title,
    )  # fmt: skip


def apply(rng: random.Random) -> Goal:
    world = generate_data(rng)
    service = rng.choice(world.services)
    values = draw_values(rng, service)
    listed = "; ".join(f'{entry.label}: "{values[entry.name]}"' for entry in service.fields)
    return Goal(
        f'Apply for the service "{service.title}" with these details and send it: {listed}.',
        "/",
        partial(Forms, world, draw_initial_state(rng)),
        lambda app, look: close_overlay(app) or _apply(app, look, service, values),
        effects=(send_effect(service, values),),
    )


def withdraw(rng: random.Random) -> Goal:
    world = generate_data(rng)
    application = _an_application(rng, world)
    page = application_path(application)
    return Goal(
        f'{sign_in_instruction(world.account)} Withdraw the application for the service "{application.service.title}" of '
        f"{format_date(application.day)}, and no other.",
        "/",
        partial(Forms, world, draw_initial_state(rng, popup=True)),
        lambda app, look: (
            close_overlay(app)
            or sign_in(app, look)
            or next_link(look, *_way(world, application), f"{page}/withdraw")
            or SubmitForm(f"{page}/withdraw")
        ),
        effects=(("withdraw", str(application.id)),),
    )


def renew(rng: random.Random) -> Goal:
    world = generate_data(rng)
    application = _an_application(rng, world)
    service, values = application.service, dict(application.values)
    entry = rng.choice([entry for entry in service.fields if entry.options])
    values[entry.name] = rng.choice([option for option in entry.options if option != values[entry.name]])
    page = application_path(application)
    return Goal(
        f'{sign_in_instruction(world.account)} Apply for the service "{service.title}" again and send it, with the details of '
        f'the application of {format_date(application.day)}, except for {entry.label}: "{values[entry.name]}".',
        "/",
        partial(Forms, world, draw_initial_state(rng, popup=True)),
        lambda app, look: (
            close_overlay(app)
            or sign_in(app, look)
            or (next_link(look, *_way(world, application)) if page not in app.visited_paths else None)
            or _apply(app, look, service, values)
        ),
        effects=(send_effect(service, values),),
    )


def _apply(app: Forms, look: PageLinks, service: Service, values: Mapping[str, str]) -> HighLevelAction:
    """Step by step, then send."""
    draft = app.drafts.get(service.slug, {})
    lists = (service_list_path(number) for number in range(1, service_list_page(app.data, service) + 1))
    for number, step in enumerate(service.form_steps, 1):
        wanted = {entry.name: values[entry.name] for entry in step}
        if wanted.items() - draft.items():
            steps = (form_step_path(service, n) for n in range(1, number + 1))
            way = (*lists, f"/service/{service.slug}", *steps)
            return next_link(look, *way) or SubmitForm(form_step_path(service, number), wanted)
    return next_link(look, review_path(service)) or SubmitForm(f"/service/{service.slug}/send")


def _an_application(rng: random.Random, world: FormsData) -> Application:
    """One that its service and its day tell from all others."""
    counts = Counter((application.service, application.day) for application in world.applications)
    return rng.choice([a for a in world.applications if counts[a.service, a.day] == 1])


def _way(world: FormsData, application: Application) -> tuple[str, ...]:
    page = world.applications.index(application) // APPLICATIONS_PER_PAGE + 1
    lists = (build_path("/applications", page=number) for number in range(1, page + 1))
    return ("/", *lists, application_path(application))


ENVIRONMENTS = {
    "forms-find-fee": Environment(Forms, "easy", find_fee),
    "forms-vote": Environment(Forms, "easy", vote),
    "forms-fastest-service": Environment(Forms, "medium", fastest),
    "forms-apply": Environment(Forms, "medium", apply),
    "forms-withdraw": Environment(Forms, "hard", withdraw),
    "forms-renew": Environment(Forms, "hard", renew),
}
