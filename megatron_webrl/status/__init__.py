"""`webrl status`: what a run is at, from its files and from its control plane. docs/status.md"""
