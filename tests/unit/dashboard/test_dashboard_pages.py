"""The page beside a real Dataflow: what it says is what /status says, and nobody gets at it without the token."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from astraflow.dashboard.live import Live
from astraflow.dashboard.serve import page_url, viewer_of
from astraflow.dataflow.reasons import REASONS
from astraflow.lib.wire import new_identity
from astraflow.protocol.errors import ConfigError

_spec = importlib.util.spec_from_file_location("dashboard_rundir_pages", Path(__file__).with_name("rundir.py"))
assert _spec is not None
assert _spec.loader is not None
made: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)

AGES = ("uptime_s", "idle_s", "metrics", "rates", "waits")
"""Fields of a status that move by themselves."""
DATA = ("live", "series", "rollouts", "rollout", "group", "export", "act", "nothing")


def scene(run_dir: Path, play: Callable[[Any, httpx.AsyncClient], Awaitable[None]], token: str = "") -> None:
    async def whole() -> None:
        bench = await made.dataflow(run_dir, token)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with httpx.AsyncClient(base_url=bench.service.server.url, headers=headers, trust_env=False, timeout=60) as http:
            await play(bench, http)
        await made.leave(bench)

    made.run(whole)


def still(status: dict[str, Any]) -> dict[str, Any]:
    """Without what moves by itself."""
    parts = {name: [{**row, "last_seen_s": 0} for row in status[name]] for name in ("trainers", "instances")}
    return {key: value for key, value in status.items() if key not in AGES} | parts


def test_the_live_view_is_the_status_and_says_drops_in_words(tmp_path: Path) -> None:
    async def play(bench: Any, http: httpx.AsyncClient) -> None:
        leases = await bench.fates()
        seen, status = (await http.get("/view/live")).json(), (await http.get("/status")).json()
        assert seen["live"]
        assert still(seen["status"]) == still(status)
        assert {edge["who"] for edge in seen["status"]["waits"]} == {edge["who"] for edge in status["waits"]}
        assert seen["counts"] == status["ledger"]
        assert [(drop["lease_id"], drop["reason"], drop["why"]) for drop in seen["drops"]] == [
            (leases[2], "zero_variance", REASONS["zero_variance"]),
            (leases[3], "unscored", REASONS["unscored"]),
        ]

    scene(tmp_path, play)


def test_without_the_token_there_is_a_page_and_no_data(tmp_path: Path) -> None:
    async def play(bench: Any, http: httpx.AsyncClient) -> None:
        async with httpx.AsyncClient(base_url=bench.service.server.url, trust_env=False, timeout=60) as stranger:
            for path in DATA:
                method = "POST" if path == "act" else "GET"
                for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "token=secret-token"}):
                    answer = await stranger.request(method, f"/view/{path}?token=secret-token", headers=wrong)
                    assert answer.status_code == 401, path
            for name in ("", "main.js", "page.css"):
                answer = await stranger.get(f"/dashboard/{name}")
                assert answer.status_code == 200, name
                assert "secret-token" not in answer.text
            for sly in ("/dashboard/../status", "/dashboard/..%2f..%2fview/live", "/dashboard//view/live", "/dashboardx"):
                assert (await stranger.get(sly)).status_code in (401, 404), sly
        assert (await http.get("/view/live")).json()["live"]

    scene(tmp_path, play, token="secret-token")


def test_every_answer_forbids_foreign_scripts_and_no_path_leads_out(tmp_path: Path) -> None:
    async def play(bench: Any, http: httpx.AsyncClient) -> None:
        for path in ("/dashboard/", "/dashboard/main.js", "/view/live", "/view/nothing", "/view/rollout?place=x", "/dashboard/nothing"):
            headers = (await http.get(path)).headers
            policy = headers["content-security-policy"]
            assert "default-src 'self'" in policy
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
        page = (await http.get("/dashboard/")).text
        assert " style=" not in page
        assert "<script>" not in page
        assert "://" not in page, "nothing of another host"
        for path in ("..%2fapp.py", "%2e%2e/app.py", "..%5capp.py", "/etc/passwd", "....//app.py"):
            assert (await http.get(f"/dashboard/{path}")).status_code == 404, path
        for place in ("../config", "..%2F..%2Fetc%2Fpasswd", "/etc/passwd", "r/../../dataflow"):
            assert (await http.get(f"/view/rollout?place={place}")).status_code == 404, place
        rebound = await http.get("/view/live", headers={"Host": "evil.example"})
        assert (rebound.status_code, "evil.example" in rebound.text) == (401, True)

    (tmp_path / "config.json").write_text("{}")
    scene(tmp_path, play)


def test_buttons_do_what_they_say_and_only_for_this_page(tmp_path: Path) -> None:
    async def play(bench: Any, http: httpx.AsyncClient) -> None:
        async def act(**values: str) -> httpx.Response:
            return await http.post("/view/act", json=values)

        assert bench.service.acquisition._blocked() is None
        assert (await act(action="pause")).status_code == 200
        assert (await http.get("/status")).json()["paused"]
        assert bench.service.acquisition._blocked() == ("operator", "acquisition is paused")
        bench.service.guard._watch.limit_s = 1e-6
        assert [bench.service.guard.look() for _ in "12"] == [False, False], "somebody wants it to stand still, so it is no stall"
        assert (await act(action="resume")).status_code == 200
        assert [bench.service.guard.look() for _ in "12"] == [False, True], "now it would be one"
        assert bench.service.acquisition._blocked() is None
        assert "no validation set" in (await act(action="eval")).json()["said"]
        assert str(bench.shelf.ledger.path) in (await act(action="save")).json()["said"]
        refused = await act(action="checkpoint", model="nobody")
        assert (refused.status_code, "nobody" in refused.json()["message"]) == (409, True)
        unknown = await act(action="drain", instance="x")
        assert (unknown.status_code, unknown.json()["message"]) == (400, "instance: 'x' is not in the pool; known: r")
        assert (await act(action="explode")).status_code == 422
        body = json.dumps({"action": "pause"})
        for headers in ({"Content-Type": "text/plain"}, {"Content-Type": "application/json", "Origin": "http://evil.example"}):
            assert (await http.post("/view/act", content=body, headers=headers)).status_code in (401, 422)
        assert (await http.post("/view/act", content=b" " * 5000, headers={"Content-Type": "application/json"})).status_code == 413
        assert not (await http.get("/status")).json()["paused"]
        assert (await act(action="drain", instance="r")).status_code == 200
        assert bench.shelf.pool.instances["r"].state in ("draining", "gone")

    scene(tmp_path, play)


def test_bad_questions_get_one_line_that_names_the_field(tmp_path: Path) -> None:
    async def play(bench: Any, http: httpx.AsyncClient) -> None:
        for path, said in {
            "rollouts?size=999": "size", "rollouts?sise=1": "sise", "rollouts?reward_min=nan": "reward_min", "rollouts?order=odd": "order",
            "rollouts?tokens_min=99999999999999999999": "tokens_min", "rollouts?page=-1": "page", "series?since=-1": "since",
            "series?since=%C2%B2": "since", f"rollouts?q={'x' * 1001}": "q",
        }.items():  # fmt: skip
            answer = await http.get(f"/view/{path}")
            assert answer.status_code == 400, path
            assert said in answer.json()["message"], path
            assert "\n" not in answer.json()["message"]

    scene(tmp_path, play)


def test_who_views_a_directory_has_the_id_and_the_token_of_its_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the directory of a run"):
        viewer_of(tmp_path)
    (tmp_path / "config.yaml").write_text("experiment: {run_id: one-12}\n")
    assert (viewer_of(tmp_path).run_id, viewer_of(tmp_path).token) == ("one-12", "")
    (tmp_path / "token").write_text("secret\n")
    assert viewer_of(tmp_path).token == "secret"
    assert page_url("http://127.0.0.1:1", "secret") == "http://127.0.0.1:1/dashboard/#token=secret"
    (tmp_path / "other").write_text("another\n")
    (tmp_path / "config.yaml").write_text(f"experiment: {{run_id: one-12}}\nlaunch: {{token_file: {tmp_path / 'other'}}}\n")
    assert viewer_of(tmp_path).token == "another"
    assert viewer_of(tmp_path, str(tmp_path / "token")).token == "secret"


def test_a_run_that_is_over_is_told_from_what_it_left(tmp_path: Path) -> None:
    async def whole() -> None:
        bench = await made.dataflow(tmp_path)
        await bench.fates()
        counts = bench.shelf.ledger.snapshot
        await made.leave(bench)
        live = Live(tmp_path, new_identity("r"))
        seen = await live.look()
        await live.close()
        assert not seen["live"]
        assert "Dataflow does not answer" in seen["note"]
        assert seen["status"] is None
        assert (seen["counts"]["made"], seen["counts"]["dropped"]) == (counts.made, counts.dropped)

    made.run(whole)
