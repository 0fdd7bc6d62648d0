"""Stop strings are found across the borders of pieces, and no more text is held back than could still begin one."""

import random
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.errors import RequestError
from tandem.text.stop import StopMatcher


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(begin, end) of the match that is complete first, the longest of those; by looking at every place."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins), end
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


def cut(text: str, rng: random.Random) -> list[str]:
    """`text` in pieces of 0 to 4 characters."""
    pieces = []
    while text:
        length = rng.randint(0, 4)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


@settings(max_examples=1500, deadline=None)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=6), max_size=4), st.integers(0, 9))
@example("aab", ["aaab", "ab"], 0)
@example("abababc", ["ababc"], 1)
def test_the_stream_equals_the_definition_however_it_is_cut(text, stops, seed):
    matcher = StopMatcher(stops)
    found = first_match(text, stops)
    shown, seen = "", ""
    for piece in cut(text, random.Random(seed)):
        emitted, stopped = matcher.push(piece)
        shown, seen = shown + emitted, seen + piece
        assert stopped == (found is not None and len(seen) >= found[1])
        if not stopped:
            assert len(seen) - len(shown) == longest_beginning(seen, stops)
    if found is None:
        assert matcher.matched is None
        assert shown + matcher.flush() == text
    else:
        assert shown == text[: found[0]]
        assert matcher.matched == text[found[0] : found[1]]
        assert matcher.push("more") == ("", True)
        assert matcher.flush() == ""


def test_a_stop_string_across_three_tokens_is_cut_off_whole():
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.push(piece) for piece in ["Hi.", "\nUs", "e", "r", ": x"]] == [
        ("Hi.", False),
        ("", False),
        ("", False),
        ("", False),
        ("", True),
    ]


def test_a_beginning_that_comes_to_nothing_is_shown_at_once():
    matcher = StopMatcher(["</answer>"])
    assert matcher.push("x </ans") == ("x ", False)
    assert matcher.push("wers") == ("</answers", False)
    assert matcher.push(" <") == (" ", False)
    assert matcher.flush() == "<"


def test_without_stop_strings_everything_passes():
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", False)
    assert matcher.flush() == ""


def test_after_flush_a_new_stream_begins():
    matcher = StopMatcher(["ab"])
    assert matcher.push("xa") == ("x", False)
    assert matcher.flush() == "a"
    assert matcher.push("b") == ("b", False)
    assert matcher.push("ab") == ("", True)
    matcher.flush()
    assert matcher.matched is None
    assert matcher.push("c") == ("c", False)


@pytest.mark.parametrize("stops", ["abc", [""], ["a", ""], [3], [None], [b"x"]])
def test_what_is_no_stop_string_is_a_request_error(stops):
    with pytest.raises(RequestError, match="stop strings: got"):
        StopMatcher(stops)


def test_repetitive_stop_strings_take_linear_time():
    matcher = StopMatcher(["a" * 5000 + "b", "a" * 4000 + "c"])
    start = time.process_time()
    shown = "".join(matcher.push("a")[0] for _ in range(100_000))
    assert time.process_time() - start < 5
    assert len(shown) == 95_000
