"""Drafts from the text so far: what followed the last time that the newest tokens stood together.

Verification is exact for any tree, so a draft may come from anywhere. Summaries, answers from given passages, code and
lists repeat what stands in the prompt or was just written; there a match of a few tokens is worth more than any head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Probability that the model's next greedy token is the one that followed the last time, by the length of the run that
# agrees so far; measured on its own answers (docs/heads.md).
AGREEMENT = (0.0, 0.22, 0.59, 0.7, 0.77, 0.77, 0.82, 0.85, 0.93, 0.94, 0.95, 0.96, 0.96, 0.96, 0.97)


def agreement(length: int, count: int) -> list[float]:
    """Probability of each token of a continuation behind a match of ``length``, given that those before it came true.

    Example:
        >>> agreement(2, 3)
        [0.59, 0.7, 0.77]
    """
    return [AGREEMENT[min(length + step, len(AGREEMENT) - 1)] for step in range(count)]


class ContextMatcher:
    """Finds continuations of the newest tokens in the tokens before them.

    Args:
        longest: tokens of the longest match that is told from longer ones.

    Example:
        >>> matcher = ContextMatcher()
        >>> matcher.extend([1, 2, 3, 9, 2, 3])
        >>> matcher.matches(4)
        [(2, [9, 2, 3, 9])]
    """

    def __init__(self, longest: int = 8) -> None:
        self.longest = longest
        self.tokens: list[int] = []
        # For every length, the places behind each run of that many tokens, latest last.
        self._behind: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(longest + 1)]

    def extend(self, tokens: Iterable[int]) -> None:
        """Add the next tokens of the text."""
        text, behind = self.tokens, self._behind
        for token in tokens:
            text.append(token)
            end = len(text)
            for length in range(1, min(self.longest, end) + 1):
                behind[length].setdefault(tuple(text[end - length :]), []).append(end)

    def matches(self, max_depth: int, count: int = 1) -> list[tuple[int, list[int]]]:
        """Continuations of the newest tokens, those of longer and later matches first.

        Args:
            max_depth: tokens of a continuation.
            count: continuations at most; no two begin with the same token.

        Returns:
            Pairs of the matched length and the continuation. One that reaches the end of the text goes on with itself,
            as a text that repeats does.
        """
        text, found, firsts = self.tokens, [], set()
        end = len(text)
        for length in range(min(self.longest, end - 1), 0, -1):
            for place in reversed(self._behind[length].get(tuple(text[end - length :]), ())):
                if place == end or text[place] in firsts:
                    continue
                firsts.add(text[place])
                found.append((length, _continued(text, place, max_depth)))
                if len(found) == count:
                    return found
        return found


def _continued(text: Sequence[int], place: int, count: int) -> list[int]:
    period = len(text) - place
    return [text[place + step % period] for step in range(count)]
