"""The calendar: weeks, appointments that can be made, moved and cancelled, and search."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta

from megatron_webrl.tasks.server import Reply, Request
from megatron_webrl.tasks.sites.app import Account, App, Start, entered, route
from megatron_webrl.tasks.sites.markup import (
    Html,
    choices,
    dialog,
    facts,
    field,
    form,
    join,
    link,
    table,
    tag,
    text,
)
from megatron_webrl.tasks.sites.words import a_weekday, account, names, pairs

OPENS, CLOSES = 8, 18
"""Hours of the working day."""

DURATIONS = (("30", "30 minutes"), ("60", "60 minutes"))

_KINDS = ("Budget", "Design", "Hiring", "Launch", "Safety", "Supplier", "Travel", "Training", "Contract", "Garden")
_FORMS = ("review", "workshop", "call", "interview", "lunch", "planning", "briefing", "inspection")
_ROOMS = ("Oak room", "River room", "Annex 2", "Library", "Video call")


@dataclass(frozen=True)
class Event:
    """An appointment."""

    id: int
    title: str
    person: str
    room: str
    start: datetime
    minutes: int

    @property
    def end(self) -> datetime:
        """When it is over."""
        return self.start + timedelta(minutes=self.minutes)

    def meets(self, other: Event) -> bool:
        """Whether the two overlap."""
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class World:
    """The calendar's content."""

    account: Account
    today: date
    people: tuple[str, ...]
    events: tuple[Event, ...]

    def on(self, day: date) -> list[Event]:
        """The appointments of a day, in order."""
        return sorted((e for e in self.events if e.start.date() == day), key=lambda e: e.start)


def make_world(rng: random.Random) -> World:
    """The calendar of five weeks, from the week before today's on."""
    today, people = a_weekday(rng), tuple(names(rng, 6))
    titles, ids = iter(pairs(rng, _KINDS, _FORMS, 80)), iter(rng.sample(range(1000, 9999), 80))
    events = []
    for week in range(-1, 4):
        for weekday in range(5):
            day = monday(today) + timedelta(days=7 * week + weekday)
            for hour in sorted(rng.sample(range(OPENS, CLOSES), rng.randint(1, 3))):
                start = datetime.combine(day, time(hour))
                event = Event(
                    next(ids), next(titles), rng.choice(people), rng.choice(_ROOMS), start, rng.choice((30, 60))
                )
                events.append(event)
    return World(account(rng), today, people, tuple(events))


