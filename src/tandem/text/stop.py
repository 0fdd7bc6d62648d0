"""Stop strings in streamed text: pieces of text come in, text that no stop string can reach any more goes out."""

from collections.abc import Sequence

from tandem.errors import RequestError


class StopMatcher:
    """Cuts a stream at the first stop string, however the stream is cut into pieces.

    The first match is the one that is complete first; of two that end together, the longer. `matched` is that string.
    """

    def __init__(self, stops: Sequence[str]):
        """stops: the strings that end the text, each not empty. Raises RequestError otherwise."""
        if isinstance(stops, str):
            raise RequestError(f"stop strings: got the string {stops!r}, need a list of strings")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop strings: got {stop!r}, need strings of at least one character")
        # Longest first: of the matches that end at one character, the one that began first is reported.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_border_lengths(stop) for stop in self._stops]
        self._depths = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text to show now, whether a stop string is complete). After a match: always ("", True)."""
        if self.matched is not None:
            return "", True
        held = len(self._held)
        window = self._held + text
        for end in range(held, len(window)):
            stop = self._advance(window[end])
            if stop is not None:
                self.matched, self._held = stop, ""
                return window[: end + 1 - len(stop)], True
        keep = max(self._depths, default=0)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], False

    def flush(self) -> str:
        """The text held back when the stream ends without a match. The matcher can then be used for a new stream."""
        text, self._held = self._held, ""
        self._depths = [0] * len(self._stops)
        self.matched = None
        return text

    def _advance(self, char: str) -> str | None:
        """Step every stop string's automaton by one character; the longest one that is now complete."""
        found = None
        for index, stop in enumerate(self._stops):
            depth, borders = self._depths[index], self._borders[index]
            while depth and stop[depth] != char:
                depth = borders[depth - 1]
            depth += stop[depth] == char
            if depth == len(stop):
                found, depth = found or stop, 0
            self._depths[index] = depth
        return found


def _border_lengths(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix (Knuth, Morris and Pratt)."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        length += pattern[index] == pattern[length]
        borders[index] = length
    return borders
