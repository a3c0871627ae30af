"""The agent of agent_openai.py on the Anthropic SDK, with streamed answers."""

from __future__ import annotations

import sys

from anthropic import Anthropic

MODEL = "small"
TURNS = 3
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ADD = {
    "name": "add",
    "description": "Adds two whole numbers.",
    "input_schema": {"type": "object", "properties": NUMBERS, "required": ["a", "b"]},
}


def add(given: dict) -> str:
    """The tool; a model's mistakes are told to it."""
    try:
        return str(int(given["a"]) + int(given["b"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error!r}"


def main(question: str) -> None:
    client = Anthropic()
    messages: list = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        with client.messages.stream(model=MODEL, max_tokens=256, messages=messages, tools=[ADD]) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            break
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": add(call.input)} for call in calls]
        messages.append({"role": "user", "content": results})
    sys.stdout.write("".join(block.text for block in message.content if block.type == "text") + "\n")


main(sys.argv[1])
