"""Egress policy of a browser: proxy, quotas, recorded traffic."""
