"""What `astraflow doctor` looks at in a model directory: do engine and trainer read the same tokens and the same names?"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from astraflow.config.experiment import Experiment
from astraflow.lib.aio import one_line
from astraflow.lib.tokenizer import Tokenizer, flat_ids
from astraflow.protocol.errors import ConfigError, LayoutMismatch, UserError
from astraflow.raas.engines.embedded_arch import eos_ids, read_architecture, read_json, unsupported
from astraflow.tools.doctor import Line
from astraflow.weights.config import ModelConfig

PLAIN = ("The answer is 42.", " two  spaces,\ttab\nline", "x² + é — 数学 🙂", "<think>7</think>\n\n\\boxed{\\frac{3}{4}}", "a" * 70)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "2 + 2 ="}],
    [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2 ="}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": " c "}],
)
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def examine_model(policy: str, model: ModelConfig, experiment: Experiment) -> Iterator[Line]:
    """All lines of one policy."""
    directory = Path(model.path).expanduser()
    tokenizer = Tokenizer.load(Path(model.tokenizer_path).expanduser() if model.tokenizer_path else directory)
    yield from special_ids(policy, tokenizer, directory)
    yield turn_end(policy, tokenizer)
    yield same_ids(policy, tokenizer, directory)
    yield from names(policy, directory, experiment)
    yield from dtypes(policy, model, experiment, header(directory))


# --- tokens -------------------------------------------------------------------------------------------------------------


def special_ids(policy: str, tokenizer: Tokenizer, directory: Path) -> Iterator[Line]:
    """Ends of sequence of the engine (the model's own files) and of the tokenizer that prompts and masks are made with."""
    engine, size = eos_ids(directory), read_json(directory / "config.json").get("vocab_size")
    ends = list(tokenizer.eos_ids)
    check = f"special ids {policy}"
    if not ends:
        yield Line("FAIL", check, "no end-of-sequence id", "name one in generation_config.json (eos_token_id): answers would never end")
    elif not set(engine) <= set(ends):
        yield Line("FAIL", check, f"the model ends at {engine}, its tokenizer at {ends}", "give both the same eos_token_id")
    else:
        yield Line("OK", check, f"generations end at {ends}")
    biggest = max([tokenizer.vocab_size - 1, *ends])
    if isinstance(size, int) and biggest >= size:
        todo = "the tokenizer belongs to another model (models.<policy>.tokenizer_path)"
        yield Line("FAIL", f"vocabulary {policy}", f"token ids up to {biggest}, the model has {size}", todo)


def turn_end(policy: str, tokenizer: Tokenizer) -> Line:
    """The token that closes an assistant's turn must end a generation, or every answer runs into its limit."""
    check = f"chat template {policy}"
    if not tokenizer.has_chat_template:
        return Line("WARN", check, "none", "data sets with `messages` cannot be used; give the model a chat_template.jinja")
    try:
        before = tokenizer.render(CHATS[0])
        whole = tokenizer.render([*CHATS[0], {"role": "assistant", "content": "4"}], add_generation_prompt=False)
    except (UserError, ConfigError) as error:
        return Line("FAIL", check, one_line(error))
    tail = tokenizer.encode(whole[whole.rindex("4") + 1 :])
    if whole.startswith(before) and set(tail) & set(tokenizer.eos_ids):
        return Line("OK", check, "an assistant's turn closes with an end token")
    if not whole.startswith(before):
        return Line("WARN", check, "a turn does not begin as its generation prompt ends", "later turns see other tokens than were sampled")
    shown = tokenizer.decode(tail[:1], skip_special=False)
    return Line("WARN", check, f"a turn closes with {shown!r}, which ends no generation", "add it to the model's eos_token_id")


def same_ids(policy: str, tokenizer: Tokenizer, directory: Path) -> Line:
    """Our reading against that of transformers, which trainers and servers of others use."""
    check = f"tokenizer {policy}"
    if importlib.util.find_spec("transformers") is None:
        return Line("WARN", check, "not compared: transformers is not installed here", "pip install 'astraflow[train]'")
    from transformers import AutoTokenizer

    auto: Any = AutoTokenizer
    theirs = auto.from_pretrained(directory)
    for text in PLAIN:
        ids = flat_ids(theirs(text, add_special_tokens=False))
        if tokenizer.encode(text) != ids:
            return Line("FAIL", check, f"{text[:20]!r} is {tokenizer.encode(text)[:8]} here and {ids[:8]} in the model's own files", _OTHER)
    for chat in CHATS if tokenizer.has_chat_template else ():
        try:
            ids = flat_ids(theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True))
            mine = tokenizer.chat(chat)
        except (UserError, ValueError) as error:
            return Line("WARN", check, f"{len(chat)} messages cannot be rendered: {one_line(error)}", "use other roles in the data")
        if mine != ids:
            return Line("FAIL", check, f"{len(chat)} messages are {len(mine)} tokens here, {len(ids)} in the model's own files", _OTHER)
    return Line("OK", check, f"{len(PLAIN)} texts and {len(CHATS)} chats have the same ids in rollout service, trainer and transformers")


