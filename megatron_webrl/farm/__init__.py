"""Browsers as a service: browser servers, a router, a client, a Gymnasium environment."""
