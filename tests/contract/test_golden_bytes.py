"""Golden bytes: the exact bytes of every message, so that a change of the contract is a visible change of this directory.

`python tests/contract/test_golden_bytes.py --write` writes `golden.json` again; say in the commit why the bytes changed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

import astraflow.protocol
from astraflow.protocol import codec
from astraflow.protocol.errors import BadMessage

GOLDEN = Path(__file__).with_name("golden.json")


def structs() -> dict[str, type[msgspec.Struct]]:
    """Every Struct that is defined in `protocol`, by name."""
    found: dict[str, type[msgspec.Struct]] = {}
    for module_info in pkgutil.iter_modules(astraflow.protocol.__path__):
        module = importlib.import_module(f"astraflow.protocol.{module_info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__:
                assert value.__name__ not in found, f"two messages are called {value.__name__}"
                found[value.__name__] = value
    return dict(sorted(found.items()))


STRUCTS = structs()
FIXED: dict[str, Any] = {"run_id": "run-1", "incarnation": "0123456789abcdef", "protocol_version": 1}


def sample(kind: inspect.Type, name: str, json_text: bool, every_field: bool = True) -> Any:
    """A value of this type, always the same: numbers are small, texts repeat the field's name."""
    match kind:
        case inspect.StructType(cls=cls) if cls is codec.Column:
            return codec.Column("int32", (2,), bytes(range(8)))
        case inspect.StructType(cls=cls, fields=fields):
            chosen = [field for field in fields if every_field or field.required]
            return cls(**{field.name: FIXED.get(field.name, sample(field.type, field.name, json_text)) for field in chosen})
        case inspect.UnionType(types=types):
            return sample(next(item for item in types if not isinstance(item, inspect.NoneType)), name, json_text)
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.ListType(item_type=item):
            return [sample(item, name, json_text)]
        case inspect.VarTupleType():
            return (2, 3)
        case inspect.TupleType(item_types=items):
            return tuple(sample(item, name, json_text) for item in items)
        case inspect.DictType(key_type=key, value_type=value):
            return {sample(key, "key", json_text): sample(value, name, json_text)}
        case inspect.RawType():
            return msgspec.Raw(b'{"raw":1}' if json_text else codec.encode({"raw": 1}))
        case inspect.AnyType():
            return {"any": [1, 0.5, None, "größe"]}
        case inspect.StrType():
            return name
        case inspect.BytesType():
            return b"\x00\xff"
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 7
        case inspect.FloatType():
            return 0.5
    raise AssertionError(f"{name}: no sample for {kind}")


def make(name: str, json_text: bool, every_field: bool = True) -> Any:
    return sample(inspect.type_info(STRUCTS[name]), name, json_text, every_field)


def golden() -> dict[str, dict[str, str]]:
    """Name → bytes with every field set, and with the required ones only (which pins the defaults)."""
    return {
        name: {
            "msgpack": codec.encode(make(name, False)).hex(),
            "json": codec.encode_json(make(name, True)).decode(),
            "required_only": codec.encode_json(make(name, True, every_field=False)).decode(),
        }
        for name in STRUCTS
    }


def written() -> dict[str, dict[str, str]]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_the_golden_file_lists_every_message() -> None:
    assert sorted(written()) == list(STRUCTS)
    assert len(STRUCTS) > 60


@pytest.mark.parametrize("name", STRUCTS)
def test_bytes_are_the_golden_ones(name: str) -> None:
    assert golden()[name] == written()[name], "the contract changed: see the docstring of this file"


@pytest.mark.parametrize("name", STRUCTS)
def test_what_is_encoded_is_decoded_again(name: str) -> None:
    for every_field in (True, False):
        for json_text, encode, decode in ((False, codec.encode, codec.decode), (True, codec.encode_json, codec.decode_json)):
            message = make(name, json_text, every_field)
            data = encode(message)
            again = decode(data, STRUCTS[name])
            assert encode(again) == data
            if name not in ("Delivery", "PullReply"):  # Raw compares by identity
                assert again == message


