"""The offline website calendar and its tasks."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta

from megatron_webrl.tasks.server import PageRequest, PageResponse
from megatron_webrl.tasks.sites.app import (
    Account,
    App,
    InitialSiteState,
    form_text,
    matches_query,
    query_text,
    route,
    search_paths,
)
from megatron_webrl.tasks.sites.content_generator import draw_account, draw_names, draw_pairs, draw_weekday
from megatron_webrl.tasks.sites.goal import Fact, Goal, make_environments
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, SubmitForm, next_link, next_unvisited

OPENING_HOUR, CLOSING_HOUR = 8, 18  # of the working day
DURATIONS = (("30", "30 minutes"), ("60", "60 minutes"))

_KINDS = ("Budget", "Design", "Hiring", "Launch", "Safety", "Supplier", "Travel", "Training", "Contract", "Garden")
_FORMS = ("review", "workshop", "call", "interview", "lunch", "planning", "briefing", "inspection")
_ROOMS = ("Oak room", "River room", "Annex 2", "Library", "Video call")


@dataclass(frozen=True)
class Appointment:
    id: int
    title: str
    person: str
    room: str
    start: datetime
    minutes: int

    @property
    def end(self) -> datetime:
        return self.start + timedelta(minutes=self.minutes)

    @property
    def hours(self) -> str:
        return f"{self.start:%H:%M} to {self.end:%H:%M}"

    @property
    def when(self) -> str:
        """Day and hours."""
        return f"{self.start:%a} {self.start.date().isoformat()}, {self.hours}"

    def overlaps(self, other: Appointment) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class CalendarData:
    account: Account
    today: date
    people: tuple[str, ...]
    appointments: tuple[Appointment, ...]

    def appointments_on(self, day: date) -> list[Appointment]:
        return sorted((e for e in self.appointments if e.start.date() == day), key=lambda e: e.start)


def generate_data(rng: random.Random) -> CalendarData:
    """Draw a calendar of five weeks, from the week before today's."""
    today, people = draw_weekday(rng), tuple(draw_names(rng, 6))
    titles, ids = iter(draw_pairs(rng, _KINDS, _FORMS, 80)), iter(rng.sample(range(1000, 9999), 80))
    events = []
    for week in range(-1, 4):
        for weekday in range(5):
            day = week_start(today) + timedelta(days=7 * week + weekday)
            for hour in sorted(rng.sample(range(OPENING_HOUR, CLOSING_HOUR), rng.randint(1, 3))):
                start = datetime.combine(day, time(hour))
                event = Appointment(
                    next(ids), next(titles), rng.choice(people), rng.choice(_ROOMS), start, rng.choice((30, 60))
                )
                events.append(event)
    return CalendarData(draw_account(rng), today, people, tuple(events))


