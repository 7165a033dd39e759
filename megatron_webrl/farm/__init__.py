"""Browsers as a service: nodes that hold them, a router in front, a client, an environment for other frameworks."""
