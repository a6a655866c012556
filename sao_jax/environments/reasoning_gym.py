"""Any data set of the reasoning-gym library as a single-turn chat: one question, one reply, a score in 0..1 by the library's own scorer.

Items. The library seeds its generators with (seed + index), so that data sets with nearby seeds share items. Here every task has its own
item seed, drawn from (seed, split, index), and the text of its question decides its split: a question of the test split is never trained
on, whatever the seeds of the two runs. An item is made again from its seed where it is needed, so tasks stay small and plain.

Answers. `extraction` says where the answer stands in the reply:
  'tag'          between the last '<answer>' and '</answer>'
  'last_number'  the last decimal number, thousands separators allowed ('1,024.5')
  'last_line'    the last line that is not blank
  'whole'        the whole reply
each without surrounding blanks. A reply without an answer, or with one longer than `MAX_ANSWER`, scores 0 and is not shown to the scorer.

Scorers that evaluate. Some scorers run the answer as Python code, others take for ever over a short one, or are fooled by it ('nan'). What
they get here matches a narrow pattern (`GUARDS`), or the answer scores 0. Where even that may take long (`SYMBOLIC`), the scorer runs in a
process of its own with limits of time and memory; running into them is a 'grader_timeout'.

Scorers that raise. A scorer that raises, or gives no finite number, is a failure of the environment, never a reward of zero; but for those
that are known to raise on an answer that they cannot read (`UNREADABLE`): there it scores 0 and counts as rejected.

The data set 'composite' mixes others: params={'datasets': [{'name': 'chain_sum', 'weight': 1.0, 'config': {...}}, ...]}; an answer is
treated as the data set of its item has it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import threading
from typing import Any, Mapping

import numpy as np

from sao_jax.environments import base
from sao_jax.services import pool

MAX_ANSWER = 10_000  # Characters.
MAX_GUARDED = 500  # Characters of an answer that a scorer evaluates.
EXTRACTIONS = ('tag', 'last_number', 'last_line', 'whole')
REWARDS = ('score', 'success')
DEFAULT_SYSTEM = 'Answer the question. Write the final answer, and nothing else, between <answer> and </answer>.'

_LISTS = re.compile(r'[0-9\[\], \n-]*')
_ARITHMETIC = re.compile(r'(?:[0-9+\-/() ]|\*(?! *\*))*')  # No power: '9**9**9' takes for ever.
_FUNCTIONS = (
    'sin', 'cos', 'tan', 'sec', 'csc', 'cot', 'asin', 'acos', 'atan', 'sinh', 'cosh', 'tanh', 'exp', 'log', 'ln', 'sqrt', 'pi', 'Abs')
_FORMULA = re.compile(  # Nothing in it but numbers, signs, letters and functions: no attribute, no text, no other name.
    r'(?:[ \n+\-*/(),]|[0-9]+(?:\.[0-9]+)?|(?<![A-Za-z0-9])(?:%s|[A-Za-z])(?![A-Za-z0-9]))*' % '|'.join(_FUNCTIONS))
_MOVE = r'[A-Za-z][+-][0-9]{1,2}'
_CUBE_MOVE = r"[0-9]?[LRDUBFXYZMES]w?'?[0-9]?"
SYMBOLIC = ('intermediate_integration', 'polynomial_multiplication', 'simple_integration')
GUARDS = {  # What an answer may look like, where its scorer evaluates it, takes for ever or is fooled (reasoning-gym 0.1.25).
    'binary_matrix': _LISTS,
    'spiral_matrix': _LISTS,
    'countdown': _ARITHMETIC,
    'puzzle24': _ARITHMETIC,
    'n_queens': re.compile(r"[Q_\[\]'\", \n]*"),
    'string_insertion': re.compile(r"[A-Z\[\]'\", \n]*"),
    **dict.fromkeys(SYMBOLIC, _FORMULA),
    'complex_arithmetic': re.compile(r'[0-9ij+\-., ()]*'),  # 'nan' is as near as can be to every number.
    'game_of_life_halting': re.compile(r'(?i:true|false)'),  # Whatever is not 'True' counts as 'False'.
    'rush_hour': re.compile(r'\s*(?:%s(?:[\s,]+|$))*' % _MOVE),  # 'F999999999' is driven step by step.
    'coin_flip': re.compile(r'[+-]?[0-9.,]{1,40}(?:/[0-9.,]{1,40}|e-?[0-9]{1,2})?'),  # '1e999999999' is worked out as a fraction.
    'rubiks_cube': re.compile(r'\s*(?:%s(?:\s+|$))*' % _CUBE_MOVE),  # 'F999999999' is written out.
}
UNREADABLE = {  # Errors by which a scorer says that it cannot read an answer.
    'boxnet': (AttributeError, IndexError, KeyError, TypeError, ValueError),  # Also moves off the board.
    'game_of_life': (KeyError, TypeError),
    'prime_factorization': (ValueError,),
}
REUSED = ('arc_agi', 'codeio', 'figlet_font', 'group_anagrams')  # Slow to make; item i of a data set of seed 0 is item 0 of one of seed i.
SCORE_LIMIT_S, SCORE_MEMORY_MB, SCORE_PROCESSES = 5.0, 2048, 2

_NUMBER = re.compile(r'(?:(?<![0-9)])-)?[0-9][0-9,]*(?:\.[0-9]+)?')  # In '12-7' and '(3)-4' the minus is no sign.
_local = threading.local()  # Data sets of this thread that are kept, by (name, parameters).


class ReasoningGym(base.Environment):
  """One data set of reasoning-gym.

  Args:
    dataset: its name in the library, e.g. 'chain_sum'.
    params: settings of the data set, e.g. {'min_terms': 2, 'max_terms': 2}; 'seed' and 'size' are set here.
    system_prompt: system message; '' for none.
    extraction: where the answer stands in a reply, see the module's text.
    reward: 'score', or 'success' (1 where the score reaches the threshold, else 0); some scorers give part of the score to an answer that
      only contains the right one.
    success_threshold: score from which the task counts as solved.
    test_share: share of all questions that belong to the test split.

  Raises:
    ImportError: when reasoning-gym is not installed.
    ValueError: on an unknown data set, extraction or parameter.
  """

  name = 'reasoning_gym'
  replayable = True
  conversation = 'chat'
  has_demonstrations = True
  metric_names = ('success', 'score', 'answered', 'rejected')

  def __init__(
      self, *, dataset: str = 'chain_sum', params: Mapping[str, Any] | None = None, system_prompt: str = DEFAULT_SYSTEM,
      extraction: str = 'tag', reward: str = 'score', success_threshold: float = 1.0, test_share: float = 0.2,
  ):
    for name, value, choices in (('extraction', extraction, EXTRACTIONS), ('reward', reward, REWARDS)):
      if value not in choices:
        raise ValueError(f'{name} must be one of {", ".join(choices)}, got {value!r}.')
    if not isinstance(system_prompt, str):
      raise ValueError(f'system_prompt must be a string, got {system_prompt!r}.')
    base.check_range('success_threshold', success_threshold, 1e-6, 1.0)
    base.check_range('test_share', test_share, 0.01, 0.99)
    self.dataset, self.params = dataset, dict(params or {})
    _check_dataset(dataset, self.params)
    self.system_prompt, self.extraction, self.reward = system_prompt, extraction, reward
    self.success_threshold, self.test_share = success_threshold, test_share
    self._entry: dict[str, Any] | None = None

  def sample_task(self, index: int, split: str, seed: int) -> base.Task:
    """Task whose data are 'question' and 'item_seed'. Raises ValueError when 200 items hold no question of the split."""
    base.check_split(split)
    rng = base.generator('reasoning_gym/' + split, seed, index)
    for _ in range(200):
      item_seed = int(rng.integers(2**31))
      question = self._item(item_seed)['question']
      if base.split_of(question, self.test_share) == split:
        return base.Task(index, split, seed, {'question': question, 'item_seed': item_seed})
    raise ValueError(f'200 items of {self.dataset} hold no question of the {split} split: too few different questions; widen its params.')

  def _item(self, item_seed: int) -> dict[str, Any]:
    if self.dataset in REUSED:
      return _kept(self.dataset, self.params, 2**31)[item_seed]
    return _create(self.dataset, {**self.params, 'seed': item_seed, 'size': 1})[0]

  def reset(self, task: base.Task) -> base.Observation:
    try:
      self._entry = self._item(task.data['item_seed'])
    except Exception as error:  # The library's own fault, whatever it raises.
      raise base.EnvironmentFailure(f'{self.dataset} made no item from seed {task.data["item_seed"]}: {error!r}') from error
    system = ({'role': 'system', 'content': self.system_prompt},) if self.system_prompt else ()
    return base.Observation(messages=(*system, {'role': 'user', 'content': task.data['question']}))

  def step(self, action: str) -> base.StepResult:
    if self._entry is None:
      raise RuntimeError('step was called without a running episode; call reset first.')
    entry, self._entry = self._entry, None
    answer = extract_answer(action, self.extraction)
    answered, score = answer is not None and 0 < len(answer) <= MAX_ANSWER, None
    if answered and is_safe(entry['metadata']['source_dataset'], answer):
      score = self._score(answer, entry)
    success = float(score is not None and score >= self.success_threshold)
    metrics = {'success': success, 'score': score or 0.0, 'answered': float(answered), 'rejected': float(answered and score is None)}
    return base.StepResult(reward=success if self.reward == 'success' else score or 0.0, terminated=True, metrics=metrics)

  def _score(self, answer: str, entry: dict[str, Any]) -> float | None:
    """Score of an answer, None where the scorer says that it cannot read it."""
    name = entry['metadata']['source_dataset']
    if name in SYMBOLIC:
      return _score_in_process(name, answer, entry)
    try:
      return float(_kept(self.dataset, self.params, 1).score_answer(answer, entry))
    except UNREADABLE.get(name, ()):
      return None
    except Exception as error:  # The library's own fault, whatever it raises.
      raise base.GraderError(f'The scorer of {name} raised {error!r}.') from error

  def demonstration(self, task: base.Task, rng: np.random.Generator) -> list[str]:
    """The right answer in the form that `extraction` looks for, without any reasoning. Raises ValueError where the item names none."""
    del rng
    answer = self._item(task.data['item_seed'])['answer']
    if not isinstance(answer, str) or not answer:
      raise ValueError(f'{self.dataset} names no right answer to demonstrate.')
    return [f'<answer>{answer}</answer>' if self.extraction == 'tag' else answer]


def extract_answer(reply: str, extraction: str) -> str | None:
  """The answer in a reply, None where there is none; takes time linear in the reply's length."""
  if extraction == 'tag':
    stop = reply.rfind('</answer>')
    start = reply.rfind('<answer>', 0, max(stop, 0))
    return reply[start + len('<answer>'):stop].strip() if start >= 0 else None
  if extraction == 'last_number':
    last = None
    for last in _NUMBER.finditer(reply):
      pass
    return last[0].replace(',', '') if last else None
  text = reply.strip()
  return (text.splitlines()[-1].strip() if extraction == 'last_line' else text) if text else None