class Calendar(App):
    """A calendar. Effects: ("create", title, date, time, minutes), ("move", id, date, time) and ("cancel", id)."""

    name, title, search_hint = "calendar", "Daybook", "Search appointments"
    accent, ground = "#0b5394", "#f3f7fb"
    popup = ("Daybook on your phone", "Take your appointments with you: our app is free for the first month.")
    login_required = True

    data: CalendarData

    def __init__(self, data: CalendarData, start: InitialSiteState) -> None:
        super().__init__(data, start)
        self.appointments = {event.id: event for event in data.appointments}

    def navigation_links(self) -> tuple[tuple[str, str], ...]:
        return ("/", "This week"), ("/new", "New appointment")

    @route("GET", "/")
    def home(self, request: PageRequest) -> PageResponse:
        return self._week(week_start(self.data.today))

    @route("GET", r"/week/(\d{4}-\d\d-\d\d)")
    def week(self, request: PageRequest, start: str) -> PageResponse:
        day = parse_date(start)
        return self._week(week_start(day)) if day else self.not_found()

    @route("GET", r"/event/(\d{1,6})")
    def event(self, request: PageRequest, id: str) -> PageResponse:
        return self._event_page(self.find(self.appointments, int(id)))

    @route("GET", r"/event/(\d{1,6})/cancel")
    def ask(self, request: PageRequest, id: str) -> PageResponse:
        return self._event_page(self.find(self.appointments, int(id)), asking=True)

    @route("POST", r"/event/(\d{1,6})/cancel")
    def cancel(self, request: PageRequest, id: str) -> PageResponse:
        event = self.find(self.appointments, int(id))
        del self.appointments[event.id]
        return self.complete(("cancel", id), week_path(event.start.date()), f"{event.title} has been cancelled.")

    @route("GET", r"/event/(\d{1,6})/move")
    def move_page(self, request: PageRequest, id: str) -> PageResponse:
        event = self.find(self.appointments, int(id))
        return self.render_page(f"Move {event.title}", "move", crumbs=[(f"/event/{id}", event.title)], event=event)

    @route("POST", r"/event/(\d{1,6})/move")
    def move(self, request: PageRequest, id: str) -> PageResponse:
        event = self.find(self.appointments, int(id))
        start = parse_start(form_text(request, "day"), form_text(request, "time"))
        if start is None:
            return self.redirect(f"/event/{id}/move", "Please give the date as 2026-03-05 and the time as 14:00.")
        moved = replace(event, start=start)
        if refusal := self._refusal(moved):
            return self.redirect(f"/event/{id}/move", refusal)
        self.appointments[event.id] = moved
        return self.complete(
            ("move", id, start.date().isoformat(), f"{start:%H:%M}"), f"/event/{id}", f"Moved to {moved.when}."
        )

    @route("GET", "/new")
    def new_page(self, request: PageRequest) -> PageResponse:
        return self.render_page("New appointment", "new", durations=DURATIONS)

    @route("POST", "/new")
    def new(self, request: PageRequest) -> PageResponse:
        title, minutes = form_text(request, "title"), form_text(request, "minutes")
        when = parse_start(form_text(request, "day"), form_text(request, "time"))
        if not title or minutes not in dict(DURATIONS) or when is None:
            return self.redirect("/new", "Please give a title, the date as 2026-03-05 and the time as 14:00.")
        new = Appointment(max(self.appointments, default=1000) + 1, title, "nobody else", "No room", when, int(minutes))
        if refusal := self._refusal(new):
            return self.redirect("/new", refusal)
        self.appointments[new.id] = new
        return self.complete(
            ("create", title, when.date().isoformat(), f"{when:%H:%M}", minutes),
            f"/event/{new.id}",
            "The appointment has been saved.",
        )

    @route("GET", "/search")
    def search(self, request: PageRequest) -> PageResponse:
        found = [
            event
            for event in sorted(self.appointments.values(), key=lambda event: event.start)
            if matches_query(request, f"{event.title} {event.person}")
        ][:20]
        return self.render_page(f'{len(found)} appointments match "{query_text(request)}"', "found", events=found)

    def _week(self, start: date) -> PageResponse:
        days = [start + timedelta(days=number) for number in range(5)]
        events = sorted(self.appointments.values(), key=lambda event: event.start)
        return self.render_page(
            f"{days[0].day} {days[0]:%B} to {days[4].day} {days[4]:%B %Y}", "week", today=self.data.today,
            before=week_path(start - timedelta(days=7)), after=week_path(start + timedelta(days=7)),
            days=[(day, [event for event in events if event.start.date() == day]) for day in days],
        )  # fmt: skip

    def _event_page(self, event: Appointment, asking: bool = False) -> PageResponse:
        crumbs = [(week_path(event.start.date()), "Week")]
        return self.render_page(event.title, "event", crumbs, event=event, asking=asking)

    def _refusal(self, event: Appointment) -> str:
        """Why an appointment cannot take place; empty if it can."""
        day = event.start.date()
        opens, closes = datetime.combine(day, time(OPENING_HOUR)), datetime.combine(day, time(CLOSING_HOUR))
        if day.weekday() > 4 or event.start < opens or event.end > closes:
            return f"Appointments are from Monday to Friday, {OPENING_HOUR:02d}:00 to {CLOSING_HOUR}:00."
        for other in self.appointments.values():
            if other.id != event.id and event.overlaps(other):
                return f"That time is taken by {other.title}."
        return ""


