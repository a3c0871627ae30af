from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from astraflow.lib.auth import given_token, load_or_make_token, read_token, same_token, token_required
from astraflow.protocol.errors import ConfigError


def test_a_token_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    token = load_or_make_token(path)
    assert len(token) >= 32
    assert load_or_make_token(path) == token == read_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


def test_processes_that_start_at_once_agree_on_the_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: load_or_make_token(tmp_path / "token"), range(32)))
    assert len(tokens) == 1


@pytest.mark.parametrize("content", ["", "\n", "two words\n", "é"])
def test_a_token_file_without_a_token_is_refused_by_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="token"):
        load_or_make_token(path)


def test_tokens_are_compared_whole_and_any_text_may_be_given() -> None:
    assert same_token("secret", "secret")
    for wrong in ("", "secre", "secrets", "SECRET", "é\udcff"):
        assert not same_token(wrong, "secret")


def test_only_loopback_goes_without_a_token() -> None:
    assert not token_required("127.0.0.1")
    assert not token_required("::1")
    assert token_required("0.0.0.0")
    assert token_required("10.1.2.3")


def test_the_token_is_also_the_password_of_an_address() -> None:
    """Clients that can only be given `http://any:TOKEN@host:port` send it as Basic."""
    basic = base64.b64encode(b"any:a:token").decode()
    headers = {"Bearer x": "x", "bearer  x ": "x", f"Basic {basic}": "a:token", "Basic !": "", "Basic /w==": "", "Digest x": "", "": ""}
    assert {header: given_token(header) for header in headers} == headers