@pytest.mark.parametrize("name", STRUCTS)
def test_a_field_of_tomorrow_is_skipped_and_a_new_field_takes_its_default(name: str) -> None:
    kind = STRUCTS[name]
    for json_text, encode, decode in ((False, codec.encode, codec.decode), (True, codec.encode_json, codec.decode_json)):
        data = encode(make(name, json_text))
        read: Any = msgspec.json.decode(data) if json_text else msgspec.msgpack.decode(data)
        newer = encode(read | {"field_of_tomorrow": {"nested": [1]}})
        assert encode(decode(newer, kind)) == data
        tomorrow: Any = msgspec.defstruct(name, [("field_of_tomorrow", int, 5)], bases=(kind,), kw_only=True)
        assert decode(data, tomorrow).field_of_tomorrow == 5
        for field in inspect.type_info(kind).fields:  # type: ignore[attr-defined]
            older = encode({key: value for key, value in read.items() if key != field.encode_name})
            if field.required:
                with pytest.raises(BadMessage, match=field.encode_name):
                    decode(older, kind)
            else:
                decode(older, kind)


@pytest.mark.parametrize("name", STRUCTS)
def test_a_wrong_type_names_the_path_of_its_field(name: str) -> None:
    data = msgspec.msgpack.decode(codec.encode(make(name, False)))
    for field in inspect.type_info(STRUCTS[name]).fields:  # type: ignore[attr-defined]
        if isinstance(field.type, inspect.RawType):
            continue
        with pytest.raises(BadMessage, match=rf"^{name}: .*\$\.{field.encode_name}"):
            codec.decode(codec.encode(data | {field.encode_name: msgspec.msgpack.Ext(5, b"x")}), STRUCTS[name])


def only_bad_message(data: bytes, kind: type[Any]) -> None:
    for decode in (codec.decode, codec.decode_json):
        with contextlib.suppress(BadMessage):
            decode(data, kind)


@given(st.binary(max_size=200), st.sampled_from(list(STRUCTS)))
def test_random_bytes_are_bad_messages_and_nothing_else(data: bytes, name: str) -> None:
    only_bad_message(data, STRUCTS[name])


@given(st.data())
def test_damaged_messages_are_bad_messages_and_nothing_else(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(STRUCTS)))
    json_text = data.draw(st.booleans())
    message = bytearray((codec.encode_json if json_text else codec.encode)(make(name, json_text)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(message) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                message[place] = data.draw(st.integers(0, 255))
            case "cut" if place > 0:
                del message[place:]
            case _:
                message[place:place] = data.draw(st.binary(max_size=9))
    only_bad_message(bytes(message), STRUCTS[name])


@given(st.binary(max_size=8), st.sampled_from([0xDE, 0xDF, 0xDC, 0xDD, 0xC6, 0xC9, 0xDB]), st.sampled_from(list(STRUCTS)))
def test_announced_lengths_without_their_content_are_bad_messages(tail: bytes, marker: int, name: str) -> None:
    only_bad_message(bytes([marker, 0xFF, 0xFF, 0xFF, 0xFF]) + tail, STRUCTS[name])
    only_bad_message(bytes([0x81, 0xA7]) + b"message" + bytes([marker, 0x7F, 0xFF, 0xFF, 0xFF]) + tail, STRUCTS[name])


def test_nesting_without_end_is_a_bad_message() -> None:
    lease = codec.encode(make("Lease", False))
    assert lease.count(b"\xa4data\x81") == 1
    for bottom in (b"\x91" * 100_000, b"\x81\xa1a" * 100_000):
        damaged = lease.replace(b"\xa4data\x81", b"\xa4data\x82\xa1x" + bottom)
        with pytest.raises(BadMessage):
            codec.decode(damaged, STRUCTS["Lease"])
    with pytest.raises(BadMessage):
        codec.decode_json(b'{"config": ' + b"[" * 100_000, STRUCTS["ConfigReply"])


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: test_golden_bytes.py --write"
    GOLDEN.write_text(json.dumps(golden(), indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
