"""The agents' door: programs that know nothing of training talk to the policies of their episode as to any hosted model.

    door      addresses, keys, bodies; who may come in and what is cut when an episode ends
    asks      bodies of clients: typed, what cannot be honoured is refused by name
    openai    /v1/chat/completions, /v1/completions, /v1/models
    anthropic /v1/messages
"""
