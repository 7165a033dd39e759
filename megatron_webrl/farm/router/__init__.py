"""The front of many browser servers."""
