"""`webrl gpu-check`: proves that this package computes, sends weights and trains as it should on a machine."""