def is_safe(dataset: str, answer: str) -> bool:
  """Whether the scorer of `dataset` may see `answer`: always, unless it evaluates answers."""
  if dataset not in GUARDS:
    return True
  return len(answer) <= MAX_GUARDED and GUARDS[dataset].fullmatch(answer) is not None and _depth(answer) <= 20


def _depth(text: str) -> int:
  depth = deepest = 0
  for character in text:
    depth += (character in '([') - (character in ')]')
    deepest = max(deepest, depth)
  return deepest


def _library(module: str = 'reasoning_gym.factory') -> Any:
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise ImportError(
        "The environment 'reasoning_gym' needs the package reasoning-gym: pip install -r requirements/reasoning_gym.txt") from error


def _create(dataset: str, params: Mapping[str, Any]) -> Any:
  _library('reasoning_gym')
  if dataset == 'composite':
    spec = _library('reasoning_gym.composite').DatasetSpec
    params = {**params, 'datasets': [spec(**part) for part in params['datasets']]}
  return _library().create_dataset(dataset, **params)


def _kept(dataset: str, params: Mapping[str, Any], size: int) -> Any:
  """The data set of seed 0 that this thread keeps."""
  kept = _local.__dict__.setdefault('kept', {})
  key = (dataset, repr(sorted(params.items())), size)
  if key not in kept:
    kept[key] = _create(dataset, {**params, 'seed': 0, 'size': size})
  return kept[key]


