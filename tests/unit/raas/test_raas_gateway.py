"""The agents' door over real sockets: raw HTTP as any client would send it, the scripted engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Mount

sys.path.insert(0, str(Path(__file__).parent))
from gateway_agents import WAIT_S, NoApi, client, opened, played, plays, post, run

from astraflow.lib.aio import poll_until
from astraflow.lib.wire import Server, new_identity
from astraflow.protocol.codec import array
from astraflow.protocol.errors import UserError
from astraflow.raas.gateway.door import MAX_BODY_BYTES
from astraflow.workflows.config import AgentConfig

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'


def say(*messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": role, "content": text} for role, text in messages], **more}


def ids(segment: Any) -> list[int]:
    return array(segment.input_ids).tolist()


async def loop_of_three(url: str, key: str, **more: Any) -> str:
    """Two tool calls, then the answer; what comes back goes into the history as any client would put it there."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2 + 3 ="}]
    for _ in range(3):
        found = await post(f"{url}/chat/completions", key, {"model": "default", "messages": messages, "tools": TOOLS, **more})
        message = found["choices"][0]["message"]
        messages.append({name: value for name, value in message.items() if value is not None})
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "5"})
    return str(messages[-1]["content"])


def test_a_tool_loop_over_raw_http_is_one_segment_of_exactly_what_the_engine_saw(rig):
    async def test() -> None:
        async with opened(rig, script=[{"text": CALL % 2}, {"text": "So " + CALL % 3}, {"text": "= 5"}]) as world:
            group = await played(world, lambda task, url, key: loop_of_three(url, key))
            (member,) = group.trajectories
            assert (member.error, member.reward, member.finish) == (None, 0.2, "stop"), "the last number is right, there is more text"
            (segment,) = member.segments
            seen = world.engine.seen
            tokens, mask = ids(segment), array(segment.loss_mask).tolist()
            for request in seen:
                assert tokens[: len(request.input_ids)] == request.input_ids
            text = world.engine._setup.tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m], skip_special=False)
            assert text == f"{CALL % 2}<end>So {CALL % 3}<end>= 5<end>"
            assert (group.metrics["rollout/forks"], group.metrics["rollout/rewritten"], group.metrics["rollout/calls"]) == (0, 0, 3)

    run(test())


def test_streams_bring_the_same_answer_as_whole_replies(rig):
    async def test() -> None:
        async with opened(rig, script=[{"text": "So " + CALL % 3}], script_repeats=True) as world:

            async def play(task: dict[str, Any], url: str, key: str) -> None:
                body = say(("user", "2 + 3 ="), tools=TOOLS, logprobs=True, n=2)
                whole = await post(f"{url}/chat/completions", key, body)
                async with client(key) as http:
                    options = {"stream": True, "stream_options": {"include_usage": True}}
                    stream = await http.post(f"{url}/chat/completions", json={**body, **options})
                assert stream.headers["content-type"] == "text/event-stream"
                lines = [line for line in stream.text.split("\n\n") if line]
                assert lines[-1] == "data: [DONE]"
                chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
                assert chunks[-1]["usage"] == whole["usage"]
                for place, choice in enumerate(whole["choices"]):
                    mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == place]
                    assert "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"] == "So"
                    (call,) = [call for c in mine for call in c["delta"].get("tool_calls", [])]
                    assert call["function"] == choice["message"]["tool_calls"][0]["function"]
                    assert mine[-1]["finish_reason"] == choice["finish_reason"] == "tool_calls"
                    tokens = [[one["token"] for one in side["logprobs"]["content"]] for side in (mine[-1], choice)]
                    assert tokens[0] == tokens[1]

            group = await played(world, play)
            assert len(group.trajectories[0].segments) == 4, "two answers to each of two calls"

    run(test())


