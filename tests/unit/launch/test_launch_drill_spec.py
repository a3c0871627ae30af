"""The words of `--chaos`: what they mean, and mistakes that name the part, its value and what is accepted."""

from __future__ import annotations

import pytest

from astraflow.config.sections import LaunchConfig
from astraflow.launch.drill_spec import Drill, Fault, check, parse
from astraflow.protocol.errors import ConfigError


def test_every_kind_of_fault_with_its_amounts() -> None:
    text = "kill=raas:0.02, stop=trainer:0.01:250ms,delay=weights:5s,drop=pull:1,seed=7,delay=raas:1m,for=2h"
    assert parse(text) == Drill(
        text,
        (
            Fault("kill", "raas", chance=0.02),
            Fault("stop", "trainer", chance=0.01, time_s=0.25),
            Fault("delay", "weights", time_s=5.0),
            Fault("drop", "pull"),
            Fault("delay", "raas", time_s=60.0),
        ),
        seed=7,
        for_s=7200.0,
    )


def test_faults_go_to_those_who_suffer_them() -> None:
    drill = parse("kill=sender:.5,drop=notify:.1,drop=raas:.2,delay=batch:1s,drop=weights:.3")
    assert [fault.target for fault in drill.of_processes("sender")] == ["sender"]
    assert drill.of_processes("trainer") == []
    assert {role: [fault.target for fault in drill.of_wires(role)] for role in ("dataflow", "raas", "trainer")} == {  # type: ignore[misc]
        "dataflow": ["notify", "raas"],
        "raas": ["weights"],
        "trainer": ["notify", "batch"],
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'': no fault; accepted: KIND=TARGET:AMOUNT"),
        ("seed=7", "'seed=7': no fault"),
        ("kil=raas:0.1", "'kil=raas:0.1': 'kil' is no kind of fault; did you mean kill?; accepted: kill, stop, drop, delay, for, seed"),
        ("raas", "'raas': 'raas' is no kind of fault"),
        ("kill=rass:0.1", "'kill=rass:0.1': 'rass' is no target of kill; did you mean raas?; accepted: raas, trainer, dataflow, sender"),
        ("drop=trainer:0.1", "'trainer' is no target of drop; accepted: pull, batch, notify, raas, weights"),
        ("kill=raas", "'kill=raas': 'raas'; accepted: kill=raas:PROBABILITY"),
        ("stop=raas:0.1", "'raas:0.1'; accepted: stop=raas:PROBABILITY:TIME"),
        ("kill=raas:0.1:5s", "'raas:0.1:5s'; accepted: kill=raas:PROBABILITY"),
        ("kill=raas:1", "'1' is no probability; accepted: a number above 0 and below 1, in every second"),
        ("drop=pull:1.5", "'1.5' is no probability; accepted: a number above 0 and up to 1"),
        ("drop=pull:nan", "'nan' is no probability"),
        ("kill=raas:often", "'often' is no probability"),
        ("delay=raas:5", "'5' is no time; accepted: a number with ms, s, m or h, above 0 and up to 600s, e.g. 5s"),
        ("delay=raas:0s", "'0s' is no time"),
        ("stop=raas:0.1:11m", "'11m' is no time"),
        ("kill=raas:0.1,seed=x", "'seed=x': seed 'x'; accepted: a whole number"),
        ("kill=raas:0.1,kill=raas:0.2", "'kill=raas:0.2': kill=raas is given twice"),
    ],
)
def test_a_mistake_is_told_by_its_part(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert told in str(refused.value)
    assert str(refused.value).startswith("--chaos")


def test_a_fault_that_would_hit_nothing_is_refused() -> None:
    check(parse("kill=sender:.1,kill=raas:.1,drop=notify:.1"), LaunchConfig())
    check(parse("drop=notify:.1"), LaunchConfig(trainers=False))
    for text, launch, told in (
        ("kill=sender:.1", LaunchConfig(trainers=False), "--chaos: kill=sender would hit nothing of this run (launch.trainers = false)"),
        ("delay=batch:1s", LaunchConfig(trainers=False), "--chaos: delay=batch would hit nothing of this run (launch.trainers = false)"),
        ("stop=raas:.1:1s", LaunchConfig(raas=0), "--chaos: stop=raas would hit nothing of this run (launch.raas = 0)"),
    ):
        with pytest.raises(ConfigError) as refused:
            check(parse(text), launch)
        assert str(refused.value) == told
