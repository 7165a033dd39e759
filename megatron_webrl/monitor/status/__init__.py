"""`webrl status`: the state of a run, from its files and its control service. docs/status.md"""
