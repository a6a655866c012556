"""Text games with the interface of Gymnasium: any object with

    reset(seed=..., options=...) -> (observation, info)        step(action) -> (observation, reward, terminated, truncated, info)

registered with the library (`id`) or made by a function of yours (`make`), which needs no library.

Observations are texts, or are made into texts by `show`. Actions are texts, names of values (`actions`), or whatever `parse` makes of a
text. Where there are names or a parser, an action that is none is answered by an observation that says so, and the game does not move; the
`max_invalid`-th one ends the episode (terminated, reward 0). Otherwise every text goes to the game, and what is wrong with it is the
game's own business.

The game's rewards are those of the turns; its `terminated` and `truncated` stay apart. What it raises is a failure of the environment.
A task is a seed for `reset`: even numbers for training, odd ones for the test split, so that the splits never meet.

In a raw conversation a turn is one line: the observation is followed by '\\n> ', and the action ends with its newline. In a chat every
observation is a message of the user.
"""

from __future__ import annotations

import importlib
from typing import Any, Callable, Mapping, Sequence

from sao_jax.environments import base
from sao_jax.tool_calls import after_thinking

EXTRACTIONS = ('last_line', 'whole')
MAX_OBSERVATION = 20_000  # Characters; a longer one is a fault of the game or of `show`.
PROMPT = '\n> '


class TextGame(base.Environment):
  """A game as an environment.

  Args:
    id: name of a game in Gymnasium's registry; '' where `make` is given.
    make: 'module:function' that makes a game.
    kwargs: keyword arguments of the game.
    options: `options` of the game's reset; None where its reset takes none.
    describe: text before the first observation: the rules.
    actions: names of actions, in the order of a discrete action space, or {name: value}; None for texts.
    parse: 'module:function' that makes an action of a text and raises ValueError, with a message for the policy, where it is none.
    show: 'module:function' that makes a text of an observation; 'str' for Python's own; '' where observations are texts.
    extraction: where the action stands in a turn: its last line that is not blank, or the whole turn, without surrounding blanks.
    max_invalid: this many texts that are no action end the episode.
    success_threshold: total reward from which a finished episode counts as a success.
    replayable: whether the game is a function of its seed and the actions, as Gymnasium asks for.
    chat: a chat instead of raw text.
    system_prompt: system message of a chat; '' for none.

  Raises:
    ImportError: when `id` is given and gymnasium is not installed.
    ValueError: on an unknown game or function, or settings that do not fit the game's action space.
  """

  name = 'gymnasium'
  conversation = 'raw'
  stop_strings = ('\n',)
  metric_names = ('success', 'return', 'steps', 'invalid')

  def __init__(
      self, *, id: str = '', make: str = '', kwargs: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None,
      describe: str = '', actions: Sequence[str] | Mapping[str, Any] | None = None, parse: str = '', show: str = '',
      extraction: str = 'last_line', max_invalid: int = 5, success_threshold: float = 1.0, replayable: bool = True, chat: bool = False,
      system_prompt: str = '',
  ):
    if bool(id) == bool(make):
      raise ValueError(f'Give either id (a registered game) or make (a function), got id={id!r}, make={make!r}.')
    if actions is not None and parse:
      raise ValueError('Give actions or parse, not both: a name stands for its value already.')
    if extraction not in EXTRACTIONS:
      raise ValueError(f'extraction must be one of {", ".join(EXTRACTIONS)}, got {extraction!r}.')
    for name, value in (('replayable', replayable), ('chat', chat)):
      if not isinstance(value, bool):
        raise ValueError(f'{name} must be True or False, got {value!r}.')
    base.check_range('max_invalid', max_invalid, 1, 1000)
    base.check_range('success_threshold', success_threshold, -1e9, 1e9)
    self._actions = _named(actions)
    self._parse = load(parse) if parse else None
    self._show: Callable[[Any], str] | None = str if show == 'str' else load(show) if show else None
    self.options, self.describe, self.extraction, self.max_invalid = options, describe, extraction, max_invalid
    self.success_threshold, self.replayable, self.system_prompt = success_threshold, replayable, system_prompt
    if chat:
      self.conversation, self.stop_strings = 'chat', ()
    self._game = _make_registered(id, kwargs or {}) if id else load(make)(**(kwargs or {}))
    self._check_actions(getattr(self._game, 'action_space', None))
    self._running = False

  def _check_actions(self, space: Any) -> None:
    """Raises ValueError where texts or names do not fit a discrete action space; other spaces are taken at the user's word."""
    count = getattr(space, 'n', None)
    if count is None or self._parse:
      return
    if self._actions is None:
      raise ValueError(f'The game has {int(count)} actions ({space}): name them with actions=[...], or give parse.')
    wrong = [f'{name}={value!r}' for name, value in self._actions.items() if not space.contains(value)]
    if wrong or len(self._actions) > int(count):
      raise ValueError(f'The game has {int(count)} actions ({space}); these do not fit: {", ".join(wrong) or len(self._actions)}.')

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    """Task whose data are the game's 'seed'."""
    base.check_split(split)
    number = int(base.generator('gymnasium/task/' + split, seed, index).integers(2**30))
    return base.Task(index, split, seed, {'seed': 2 * number + (split == 'test')})

  def reset(self, task: base.Task) -> base.Observation:
    self._metrics = dict.fromkeys(self.metric_names, 0.0)
    options = {} if self.options is None else {'options': dict(self.options)}
    observation, _ = self._play(lambda: self._game.reset(seed=task.data['seed'], **options), 2, 'reset')
    self._running = True
    text = self._text(observation)
    return self._observation(f'{self.describe}\n{text}' if self.describe else text, first=True)

  def step(self, action: str) -> base.StepResult:
    if not self._running:
      raise RuntimeError('step was called without a running episode; call reset first.')
    try:
      value = self._action(action)
    except ValueError as error:
      return self._invalid(str(error))
    observation, reward, terminated, truncated, _ = self._play(lambda: self._game.step(value), 5, 'step')
    text = self._text(observation)
    result = base.StepResult(self._observation(text), reward=_number(reward), terminated=bool(terminated), truncated=bool(truncated))
    self._metrics['steps'] += 1
    self._metrics['return'] += result.reward
    self._running = not (result.terminated or result.truncated)
    self._metrics['success'] = float(not self._running and self._metrics['return'] >= self.success_threshold)
    return base.StepResult(
        result.observation, result.reward, result.terminated, result.truncated, metrics=dict(self._metrics))

  def _action(self, turn: str) -> Any:
    """What a turn says to the game. Raises ValueError, with words for the policy, where it is no action."""
    text = after_thinking(turn).strip() if self.conversation == 'chat' else turn.strip()
    if self.extraction == 'last_line' and text:
      text = text.splitlines()[-1].strip()
    if self._parse:
      return self._parse(text)
    if self._actions is None:
      return text
    if text.casefold() not in self._actions:
      raise ValueError(f'Not an action: {text[:40]!r}. Actions: {", ".join(self._actions)}.')
    return self._actions[text.casefold()]

  def _invalid(self, message: str) -> base.StepResult:
    self._metrics['invalid'] += 1
    self._running = self._metrics['invalid'] < self.max_invalid
    return base.StepResult(self._observation(message[:500]), terminated=not self._running, metrics=dict(self._metrics))

  def _play(self, call: Callable[[], Any], size: int, what: str) -> tuple[Any, ...]:
    """What the game gives. Raises EnvironmentFailure where it raises, or gives something else than its interface says."""
    try:
      result = call()
    except Exception as error:  # The game's own fault, whatever it raises.
      self._running = False
      raise base.EnvironmentFailure(f'{what} of the game raised {type(error).__name__}: {error}') from error
    if not isinstance(result, tuple) or len(result) != size:
      raise base.EnvironmentFailure(f'{what} of the game must give {size} values, got {result!r:.200}.')
    return result

  def _text(self, observation: Any) -> str:
    text = observation if self._show is None else self._show(observation)
    if not isinstance(text, str):
      raise TypeError(f'Observations must be texts, or show must make texts of them; got {type(text).__name__}: {text!r:.200}.')
    if len(text) > MAX_OBSERVATION:
      raise base.EnvironmentFailure(f'An observation of {len(text):,} characters; at most {MAX_OBSERVATION:,} are shown.')
    return text

  def _observation(self, text: str, first: bool = False) -> base.Observation:
    if self.conversation == 'raw':
      return base.Observation(text + PROMPT)
    system = ({'role': 'system', 'content': self.system_prompt},) if first and self.system_prompt else ()
    return base.Observation(messages=(*system, {'role': 'user', 'content': text}))

  def close(self) -> None:
    close = getattr(self._game, 'close', None)
    if close is not None:
      close()


