"""Tasks of the calendar."""

from __future__ import annotations

import random
from datetime import date, timedelta

from megatron_webrl.tasks.sites.app import search_paths
from megatron_webrl.tasks.sites.calendar import (
    CLOSING_HOUR,
    OPENING_HOUR,
    Appointment,
    Calendar,
    CalendarData,
    generate_data,
    parse_start,
    week_path,
    week_start,
)
from megatron_webrl.tasks.sites.goal import Fact, Goal, make_environments
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, SubmitForm, next_link, next_unvisited

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
