"""A prediction of training for this CPU beside a measured step: `python -m tools.predict_step --measure`."""
