"""`webrl status`: the state of a run, from its files and its control plane. docs/status.md"""