def test_keys_open_their_own_episode_and_only_while_it_runs(rig):
    async def test() -> None:
        async with opened(rig) as world:
            inside: list[tuple[str, str]] = []
            both = asyncio.Event()

            async def play(task: dict[str, Any], url: str, key: str) -> None:
                inside.append((url, key))
                if len(inside) == 2:
                    both.set()
                await both.wait()
                if inside[0] == (url, key):
                    (_, mine), (other, theirs) = inside
                    for wrong in (theirs, mine + "x", "x", "cluster-token", "k" * 5000):
                        async with client(wrong) as http:
                            reply = await http.post(f"{url}/chat/completions", json=say(("user", "2 + 3 =")))
                        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
                    async with httpx.AsyncClient() as http:
                        reply = await http.post(f"{other}/messages", json={}, headers={"x-api-key": mine})
                        assert (reply.status_code, reply.json()["type"]) == (401, "error")
                        assert reply.json()["error"]["type"] == "authentication_error"
                        nowhere = url.replace(url.split("/")[-2], "0" * 16)
                        assert (await http.get(f"{nowhere}/models", headers={"x-api-key": mine})).status_code == 401
                await post(f"{url}/chat/completions", key, say(("user", "2 + 3 =")))

            group = await played(world, play, n=2)
            assert [member.error for member in group.trajectories] == [None, None]
            async with client(inside[0][1]) as http:
                late = await http.post(f"{inside[0][0]}/chat/completions", json=say(("user", "2 + 3 =")))
            assert (late.status_code, late.json()["error"]["code"]) == (403, "episode_ended")
            counts = world.door._counts
            assert (counts["raas/door_after_end"], counts["raas/door_wrong_key"], counts["raas/door_calls"]) == (1, 7, 2)
            assert len(world.engine.seen) == 2, "nobody else was answered"

    run(test())


def test_a_huge_body_and_a_reader_that_does_not_read_disturb_nobody(rig):
    async def test() -> None:
        async with opened(rig, answer_tokens=200) as world:

            async def play(task: dict[str, Any], url: str, key: str) -> None:
                async with client(key) as http:
                    reply = await http.post(f"{url}/chat/completions", content=b"[" * (50 << 20))
                assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")
                assert str(MAX_BODY_BYTES) in reply.json()["error"]["message"]
                host, _, port = url.split("/")[2].partition(":")
                reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
                body = json.dumps(say(("user", "x"), n=16, logprobs=True)).encode()
                head = f"POST /{url.split('/', 3)[3]}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
                writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
                await poll_until(lambda: len(world.engine.seen) == 16, WAIT_S, "the slow reader's answers")
                for number in range(3):
                    await post(f"{url}/chat/completions", key, say(("user", f"{number} + 3 =")))
                plays["reader"] = reader  # type: ignore[assignment]

            group = await played(world, play)
            assert group.trajectories[0].error is None
            assert len(group.trajectories[0].segments) == 16 + 3

    run(test())


def test_a_client_that_goes_away_takes_its_generation_with_it(rig):
    async def test() -> None:
        async with opened(rig, stuck_requests=[0]) as world:

            async def play(task: dict[str, Any], url: str, key: str) -> None:
                with contextlib.suppress(httpx.ReadTimeout):
                    async with client(key) as http:
                        await http.post(f"{url}/chat/completions", json=say(("user", "2 + 3 =")), timeout=httpx.Timeout(WAIT_S, read=0.3))
                await poll_until(lambda: world.engine.report().status.running == 0, WAIT_S, "the abandoned call ends")
                await post(f"{url}/chat/completions", key, say(("user", "2 + 3 =")))

            group = await played(world, play)
            assert (group.trajectories[0].error, len(group.trajectories[0].segments)) == (None, 1)

    run(test())


