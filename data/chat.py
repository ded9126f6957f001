"""Chats: messages to text by the template that a model came with, and to ids that know which of them are answers.

A template is a program in Jinja that somebody else wrote. It runs in Jinja's sandbox, with what `transformers` gives
its templates (`apply_chat_template`) and nothing else: raise_exception, strftime_now, tojson, break and continue, and
the tag {% generation %}, which changes nothing here.

Only a template may begin and end turns. Special strings in what a user, the system or a tool says stay ordinary text.
(In an assistant's message they become ids: the answers of models that reason have their <think> there.)

Which ids are an answer: the prompt of message i is what the template makes of the messages before it, with the opening
of the assistant's turn. The answer begins where the whole chat goes on from there, and ends with the first token that
ends a turn. That holds if every prompt is the beginning of the whole chat, which is checked.
"""

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import lru_cache

import numpy as np

from .errors import UserError
from .shards import ANSWER, ENDS_DOCUMENT
from .tokenizer import Tokenizer

BREAK = "\ufdd0"  # a code point that no text has: where it stands, what is left and right of it is encoded apart

Message = dict[str, str]  # {"role": "user", "content": "..."}


def render(tokenizer: Tokenizer, messages: Sequence[Message], open_answer: bool = False) -> str:
    """The text of a chat, by the tokenizer's template; with `open_answer`, up to where an assistant would begin.

    Raises:
        UserError: the tokenizer has no template, or the template cannot be run on these messages.
    """
    jinja2 = _import_jinja2()
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no chat template: use a checkpoint converted from a model for chats"
        )
    written = {id: text for text, id in tokenizer.special_tokens.items()}
    try:
        return _compiled(tokenizer.chat_template).render(
            messages=[_guarded(message, tokenizer) for message in messages],
            add_generation_prompt=open_answer,
            tools=None,
            documents=None,
            bos_token=written.get(tokenizer.bos_id, ""),
            eos_token=written.get(tokenizer.eot_id, ""),
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template is broken: {error.message} (its line {error.lineno})") from error
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template refuses this chat: {error}") from error
    except Exception as error:  # the template is somebody else's program: whatever it raises is not ours
        raise UserError(f"the chat template failed: {type(error).__name__}: {error}") from error


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The ids that an assistant's answer to `messages` follows. Raises what `render` does."""
    return _encode(tokenizer, render(tokenizer, messages, open_answer=True))


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> np.ndarray:
    """A chat as marked ids, uint32 [n]: ANSWER is set on the assistant's answers and on the token that ends each.

    Raises:
        UserError: what `render` raises, and a template whose answers cannot be told from the rest.
    """
    text = render(tokenizer, messages)
    ids = np.array(_encode(tokenizer, text), dtype=np.uint32)
    ends_turn = np.flatnonzero(np.isin(ids, list(tokenizer.stop_ids)))
    asked = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [_answer_start(tokenizer, messages[:i], text, ids) for i in asked]
    for start, limit in zip(starts, [*starts[1:], len(ids)], strict=True):
        inside = ends_turn[(ends_turn >= start) & (ends_turn < limit)]
        if not len(inside):
            raise UserError(
                "the chat template ends an answer with none of the tokens that end a turn, so that a model could not "
                "learn where to stop"
            )
        ids[start : inside[0] + 1] |= ANSWER
    return ids


def _answer_start(tokenizer: Tokenizer, before: Sequence[Message], text: str, ids: np.ndarray) -> int:
    """The index of the first token that the prompt made of `before` does not have; `text` and `ids` are the chat's."""
    prompt = render(tokenizer, before, open_answer=True)
    if not text.startswith(prompt):
        raise UserError(
            f"the chat template writes the first {len(before)} messages otherwise when others follow, so that it "
            f"cannot be told which tokens are the answer"
        )
    opening = np.array(_encode(tokenizer, prompt), dtype=np.uint32)
    shared = min(len(opening), len(ids))
    # A token may reach over the end of the prompt, "\n\n" for instance: it is the answer's.
    differs = np.flatnonzero(opening[:shared] != ids[:shared])
    return int(differs[0]) if len(differs) else shared


def encode_chats(batch: Iterable[tuple[str, bool]], tokenizer: Tokenizer) -> tuple[int, np.ndarray]:
    """Bytes of JSON, and marked ids with an eot_id after each chat, of chats in JSON as `reading.pieces` gives them."""
    n_bytes, parts = 0, []
    for text, _ in batch:
        n_bytes += len(text.encode("utf-8"))
        try:
            ids = chat_ids(tokenizer, json.loads(text))
        except UserError as error:
            raise UserError(f"{error}; the chat is {text if len(text) < 100 else text[:97] + '...'}") from error
        parts += [ids, np.array([tokenizer.eot_id | ENDS_DOCUMENT], dtype=np.uint32)]
    return n_bytes, np.concatenate(parts)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return [id for part in text.split(BREAK) if part for id in tokenizer.encode_with_specials(part)]


def _guarded(message: Message, tokenizer: Tokenizer) -> Message:
    """The message with a BREAK inside every special string that is not the assistant's own."""
    content = message["content"].replace(BREAK, "")
    if message["role"] != "assistant" and tokenizer.special_tokens:
        longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
        specials = "|".join(map(re.escape, longest_first))
        content = re.sub(specials, lambda match: match[0][:1] + BREAK + match[0][1:], content)
    return {**message, "content": content}


def _import_jinja2():
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ModuleNotFoundError as error:
        raise UserError("chats take the package jinja2, which is missing: pip install jinja2") from error
    return jinja2


@lru_cache(maxsize=4)
def _compiled(template: str):
    """The template, ready to run, in an environment like that of `transformers`."""
    jinja2 = _import_jinja2()

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}: the block as it is."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(template)
