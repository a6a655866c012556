"""What an answer must not be, before any parser sees it.

Two kinds are told apart. What is no answer at all (megabytes, hundreds of brackets, program code, control characters) is wrong. What may
be an answer but cannot be worked out within the limits (`arithmetic.TooLarge`: towers of powers, factorials of factorials) leads to
'grader_timeout', as running into the limits would.
"""

from __future__ import annotations

import re

from sao_jax.graders import forms, latex

MAX_ANSWER = 2_000  # Characters.
MAX_DEPTH = 40  # Brackets inside brackets.
MAX_POWERS = 96  # Signs '^'.

_CODE = re.compile(
    r'__|(?<!\\)\b(?:import|lambda|eval|exec|compile|getattr|setattr|globals|locals|vars|builtins|subprocess|breakpoint|classmethod)\b'
    r'|\b(?:os|sys|shutil|socket|pathlib)\s*\.|\bopen\s*\(|;\s*\w+\s*\(|\\(?:input|include|write|csname|immediate|def|catcode)(?![A-Za-z])')
_CONTROL = re.compile(r'[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]')


def refusal(answer: str) -> str:
  """Why `answer` is not looked at; '' where it is. Takes time linear in its length."""
  if len(answer) > MAX_ANSWER:
    return f'longer than {MAX_ANSWER:,} characters'
  if _CONTROL.search(answer.replace('\r\n', '\n')):
    return 'control characters'
  if _CODE.search(answer):
    return 'program code'
  if answer.count('^') > MAX_POWERS:
    return 'too many powers'
  parts = latex.tokens(latex.canonical(answer))
  if forms.depth_of(parts) > MAX_DEPTH or sum(part in ('\\frac', '\\sqrt', '\\binom') for part in parts) > MAX_DEPTH * 4:
    return f'more than {MAX_DEPTH} brackets inside each other'
  if _longest_run(parts) > MAX_DEPTH:
    return 'commands inside each other without brackets'
  return ''


def _longest_run(parts: list[str]) -> int:
  r"""Longest row of commands that take an argument, each the argument of the one before: \sqrt\sqrt\sqrt 2."""
  run = longest = 0
  for part in parts:
    run = run + 1 if part in latex.ARGUMENTS or part in ('^', '-', '_') else 0
    longest = max(longest, run)
  return longest
