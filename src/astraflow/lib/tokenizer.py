"""Text to token ids and back for one model directory, without torch: `tokenizers` plus the model's own chat template.

Chat templates come with downloaded models and are code, so they run in jinja2's immutable sandbox, with the globals that
transformers gives them (`raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls, `{% generation %}`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers
import xxhash
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from astraflow.protocol.errors import ConfigError, UserError

NO_LIMIT = 1 << 30
"""`context_length` of a model that names none."""
SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one model. Safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer, special: Mapping[str, str], templates: Mapping[str, str], configs: Mapping[str, Any]):
        """`special`: role → token text; `templates`: name → chat template; `configs`: file stem → parsed JSON. Prefer `load`."""
        backend.no_padding()
        backend.no_truncation()  # a limit left in tokenizer.json would cut prompts silently
        self._backend = backend
        self._special = dict(special)
        self._templates = dict(templates)
        self._configs = configs
        self.bos_id = self._id(special.get("bos_token"))
        self.eos_ids = _eos_ids(configs, self._id(special.get("eos_token")))
        self.pad_id = _first_int(self._id(special.get("pad_token")), configs["config"].get("pad_token_id"), *self.eos_ids, 0)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.context_length = _context_length(configs)

    @classmethod
    def load(cls, model_dir: Path | str) -> Self:
        """From a Hugging Face directory (tokenizer.json is needed). Raises ConfigError naming the file that is missing or broken."""
        directory = Path(model_dir)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"tokenizer: {path} does not exist; expected a model directory with a tokenizer.json")
        configs = {name: _read_json(directory / f"{name}.json") for name in ("config", "generation_config", "tokenizer_config")}
        special = _special_tokens(_read_json(directory / "special_tokens_map.json"), configs["tokenizer_config"])
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except (ValueError, OSError) as error:
            raise ConfigError(f"tokenizer: {path}: {error}") from None
        return cls(backend, special, _templates(directory, configs["tokenizer_config"]), configs)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of a text. With `add_special` the model's leading and trailing tokens are added; BOS is never doubled."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        if add_special and self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; special tokens (end of turn, padding) are left out unless asked for."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_id(self, token: str) -> int | None:
        """Id of exactly this token, or None."""
        return self._id(token)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Token ids of a conversation. The template writes BOS itself where the model wants one, so none is added."""
        ids: list[int] = self._backend.encode(self.render(messages, tools, add_generation_prompt, **options), add_special_tokens=False).ids
        return ids[1:] if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id] else ids

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """Text of a conversation; `options` go to the template (`enable_thinking=False`). Raises UserError when it refuses."""
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise UserError("chat template: this model has none; give it a chat_template.jinja, or use `prompt` instead of `messages`")
        template = self._compiled[name]
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            text: str = template.render(
                messages=plain, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **{**self._special, **options}
            )
            return text
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"chat template: {type(error).__name__}: {error}") from None

    @cached_property
    def _compiled(self) -> dict[str, Any]:
        environment = _environment()
        try:
            return {name: environment.from_string(text) for name, text in self._templates.items()}
        except TemplateError as error:
            raise ConfigError(f"chat template: {error}") from None

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._templates

    @cached_property
    def hash(self) -> str:
        """xxh3-128 of the tokenizer's canonical content: equal for two files that differ in layout, padding or truncation only."""
        content = json.loads(self._backend.to_str())
        content["padding"] = content["truncation"] = None
        return _digest(content)

    @cached_property
    def template_hash(self) -> str:
        """xxh3-128 of the chat templates and the special tokens that they print."""
        return _digest({"templates": self._templates, "special": self._special})


def flat_ids(value: Any) -> list[int]:
    """Token ids from whatever a tokenizer returned: a list or array of ids, `[[…]]` of one row, or a mapping with `input_ids`.

    Raises UserError for several rows, text or anything that is not whole numbers (case G19).
    """
    if hasattr(value, "input_ids") or isinstance(value, Mapping):
        inner = value["input_ids"] if isinstance(value, Mapping) and "input_ids" in value else getattr(value, "input_ids", None)
        if inner is None:
            raise UserError(f"token ids: a mapping without input_ids (it has {', '.join(map(str, value))})")
        return flat_ids(inner)
    if hasattr(value, "ids") and not callable(value.ids):  # tokenizers.Encoding
        return flat_ids(value.ids)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise UserError(f"token ids: expected a list of ids or a mapping with input_ids, got {type(value).__name__}")
    if value and hasattr(value[0], "__len__"):
        if len(value) != 1:
            raise UserError(f"token ids: {len(value)} rows of {type(value[0]).__name__}, expected one flat list of ids")
        return flat_ids(value[0])
    for position, item in enumerate(value):
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise UserError(f"token ids: position {position} holds {item!r}, expected a whole number")
    return [int(item) for item in value]


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training masks; here it only prints its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"tokenizer: {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"tokenizer: {path}: expected a JSON object, got {type(content).__name__}")
    return content


def _special_tokens(tokens_map: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Role → text; tokenizer_config.json wins. A token is written as text or as an object with `content`."""
    found: dict[str, str] = {}
    for key in SPECIAL_KEYS:
        for source in (config, tokens_map):
            value = source.get(key)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                found[key] = text
                break
    return found


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name → chat template; files win over the entry of tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if templates:
        return templates
    entry = config.get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        return {item["name"]: item["template"] for item in entry}
    return dict(entry) if isinstance(entry, Mapping) else {}


def _eos_ids(configs: Mapping[str, Mapping[str, Any]], own: int | None) -> tuple[int, ...]:
    """All ids that end a generation, each once: generation_config, config (its text part too), the tokenizer's own (case G17)."""
    text_config = configs["config"].get("text_config")
    sources = [configs["generation_config"], configs["config"], text_config if isinstance(text_config, Mapping) else {}]
    found: list[int] = []
    for value in [*(source.get("eos_token_id") for source in sources), own]:
        found += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int) and item >= 0]
    return tuple(dict.fromkeys(found))


def _first_int(*values: Any) -> int:
    return next(value for value in values if isinstance(value, int))


def _context_length(configs: Mapping[str, Mapping[str, Any]]) -> int:
    config = configs["config"]
    text_config = config.get("text_config")
    parts = [config, text_config if isinstance(text_config, Mapping) else {}]
    named = [part.get(key) for part in parts for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
    lengths = [value for value in [*named, configs["tokenizer_config"].get("model_max_length")] if isinstance(value, int | float)]
    return min([int(value) for value in lengths if 0 < value < NO_LIMIT], default=NO_LIMIT)


def _digest(content: Any) -> str:
    canonical = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(canonical.encode("utf-8"))
