"""Tasks of the city service desk."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

from megatron_webrl.tasks.sites.content_generator import format_date
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
from megatron_webrl.tasks.sites.goal import Fact, Goal, make_environments
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, HighLevelAction, PageLinks, SubmitForm, next_link
from megatron_webrl.tasks.sites.markup import build_path


def find_fee(rng: random.Random, data: FormsData) -> Goal:
    service = rng.choice(data.services)
    return Goal(
        f'What is the fee of the service "{service.title}"? Answer with the amount.',
        f"/service/{service.slug}",
        lambda app, view: GiveAnswer(f"${service.fee}"),
        answer=f"${service.fee}",
        facts=(Fact(f'The fee of the service "{service.title}" is ${service.fee}.', (f"/service/{service.slug}",)),),
    )


def vote(rng: random.Random, data: FormsData) -> Goal:
    question, options = data.poll
    option = rng.choice(options)
    return Goal(
        f'Vote for "{option}" in the poll "{question}"',
        "/poll",
        lambda app, view: next_link(view, "/poll") or SubmitForm("/vote", {"option": option}),
        effects=(("vote", option),),
        facts=(Fact(f'The desk confirms a vote for "{option}" in the poll "{question}".'),),
    )


def fastest_service(rng: random.Random, data: FormsData) -> Goal:
    office = rng.choice(data.services).office
    services = data.services_of(office)
    best = min(services, key=lambda service: service.days)
    return Goal(
        f"Of the services of the {office}, which one is decided within the fewest days? Answer with its name.",
        "/",
        lambda app, view: (
            next((
                next_link(view, "/offices", office_path(office), f"/service/{service.slug}")
                for service in services if f"/service/{service.slug}" not in app.visited_paths
            ), None)
            or GiveAnswer(best.title)
        ),
        answer=best.title,
        facts=(
            *(
                Fact(
                    f'The service "{service.title}" of the {office} is decided within {service.days} days.',
                    (f"/service/{service.slug}",),
                )
                for service in services
            ),
            Fact(f'The service decided within the fewest days is "{best.title}".'),
        ),
    )  # fmt: skip


def apply(rng: random.Random, data: FormsData) -> Goal:
    service = rng.choice(data.services)
    values = draw_values(rng, service)
    listed = "; ".join(f'{entry.label}: "{values[entry.name]}"' for entry in service.fields)
    return Goal(
        f'Apply for the service "{service.title}" with these details and send it: {listed}.',
        "/",
        lambda app, view: _apply(app, view, service, values),
        effects=(send_effect(service, values),),
        facts=_application_facts(service, values),
    )


def withdraw(rng: random.Random, data: FormsData) -> Goal:
    application = _an_application(rng, data)
    page = application_path(application)
    return Goal(
        f'Withdraw the application for the service "{application.service.title}" of '
        f"{format_date(application.day)}, and no other.",
        "/",
        lambda app, view: (
            next_link(view, *_path_to(data, application), f"{page}/withdraw") or SubmitForm(f"{page}/withdraw")
        ),
        effects=(("withdraw", str(application.id)),),
        facts=(
            Fact("The desk confirms that an application has been withdrawn."),
            Fact(f'It was for the service "{application.service.title}".'),
            Fact(f"It was sent on {format_date(application.day)}."),
            Fact("No other application has been withdrawn."),
        ),
    )


def renew(rng: random.Random, data: FormsData) -> Goal:
    application = _an_application(rng, data)
    service, values = application.service, dict(application.values)
    entry = rng.choice([entry for entry in service.fields if entry.options])
    values[entry.name] = rng.choice([option for option in entry.options if option != values[entry.name]])
    page = application_path(application)
    return Goal(
        f'Apply for the service "{service.title}" again and send it, with the details of '
        f'the application of {format_date(application.day)}, except for {entry.label}: "{values[entry.name]}".',
        "/",
        lambda app, view: (
            (next_link(view, *_path_to(data, application)) if page not in app.visited_paths else None)
            or _apply(app, view, service, values)
        ),
        effects=(send_effect(service, values),),
        facts=_application_facts(service, values),
    )


def _application_facts(service: Service, values: Mapping[str, str]) -> tuple[Fact, ...]:
    sent = Fact(f'The desk confirms that one application for the service "{service.title}" has been sent.')
    return (sent, *(Fact(f'{entry.label} is "{values[entry.name]}".') for entry in service.fields))


def _apply(app: Forms, view: PageLinks, service: Service, values: Mapping[str, str]) -> HighLevelAction:
    """Fill in the application step by step, then send it."""
    draft = app.drafts.get(service.slug, {})
    lists = (service_list_path(number) for number in range(1, service_list_page(app.data, service) + 1))
    for number, step in enumerate(service.form_steps, 1):
        wanted = {entry.name: values[entry.name] for entry in step}
        if wanted.items() - draft.items():
            steps = (form_step_path(service, n) for n in range(1, number + 1))
            path = (*lists, f"/service/{service.slug}", *steps)
            return next_link(view, *path) or SubmitForm(form_step_path(service, number), wanted)
    return next_link(view, review_path(service)) or SubmitForm(f"/service/{service.slug}/send")


def _an_application(rng: random.Random, data: FormsData) -> Application:
    """An application identified by its service and day."""
    counts = Counter((application.service, application.day) for application in data.applications)
    return rng.choice([a for a in data.applications if counts[a.service, a.day] == 1])


def _path_to(data: FormsData, application: Application) -> tuple[str, ...]:
    page = data.applications.index(application) // APPLICATIONS_PER_PAGE + 1
    lists = (build_path("/applications", page=number) for number in range(1, page + 1))
    return ("/", *lists, application_path(application))


ENVIRONMENTS = make_environments(
    Forms, generate_data, easy=(find_fee, vote), medium=(fastest_service, apply), hard=(withdraw, renew)
)