def load(path: str) -> Callable[..., Any]:
  """The function at 'module:function'. Raises ValueError where there is none."""
  module, _, name = path.partition(':') if isinstance(path, str) else ('', '', '')
  try:
    function = getattr(importlib.import_module(module), name) if module and name else None
  except (ImportError, AttributeError) as error:
    raise ValueError(f'{path!r} cannot be loaded: {error}') from error
  if not callable(function):
    raise ValueError(f"A function must be given as 'module:function', got {path!r}.")
  return function


def _named(actions: Sequence[str] | Mapping[str, Any] | None) -> dict[str, Any] | None:
  """Name in lower case -> value."""
  if actions is None:
    return None
  pairs = list(actions.items()) if isinstance(actions, Mapping) else [(name, i) for i, name in enumerate(actions)]
  names = [name.strip().casefold() if isinstance(name, str) else '' for name, _ in pairs]
  if isinstance(actions, str) or not all(names) or not names or len(set(names)) < len(names):
    raise ValueError(f'actions must be different names, a list or {{name: value}}, got {actions!r}.')
  return {name: value for name, (_, value) in zip(names, pairs)}


def _number(reward: Any) -> Any:
  """A reward as a float where it is a number of any kind; anything else is left for `StepResult` to refuse."""
  try:
    return float(reward)
  except (TypeError, ValueError):
    return reward


def _make_registered(id: str, kwargs: Mapping[str, Any]) -> Any:
  try:
    import gymnasium
  except ImportError as error:
    raise ImportError(
        f"The game {id!r} is one of Gymnasium's: pip install -r requirements/gymnasium.txt, or give make='module:function'.") from error
  try:
    return gymnasium.make(id, **kwargs)
  except gymnasium.error.Error as error:
    raise ValueError(f'Gymnasium makes no game {id!r}: {error}') from error