@pytest.mark.parametrize(
    ("path", "body", "status", "field", "words"),
    [
        ("chat/completions", {"model": "gpt-4o"}, 404, "model", "the models of this episode: default"),
        ("chat/completions", {"best_of": 2}, 400, "best_of", "unsupported parameter"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, 400, "response_format", "accepted: "),
        ("chat/completions", {"tool_choice": "required"}, 400, "tool_choice", "accepted: auto, none"),
        ("chat/completions", {"n": 17}, 400, "n", "1 … 16"),
        ("chat/completions", {"temperature": "hot"}, 400, "temperature", "Expected `float"),
        ("chat/completions", {"temperature": -1}, 400, "temperature", "0 … 2"),
        ("chat/completions", {"max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ("chat/completions", {"messages": []}, 400, "messages", "empty"),
        ("chat/completions", {"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages", "expected user or tool"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages[0].role", "missing"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]", "text"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages", "context of 4096"),
        ("completions", {"prompt": ["a", "b"]}, 400, "prompt", "Expected `str`"),
        ("completions", {"prompt": "a", "logprobs": 5}, 400, "logprobs", "expected 0"),
        ("messages", {"max_tokens": None}, 400, None, "max_tokens"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, 400, None, "thinking"),
        ("embeddings", {}, 404, None, "known: /v1/chat/completions"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
def test_what_cannot_be_honoured_is_refused_by_name(rig, path, body, status, field, words):
    async def test() -> None:
        async with opened(rig) as world:

            async def play(task: dict[str, Any], url: str, key: str) -> None:
                base = {} if path == "completions" else say(("user", "2 + 3 ="))
                base = {"model": "default", "max_tokens": 9, **base} if path == "messages" else {"model": "default", **base}
                async with client(key) as http:
                    reply = await http.post(f"{url}/{path}", json={**base, **body})
                error = reply.json()["error"]
                assert (reply.status_code, words in error["message"]) == (status, True), error
                if path != "messages":
                    assert error["param"] == field
                assert world.engine.seen == [], "nothing was sampled"
                await post(f"{url}/chat/completions", key, say(("user", "2 + 3 =")))

            assert (await played(world, play)).trajectories[0].error is None

    run(test())


def test_the_other_apis_speak_for_the_same_policies(rig):
    lines = [{"text": "<think>hm</think>So " + CALL % 3}, {"text": "5 STOP"}, {"text": "five"}]

    async def test() -> None:
        async with opened(rig, script=lines) as world:

            async def play(task: dict[str, Any], url: str, key: str) -> float:
                async with httpx.AsyncClient(headers={"x-api-key": key, "anthropic-version": "2023-06-01"}) as http:
                    listed = (await http.get(f"{url}/models")).json()
                    assert [model["id"] for model in listed["data"]] == ["default"]
                    assert (await http.get(f"{url}/models/default")).json() == listed["data"][0]
                    assert (await http.get(f"{url}/chat/completions")).status_code == 405
                    tools = [{"name": "add", "input_schema": {"type": "object"}}]
                    history: list[dict[str, Any]] = [{"role": "user", "content": "2 + 3 ="}]
                    body = {"model": "default", "max_tokens": 200, "tools": tools, "messages": history, "system": "Add."}
                    said = (await http.post(f"{url}/messages", json=body)).json()
                    assert [block["type"] for block in said["content"]] == ["thinking", "text", "tool_use"]
                    assert (said["stop_reason"], said["content"][2]["input"]) == ("tool_use", {"a": 3})
                    history += [
                        {"role": "assistant", "content": said["content"][1:]},
                        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": said["content"][2]["id"], "content": "5"}]},
                    ]
                    streamed = await http.post(f"{url}/messages", json={**body, "stream": True, "stop_sequences": ["STOP"]})
                    events = [json.loads(part.partition("data: ")[2]) for part in streamed.text.split("\n\n") if part]
                    kinds = [event["type"] for event in events]
                    block = ["content_block_start", "content_block_delta", "content_block_stop"]
                    assert kinds == ["message_start", *block, "message_delta", "message_stop"]
                    assert events[2]["delta"] == {"type": "text_delta", "text": "5 "}
                    assert events[4]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}
                text = await post(f"{url}/completions", key, {"model": "default", "prompt": "Say:", "logprobs": 0})
                assert text["choices"][0]["text"] == "five"
                assert text["choices"][0]["logprobs"]["tokens"] == ["f", "i", "v", "e", "<end>"]
                return 0.75

            group = await played(world, play, reward="", options={"score": "posted"})
            (member,) = group.trajectories
            assert (member.error, member.reward) == (None, 0.75)
            assert len(member.segments) == 2, "the messages are one conversation, the bare text is another"

    run(test())


def test_sampling_that_may_not_be_trained_on_is_the_recipe_s_and_counted_and_an_evaluation_s_is_the_agent_s(rig):
    async def test() -> None:
        async with opened(rig) as world:

            async def play(task: dict[str, Any], url: str, key: str) -> None:
                await post(f"{url}/chat/completions", key, say(("user", "2 + 3 ="), temperature=0, top_p=0.5, max_tokens=3))
                await post(f"{url}/chat/completions", key, say(("user", "2 + 3 ="), temperature=0.5, max_completion_tokens=10_000))

            group = await played(world, play)
            seen = [(one.temperature, one.top_p, one.max_new_tokens) for one in world.engine.seen]
            assert seen == [(1.0, 1.0, 3), (0.5, 1.0, 256)]
            assert group.metrics["rollout/sampling_replaced"] == 1
            world.executor.submit([world.lease("l2", data={"play": "it", "prompt": "2 + 3 ="}, deadline_s=WAIT_S)], lane="eval")
            await world.groups(lane="eval")
            assert [(one.temperature, one.top_p) for one in world.engine.seen[2:]] == [(0.0, 0.5), (0.5, 1.0)]

    run(test())


PYTHON = sys.executable
ASK = """
import json, os, urllib.request
def post(path, body):
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), head)))
def ask(text):
    return post("/chat/completions", {"model": os.environ["ASTRAFLOW_MODEL"], "messages": [{"role": "user", "content": text}]})
"""


@pytest.mark.parametrize(
    ("code", "options", "outcome"),
    [
        ("ask(sys.argv[1]); print('done')", {"score": "exit"}, 1.0),
        ("ask('x'); sys.exit(1)", {"score": "exit"}, 0.0),
        ("ask('x'); post('/reward', {'reward': 0.5})", {"score": "posted"}, 0.5),
        ("ask('x'); post('/reward', {'answer': '5'})", {}, 1.0),
        ("ask('x')", {"score": "posted"}, "agent_no_reward"),
        ("print('nothing to say')", {}, "agent_no_call"),
        ("ask('x' * 5000)", {}, "prompt/overlong"),
        ("ask('x'); raise KeyError('oh')", {}, "agent_exit"),
        ("while True: ask('x')", {"max_calls": 3}, "agent_limit"),
        ("while True: ask('x')", {"max_tokens": 9}, "agent_limit"),
    ],
)
def test_a_program_ends_with_a_reward_or_with_a_reason(rig, tmp_path, code, options, outcome):
    (tmp_path / "agent.py").write_text(f"import sys\n{ASK}\nprint('begun', flush=True)\n{code}")
    command = [PYTHON, str(tmp_path / "agent.py"), "{prompt}"]

    async def test() -> None:
        async with opened(rig, {"mine": AgentConfig(command=command)}) as world:
            world.register(workflow="agent", options=options, reward="last_number")
            world.executor.submit([world.lease(deadline_s=WAIT_S)])
            (group,) = await world.groups()
            (member,) = group.trajectories
            if isinstance(outcome, str):
                assert member.error is not None
                reason = outcome if "/" in outcome else f"workflow/{outcome}"
                assert f"{member.error.boundary}/{member.error.kind}" == reason, member.error
                assert world.executor.counts[f"raas/error/{reason}"] == 1
            else:
                assert (member.error, member.reward) == (None, outcome)
                assert world.engine.seen
            await poll_until(lambda: member.record_ref in world.executor._records._kept, WAIT_S, "the record")
            (output,) = [turn for turn in json.loads(world.executor._records.load(member.record_ref))["turns"] if turn["role"] == "output"]
            assert output["content"].startswith("begun\n")

    run(test())


def test_a_program_over_its_deadline_is_ended_with_all_that_it_started(rig, tmp_path):
    (tmp_path / "agent.py").write_text(f"""
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
""")

    async def test() -> None:
        async with opened(rig, {"mine": AgentConfig(command=[PYTHON, str(tmp_path / "agent.py")])}) as world:
            world.register(workflow="agent", options={"deadline_s": 2.0}, reward="last_number")
            world.executor.submit([world.lease(deadline_s=WAIT_S)])
            (group,) = await world.groups()
            error = group.trajectories[0].error
            assert error is not None
            assert (error.kind, "2 s" in error.message) == ("agent_timeout", True)
            pids = (tmp_path / "pids").read_text().split()
            assert len(pids) == 2
            await poll_until(lambda: not any(alive(pid) for pid in pids), WAIT_S, "all are gone")

    run(test())


@pytest.mark.parametrize(
    ("agents", "options", "words"),
    [
        ({}, {"agent": "nobody"}, "options.agent: 'nobody' is not in raas.agents; known: one"),
        ({}, {"score": "reward"}, "names no reward function"),
        ({}, {"score": "exit"}, "has no command"),
        ({}, {"credit": "team"}, "'team' is not one of shared, own"),
        ({"two": AgentConfig(url="http://x")}, {}, "options.agent: '' is not in raas.agents; known: one, two"),
        ({"one": AgentConfig()}, {}, "raas.agents.one: nothing is given, expected one of command, function, url"),
        ({"one": AgentConfig(url="x", command=["y"])}, {}, "raas.agents.one: command, url is given"),
        ({"one": AgentConfig(url="x.org")}, {}, "raas.agents.one.url: 'x.org': expected http://"),
        ({"one": AgentConfig(command=["a", "{0}"])}, {}, "raas.agents.one.command: '{0}': {0} names no field"),
        ({"one": AgentConfig(function="gateway_agents:tool_loop")}, {}, "is no `async def`"),
        ({"one": AgentConfig(function="gateway_agents:nobody")}, {}, "has no 'nobody'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_agent_that_cannot_be_run_is_refused_with_what_is_wrong(rig, agents, options, words):
    async def test() -> None:
        world = rig(agents={"one": AgentConfig(function="gateway_agents:playing"), **agents})
        with pytest.raises(UserError) as caught:
            world.register(workflow="agent", options=options)
        assert words in str(caught.value)

    run(test())


def alive(pid: str) -> bool:
    """Not a process that only waits to be reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_engine_that_dies_runs_the_episode_again(rig):
    async def test() -> None:
        async with opened(rig, fail_requests=[0]) as world:
            runs: list[str] = []

            async def play(task: dict[str, Any], url: str, key: str) -> None:
                runs.append(url)
                async with client(key) as http:
                    await http.post(f"{url}/chat/completions", json=say(("user", "2 + 3 =")))

            group = await played(world, play)
            assert (group.trajectories[0].error, len(set(runs))) == (None, 2)
            assert world.executor.counts["raas/episode_retries"] == 1

    run(test())


def test_a_remote_agent_is_told_and_reports_by_posting(rig):
    async def test() -> None:
        told: list[dict[str, Any]] = []
        working: list[asyncio.Task[None]] = []

        async def work(note: dict[str, Any]) -> None:
            await post(f"{note['base_url']}/chat/completions", note["api_key"], say(("user", note["task"]["prompt"])))
            await post(f"{note['base_url']}/reward", note["api_key"], {"reward": 0.5, "credit": {"default": 0.25}})

        async def remote(scope: Any, receive: Any, send: Any) -> None:
            told.append(json.loads((await receive())["body"]))
            working.append(asyncio.ensure_future(work(told[-1])))
            await send({"type": "http.response.start", "status": 202, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        other = Server("other", NoApi, {}, new_identity("r"), extra_routes=[Mount("/go", app=remote)])
        await other.start()
        try:
            async with opened(rig, {"far": AgentConfig(url=f"{other.url}/go/")}) as world:
                world.register(workflow="agent", options={"score": "posted", "credit": "own"})
                world.executor.submit([world.lease(deadline_s=WAIT_S)])
                (group,) = await world.groups()
                (member,) = group.trajectories
                assert (member.error, member.reward) == (None, 0.5)
                assert [segment.credit for segment in member.segments] == [{"default": 0.25}]
                assert told[0]["models"] == ["default"]
        finally:
            await other.stop(1.0)

    run(test())
