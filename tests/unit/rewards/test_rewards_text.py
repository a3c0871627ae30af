from __future__ import annotations

import pytest

from astraflow.rewards.text import exact_match, f1, last_number


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("4", "4", 1.0),
        (" 4\n", "4", 1.0),
        ("4", 4, 1.0),
        ("1,000", "1000", 0.2),
        ("2 + 2 = 4", "4", 0.2),
        ("The answer is 4.", "4", 0.2),
        ("4.0", "4", 0.2),
        ("-3", "-3", 1.0),
        ("it is -3", "-3", 0.2),
        ("5-3", "-3", 0.0),
        ("5-3", "3", 0.2),
        ("4 and 5", "4", 0.0),
        ("45", "4", 0.0),
        ("14", "4", 0.0),
        ("four", "4", 0.0),
        ("", "4", 0.0),
        (".5", "0.5", 0.2),
        ("v 1,234.50", "1234.5", 0.2),
        ("1,2", "2", 0.2),
        ("4²", "2", 0.0),
    ],
)
def test_the_exact_answer_is_worth_one_and_the_right_last_number_a_fifth(text, answer, score):
    assert last_number("", text, [], [], answer=answer) == score


@pytest.mark.parametrize("answer", [None, "", "many", "nan", "inf"])
def test_without_a_number_to_compare_with_a_sample_is_unscored(answer):
    assert last_number("", "4", [], [], answer=answer) is None


def test_an_exact_match_ignores_blanks_around_and_nothing_else():
    assert exact_match("", " Paris\n", [], [], answer="Paris") == 1.0
    assert exact_match("", "paris", [], [], answer="Paris") == 0.0
    assert exact_match("", "Paris.", [], [], answer="Paris") == 0.0
    assert exact_match("", "", [], [], answer="Paris") == 0.0
    assert exact_match("", "b", [], [], answer=["a", "b"]) == 1.0
    assert exact_match("", "x", [], []) is None
    assert exact_match("", "", [], [], answer="  ") is None


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("The Eiffel Tower", "eiffel tower.", 1.0),
        ("Eiffel Tower in Paris", "Eiffel Tower", 2 * 2 / 6),
        ("<think>Rome</think><answer>Paris</answer> surely", "Paris", 1.0),
        ("Rome", ["Paris", "rome"], 1.0),
        ("Paris Paris", "Paris", 2 / 3),
        ("yes", "yes", 1.0),
        ("yes it is", "yes", 0.0),
        ("no", "no way", 0.0),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "Paris", 0.0),
    ],
)
def test_f1_counts_the_shared_words(text, answer, score):
    assert f1("", text, [], [], answer=answer) == pytest.approx(score)


def test_f1_without_an_answer_leaves_the_sample_unscored():
    assert f1("", "Paris", [], []) is None
    assert f1("", "Paris", [], [], answer=[]) is None
