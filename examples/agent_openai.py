"""An agent on the OpenAI SDK: it may add with a tool, three turns at most, and knows nothing of AstraFlow.

    OPENAI_API_KEY=… python examples/agent_openai.py "What is 2 + 3?"      any hosted model
    astraflow run recipes/agent-openai.yaml                                 train the model that it runs on
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI

MODEL = "small"
TURNS = 3
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two whole numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
    },
}


def add(arguments: str) -> str:
    """The tool; a model's mistakes are told to it."""
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) + int(given["b"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error!r}"


def main(question: str) -> None:
    client = OpenAI()
    messages: list = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=[ADD]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)})
    sys.stdout.write(f"{'no answer in time' if isinstance(messages[-1], dict) else messages[-1].content}\n")


main(sys.argv[1])
