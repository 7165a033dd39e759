"""The offline website forms and its tasks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta

from megatron_webrl.tasks.server import PageRequest, PageResponse
from megatron_webrl.tasks.sites.app import (
    Account,
    App,
    InitialSiteState,
    build_path,
    form_text,
    format_date,
    matches_query,
    paginate,
    route,
)
from megatron_webrl.tasks.sites.content_generator import (
    FIRST_NAMES,
    LAST_NAMES,
    draw_account,
    draw_weekday,
)
from megatron_webrl.tasks.sites.goal import Fact, Goal, make_environments
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, HighLevelAction, PageLinks, SubmitForm, next_link

SERVICES_PER_PAGE, APPLICATIONS_PER_PAGE = 7, 5

_SERVICES = (
    "Resident parking permit", "Library card", "Street party permit", "Dog registration", "Allotment lease",
    "Market stall licence", "Bulky waste collection", "Tree felling permit", "Skip permit", "Busking licence",
    "Sports hall booking", "School meal pass", "Heritage plaque", "Night work permit", "Boat mooring", "Kiosk lease",
)  # fmt: skip
_OFFICES = ("Civic Office North", "Harbour Office", "Parks Office", "Town Hall")
_CHOICES = {
    "Duration": ("1 month", "6 months", "1 year"),
    "Collect at": ("Counter", "Post", "Locker"),
    "Applying as": ("Private person", "Business", "Association"),
    "Contact by": ("E-mail", "Letter", "Telephone"),
}
_TEXTS = ("Full name", "Street and number", "Reference", "Telephone", "Postcode")
_STREETS = ("Mill Lane", "Harbour Road", "Chapel Street", "Orchard Way", "Station Road", "Quay Street")
_STATES = ("in progress", "waiting for papers", "ready for collection")
_POLLS = (
    ("Where should the new playground be?", ("Mill Park", "Old Harbour", "Station Square", "Castle Hill")),
    ("When should the market open?", ("At 6:00", "At 7:00", "At 8:00", "At 9:00")),
    ("Which bus line needs more buses?", ("Line 2", "Line 5", "Line 7", "Line 11")),
    ("What should the fountain show?", ("A heron", "A ship", "A baker", "Nothing")),
)


@dataclass(frozen=True)
class FormField:
    """A field of an application: a choice of options, or text if there are none."""

    label: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the HTML field."""
        return self.label.lower().replace(" ", "-")


@dataclass(frozen=True)
class Service:
    title: str
    office: str
    fee: int  # whole dollars
    days: int  # until it is decided
    form_steps: tuple[tuple[FormField, ...], ...]

    @property
    def slug(self) -> str:
        """Name of the service in paths."""
        return self.title.lower().replace(" ", "-")

    @property
    def fields(self) -> tuple[FormField, ...]:
        return tuple(entry for step in self.form_steps for entry in step)


@dataclass(frozen=True)
class Application:
    id: int
    service: Service
    day: date
    state: str
    values: Mapping[str, str]  # by field


@dataclass(frozen=True)
class FormsData:
    account: Account
    services: tuple[Service, ...]
    applications: tuple[Application, ...]  # newest first
    poll: tuple[str, tuple[str, ...]]

    def services_of(self, office: str) -> list[Service]:
        return [service for service in self.services if service.office == office]


def generate_data(rng: random.Random) -> FormsData:
    """Draw 16 services of four offices, and 9 to 13 past applications."""
    titles, days = rng.sample(_SERVICES, len(_SERVICES)), rng.sample(range(2, 90), len(_SERVICES))
    services = tuple(
        Service(title, _OFFICES[index % len(_OFFICES)], rng.randint(4, 190), days[index], _steps(rng))
        for index, title in enumerate(titles)
    )
    day, applications = draw_weekday(rng), []
    familiar = rng.sample(services, 5)
    for id in rng.sample(range(20_000, 99_999), rng.randint(9, 13)):
        day -= timedelta(days=rng.randint(3, 40))
        service = rng.choice(familiar)
        applications.append(Application(id, service, day, rng.choice(_STATES), draw_values(rng, service)))
    return FormsData(draw_account(rng), services, tuple(applications), rng.choice(_POLLS))


