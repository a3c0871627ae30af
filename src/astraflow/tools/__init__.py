"""Tools around a run: the model that ships without a hub, and later bench, doctor, replay, conformance, chaos."""