class Calendar(App):
    """One person's calendar.

    Effects: ("create", title, date, time, minutes), ("move", id, date, time) and ("cancel", id).
    """

    name, title, search_hint = "calendar", "Daybook", "Search appointments"
    popup = ("Daybook on your phone", "Take your appointments with you: our app is free for the first month.")
    members_only = True

    def __init__(self, world: World, start: Start) -> None:
        super().__init__(world.account, start)
        self.world = world
        self.events = {event.id: event for event in world.events}

    def links(self) -> tuple[tuple[str, str], ...]:
        return ("/", "This week"), ("/new", "New appointment")

    @route("GET", "/")
    def home(self, request: Request) -> Reply:
        return self._week(monday(self.world.today))

    @route("GET", r"/week/(\d{4}-\d\d-\d\d)")
    def week(self, request: Request, start: str) -> Reply:
        day = as_day(start)
        return self._week(monday(day)) if day else self.missing()

    @route("GET", r"/event/(\d{1,6})")
    def event(self, request: Request, id: str) -> Reply:
        event = self.events.get(int(id))
        return self._event_page(event) if event else self.missing()

    @route("GET", r"/event/(\d{1,6})/cancel")
    def ask(self, request: Request, id: str) -> Reply:
        event = self.events.get(int(id))
        if event is None:
            return self.missing()
        keep = link(f"/event/{id}", "Keep it")
        box = dialog(
            "Cancel this appointment?",
            tag("p", text(f"{event.title} with {event.person}, {_when(event)}. This cannot be undone.")),
            form(f"/event/{id}/cancel", button="Yes, cancel it"),
            keep,
        )
        return self._event_page(event, box)

    @route("POST", r"/event/(\d{1,6})/cancel")
    def cancel(self, request: Request, id: str) -> Reply:
        event = self.events.pop(int(id), None)
        if event is None:
            return self.missing()
        self.effects.append(("cancel", id))
        return self.redirect(week_path(event.start.date()), f"{event.title} has been cancelled.")

    @route("GET", r"/event/(\d{1,6})/move")
    def move_page(self, request: Request, id: str) -> Reply:
        event = self.events.get(int(id))
        if event is None:
            return self.missing()
        return self.page(
            "Move",
            tag("div", link(f"/event/{id}", event.title), css="crumbs"),
            tag("h1", text(f"Move {event.title}")),
            tag("p", text(f"Until now: {_when(event)}")),
            form(f"/event/{id}/move", *_when_fields(), button="Move appointment", css="sheet"),
        )

    @route("POST", r"/event/(\d{1,6})/move")
    def move(self, request: Request, id: str) -> Reply:
        event = self.events.get(int(id))
        if event is None:
            return self.missing()
        start = as_start(entered(request, "day"), entered(request, "time"))
        if start is None:
            return self.redirect(f"/event/{id}/move", "Please give the date as 2026-03-05 and the time as 14:00.")
        moved = replace(event, start=start)
        if refusal := self._refusal(moved):
            return self.redirect(f"/event/{id}/move", refusal)
        self.events[event.id] = moved
        self.effects.append(("move", id, start.date().isoformat(), f"{start:%H:%M}"))
        return self.redirect(f"/event/{id}", f"Moved to {_when(moved)}.")

    @route("GET", "/new")
    def new_page(self, request: Request) -> Reply:
        fields = (
            choices("minutes", "Duration", DURATIONS, "30"),
            field("title", "Title", "What it is about"),
            *_when_fields(),
        )
        return self.page(
            "New appointment",
            tag("h1", text("New appointment")),
            form("/new", *fields, button="Save appointment", css="sheet"),
        )

    @route("POST", "/new")
    def new(self, request: Request) -> Reply:
        title, minutes = entered(request, "title"), entered(request, "minutes")
        start = as_start(entered(request, "day"), entered(request, "time"))
        if not title or minutes not in dict(DURATIONS) or start is None:
            return self.redirect("/new", "Please give a title, the date as 2026-03-05 and the time as 14:00.")
        event = Event(max(self.events, default=1000) + 1, title, "nobody else", "No room", start, int(minutes))
        if refusal := self._refusal(event):
            return self.redirect("/new", refusal)
        self.events[event.id] = event
        self.effects.append(("create", title, start.date().isoformat(), f"{start:%H:%M}", minutes))
        return self.redirect(f"/event/{event.id}", "The appointment has been saved.")

    @route("GET", "/search")
    def search(self, request: Request) -> Reply:
        asked = request.query.get("q", "").strip()
        words = asked.lower().split()
        found = [
            event
            for event in sorted(self.events.values(), key=lambda event: event.start)
            if words and all(word in f"{event.title} {event.person}".lower() for word in words)
        ][:20]
        rows = [(text(_when(event)), link(f"/event/{event.id}", event.title), text(event.person)) for event in found]
        return self.page(
            "Search",
            tag("h1", text(f'{len(found)} appointments match "{asked}"')),
            table(("When", "Appointment", "With"), rows),
        )

    def _week(self, start: date) -> Reply:
        days = [start + timedelta(days=number) for number in range(5)]
        turn = (
            link(week_path(start - timedelta(days=7)), "Week before"),
            link(week_path(start + timedelta(days=7)), "Week after"),
        )
        title = f"{days[0].day} {days[0]:%B} to {days[4].day} {days[4]:%B %Y}"
        today = tag("p", text(f"Today is {self.world.today:%A}, {self.world.today.isoformat()}."), css="muted")
        return self.page(
            title,
            tag("h1", text(title)),
            today,
            tag("div", *turn, css="tabs"),
            tag("div", *(self._day(day) for day in days), css="week"),
        )

    def _day(self, day: date) -> Html:
        events = sorted((e for e in self.events.values() if e.start.date() == day), key=lambda event: event.start)
        boxes = join(
            tag(
                "div",
                tag("span", text(f"{e.start:%H:%M} to {e.end:%H:%M}")),
                link(f"/event/{e.id}", e.title),
                css="event",
            )
            for e in events
        )
        return tag("div", tag("h2", text(f"{day:%a} {day.isoformat()}")), boxes, css="day")

    def _event_page(self, event: Event, *covers: Html) -> Reply:
        rows = (
            ("When", text(_when(event))),
            ("Duration", text(f"{event.minutes} minutes")),
            ("With", text(event.person)),
            ("Where", text(event.room)),
        )
        buttons = (
            link(f"/event/{event.id}/move", "Move", "button"),
            link(f"/event/{event.id}/cancel", "Cancel appointment", "button"),
        )
        return self.page(
            event.title,
            tag("div", link(week_path(event.start.date()), "Week"), css="crumbs"),
            tag("h1", text(event.title)),
            tag("div", facts(rows), tag("div", *buttons, css="buttons"), css="sheet"),
            *covers,
        )

    def _refusal(self, event: Event) -> str:
        """Why an appointment cannot be at that time; empty if it can."""
        day = event.start.date()
        opens, closes = datetime.combine(day, time(OPENS)), datetime.combine(day, time(CLOSES))
        if day.weekday() > 4 or event.start < opens or event.end > closes:
            return f"Appointments are from Monday to Friday, {OPENS:02d}:00 to {CLOSES}:00."
        for other in self.events.values():
            if other.id != event.id and event.meets(other):
                return f"That time is taken by {other.title}."
        return ""


def monday(day: date) -> date:
    """The first day of a day's week."""
    return day - timedelta(days=day.weekday())


def week_path(day: date) -> str:
    """Where a day's week is."""
    return f"/week/{monday(day).isoformat()}"


def as_day(words: str) -> date | None:
    """A date as 2026-03-05; None for anything else, and for years that nobody plans."""
    try:
        day = datetime.strptime(words, "%Y-%m-%d").date()
    except ValueError:
        return None
    return day if 2000 <= day.year < 2100 else None


def as_start(day_words: str, time_words: str) -> datetime | None:
    """A date and a time as 14:00; None for anything else."""
    day = as_day(day_words)
    try:
        return datetime.combine(day, datetime.strptime(time_words, "%H:%M").time()) if day else None
    except ValueError:
        return None


def _when_fields() -> tuple[Html, Html]:
    return field("day", "Date", "YYYY-MM-DD"), field("time", "Begins at", "HH:MM")


def _when(event: Event) -> str:
    return f"{event.start:%a} {event.start.date().isoformat()}, {event.start:%H:%M} to {event.end:%H:%M}"
