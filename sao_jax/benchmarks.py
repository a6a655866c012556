"""The benchmarks: which rows they are made of, how their problems are asked, and how replies are graded.

Each function below describes one; `make(name, path)` opens its file. No benchmark brings its data: every one is published by others, and
`path` says where a copy lies. Rows that are malformed are told with file and number before anything runs.

Add one: write a function that gives a `Benchmark`, with fields, source and license in its docstring, and name it in `REGISTRY`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Callable, Mapping

from sao_jax import data_sources
from sao_jax.environments.question_answer import fill

BOXED = '{question}\n\nReason step by step, and put the final answer within \\boxed{}.'
PYTHON_TOOL = 'python_tool'  # Name in the registry of environments.


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """How a benchmark is run.

  Attributes:
    name: in `REGISTRY`.
    parse: form of its rows, see `data_sources.rows.PARSERS`.
    prompt: text of the user's message; '{question}' and the names of other text fields of the parsed row in braces are filled in.
    grader: name in `graders.REGISTRY`.
    grader_settings: its settings.
    system: system message; '' for none.
    majority_vote: answers can be compared, so that maj@k means something.
    uses: whether a parsed row belongs to the benchmark.
  """

  name: str
  parse: str
  prompt: str
  grader: str
  grader_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  system: str = ''
  majority_vote: bool = True
  uses: Callable[[Mapping[str, Any]], bool] = lambda row: True


@dataclasses.dataclass(frozen=True)
class Problem:
  """One problem, ready to be asked.

  Attributes:
    index: row in its file, from 0.
    id: the data set's own name for it, or the index.
    messages: {'role', 'content'} each.
    answer: the right one; '' where tests decide.
    metadata: the other fields of the row, for the grader.
  """

  index: int
  id: str
  messages: tuple[Mapping[str, str], ...]
  answer: str
  metadata: Mapping[str, Any]


def aime() -> Benchmark:
  """Any set of AIME form, such as AIME 2024 or 2025: `problem` (or `question`) and `answer`, an integer from 0 to 999.

  Source and license: those of the file; the problems are by the Mathematical Association of America.
  """
  return Benchmark('aime', 'aime', BOXED, 'math')


def beyondaime() -> Benchmark:
  """BeyondAIME, 100 problems with integer answers: `problem`, `answer`.

  Source: ByteDance-Seed/BeyondAIME, CC0-1.0.
  """
  return Benchmark('beyondaime', 'beyondaime', BOXED, 'math')


def imo_answerbench() -> Benchmark:
  """IMO-AnswerBench, 400 olympiad problems with short answers, a CSV file: `Problem ID`, `Problem`, `Short Answer`.

  Source: google-deepmind/superhuman, imobench/answerbench_v2.csv, CC-BY-4.0, (c) 2025 Google LLC; Luong et al., "Towards Robust
  Mathematical Reasoning", EMNLP 2025.
  """
  return Benchmark('imo_answerbench', 'imo_answerbench', BOXED, 'math')


def hmmt() -> Benchmark:
  """Any set of HMMT form: `problem` (or `question`) and `answer` in LaTeX.

  Source and license: those of the file; the problems are by the Harvard-MIT Mathematics Tournament.
  """
  return Benchmark('hmmt', 'hmmt', BOXED, 'math')


def math500() -> Benchmark:
  """MATH-500: `problem`, `answer`, `solution`, `subject`, `level`, `unique_id`. Files of the whole MATH test set work as well.

  Source: openai/prm800k, prm800k/math_splits/test.jsonl, MIT; Lightman et al. 2023, arXiv:2305.20050.
  """
  return Benchmark('math500', 'math', BOXED, 'math')


def gsm8k() -> Benchmark:
  """GSM8K, 1,319 test problems: `question`, and `answer` that ends in '#### NUMBER'.

  Source: openai/grade-school-math, test.jsonl, MIT; Cobbe et al. 2021, arXiv:2110.14168.
  """
  return Benchmark('gsm8k', 'gsm8k', BOXED, 'math')


def humaneval() -> Benchmark:
  """HumanEval, 164 functions to complete: `task_id`, `prompt`, `entry_point`, `test`.

  Source: openai/human-eval, data/HumanEval.jsonl.gz, MIT; Chen et al. 2021, arXiv:2107.03374.
  """
  prompt = 'Complete this Python function. Reply with the whole function in one ```python block.\n\n```python\n{question}\n```'
  return Benchmark('humaneval', 'humaneval', prompt, 'code', majority_vote=False)


def mbpp() -> Benchmark:
  """MBPP, the 500 test problems (task_id 11 to 510): `text` (or `prompt`), `test_list`, `test_setup_code`, `task_id`.

  Source: google-research/google-research, mbpp/mbpp.jsonl, CC-BY-4.0; Austin et al. 2021, arXiv:2108.07732. As there, the prompt shows the
  tests.
  """
  prompt = '{question}\n\nYour code must pass these tests:\n\n```python\n{tests}\n```\n\nReply with the whole code in one ```python block.'
  return Benchmark(
      'mbpp', 'mbpp', prompt, 'code', majority_vote=False,
      uses=lambda row: not row.get('id', '').isdecimal() or 11 <= int(row['id']) <= 510)


REGISTRY: dict[str, Callable[[], Benchmark]] = {
    'aime': aime, 'beyondaime': beyondaime, 'imo_answerbench': imo_answerbench, 'hmmt': hmmt, 'math500': math500, 'gsm8k': gsm8k,
    'humaneval': humaneval, 'mbpp': mbpp,
}


def make(name: str) -> Benchmark:
  """The benchmark `name`. Raises ValueError, naming those there are."""
  if name not in REGISTRY:
    raise ValueError(f'Unknown benchmark {name!r}; known: {", ".join(REGISTRY)}.')
  return REGISTRY[name]()


def load(benchmark: Benchmark, path: str | os.PathLike[str], *, limit: int | None = None) -> tuple[list[Problem], str]:
  """The problems in a file, the first `limit` of them, and the file's fingerprint.

  Raises:
    ValueError: a file of another form, a bad row (with file and number), or no row of the benchmark.
    OSError: no such file.
  """
  if os.fspath(path).startswith(data_sources.TFDS):
    raise ValueError(f'A benchmark is read from a file, got {os.fspath(path)!r}; name the file that the data set was built from.')
  source = data_sources.open({'path': os.fspath(path), 'parse': benchmark.parse})
  problems = []
  for index in range(len(source)):
    row = source[index]
    if not benchmark.uses(row):
      continue
    problems.append(_problem(benchmark, index, row))
    if len(problems) == limit:
      break
  if not problems:
    raise ValueError(f'{path} holds {len(source)} rows, but none that belongs to {benchmark.name}.')
  rows: dict[str, int] = {}
  for problem in problems:
    if problem.id in rows:
      raise ValueError(f'{source.where(problem.index)} has the id {problem.id!r}, as {source.where(rows[problem.id])} has.')
    rows[problem.id] = problem.index
  return problems, source.fingerprint


def _problem(benchmark: Benchmark, index: int, row: Mapping[str, Any]) -> Problem:
  values = {**row, 'tests': '\n'.join(row['test_list'])} if 'test_list' in row else row
  prompt = fill(benchmark.prompt, values)
  system = ({'role': 'system', 'content': benchmark.system},) if benchmark.system else ()
  metadata = {name: value for name, value in row.items() if name not in ('question', 'answer')}
  return Problem(index, row.get('id', str(index)), (*system, {'role': 'user', 'content': prompt}), row['answer'], metadata)

