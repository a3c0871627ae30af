"""The shelf with rules: prompts go out, rollouts come in, trainers take batches. Torch-free."""
