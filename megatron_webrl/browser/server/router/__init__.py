"""Router of many browser servers."""