def _steps(rng: random.Random) -> tuple[tuple[FormField, ...], ...]:
    picks = [FormField(label, _CHOICES[label]) for label in rng.sample(sorted(_CHOICES), 3)]
    lines = [FormField(label) for label in rng.sample(_TEXTS, 3)]
    return (picks[0], lines[0]), (picks[1], picks[2], lines[1], lines[2])


def draw_values(rng: random.Random, service: Service) -> dict[str, str]:
    """Draw a value for every field of a service."""
    lines = {
        "Full name": f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
        "Street and number": f"{rng.choice(_STREETS)} {rng.randint(1, 180)}",
        "Reference": f"{rng.choice('ABCDEFGH')}{rng.randint(1000, 9999)}",
        "Telephone": f"0{rng.randint(100, 999)} {rng.randint(10000, 99999)}",
        "Postcode": str(rng.randint(10000, 99999)),
    }
    return {entry.name: rng.choice(entry.options) if entry.options else lines[entry.label] for entry in service.fields}


def office_path(office: str) -> str:
    return f"/office/{office.lower().replace(' ', '-')}"


def form_step_path(service: Service, number: int) -> str:
    """Path of a step of an application, from 1."""
    return f"/service/{service.slug}/step/{number}"


def application_path(application: Application) -> str:
    return f"/application/{application.id}"


