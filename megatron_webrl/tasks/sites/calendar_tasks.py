"""Tasks of the calendar."""

from __future__ import annotations

import random
from datetime import date, timedelta
from functools import partial

from megatron_webrl.tasks.sites.app import InitialSiteState, close_overlay, sign_in
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
from megatron_webrl.tasks.sites.content_generator import draw_initial_state, sign_in_instruction
from megatron_webrl.tasks.sites.goal import Environment, Goal
from megatron_webrl.tasks.sites.high_level_actions import GiveAnswer, SubmitForm, next_link, next_unvisited

_TITLES = ("Dentist", "Bicycle repair", "Parents' evening", "Boiler service", "Choir rehearsal", "Eye test")


def find_time(rng: random.Random) -> Goal:
    world = generate_data(rng)
    event = rng.choice(world.appointments)
    return Goal(
        f'At what time does the "{event.title}" begin? Answer as HH:MM.',
        week_path(event.start.date()),
        partial(Calendar, world, InitialSiteState(signed_in=True)),
        lambda app, look: GiveAnswer(f"{event.start:%H:%M}"),
        answer=f"{event.start:%H:%M}",
    )


def cancel(rng: random.Random) -> Goal:
    world = generate_data(rng)
    event = rng.choice(world.appointments)
    page = f"/event/{event.id}"
    return Goal(
        "Cancel this appointment.",
        page,
        partial(Calendar, world, InitialSiteState(signed_in=True)),
        lambda app, look: next_link(look, page, f"{page}/cancel") or SubmitForm(f"{page}/cancel"),
        effects=(("cancel", str(event.id)),),
    )


def create(rng: random.Random) -> Goal:
    world = generate_data(rng)
    day = week_start(world.today) + timedelta(days=7 * rng.randint(0, 2) + rng.randrange(5))
    hour, title, minutes = rng.choice(_free_hours(world, day)), rng.choice(_TITLES), rng.choice(("30", "60"))
    start = f"{hour:02d}:00"
    values = {"minutes": minutes, "title": title, "day": day.isoformat(), "time": start}
    return Goal(
        f'Make an appointment "{title}" on {day:%A}, {day.isoformat()}, at {start}. It lasts {minutes} minutes.',
        "/",
        partial(Calendar, world, draw_initial_state(rng, signed_in=True)),
        lambda app, look: close_overlay(app) or next_link(look, "/new") or SubmitForm("/new", values),
        effects=(("create", title, day.isoformat(), start, minutes),),
    )


def fullest_day(rng: random.Random) -> Goal:
    days: list[date] = []
    while not days:
        world = generate_data(rng)
        weeks = [week_start(world.today) + timedelta(days=7 * number) for number in (1, 2)]
        planned = {week + timedelta(days=number): 0 for week in weeks for number in range(5)}
        for event in world.appointments:
            if event.start.date() in planned:
                planned[event.start.date()] += event.minutes
        days = [day for day, minutes in planned.items() if minutes == max(planned.values())]
        days = days if len(days) == 1 else []
    return Goal(
        "On which day of the next two weeks, this one not included, do the appointments last longest in all? "
        "Answer with the date as YYYY-MM-DD.",
        "/",
        partial(Calendar, world, draw_initial_state(rng, signed_in=True)),
        lambda app, look: (
            close_overlay(app)
            or next_unvisited(app.visited_paths, look, "/", *map(week_path, weeks))
            or GiveAnswer(days[0].isoformat())
        ),
        answer=days[0].isoformat(),
    )


def move(rng: random.Random) -> Goal:
    world = generate_data(rng)
    event, day = rng.choice(_coming(world)), week_start(world.today) + timedelta(days=7 + rng.randrange(5))
    hour = _free_hours(world, day)[0]
    page, values = f"/event/{event.id}", {"day": day.isoformat(), "time": f"{hour:02d}:00"}
    # One week at a time, forwards from this week's page; the target day is looked at on the way.
    weeks = [week_path(week_start(world.today) + timedelta(days=7 * number)) for number in range(4)]
    own = weeks.index(week_path(event.start.date()))
    return Goal(
        f'{sign_in_instruction(world.account)} Move the "{event.title}" with {event.person} to {day.isoformat()}, to the first '
        "full hour of that day's working hours in which nothing else takes place for the whole hour. Working hours "
        f"begin at {OPENING_HOUR:02d}:00.",
        "/",
        partial(Calendar, world, draw_initial_state(rng, popup=True)),
        lambda app, look: (
            close_overlay(app)
            or sign_in(app, look)
            or next_unvisited(app.visited_paths, look, "/", weeks[1])
            or next_link(look, "/", *weeks[1 : own + 1], page, f"{page}/move")
            or SubmitForm(f"{page}/move", values)
        ),
        effects=(("move", str(event.id), values["day"], values["time"]),),
    )


def person_minutes(rng: random.Random) -> Goal:
    world = generate_data(rng)
    last = week_start(world.today) + timedelta(days=11)
    events = [event for event in world.appointments if week_start(world.today) <= event.start.date() <= last]
    person = rng.choice(sorted({event.person for event in events}))
    theirs = [event for event in events if event.person == person]
    minutes = str(sum(event.minutes for event in theirs))
    found = f"/search?q={person.replace(' ', '+')}"
    return Goal(
        f"{sign_in_instruction(world.account)} How many minutes do the appointments with {person} last altogether in this week "
        "and the next? Answer with the number.",
        "/",
        partial(Calendar, world, draw_initial_state(rng, popup=True)),
        lambda app, look: (
            close_overlay(app)
            or sign_in(app, look)
            or (SubmitForm("/search", {"q": person}) if found not in app.visited_paths else None)
            or GiveAnswer(minutes)
        ),
        answer=minutes,
    )


def _free_hours(world: CalendarData, day: date) -> list[int]:
    """The full hours of a working day in which nothing takes place."""
    hours = []
    for hour in range(OPENING_HOUR, CLOSING_HOUR):
        start = parse_start(day.isoformat(), f"{hour:02d}:00")
        assert start is not None
        if not any(Appointment(0, "", "", "", start, 60).overlaps(event) for event in world.appointments_on(day)):
            hours.append(hour)
    return hours


def _coming(world: CalendarData) -> list[Appointment]:
    """The appointments of this week and the next three, but for those of next week, which may stand in the way."""
    next_week = week_start(world.today) + timedelta(days=7)
    first = week_start(world.today)
    return [
        event
        for event in world.appointments
        if event.start.date() >= first and week_start(event.start.date()) != next_week
    ]


ENVIRONMENTS = {
    "calendar-find-time": Environment(Calendar, "easy", find_time),
    "calendar-cancel": Environment(Calendar, "easy", cancel),
    "calendar-create": Environment(Calendar, "medium", create),
    "calendar-fullest-day": Environment(Calendar, "medium", fullest_day),
    "calendar-move": Environment(Calendar, "hard", move),
    "calendar-person-minutes": Environment(Calendar, "hard", person_minutes),
}
