"""The page is read by Prometheus' own parser."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from astraflow.lib.prometheus import MAX_LABEL, MAX_SERIES, Exposition, Histogram

LABELS = {"process": "dataflow"}


def read(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name → sorted labels → value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = tuple(sorted(sample.labels.items()))
            assert key not in found.setdefault(sample.name, {}), "a series is told once"
            found[sample.name][key] = sample.value
    return found


def test_numbers_become_series_with_type_help_and_labels() -> None:
    text = Exposition("dataflow", LABELS).text({"rollout/made": 8, "buffer/fresh_groups/a": 3, "buffer/fresh_groups/b": math.nan})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert (families["astraflow_rollout_made"].type, families["astraflow_buffer_fresh_groups"].type) == ("counter", "gauge")
    assert families["astraflow_buffer_fresh_groups"].documentation == "complete groups that wait to be served (groups)"
    found = read(text)
    assert found["astraflow_rollout_made_total"] == {(("process", "dataflow"),): 8}
    groups = found["astraflow_buffer_fresh_groups"]
    assert groups[("model", "a"), ("process", "dataflow")] == 3
    assert math.isnan(groups[("model", "b"), ("process", "dataflow")])


@pytest.mark.parametrize("value", ['quote " back \\ line\nend', "größe", "\ud800", "x" * 500])
def test_whatever_a_label_holds_is_read_back(value: str) -> None:
    found = read(Exposition("dataflow", LABELS).text({f"rollout/dropped/{value}": 1}) if "\n" not in value else
                 Exposition("dataflow", LABELS | {"odd": value}).text({"rollout/made": 1}))  # fmt: skip
    name = "astraflow_rollout_made_total" if "\n" in value else "astraflow_rollout_dropped_total"
    ((labels, _),) = found[name].items()
    assert value.encode("utf-8", "replace").decode()[:MAX_LABEL] in dict(labels).values()


def test_made_up_label_values_do_not_grow_the_page_and_are_counted() -> None:
    page = Exposition("dataflow", LABELS)
    first = read(page.text({f"rollout/dropped/reason {n}": n for n in range(MAX_SERIES)}))["astraflow_rollout_dropped_total"]
    assert len(first) == MAX_SERIES
    many = read(page.text({f"rollout/dropped/reason {n}": n for n in reversed(range(3 * MAX_SERIES))} | {"no/row": 1.0}))
    assert many["astraflow_rollout_dropped_total"] == first, "a series that was shown once stays"
    assert many["astraflow_left_out_series"] == {(("process", "dataflow"),): 2 * MAX_SERIES + 1}


def test_a_histogram_has_cumulative_buckets_sum_and_count() -> None:
    page = Exposition("dataflow", LABELS)
    found = read(page.text({}, [Histogram("staleness/trained/{model}", {"model": "m"}, {0: 5, 1: 2, 3: 1, 100: 1})]))
    buckets = {dict(labels)["le"]: value for labels, value in found["astraflow_staleness_trained_bucket"].items()}
    assert buckets == {"0": 5, "1": 7, "2": 7, "4": 8, "8": 8, "16": 8, "32": 8, "+Inf": 9}
    key = (("model", "m"), ("process", "dataflow"))
    assert (found["astraflow_staleness_trained_sum"][key], found["astraflow_staleness_trained_count"][key]) == (105, 9)


def test_an_optional_part_that_is_left_out_is_filled_in() -> None:
    found = read(Exposition("raas", {"process": "raas-0"}, {"model": "only"}).text({"weights/pull_s": 1.5, "raas/slots": 4}))
    assert found["astraflow_weights_pull_s"] == {(("model", "only"), ("process", "raas-0")): 1.5}
    assert found["astraflow_raas_slots"] == {(("process", "raas-0"),): 4}
