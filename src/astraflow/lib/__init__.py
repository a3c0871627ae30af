"""Plumbing without domain words: wire, processes, metrics, registry, tokenizer. Never imports torch."""