_OTHER = "engine and trainer would read different tokens; use one tokenizer directory (models.<policy>.tokenizer_path)"


# --- weights ------------------------------------------------------------------------------------------------------------


def header(directory: Path) -> dict[str, dict[str, Any]]:
    """Tensor name → dtype and shape, of all safetensors files of a directory."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            found |= json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    found.pop("__metadata__", None)
    return found


def parameters(directory: Path) -> int:
    """Words of the model's tensors."""
    return sum(math.prod(entry["shape"]) for entry in header(directory.expanduser()).values())


def names(policy: str, directory: Path, experiment: Experiment) -> Iterator[Line]:
    """Names and shapes that engine and trainer expect, against those of the files. No weight is read."""
    if importlib.util.find_spec("torch") is None:
        yield Line("WARN", f"name map {policy}", "not compared: torch is not installed here", "pip install 'astraflow[train]'")
        return
    if experiment.raas.engine_of(policy).kind == "embedded":
        yield engine_names(policy, directory)
    if policy in experiment.trainer:
        yield trainer_names(policy, directory)


def engine_names(policy: str, directory: Path) -> Line:
    import torch

    from astraflow.raas.engines.embedded_weights import Weights, check_layout, open_tensors

    check = f"engine {policy}"
    arch = read_architecture(directory)
    if arch is None:
        why = unsupported(read_json(directory / "config.json"))
        return Line("WARN", check, f"{why}: computed by transformers, slowly", "use raas.engine.kind vllm or sglang")
    wanted = Weights(arch, torch.bfloat16, torch.device("meta")).shapes
    try:
        with open_tensors(directory) as files:
            check_layout(wanted, files, directory)
    except LayoutMismatch as error:
        return Line("FAIL", check, one_line(error), "config.json and weights belong to different models")
    return Line("OK", check, f"{len(wanted)} tensors have the names and shapes that the embedded engine expects")


def trainer_names(policy: str, directory: Path) -> Line:
    check = f"trainer {policy}"
    if importlib.util.find_spec("transformers") is None:
        return Line("WARN", check, "not compared: transformers is not installed here", "pip install 'astraflow[train]'")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            module = auto.from_config(AutoConfig.from_pretrained(directory))
    except (ValueError, KeyError, OSError) as error:
        return Line("FAIL", check, f"transformers does not know the model: {one_line(error)[:200]}", "install a newer transformers")
    wanted = {name: list(tensor.shape) for name, tensor in module.named_parameters()}
    found = {name: entry["shape"] for name, entry in header(directory).items()}
    wrong = [name for name, shape in wanted.items() if found.get(name) != shape]
    if wrong:
        what = f"{len(wrong)} of {len(wanted)} parameters are not in the files under their names and shapes, first {wrong[0]}"
        return Line("FAIL", check, what, "config.json and weights belong to different models")
    return Line("OK", check, f"{len(wanted)} parameters have the names and shapes of the files")


def dtypes(policy: str, model: ModelConfig, experiment: Experiment, tensors: Mapping[str, Mapping[str, Any]]) -> Iterator[Line]:
    """Stored, published, and computed with."""
    check, published = f"dtype {policy}", experiment.weights.dtype
    stored = sorted({DTYPES.get(entry["dtype"], entry["dtype"]) for entry in tensors.values()})
    settings = experiment.raas.engine_of(policy)
    engine = settings.dtype or model.dtype
    text = f"stored {', '.join(stored)}; published {published}; engine {engine}, trainer {model.dtype}"
    if engine != model.dtype:
        yield Line("WARN", check, text, "engine and trainer round differently: log-probs disagree at lag 0 (mismatch/*)")
    elif engine != "float32" and settings.device != "cuda" and not _gpu():
        yield Line("WARN", check, text, "16-bit products are 4–8 times slower on most CPUs: set models.<policy>.dtype to float32")
    elif stored == ["float32"] and published != "float32":
        yield Line("OK", check, f"{text}; version 0 is the files' words rounded")
    else:
        yield Line("OK", check, text)
    if settings.device == "cuda" and not _gpu():
        yield Line("FAIL", f"device {policy}", "raas.engine.device is cuda, and torch sees no GPU here", "use auto or cpu")


def _gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())
