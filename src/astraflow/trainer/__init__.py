"""The trainer room: get a batch, take a step, offload weights, save a checkpoint, notify. Imports torch; `config` does not."""
