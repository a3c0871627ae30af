"""The engine in-process against Hugging Face forwards: logits, the version oracle and its mutants, updates, failures.

Tiny random models, so that every token can be recomputed under the published words of its own stamp.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from astraflow.protocol.errors import ConfigError
from astraflow.raas.engines import embedded_model
from astraflow.raas.engines.embedded_batch import Scheduler, Sequence, Slots, share
from astraflow.raas.engines.embedded_cache import PrefixCache
from astraflow.raas.engines.embedded_core import EmbeddedEngineCore
from astraflow.raas.engines.frames import Failed, Init, Loaded, LoadFailed
from astraflow.workflows.api import ModelRequest, ModelResponse

sys.path.insert(0, str(Path(__file__).parents[2]))
from oracle import MODELS, VOCABULARY, Published, finish, rollouts, worst_error


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])
def test_logits_equal_a_hugging_face_forward(tmp_path: Path, name: str) -> None:
    published = Published(tmp_path, name)
    core = published.core()
    generator = random.Random(0)
    shared = [generator.randrange(VOCABULARY) for _ in range(9)]
    rows = [[*shared[:cut], *(generator.randrange(VOCABULARY) for _ in range(extra))] for cut, extra in ((9, 1), (9, 30), (4, 6), (0, 150))]
    slots, sequences = Scheduler(Slots(8, 4096), 8), []
    for index, row in enumerate(rows):
        sequences.append(Sequence(str(index), ModelRequest(input_ids=row, max_new_tokens=1), row, len(row), frozenset(), epoch=1))
        slots.submit(sequences[-1])
    for resize in slots.admit()[1]:
        core.model.kv.resize(resize)
    segments = share(sequences)
    assert len(segments) > len(rows), "a run is shared"
    logits = core.model.forward(segments)
    order = [rows.index(segment.ends[0].tokens) for segment in segments if segment.ends]
    wanted = torch.stack([published.log_probs(0, rows)[index, len(rows[index]) - 1] for index in order])
    assert (logits - wanted).abs().max() < 1e-4


def test_ragged_prompts_attend_in_one_call_and_far_longer_ones_in_their_own(tmp_path: Path) -> None:
    published = Published(tmp_path)
    core = published.core()
    generator = random.Random(1)
    lengths = [20, 31, 24, 20, 120, 28, 29, 22, 30, 31]
    rows = [[generator.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    sequences = [Sequence(str(n), ModelRequest(input_ids=row, max_new_tokens=1), row, len(row), frozenset()) for n, row in enumerate(rows)]
    slots = Scheduler(Slots(16, 4096), 16)
    for sequence in sequences:
        slots.submit(sequence)
    for resize in slots.admit()[1]:
        core.model.kv.resize(resize)
    segments = share(sequences)
    blocks = core.model._prepare(segments).blocks
    assert [(block.count, block.queries, block.padded is not None) for block in blocks] == [(4, 31, True), (1, 120, False), (5, 31, True)]
    logits = core.model.forward(segments)
    wanted = torch.stack([row[length - 1] for row, length in zip(published.log_probs(0, rows), lengths, strict=True)])
    assert (logits - wanted).abs().max() < 1e-4


@pytest.fixture(scope="module")
def three_versions(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("versions"), versions=3)


class StalePrefixes(EmbeddedEngineCore):
    """Mutant: its prefix cache survives a weight load."""

    def make_cache(self, max_tokens: int) -> PrefixCache:
        class Stale(PrefixCache):
            def flush(self, epoch: int) -> None:
                self.epoch = epoch

        return Stale(max_tokens, copy=torch.clone)


def test_every_token_has_the_log_prob_of_its_own_version(three_versions: Published) -> None:
    core = three_versions.core()
    done = rollouts(core, three_versions)
    assert len(done) == 240
    for temperature in (0.7, 1.0, 1.3):
        assert sum(len(response.output_ids) for request, response in done if request.temperature == temperature) > 700
    assert core.counts["recomputed_tokens"] > 500
    assert core.counts["prefix_hit_tokens"] > 2000
    assert core.counts["shared_tokens"] > 500
    assert any(len(set(response.versions)) == 2 for _, response in done)
    for request, response in done:
        assert len(response.output_ids) == len(response.logprobs) == len(response.versions) == request.max_new_tokens
        assert (response.finish, response.timeline) == ("length", 1)
        assert response.versions == sorted(response.versions)
    assert worst_error(three_versions, done, list) < 1e-4
    # Stamps that are one token late are caught: those of the tokens around the switch.
    assert worst_error(three_versions, done, lambda stamps: [stamps[0], *stamps[:-1]]) > 1e-2


def test_a_kept_cache_fails_the_oracle_but_only_behind_the_switch(three_versions: Published) -> None:
    done = rollouts(three_versions.core(kv_on_update="keep"), three_versions)
    assert worst_error(three_versions, done, list) > 1e-2
    cuts: list[tuple[ModelRequest, ModelResponse]] = []
    for request, response in done:
        n = response.versions.count(response.versions[0])
        columns = {"output_ids": response.output_ids[:n], "logprobs": response.logprobs[:n], "versions": response.versions[:n]}
        cuts.append((request, ModelResponse(**columns, finish="length")))
    assert sum(len(cut.versions) < request.max_new_tokens for request, cut in cuts) > 20, "an update came in the middle of these"
    assert sum(len(cut.versions) for _, cut in cuts) > 1000
    assert worst_error(three_versions, cuts, list) < 1e-4


def test_stale_prefixes_fail_the_oracle(three_versions: Published) -> None:
    assert worst_error(three_versions, rollouts(three_versions.core(make=StalePrefixes), three_versions), list) > 1e-2


def test_chunked_prefill_and_a_crowded_cache_change_nothing(three_versions: Published) -> None:
    core = three_versions.core(prefill_tokens=13, prefix_cache_bytes=40 * 512)
    assert core.cache.max_tokens == 40
    assert worst_error(three_versions, rollouts(core, three_versions), list) < 1e-4


def test_a_next_turn_computes_only_what_is_new_until_weights_change(three_versions: Published) -> None:
    core = three_versions.core()

    def say(turn: str, context: list[int]) -> list[int]:
        """One model call; its context is checked token by token."""
        request = ModelRequest(input_ids=context, max_new_tokens=12, seed=len(context))
        assert core.submit(turn, request) is None
        response = finish(core)[turn]
        assert worst_error(three_versions, [(request, response)], list) < 1e-4
        return context + response.output_ids

    context = say("first", list(range(10, 40)))
    context = say("second", [*context, 50, 51, 52])
    # The last token of a turn is returned, never computed; all others are there.
    assert core.counts["prefix_hit_tokens"] == 30 + 12 - 1
    assert core.counts["prefill_tokens"] == 30 + 1 + 3
    three_versions.load(core, 1)
    say("third", [*context, 53])
    assert core.counts["prefix_hit_tokens"] == 30 + 12 - 1, "keys of other weights are not touched"


def test_fused_attention_computes_the_same(three_versions: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "EXPLICIT_SCORES", 0)
    assert worst_error(three_versions, rollouts(three_versions.core(), three_versions), list) < 1e-4


def test_bf16_compute_stays_near_the_published_words(three_versions: Published) -> None:
    core = three_versions.core(dtype="bfloat16")
    done = rollouts(core, three_versions)
    assert core.model.weights.norm.dtype == torch.bfloat16
    assert 1e-4 < worst_error(three_versions, done, list) < 0.5


def test_a_request_gets_the_same_tokens_alone_and_among_others(three_versions: Published) -> None:
    generator = random.Random(3)
    requests = [
        ModelRequest(
            input_ids=[generator.randrange(VOCABULARY) for _ in range(generator.randrange(1, 90))],
            max_new_tokens=generator.randrange(1, 60),
            seed=index,
            temperature=generator.choice([0.7, 1.3]),
            greedy=index % 5 == 0,
        )
        for index in range(16)
    ]
    together: dict[str, Any] = {}
    core = three_versions.core(max_slots=11)
    for index, request in enumerate(requests):
        assert core.submit(str(index), request) is None
        together |= finish(core, steps=index % 4)
    together |= finish(core)
    for index, request in enumerate(requests):
        alone = three_versions.core(prefix_cache_bytes=0)
        assert alone.submit("x", request) is None
        answer = finish(alone)["x"]
        assert answer.output_ids == together[str(index)].output_ids
        assert answer.logprobs == pytest.approx(together[str(index)].logprobs, abs=1e-4)


def test_budgets_and_stamps_are_exact_across_updates(three_versions: Published) -> None:
    core = three_versions.core()
    for index in range(5):
        assert core.submit(str(index), ModelRequest(input_ids=[5, 6], max_new_tokens=8 + index, seed=index)) is None
    answers = finish(core, steps=5)
    three_versions.load(core, 1)
    answers |= finish(core, steps=3)
    three_versions.load(core, 2)
    answers |= finish(core)
    for index in range(5):
        assert answers[str(index)].versions == [0] * 5 + [1] * 3 + [2] * index
        assert answers[str(index)].finish == "length"


def test_every_end_token_of_the_model_and_of_the_request_ends_a_sequence_g17(three_versions: Published) -> None:
    core = three_versions.core(eos_ids=None)
    assert core.eos_ids == {2, 7}
    for index in range(60):
        assert (
            core.submit(str(index), ModelRequest(input_ids=[2, 9, 2], max_new_tokens=40, seed=index, stop_ids=[11], temperature=3.0))
            is None
        )
    ends = {2: 0, 7: 0, 11: 0}
    for response in finish(core).values():
        last = response.output_ids[-1]
        assert not {2, 7, 11} & set(response.output_ids[:-1])
        assert response.finish == ("stop" if last in ends else "length")
        if last in ends:
            ends[last] += 1
    assert all(ends.values()), ends


def test_a_cancelled_request_frees_its_slot_at_once(three_versions: Published) -> None:
    core = three_versions.core(max_slots=2)
    for index in range(3):
        core.submit(str(index), ModelRequest(input_ids=[5], max_new_tokens=50, seed=index))
    finish(core, steps=2)
    assert [one.id for one in core.scheduler.running] == ["0", "1"]
    answer = core.cancel("0")
    assert isinstance(answer, Failed)
    assert answer.kind == "cancelled"
    assert core.cancel("0") is None
    finish(core, steps=1)
    assert [one.id for one in core.scheduler.running] == ["1", "2"]
    assert core.cancel("2") is not None
    answers = finish(core)
    assert list(answers) == ["1"]
    assert len(answers["1"].output_ids) == 50


def test_a_bad_request_fails_alone(three_versions: Published) -> None:
    core = three_versions.core(load=False)
    good = ModelRequest(input_ids=[5], max_new_tokens=3)
    early = core.submit("early", good)
    assert early is not None
    assert early.kind == "not_loaded"
    three_versions.load(core, 0)
    assert core.submit("good", good) is None
    refused = {
        "good": (good, "bad_request"),
        "empty": (ModelRequest(input_ids=[], max_new_tokens=3), "bad_request"),
        "unknown id": (ModelRequest(input_ids=[5, VOCABULARY], max_new_tokens=3), "bad_request"),
        "no budget": (ModelRequest(input_ids=[5], max_new_tokens=0), "bad_request"),
        "cold": (ModelRequest(input_ids=[5], max_new_tokens=3, temperature=-1.0), "bad_request"),
        "long": (ModelRequest(input_ids=[5] * 510, max_new_tokens=3), "overlong"),
    }
    for name, (request, kind) in refused.items():
        answer = core.submit(name, request)
        assert answer is not None, name
        assert answer.kind == kind
    assert core.submit("exact", ModelRequest(input_ids=[5] * 509, max_new_tokens=3)) is None
    answers = finish(core)
    assert {name: len(answer.output_ids) for name, answer in answers.items()} == {"good": 3, "exact": 3}


def test_weights_that_are_not_finite_fail_requests_and_the_next_load_heals(three_versions: Published, tmp_path: Path) -> None:
    words = {name: parameter.detach().clone() for name, parameter in three_versions.models[0].named_parameters()}
    words["model.layers.0.input_layernorm.weight"].fill_(float("nan"))
    save_file(words, tmp_path / "nan.safetensors")
    core = three_versions.core()
    assert isinstance(core.load(str(tmp_path / "nan.safetensors"), timeline=1, version=1, digest=""), Loaded)
    core.submit("long", ModelRequest(input_ids=[5] * 40, max_new_tokens=3))
    answer = finish(core)["long"]
    assert answer.kind == "engine"
    assert "version 1" in answer.message
    three_versions.load(core, 2)
    # Now a short one has the row, and a long one beside it makes the step look at all of it.
    requests = {"short": ModelRequest(input_ids=[5], max_new_tokens=3), "long": ModelRequest(input_ids=[5, 6] * 20, max_new_tokens=3)}
    for name, request in requests.items():
        core.submit(name, request)
    answers = finish(core)
    assert [answers[name].versions for name in requests] == [[2, 2, 2]] * 2
    assert worst_error(three_versions, [(request, answers[name]) for name, request in requests.items()], list) < 1e-4


def broken_files(published: Published, directory: Path) -> dict[str, Path]:
    def words() -> dict[str, torch.Tensor]:
        return {name: parameter.detach().bfloat16() for name, parameter in published.models[1].named_parameters()}

    name = "model.layers.1.mlp.down_proj.weight"
    missing, shape, dtype, extra = words(), words(), words(), words()
    del missing[name]
    shape[name] = shape[name][:, 1:].contiguous()
    dtype[name] = dtype[name].to(torch.int32)
    extra["model.layers.2.mlp.down_proj.weight"] = torch.zeros(2)
    found = {"nowhere": directory / "nowhere.safetensors", "garbage": directory / "garbage.safetensors"}
    found["garbage"].write_bytes(b"\xff" * 100)
    for label, content in {"missing": missing, "shape": shape, "dtype": dtype, "extra": extra}.items():
        found[label] = directory / f"{label}.safetensors"
        save_file(content, found[label])
    cut = directory / "cut.safetensors"
    cut.write_bytes(Path(published.paths[1]).read_bytes()[:-10])
    return {**found, "cut": cut}


def test_a_failed_load_leaves_the_old_weights_complete_and_serving(three_versions: Published, tmp_path: Path) -> None:
    core = three_versions.core()
    request = ModelRequest(input_ids=[5, 9, 11], max_new_tokens=30, seed=4)
    core.submit("during", request)
    finish(core, steps=3)
    for label, path in broken_files(three_versions, tmp_path).items():
        answer = core.load(str(path), timeline=1, version=1, digest="")
        assert isinstance(answer, LoadFailed), label
        assert str(path) in answer.message
        assert (core.version, core.digest) == (0, "d0")
    during = finish(core)["during"]
    assert set(during.versions) == {0}
    assert worst_error(three_versions, [(request, during)], list) < 1e-4


def test_a_tied_model_takes_an_exported_head_only_when_it_is_the_embedding(tmp_path: Path) -> None:
    published = Published(tmp_path, "qwen3 tied")
    core = published.core()
    words = {name: parameter.detach().bfloat16() for name, parameter in published.models[0].named_parameters()}
    save_file({**words, "lm_head.weight": words["model.embed_tokens.weight"].clone()}, tmp_path / "same.safetensors")
    save_file({**words, "lm_head.weight": words["model.embed_tokens.weight"] + 1}, tmp_path / "other.safetensors")
    assert isinstance(core.load(str(tmp_path / "same.safetensors"), timeline=1, version=1, digest=""), Loaded)
    refused = core.load(str(tmp_path / "other.safetensors"), timeline=1, version=2, digest="")
    assert isinstance(refused, LoadFailed)
    assert "lm_head.weight" in refused.message


def test_an_initial_load_reads_the_model_directory(tmp_path: Path) -> None:
    published = Published(tmp_path, "llama tied")
    published.models[0].save_pretrained(tmp_path)
    core = published.core(load=False, load_initial=True)
    request = ModelRequest(input_ids=[4, 5, 6], max_new_tokens=9)
    core.submit("a", request)
    assert worst_error(published, [(request, finish(core)["a"])], list) < 1e-4


def test_another_architecture_is_computed_by_its_hugging_face_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = Published(tmp_path, "gpt2", versions=2)
    core = published.core(max_slots=4)
    requests = [ModelRequest(input_ids=[4, 5, 6, index // 3], max_new_tokens=4 + index, seed=index, temperature=0.7) for index in range(6)]
    for index, request in enumerate(requests):
        assert core.submit(str(index), request) is None
    answers = finish(core, steps=3)
    published.load(core, 1)
    answers |= finish(core)
    assert worst_error(published, [(request, answers[str(index)]) for index, request in enumerate(requests)], list) < 1e-4
    assert "model_type 'gpt2' (known: llama, mistral, qwen2, qwen3): computed by transformers" in capsys.readouterr().err


def test_an_unknown_architecture_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ConfigError, match=r"does not know model_type 'abacus' \(known: .*\), nor does transformers") as refused:
        EmbeddedEngineCore(Init(model_dir=str(tmp_path)))
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="does not exist"):
        EmbeddedEngineCore(Init(model_dir=str(tmp_path / "none")))


def test_a_stop_text_ends_a_sequence_with_the_token_that_completes_it(tmp_path: Path) -> None:
    words = {f"w{index}": index for index in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    core = Published(tmp_path).core()
    free = ModelRequest(input_ids=[5, 6], max_new_tokens=40, seed=3)
    core.submit("free", free)
    whole = finish(core)["free"].output_ids
    text = f"w{whole[20]} w{whole[21]}"
    end = next(i for i in range(1, 40) if f"w{whole[i - 1]} w{whole[i]}".startswith(text)) + 1
    core.submit("stopped", ModelRequest(input_ids=[5, 6], max_new_tokens=40, seed=3, stop=["never", text]))
    response = finish(core)["stopped"]
    assert (response.output_ids, response.finish) == (whole[:end], "stop")
    (tmp_path / "tokenizer.json").unlink()
    other = Published(tmp_path).core()
    other.submit("free", free)
    other.submit("stopped", ModelRequest(input_ids=[5, 6], max_new_tokens=40, seed=3, stop=[text]))
    answers = finish(other)
    assert answers["free"].output_ids == whole
    assert isinstance(answers["stopped"], Failed)
    assert "tokenizer.json" in answers["stopped"].message
