"""Stop strings and characters over tokens: the pure part of an answer."""

from helpers_api import END, saying, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from kvasir_peer.api.choice import Choice, Piece


def heard(answer: str, stops: tuple[str, ...]) -> list[Piece]:
    choice = Choice(tokenizer(), stops, frozenset({END}))
    pieces: list[Piece] = []
    for event in saying(answer):
        pieces.append(choice.push(event))
        if pieces[-1].finish:
            break
    return pieces


@given(
    answer=st.text("abé😀", max_size=30), stops=st.lists(st.text("abé😀", min_size=1, max_size=5), max_size=3)
)
def test_what_is_heard_ends_before_the_first_stop_string(answer: str, stops: list[str]) -> None:
    pieces = heard(answer, tuple(stops))
    text = "".join(piece.text for piece in pieces)
    # The first stop string is the one whose last character comes first.
    ends = [(answer.find(stop) + len(stop), answer.find(stop)) for stop in stops if stop in answer]
    if ends:
        end = min(ends)[0]
        assert text == answer[: min(at for at_end, at in ends if at_end == end)]
    else:
        assert text == answer
    assert pieces[-1].finish == "stop"
    so_far = ""
    for piece in pieces:  # nothing was said that had to be taken back
        so_far += piece.text
        assert not any(stop in so_far for stop in stops)


@given(answer=st.text("abé😀", max_size=30))
def test_every_token_comes_once_in_order_with_its_text(answer: str) -> None:
    pieces = heard(answer, ("ab", "éa"))
    text = "".join(piece.text for piece in pieces)
    tokens = [chosen for piece in pieces for chosen in piece.tokens]
    assert tokenizer().decode(chosen.event.token for chosen in tokens) == text
    out = 0
    for piece in pieces:
        for chosen in piece.tokens:
            assert out <= chosen.start < chosen.end <= out + len(piece.text)
        out += len(piece.text)
