"""Preparation of screenshots ahead of the forward pass, and their exchange between nodes."""