def week_start(day: date) -> date:
    """The Monday of a day's week."""
    return day - timedelta(days=day.weekday())


def week_path(day: date) -> str:
    return f"/week/{week_start(day).isoformat()}"


def parse_date(day_text: str) -> date | None:
    """Parse a date such as 2026-03-05; None if it is invalid or outside the years 2000 to 2099."""
    try:
        day = datetime.strptime(day_text, "%Y-%m-%d").date()
    except ValueError:
        return None
    return day if 2000 <= day.year < 2100 else None


def parse_start(day_text: str, time_text: str) -> datetime | None:
    """Parse a date and a time such as 14:00; None if one is invalid."""
    day = parse_date(day_text)
    try:
        return datetime.combine(day, datetime.strptime(time_text, "%H:%M").time()) if day else None
    except ValueError:
        return None


_TITLES = ("Dentist", "Bicycle repair", "Parents' evening", "Boiler service", "Choir rehearsal", "Eye test")


def find_time(rng: random.Random, data: CalendarData) -> Goal:
    event = rng.choice(data.appointments)
    return Goal(
        f'At what time does the "{event.title}" begin? Answer as HH:MM.',
        week_path(event.start.date()),
        lambda app, view: GiveAnswer(f"{event.start:%H:%M}"),
        answer=f"{event.start:%H:%M}",
        facts=(Fact(f'The "{event.title}" begins at {event.start:%H:%M}.', _pages_showing(data, event)),),
        signed_in=True,
    )


def cancel(rng: random.Random, data: CalendarData) -> Goal:
    event = rng.choice(data.appointments)
    page = f"/event/{event.id}"
    return Goal(
        "Cancel this appointment.",
        page,
        lambda app, view: next_link(view, page, f"{page}/cancel") or SubmitForm(f"{page}/cancel"),
        effects=(("cancel", str(event.id)),),
        facts=(Fact(f'The calendar confirms that the "{event.title}" has been cancelled.'),),
        signed_in=True,
    )


def create(rng: random.Random, data: CalendarData) -> Goal:
    day = week_start(data.today) + timedelta(days=7 * rng.randint(0, 2) + rng.randrange(5))
    hour, title, minutes = rng.choice(_free_hours(data, day)), rng.choice(_TITLES), rng.choice(("30", "60"))
    start = f"{hour:02d}:00"
    values = {"minutes": minutes, "title": title, "day": day.isoformat(), "time": start}
    return Goal(
        f'Make an appointment "{title}" on {day:%A}, {day.isoformat()}, at {start}. It lasts {minutes} minutes.',
        "/",
        lambda app, view: next_link(view, "/new") or SubmitForm("/new", values),
        effects=(("create", title, day.isoformat(), start, minutes),),
        facts=(
            Fact("The calendar confirms that one appointment has been saved."),
            Fact(f'Its title is "{title}".'),
            Fact(f"It is on {day.isoformat()}."),
            Fact(f"It begins at {start}."),
            Fact(f"It lasts {minutes} minutes."),
        ),
        signed_in=True,
    )


def fullest_day(rng: random.Random, data: CalendarData) -> Goal | None:
    weeks = [week_start(data.today) + timedelta(days=7 * number) for number in (1, 2)]
    planned = {week + timedelta(days=number): 0 for week in weeks for number in range(5)}
    for event in data.appointments:
        if event.start.date() in planned:
            planned[event.start.date()] += event.minutes
    days = [day for day, minutes in planned.items() if minutes == max(planned.values())]
    if len(days) > 1:
        return None
    return Goal(
        "On which day of the next two weeks, this one not included, do the appointments last longest in all? "
        "Answer with the date as YYYY-MM-DD.",
        "/",
        lambda app, view: (
            next_unvisited(app.visited_paths, view, "/", *map(week_path, weeks)) or GiveAnswer(days[0].isoformat())
        ),
        answer=days[0].isoformat(),
        signed_in=True,
        facts=(
            *(
                Fact(f"The appointments on {day.isoformat()} last {total} minutes.", _weeks_showing(data, day))
                for day, total in planned.items()
            ),
            Fact(f"They last longest on {days[0].isoformat()}."),
        ),
    )