@functools.lru_cache(maxsize=1)
def _processes() -> pool.Pool:
  """Scoring processes that all environments share; they end with this process."""
  return pool.Pool(
      size=SCORE_PROCESSES, time_limit_s=SCORE_LIMIT_S, memory_mb=SCORE_MEMORY_MB, wait_limit_s=60.0,
      service='sao_jax.environments.reasoning_gym_service')


def _score_in_process(dataset: str, answer: str, entry: Mapping[str, Any]) -> float:
  metadata = {name: value for name, value in entry['metadata'].items() if isinstance(value, str)}
  verdict, reason = _processes().ask({'dataset': dataset, 'answer': answer, 'entry': {'answer': entry['answer'], 'metadata': metadata}})
  if verdict == pool.TIMEOUT:
    raise base.GraderTimeout(reason)
  if verdict == pool.ERROR:
    raise base.GraderError(f'The scorer of {dataset} failed: {reason}')
  return float(reason)


def _check_dataset(dataset: str, params: Mapping[str, Any]) -> None:
  """Raises ValueError for an unknown data set, unknown parameters, and values that the library rejects."""
  _library('reasoning_gym')
  known = _library().DATASETS
  if dataset not in known:
    raise ValueError(f'Unknown data set {dataset!r} of reasoning-gym; known: {", ".join(sorted(known))}.')
  config_class = known[dataset][1]
  names = {field.name for field in dataclasses.fields(config_class)} - {'seed', 'size'}
  unknown = sorted(set(params) - names)
  if unknown:
    raise ValueError(f'Unknown parameter {unknown[0]!r} of the data set {dataset}; known: {", ".join(sorted(names))}.')
  if dataset == 'composite':
    _check_parts(params.get('datasets'))
  try:
    if dataset != 'composite':
      getattr(config_class(**params, seed=0, size=1), 'validate', lambda: None)()  # Not all of them have it.
  except (AssertionError, TypeError, ValueError) as error:
    raise ValueError(f'reasoning-gym rejects the parameters {dict(params)} of {dataset}: {error}') from error


def _check_parts(parts: Any) -> None:
  """Raises ValueError unless `parts` are the data sets of a composite."""
  fields = {'name', 'weight', 'config'}
  if not isinstance(parts, (list, tuple)) or not parts or not all(isinstance(p, Mapping) and set(p) == fields for p in parts):
    raise ValueError(
        "The data set 'composite' needs params={'datasets': [{'name': ..., 'weight': ..., 'config': {...}}, ...]}, got datasets="
        f'{parts!r:.200}.')
  names = [part['name'] for part in parts]
  if len(set(names)) < len(names) or 'composite' in names:
    raise ValueError(f'A composite takes each data set once, and no other composite; got {", ".join(map(str, names))}.')
  for part in parts:
    base.check_range(f'weight of {part["name"]}', part['weight'], 1e-9, 1e9)
    _check_dataset(part['name'], dict(part['config']))
