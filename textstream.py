"""The text of a row as its tokens arrive: whole characters, ending before the first stop string."""

import codecs
from collections.abc import Sequence


class TextStream:
    """The text of one row as its tokens arrive: whole characters only, ending before the first stop string.

    Bytes of an unfinished character are held back, and so is text that may turn out to begin a stop string. Of
    several stop strings the one that is complete first wins, so that the text does not depend on how it was cut
    into tokens.

    begins: the tokens are a text's first. Then the space goes that some tokenizers put before every text.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = (), begins: bool = False):
        self.tokenizer, self.stop = tokenizer, stop
        self.drops_space = begins and tokenizer.leading_space
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""
        self.stopped = False  # a stop string came; nothing more will

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that has become certain."""
        text = self.decoder.decode(self.tokenizer.decode_bytes(token_ids))
        if self.drops_space and text:
            text, self.drops_space = text.removeprefix(" "), False
        self.held += text
        return self._release(final=False)

    def finish(self) -> str:
        """No more tokens: returns what was held back; a broken character becomes U+FFFD."""
        self.held += self.decoder.decode(b"", final=True)
        return self._release(final=True)

    def _release(self, final):
        if self.stopped:
            return ""
        found = [(start + len(s), start) for s in self.stop if (start := self.held.find(s)) >= 0]
        if found:
            self.stopped = True
            return self.held[: min(found)[1]]
        keep = 0 if final else max((_overlap(self.held, s) for s in self.stop), default=0)
        certain = len(self.held) - keep
        text, self.held = self.held[:certain], self.held[certain:]
        return text


def _overlap(text, stop):
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
