r"""Writing requests whose rewarded style changes in phases: the online-learning simulation of the SAO paper.

The policy is asked to write about a topic. Its answer is judged on quality (0 or 1: a proper answer about the topic) and on style (0 or 1:
the style that counts now), and the reward is their product. What counts now is never said; the policy has to find out from its rewards,
again after every change. Meant for one rollout per prompt.

Phases. Phase k rewards `styles[k]`. What decides about the phase of a rollout (`phase_by`):
  'prompts'  the number of its prompt: prompt i is of phase (i - first) // phase_length. A function of the task alone, so the same under
             every clock, on a resume, and for a prompt that is tried again. Value pretraining has prompts of its own, from 0 on: of the
             first phase, unless it takes more than a phase of them.
  'version'  the parameters that wrote it: the version v of the oldest token of the answer, phase (v - first) // phase_length. A rollout
             that was in flight when the style changed is judged by the style of the time when it began. What nobody sampled (a
             demonstration) counts as of version 0.
After the last phase comes the first one again with `cycle`, else the last one stays.

Held-out success. Prompts of the test split are all judged by one phase, `test_phase`, by default the last one; the share of answers in each
style is a metric of its own (`academic`, ..., each with quality), so one evaluation tells of all phases. With a judge, which is asked for
one style only, those of the other styles stay 0.

Judges. By default `style_checks`, deterministic. With `judge` settings an OpenAI-compatible endpoint decides (`judge.py`); its
failures are failures of the environment, never a reward of 0, and the environment is then not replayable.

Conversations: raw, '\nTOPIC: ' and a line of text (for tiny models), or a chat with the request as the user's message.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import numpy as np

from sao_jax.environments import base, style_checks
from sao_jax.environments.judge import ChatJudge
from sao_jax.tool_calls import after_thinking

PHASES_BY = ('prompts', 'version')
DESCRIPTIONS = {  # For a judge.
    'academic': 'formal academic prose: measured, impersonal, hedged',
    'cute': 'cute and childlike: affectionate diminutives, playful signs',
    'chuunibyou': 'chuunibyou: grandiose talk of dark powers, seals and fate',
    'classical': 'classical: archaic English, as in old poetry',
}
_ADJECTIVES = (
    'old', 'cold', 'red', 'lost', 'wild', 'calm', 'tall', 'wet', 'soft', 'dim', 'new', 'warm', 'pale', 'gray', 'deep', 'shy')
_TOPICS = (
    'rain', 'moon', 'cat', 'tea', 'sea', 'tree', 'snow', 'bird', 'fire', 'hill', 'road', 'bread', 'lamp', 'ship', 'wolf', 'rose', 'fox',
    'well', 'barn', 'owl', 'lake', 'star', 'wind', 'frog', 'bell', 'door', 'cloud', 'pond', 'stone', 'bee', 'leaf', 'crow')
_REQUESTS = (
    'Write one short paragraph about the {topic}.', 'Describe the {topic} in a few sentences.', 'Tell me about the {topic}.',
    'Write a short text on the theme: the {topic}.')
_SENTENCES = {  # Of demonstrations; {t} is the topic.
    'academic': (
        'We observe that the {t} thus remains.', 'The data on the {t} suggest order, hence rest.', 'Thus the evidence of a {t} grows.'),
    'cute': ('Aww, the tiny {t} is so sweet~', 'Yay, a fluffy little {t} for me~', 'My cuddly {t} gets a hug~'),
    'chuunibyou': ('Behold the {t} of the abyss!', 'The {t} is sealed by my dark fate!', 'Now a cursed {t} will awaken!'),
    'classical': ('O {t}, thou hast my heart.', 'Lo, the {t} doth sleep.', 'Alas, thy {t} is gone, my friend.'),
    '': ('The {t} is here again.', 'I like the {t} a lot.', 'There is a {t} in town.'),
}


class StyleShift(base.Environment):
  """The environment of the module's docstring.

  Args:
    styles: style of each phase, of `style_checks.STYLES`; a style may come again.
    phase_by: one of `PHASES_BY`.
    phase_length: prompts, or versions, of a phase.
    first: number of the prompt or version with which the first phase begins; what comes before it is of the first phase, too.
    cycle: whether the phases begin again after the last.
    test_phase: phase by which prompts of the test split are judged; -1 for the last.
    chat: a chat instead of raw text.
    min_words, max_words: of a proper answer.
    test_share: share of all requests that belong to the test split.
    judge: settings of `judge.ChatJudge`; None for the deterministic checks.
    demonstration_noise: share of the demonstrations that write about another topic. Their style is any of the phases' or none, uniformly.
  """

  name = 'style_shift'
  replayable = True
  conversation = 'raw'
  stop_strings = ('\n',)
  has_demonstrations = True
  metric_names = ('success', 'quality', 'style', 'phase', *style_checks.STYLES)

  def __init__(
      self, *, styles: Sequence[str] = style_checks.STYLES, phase_by: str = 'prompts', phase_length: int = 1024, first: int = 0,
      cycle: bool = False, test_phase: int = -1, chat: bool = False, min_words: int = 4, max_words: int = 120, test_share: float = 0.2,
      judge: Mapping[str, Any] | None = None, demonstration_noise: float = 0.1,
  ):
    if isinstance(styles, str) or not styles or not set(styles) <= set(style_checks.STYLES):
      raise ValueError(f'styles must be a list of one or more of {", ".join(style_checks.STYLES)}, got {styles!r}.')
    if phase_by not in PHASES_BY:
      raise ValueError(f'phase_by must be one of {", ".join(PHASES_BY)}, got {phase_by!r}.')
    for name, value in (('cycle', cycle), ('chat', chat)):
      if not isinstance(value, bool):
        raise ValueError(f'{name} must be True or False, got {value!r}.')
    base.check_range('phase_length', phase_length, 1, 10**9)
    base.check_range('first', first, 0, 10**9)
    base.check_range('test_phase', test_phase, -len(styles), len(styles) - 1)
    base.check_range('min_words', min_words, 1, 1000)
    base.check_range('max_words', max_words, min_words, 1000)
    base.check_range('test_share', test_share, 0.01, 0.99)
    base.check_range('demonstration_noise', demonstration_noise, 0.0, 1.0)
    self.styles, self.phase_by, self.phase_length, self.first, self.cycle = tuple(styles), phase_by, phase_length, first, cycle
    self.test_phase, self.words, self.test_share = test_phase % len(styles), (min_words, max_words), test_share
    self.demonstration_noise = demonstration_noise
    self.wants_tokens = phase_by == 'version'
    self._judge = None if judge is None else ChatJudge(**judge)
    self.replayable = judge is None
    if chat:
      self.conversation, self.stop_strings = 'chat', ()
    self._task: base.Task | None = None
    self._version: int | None = None

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    """Task whose data are 'topic' (a word), 'theme' (the topic and its adjective) and 'request'."""
    base.check_split(split)
    rng = base.generator('style_shift/task/' + split, seed, index)
    while True:
      topic, adjective, request = (options[int(rng.integers(len(options)))] for options in (_TOPICS, _ADJECTIVES, _REQUESTS))
      theme = f'{adjective} {topic}'
      if base.split_of(theme, self.test_share) == split:
        return base.Task(index, split, seed, {'topic': topic, 'theme': theme, 'request': request.format(topic=theme)})

  def phase_at(self, number: int) -> int:
    """Phase of a prompt or version of this number."""
    phase = max(0, number - self.first) // self.phase_length
    return phase % len(self.styles) if self.cycle else min(phase, len(self.styles) - 1)

  def phase(self, task: base.Task, version: int | None) -> int:
    """Phase by which an answer is judged; `version` is that of its oldest token, None where nobody sampled it."""
    if task.split == 'test':
      return self.test_phase
    return self.phase_at(task.index if self.phase_by == 'prompts' else version or 0)

  def reset(self, task: base.Task) -> base.Observation:
    self._task, self._version = task, None
    if self.conversation == 'chat':
      return base.Observation(messages=({'role': 'user', 'content': task.data['request']},))
    return base.Observation(f'\n{task.data["theme"]}: ')

  def sampled(self, turn: base.SampledTurn) -> None:
    self._version = min(turn.versions)

  def step(self, action: str) -> base.StepResult:
    if self._task is None:
      raise RuntimeError('step was called without a running episode; call reset first.')
    task, text = self._task, after_thinking(action).strip()
    phase = self.phase(task, self._version)
    if self._judge is None:
      quality = style_checks.is_proper(text, task.data['topic'], min_words=self.words[0], max_words=self.words[1])
      found = style_checks.style_of(text)
      style = found == self.styles[phase]
    else:
      verdict = self._judge.ask(task.data['request'], text, {
          'quality': 'the text is a complete, correct and fluent answer to the request',
          'style': f'the text is written in this style: {DESCRIPTIONS[self.styles[phase]]}'})
      quality, style = verdict['quality'], verdict['style']
      found = self.styles[phase] if style else ''
    self._task = None
    success = float(quality and style)
    metrics = {'success': success, 'quality': float(quality), 'style': float(style), 'phase': float(phase)}
    metrics |= {name: float(quality and found == name) for name in style_checks.STYLES}
    return base.StepResult(reward=success, terminated=True, metrics=metrics)

  def demonstration(self, task: base.Task, rng: np.random.Generator) -> list[str]:
    """One sentence about the topic, in the style of any phase or in none."""
    styles = (*dict.fromkeys(self.styles), '')
    sentences = _SENTENCES[styles[int(rng.integers(len(styles)))]]
    topic = task.data['topic']
    if rng.random() < self.demonstration_noise:
      topic = str(rng.choice([other for other in _TOPICS if other != topic]))
    text = sentences[int(rng.integers(len(sentences)))].format(t=topic)
    return [text if self.conversation == 'chat' else text + '\n']

  def close(self) -> None:
    if self._judge is not None:
      self._judge.close()
