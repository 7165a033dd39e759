"""One machine: launcher, role processes, watchdog, trainer restart."""
