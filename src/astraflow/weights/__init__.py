"""Weights from the trainer to the engines: shared-memory double buffer, sender agent, receiver, bit-exact deltas."""
