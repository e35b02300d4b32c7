"""Stop strings: exact cut, least hold-back, any split of the text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from engine.stopping import StopMatcher


def feed(matcher: StopMatcher, *pieces: str) -> tuple[list[str], str | None]:
    """What each piece released, and the match; flushed if there is none."""
    released: list[str] = []
    for piece in pieces:
        text, stop = matcher.feed(piece)
        released.append(text)
        if stop is not None:
            return released, stop
    released.append(matcher.flush())
    return released, None


def test_a_stop_over_several_pieces_is_never_sent() -> None:
    assert feed(StopMatcher(["DEFGHIJ"]), "abcDEF", "G", "HI", "J", "more") == (["abc", "", "", ""], "DEFGHIJ")


def test_a_stop_inside_a_piece_cuts_at_its_start() -> None:
    assert feed(StopMatcher(["Pari"]), "in", " Paris") == (["in", " "], "Pari")


def test_held_text_is_released_when_the_match_fails_or_at_the_end() -> None:
    assert feed(StopMatcher(["abcd"]), "xab", "cx", "ab") == (["x", "abcx", "", "ab"], None)


def test_a_failed_match_may_hold_a_shorter_one() -> None:
    assert feed(StopMatcher(["aab"]), "a", "a", "a", "b") == (["", "", "a", ""], "aab")


def test_the_earliest_start_wins_whatever_the_order_of_stops() -> None:
    for stops in (["c", "bcd"], ["bcd", "c"]):
        assert feed(StopMatcher(stops), "abcd") == (["a"], "bcd")


def test_included_stop_is_sent_and_holds_nothing_back() -> None:
    assert feed(StopMatcher(["END"], include=True), "xE", "N", "Dy") == (["xE", "N", "D"], "END")


def test_unarmed_text_is_not_matched_but_its_end_may_begin_a_match() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("ab a", armed=False) == ("ab ", None)
    assert matcher.feed("bc") == ("", "ab")


def test_a_stop_that_ended_in_unarmed_held_text_is_not_matched_later() -> None:
    matcher = StopMatcher(["bcX", "c"])
    assert matcher.feed("abc", armed=False) == ("a", None)
    assert matcher.feed("d") == ("bcd", None)


pieces = st.lists(st.text(alphabet="ab", max_size=4), max_size=12)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3)


@given(pieces, stop_lists, st.booleans(), st.integers(0, 6))
@example(["ab"], ["b", "abX"], False, 1)
def test_equals_a_search_of_the_whole_text(texts: list[str], stops: list[str], include: bool, unarmed: int) -> None:
    matcher = StopMatcher(stops, include=include)
    whole = sent = ""
    for position, piece in enumerate(texts):
        old, whole = len(whole), whole + piece
        armed = position >= unarmed
        released, stop = matcher.feed(piece, armed=armed)
        sent += released
        found = [
            (start, len(candidate), candidate)
            for candidate in stops
            for start in range(len(whole))
            if armed and whole.startswith(candidate, start) and start + len(candidate) > old
        ]
        if found:
            start, length, candidate = min(found)
            assert stop == candidate
            assert sent == whole[: start + length if include else start]
            return
        assert stop is None
        assert whole.startswith(sent)
        held = whole[len(sent) :]
        partial = {candidate[:length] for candidate in stops for length in range(len(candidate))}
        assert held in partial, "more is held back than may still match"
        assert include or not any(whole.endswith(p) for p in partial if len(p) > len(held)), "a possible stop was sent"
        assert not (include and held)
    assert sent + matcher.flush() == whole
