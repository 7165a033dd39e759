"""One page of a session: observation and actions."""