def move(rng: random.Random, data: CalendarData) -> Goal:
    event, day = rng.choice(_coming(data)), week_start(data.today) + timedelta(days=7 + rng.randrange(5))
    hour = _free_hours(data, day)[0]
    page, values = f"/event/{event.id}", {"day": day.isoformat(), "time": f"{hour:02d}:00"}
    # One week at a time, forwards from this week's page, so that the target day is visited.
    weeks = [week_path(week_start(data.today) + timedelta(days=7 * number)) for number in range(4)]
    own = weeks.index(week_path(event.start.date()))
    return Goal(
        f'Move the "{event.title}" with {event.person} to {day.isoformat()}, to the first '
        "full hour of that day's working hours in which nothing else takes place for the whole hour. Working hours "
        f"begin at {OPENING_HOUR:02d}:00.",
        "/",
        lambda app, view: (
            next_unvisited(app.visited_paths, view, "/", weeks[1])
            or next_link(view, "/", *weeks[1 : own + 1], page, f"{page}/move")
            or SubmitForm(f"{page}/move", values)
        ),
        effects=(("move", str(event.id), values["day"], values["time"]),),
        facts=(
            Fact(f'The calendar confirms that the "{event.title}" has been moved.'),
            Fact(f"It takes place on {day.isoformat()}."),
            Fact(f"It begins at {hour:02d}:00."),
            Fact("No earlier full hour of that day's working hours was free."),
            Fact("No other appointment has been changed."),
        ),
    )


def person_minutes(rng: random.Random, data: CalendarData) -> Goal:
    last = week_start(data.today) + timedelta(days=11)
    events = [event for event in data.appointments if week_start(data.today) <= event.start.date() <= last]
    person = rng.choice(sorted({event.person for event in events}))
    theirs = [event for event in events if event.person == person]
    minutes = str(sum(event.minutes for event in theirs))
    found = f"/search?q={person.replace(' ', '+')}"
    return Goal(
        f"How many minutes do the appointments with {person} last altogether in this week "
        "and the next? Answer with the number.",
        "/",
        lambda app, view: (
            (SubmitForm("/search", {"q": person}) if found not in app.visited_paths else None) or GiveAnswer(minutes)
        ),
        answer=minutes,
        facts=(
            *(
                Fact(
                    f'The "{event.title}" with {person} lasts {event.minutes} minutes.',
                    (f"/event/{event.id}", *search_paths(event.title), *search_paths(person)),
                )
                for event in theirs
            ),
            Fact(f"The appointments with {person} are {len(theirs)}."),
            Fact(f"Together they last {minutes} minutes."),
        ),
    )


def _weeks_showing(data: CalendarData, day: date) -> tuple[str, ...]:
    """The pages that show the week of a day."""
    return (week_path(day), *(("/",) if week_start(day) == week_start(data.today) else ()))


def _pages_showing(data: CalendarData, event: Appointment) -> tuple[str, ...]:
    """The pages that show when an appointment begins."""
    return (*_weeks_showing(data, event.start.date()), f"/event/{event.id}", *search_paths(event.title))


def _free_hours(data: CalendarData, day: date) -> list[int]:
    """The free full hours of a working day."""
    hours = []
    for hour in range(OPENING_HOUR, CLOSING_HOUR):
        start = parse_start(day.isoformat(), f"{hour:02d}:00")
        assert start is not None
        if not any(Appointment(0, "", "", "", start, 60).overlaps(event) for event in data.appointments_on(day)):
            hours.append(hour)
    return hours


def _coming(data: CalendarData) -> list[Appointment]:
    """The appointments of this week and the next three, except next week's: they could occupy the target hour."""
    next_week = week_start(data.today) + timedelta(days=7)
    first = week_start(data.today)
    return [e for e in data.appointments if e.start.date() >= first and week_start(e.start.date()) != next_week]


ENVIRONMENTS = make_environments(
    Calendar, generate_data, easy=(find_time, cancel), medium=(create, fullest_day), hard=(move, person_minutes)
)
