"""A browser server: leases of sessions over HTTP."""