class Forms(App):
    """A citizen's service desk. Effects: ("send", slug, "field=value", ...), ("withdraw", id) and ("vote", option)."""

    name, title, search_hint = "forms", "City Service Desk", "Search services"
    accent, ground = "#8a1f3d", "#faf5f6"
    template_functions = (office_path, form_step_path, application_path)
    popup = ("Tell us what you think", "Five minutes of your time make our desk better. Would you like to take part?")

    data: FormsData

    def __init__(self, data: FormsData, start: InitialSiteState) -> None:
        super().__init__(data, start)
        self.drafts: dict[str, dict[str, str]] = {}  # values by service
        self.applications = {application.id: application for application in data.applications}
        self._services = {service.slug: service for service in data.services}

    def navigation_links(self) -> tuple[tuple[str, str], ...]:
        return ("/offices", "Offices"), ("/poll", "Poll"), ("/applications", "My applications")

    @route("GET", "/")
    def home(self, request: PageRequest) -> PageResponse:
        shown, links = paginate(request, self.data.services, SERVICES_PER_PAGE, "/")
        return self.render_page("All services", "services", services=shown, pages=links)

    @route("GET", "/offices")
    def offices(self, request: PageRequest) -> PageResponse:
        counts = [(name, len(self.data.services_of(name))) for name in _OFFICES]
        return self.render_page("Offices", "offices", counts=counts)

    @route("GET", r"/office/([a-z-]+)")
    def office(self, request: PageRequest, slug: str) -> PageResponse:
        name = next((name for name in _OFFICES if office_path(name) == f"/office/{slug}"), None)
        if name is None:
            return self.not_found()
        return self.render_page(name, "services", services=self.data.services_of(name))

    @route("GET", "/search")
    def search(self, request: PageRequest) -> PageResponse:
        found = [service for service in self.data.services if matches_query(request, service.title)]
        return self.render_page(f"{len(found)} services found", "services", services=found)

    @route("GET", r"/service/([a-z-]+)")
    def service(self, request: PageRequest, slug: str) -> PageResponse:
        service = self.find(self._services, slug)
        return self.render_page(service.title, "service", service=service)

    @route("GET", r"/service/([a-z-]+)/step/(\d)")
    def step(self, request: PageRequest, slug: str, number: str) -> PageResponse:
        service = self.find(self._services, slug)
        return self.render_page(
            f"{service.title}: step {number} of {len(service.form_steps)}", "step",
            crumbs=[(f"/service/{slug}", service.title)], action=form_step_path(service, int(number)),
            fields=self.find(dict(enumerate(service.form_steps, 1)), int(number)), draft=self.drafts.get(slug, {}),
        )  # fmt: skip

    @route("POST", r"/service/([a-z-]+)/step/(\d)")
    def enter(self, request: PageRequest, slug: str, number: str) -> PageResponse:
        service = self.find(self._services, slug)
        step = self.find(dict(enumerate(service.form_steps, 1)), int(number))
        for entry in step:
            value = form_text(request, entry.name)
            if not value or (entry.options and value not in entry.options):
                return self.redirect(form_step_path(service, int(number)), f"Please fill in {entry.label}.")
            self.drafts.setdefault(slug, {})[entry.name] = value
        last = int(number) == len(service.form_steps)
        return self.redirect(f"/service/{service.slug}/review" if last else form_step_path(service, int(number) + 1))

    @route("GET", r"/service/([a-z-]+)/review")
    def review(self, request: PageRequest, slug: str) -> PageResponse:
        service = self.find(self._services, slug)
        if missing := self._unfinished(service):
            return self.redirect(form_step_path(service, missing), "Please fill in this step first.")
        rows = [(entry.label, self.drafts[slug][entry.name]) for entry in service.fields]
        return self.render_page(f"{service.title}: is this right?", "review", service=service, rows=rows)

    @route("POST", r"/service/([a-z-]+)/send")
    def send(self, request: PageRequest, slug: str) -> PageResponse:
        service = self.find(self._services, slug)
        if missing := self._unfinished(service):
            return self.redirect(form_step_path(service, missing), "Please fill in this step first.")
        return self.complete(
            send_effect(service, self.drafts.pop(slug)), f"/service/{slug}", "Your application has been sent."
        )

    @route("GET", "/applications")
    def list_applications(self, request: PageRequest) -> PageResponse:
        self.require_login()
        applications = list(self.applications.values())
        shown, links = paginate(request, applications, APPLICATIONS_PER_PAGE, "/applications")
        return self.render_page("Your applications", "applications", applications=shown, pages=links)

    @route("GET", r"/application/(\d{1,6})")
    def application(self, request: PageRequest, id: str) -> PageResponse:
        return self._application(int(id))

    @route("GET", r"/application/(\d{1,6})/withdraw")
    def ask(self, request: PageRequest, id: str) -> PageResponse:
        return self._application(int(id), asking=True)

    @route("POST", r"/application/(\d{1,6})/withdraw")
    def withdraw(self, request: PageRequest, id: str) -> PageResponse:
        self.require_login()
        del self.applications[self.find(self.applications, int(id)).id]
        return self.complete(("withdraw", id), "/applications", f"Application {id} has been withdrawn.")

    @route("GET", "/poll")
    def poll(self, request: PageRequest) -> PageResponse:
        question, options = self.data.poll
        return self.render_page(question, "poll", options=options)

    @route("POST", "/vote")
    def vote(self, request: PageRequest) -> PageResponse:
        option = form_text(request, "option")
        if option not in self.data.poll[1]:
            return self.redirect("/poll", "Please choose one of the options.")
        return self.complete(("vote", option), "/poll", "Thank you for your vote.")

    def _unfinished(self, service: Service) -> int:
        """Number of the first incomplete step; 0 if all are complete."""
        draft = self.drafts.get(service.slug, {})
        missing = (n for n, step in enumerate(service.form_steps, 1) if any(entry.name not in draft for entry in step))
        return next(missing, 0)

    def _application(self, id: int, asking: bool = False) -> PageResponse:
        self.require_login()
        found = self.find(self.applications, id)
        rows = [("Service", found.service.title), ("Sent on", format_date(found.day)), ("State", found.state)]
        rows += [(entry.label, found.values[entry.name]) for entry in found.service.fields]
        crumbs = [("/applications", "My applications")]
        return self.render_page(
            f"Application No. {id}", "application", crumbs, application=found, rows=rows, asking=asking
        )


def send_effect(service: Service, values: Mapping[str, str]) -> tuple[str, ...]:
    return ("send", service.slug, *(f"{name}={value}" for name, value in sorted(values.items())))


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
    page = app.data.services.index(service) // SERVICES_PER_PAGE + 1
    lists = (build_path("/", page=number) for number in range(1, page + 1))
    for number, step in enumerate(service.form_steps, 1):
        wanted = {entry.name: values[entry.name] for entry in step}
        if wanted.items() - draft.items():
            steps = (form_step_path(service, n) for n in range(1, number + 1))
            path = (*lists, f"/service/{service.slug}", *steps)
            return next_link(view, *path) or SubmitForm(form_step_path(service, number), wanted)
    return next_link(view, f"/service/{service.slug}/review") or SubmitForm(f"/service/{service.slug}/send")


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
