"""Offline websites: many hosts with the pages of the sites, for tasks from files without the web."""
