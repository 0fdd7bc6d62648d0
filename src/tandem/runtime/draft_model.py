"""Drafts by a second, smaller model with the same vocabulary: it runs the text along and guesses on from its end.

The smaller model keeps a session of its own. What its guesses did to recurrent state is undone from a snapshot.
"""

from collections.abc import Sequence

from tandem.errors import SettingError
from tandem.runtime.session import Session


class ModelDraft:
    """Greedy drafts of one sequence at a time; `session` is the small model's.

    Raises SettingError if its vocabulary is not the large model's: tokens: the texts of both, in order.
    """

    def __init__(self, session: Session):
        self.session = session

    @staticmethod
    def check_vocabularies(small: Sequence[str], large: Sequence[str]) -> None:
        """Raises SettingError unless every token id means the same in both."""
        if len(small) != len(large):
            raise SettingError(
                f"the draft model has {len(small)} tokens, the model {len(large)}: give one with the same vocabulary"
            )
        differs = next((i for i, (a, b) in enumerate(zip(small, large, strict=True)) if a != b), None)
        if differs is not None:
            raise SettingError(
                f"token {differs} is {small[differs]!r} in the draft model and {large[differs]!r} in the model: "
                "give one with the same vocabulary"
            )

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens that this model would write after `tokens`; fewer where its context ends."""
        session = self.session
        count = min(count, session.ctx - len(tokens))
        if count < 1:
            return []
        logits, _ = session.sync(tokens)
        drafts = [int(logits.argmax())]
        if count > 1:
            place = session.place()
            while len(drafts) < count:
                drafts.append(int(session.append(drafts[-1]).argmax()))
            session.back_to(place)
        return drafts
