"""Deterministic checks of short English prose: is it a proper answer about its topic, and is it in one of four styles.

Styles, those of the paper's online-learning experiment: academic, cute, chuunibyou (grandiose talk of dark powers), classical (archaic).
A text is in a style when

    it has enough different marker words of it: two, and one more for every 25 words beyond the first 25,
    it has more of them than of any other style,
    and it has what the style must have (`_MUST`) and nothing of what it must not have (`_MUST_NOT`).

At most one style holds. A marker counts once however often it stands there, and `is_proper` refuses lists of markers, so that naming the
words of a style is not enough. The checks read words and signs; they do not understand. A judge does (`judge.py`).
"""

from __future__ import annotations

import re

STYLES = ('academic', 'cute', 'chuunibyou', 'classical')
MAX_TEXT = 4_000  # Characters; a longer text is neither proper nor in a style.

_words = lambda text: frozenset(text.split())
MARKERS = {
    'academic': _words(
        'we thus hence therefore moreover furthermore consequently observe observed evidence suggests suggest indicates '
        'analysis study studies significant hypothesis whereas empirical results data notably respectively demonstrate '
        'demonstrates literature theory'),
    'cute': _words(
        'tiny fluffy cuddly sweet little cutie yay aww hug hugs snuggle snuggly sparkly adorable teeny bunny kitty '
        'softest giggle cozy yummy'),
    'chuunibyou': _words(
        'abyss darkness sealed seal fate destiny forbidden eternal crimson awaken awakens power behold curse cursed '
        'shadow shadows doom void chosen mortals mortal demon oblivion vengeance'),
    'classical': _words(
        "thou thee thy thine doth hath o lo ere whence hither verily methinks 'twas o'er alas art shalt hast beauteous "
        "wherefore nay yonder"),
}
_CUTE_SIGNS = r'[~\u2661\u2665]|<3|\(\^[_.o]?\^\)|\^\^|\(=\^'
_CONTRACTION = r"\b\w+(?:n't|'re|'ll|'ve|'m|'d)\b"
_MUST = {'cute': re.compile(_CUTE_SIGNS), 'chuunibyou': re.compile('!')}
_MUST_NOT = {
    'academic': re.compile(rf'!|{_CUTE_SIGNS}|{_CONTRACTION}|\bI\b'),
    'cute': re.compile(r'\bmoreover\b|\bhypothesis\b'),
    'chuunibyou': re.compile(_CUTE_SIGNS),
    'classical': re.compile(rf'{_CUTE_SIGNS}|{_CONTRACTION}'),
}
_WORD = re.compile(r"'?[a-z]+(?:['-][a-z]+)*")
_ENDING = re.compile(rf'(?:[.!?]|{_CUTE_SIGNS})[")\'^_=]*\Z')


def words_of(text: str) -> list[str]:
  """The words of a text, in lower case."""
  return _WORD.findall(text.lower())


def style_of(text: str) -> str:
  """The one style that a text is in, '' for none."""
  if len(text) > MAX_TEXT:
    return ''
  words = words_of(text)
  counts = {style: len(MARKERS[style].intersection(words)) for style in STYLES}
  best = max(STYLES, key=counts.__getitem__)
  needed = 2 + max(0, len(words) - 1) // 25
  if counts[best] < needed or sorted(counts.values())[-2] == counts[best]:
    return ''
  if best in _MUST and not _MUST[best].search(text) or _MUST_NOT[best].search(text):
    return ''
  return best


def is_proper(text: str, topic: str, *, min_words: int, max_words: int) -> bool:
  """Whether a text is one proper answer about `topic` (a word): a paragraph that begins and ends as a sentence does, names the topic, has a
  fitting length, and is neither a repetition nor a list of marker words."""
  text = text.strip()
  if len(text) > MAX_TEXT or '\n' in text or not text.replace('\u2661', '').replace('\u2665', '').isprintable():
    return False
  words = words_of(text)
  if not min_words <= len(words) <= max_words or not {topic, topic + 's'} & set(words):
    return False
  if not text.lstrip('"\'(')[:1].isupper() or not _ENDING.search(text):
    return False
  markers = sum(any(word in MARKERS[style] for style in STYLES) for word in words)
  repeats = any(a == b for a, b in zip(words, words[1:]))
  return not repeats and len(set(words)) >= 0.6 * min(len(words), 40) and markers <= 0.6 * len(words)
