r"""Held-out success of a checkpoint, greedy and at temperature 1; or a benchmark.

  python launch/evaluate.py --workdir=runs/quickstart [--checkpoint=12] [--num_prompts=500]
  python launch/evaluate.py --workdir=runs/quickstart --task=calculator --task_settings="{'min_operations': 3, 'max_operations': 3}"
      (a harder task than it was trained on)
  python launch/evaluate.py --config=configs/smollm2_chain_sum.py          (before any training)

  python launch/evaluate.py --benchmark=beyondaime --benchmark_path=FILE --num_samples=4 --pretrained=FOLDER [--max_tokens=8192]
  python launch/evaluate.py --benchmark=gsm8k --benchmark_path=FILE --workdir=runs/mine [--checkpoint=12] [--temperature=0]

  python launch/evaluate.py --benchmark=swe --benchmark_path=FILE [--repositories=FOLDER] --predictions=FILE|gold|empty
  python launch/evaluate.py --benchmark=swe --benchmark_path=FILE --pretrained=FOLDER [--max_turns=300]
  python launch/evaluate.py --benchmark=swe --benchmark_path=FILE --measure=FILE       (which tests are fit to judge with; see docs/swe.md)

Benchmarks: aime, beyondaime, imo_answerbench, hmmt, math500, gsm8k, humaneval, mbpp; docs/data.md tells the form of their files.

Settings come from the workdir's config.json, or from --config and its overrides, or are those of the folder (or name) --pretrained. A
workdir is only read: a run may go on in it. Prints a table on standard error and one JSON object on standard output. Intervals: 95 %;
Wilson's for success, bootstrap for the mean reward, bootstrap over problems for benchmarks.

A benchmark writes to --output: problems.jsonl, a line as each problem ends, and summary.json. The same command again goes on where it was
stopped.
"""

import ast
import json
import pathlib
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))  # The repository, for `import sao_jax` without an installation.

import command_line

from absl import flags  # After command_line, which tells what to do where it is missing.
from ml_collections import config_flags

CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'Settings; default: those of the workdir.', lock_config=False, accept_new_attributes=True)  # Judged by `from_dict`.
WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a run; without it, the weights that --config starts from are evaluated.')
CHECKPOINT = flags.DEFINE_integer('checkpoint', None, 'Number of the checkpoint; default: the newest.', lower_bound=0)
TASK = flags.DEFINE_string('task', None, 'Another environment.')
TASK_SETTINGS = flags.DEFINE_string('task_settings', None, "Its settings, as a Python dictionary, e.g. \"{'max_operations': 4}\".")
NUM_PROMPTS = flags.DEFINE_integer('num_prompts', None, 'Held-out prompts; default: evaluation.prompts of the settings.', lower_bound=1)
SEED = flags.DEFINE_integer('seed', None, 'Of the held-out prompts and the sampling noise; default: evaluation.seed of the settings.')
PRETRAINED = flags.DEFINE_string('pretrained', None, 'Folder or name of pretrained weights to evaluate, instead of --workdir or --config.')
BENCHMARK = flags.DEFINE_string('benchmark', None, 'Name of a benchmark, instead of held-out prompts of a task.')
BENCHMARK_PATH = flags.DEFINE_string('benchmark_path', None, 'File with the rows of the benchmark.')
NUM_SAMPLES = flags.DEFINE_integer('num_samples', 1, 'Samples of each problem of the benchmark.', lower_bound=1)
LIMIT = flags.DEFINE_integer('limit', None, 'Only the first so many problems of the benchmark.', lower_bound=1)
MAX_TOKENS = flags.DEFINE_integer('max_tokens', 2048, 'Longest reply to a problem of the benchmark, in tokens.', lower_bound=1)
SLOTS = flags.DEFINE_integer('slots', None, 'Replies sampled at once; default: 16, or sampler.slots of the settings.', lower_bound=1)
PYTHON_TOOL = flags.DEFINE_bool('python_tool', False, 'Let the policy run Python while it solves a problem of the benchmark.')
OUTPUT = flags.DEFINE_string('output', None, 'Folder for what a benchmark writes; default: runs/evaluations/NAME-HASH of its settings.')
PREDICTIONS = flags.DEFINE_string('predictions', None, "Predictions to grade, in SWE-bench's form; or 'gold', or 'empty'.")
MEASURE = flags.DEFINE_string('measure', None, 'Run the gold patches, and write to this file which tests of the instances are unfit.')
MEASURED = flags.DEFINE_string('measured', None, 'File that --measure wrote.')
REPEATS = flags.DEFINE_integer('repeats', 3, 'Runs of every gold patch with --measure.', lower_bound=1)
REPOSITORIES = flags.DEFINE_string('repositories', None, 'Folder of the repositories of the instances.')
TEST_TIME_S = flags.DEFINE_float('test_time_s', 1800.0, 'Of one run of the tests of an instance.', lower_bound=1.0)
CONTROLS = flags.DEFINE_integer('controls', 1, 'Control runs of a prediction that passes.', lower_bound=0, upper_bound=16)
MAX_TURNS = flags.DEFINE_integer('max_turns', 300, 'Turns of an episode of the benchmark swe.', lower_bound=1)
EPISODE_TOKENS = flags.DEFINE_integer(
    'episode_tokens', None, 'Tokens of an episode of the benchmark swe; default: what the model was made for.', lower_bound=64)
WORKERS = flags.DEFINE_integer('workers', 2, 'Instances of the benchmark swe that are graded at once.', lower_bound=1)
TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Of the sampled evaluation; for a benchmark also 0, greedy.', lower_bound=0.0)
TOP_P = flags.DEFINE_float('top_p', 1.0, 'Of the sampled evaluation; 1 for the whole distribution.')
TOP_K = flags.DEFINE_integer('top_k', 0, 'Of the sampled evaluation; 0 for the whole distribution.')

SWE = 'swe'
SWE_FLAGS = {
    'predictions', 'measure', 'measured', 'repeats', 'repositories', 'test_time_s', 'controls', 'max_turns', 'workers', 'episode_tokens'}


def check_flags() -> None:
  """Raises ValueError for flags that do not go together."""
  given = {name for name in flags.FLAGS if flags.FLAGS[name].present}
  if WORKDIR.value is not None:
    command_line.check_workdir(WORKDIR.value)
  if WORKDIR.value is not None and PRETRAINED.value is not None:
    raise ValueError('Give --workdir or --pretrained, not both.')
  if CHECKPOINT.value is not None and WORKDIR.value is None:
    raise ValueError('--checkpoint is that of a --workdir.')
  if BENCHMARK.value is None:
    wrong = sorted(given & SWE_FLAGS)
    if wrong:
      raise ValueError(f'--{wrong[0]} is only for --benchmark={SWE}.')
    wrong = sorted(given & {'benchmark_path', 'num_samples', 'limit', 'max_tokens', 'python_tool', 'output', 'slots'})
    if wrong:
      raise ValueError(f'--{wrong[0]} is for a benchmark; name it with --benchmark.')
    if PRETRAINED.value is not None and TASK.value is None and CONFIG.value is None:
      raise ValueError('Give --benchmark, --task or --config with --pretrained: what is to be evaluated?')
  else:
    swe = BENCHMARK.value == SWE
    wrong = sorted(given & ({'num_samples', 'python_tool'} if swe else SWE_FLAGS))
    if wrong:
      raise ValueError(f'--{wrong[0]} is {"not" if swe else "only"} for --benchmark={SWE}.')
    if PREDICTIONS.value is not None and MEASURE.value is not None:
      raise ValueError('Give --predictions or --measure, not both.')
    wrong = sorted(given & {'task', 'task_settings', 'num_prompts'})
    if wrong:
      raise ValueError(f'--{wrong[0]} is for held-out prompts of a task; a benchmark has --limit and --num_samples.')
    if BENCHMARK_PATH.value is None:
      raise ValueError(f'Give --benchmark_path, the file with the rows of {BENCHMARK.value}; docs/data.md tells its form.')


def read_settings(settings) -> dict:
  """The settings to evaluate with. Raises ValueError where there are none, or where they are not readable."""
  if CONFIG.value is not None:
    values = CONFIG.value.to_dict()
  elif PRETRAINED.value is not None:
    values = settings.default_dict()
    values['sampler'] |= {'slots': 16, 'sessions': 16, 'prefill_rows': (4, 16)}
  elif WORKDIR.value is None:
    raise ValueError('Give --workdir of a run, --pretrained, or --config for weights before any training.')
  elif not (path := pathlib.Path(WORKDIR.value) / 'config.json').is_file():
    raise ValueError(f'{path} does not exist; is {WORKDIR.value} the workdir of a run? Else give --config.')
  else:
    values = command_line.read_settings_file(path)
  if PRETRAINED.value is not None:
    values['model'] |= {'pretrained': PRETRAINED.value, 'tokenizer': 'pretrained'}
  if SLOTS.value is not None:
    values['sampler'] |= {'slots': SLOTS.value, 'sessions': max(SLOTS.value, values['sampler']['sessions'])}
  greedy = BENCHMARK.value is not None and TEMPERATURE.value == 0
  values['sampler'] |= {'temperature': 1.0 if greedy else TEMPERATURE.value, 'top_p': TOP_P.value, 'top_k': TOP_K.value}
  values['rl']['policy_steps'] = values['value_pretrain']['rollouts'] = values['sft']['steps'] = 0  # Nothing is trained here.
  if SEED.value is not None:
    values['evaluation']['seed'] = SEED.value
  if TASK.value is not None:
    values['task'] |= {'name': TASK.value, 'settings': {}}
  if TASK_SETTINGS.value is not None:
    values['task']['settings'] = task_settings(TASK_SETTINGS.value)
  return values


def task_settings(text: str) -> dict:
  """The dictionary that `text` writes. Raises ValueError where it is none, or has other names than strings."""
  try:
    values = ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    values = None
  if not isinstance(values, dict):
    raise ValueError(f'--task_settings must be a Python dictionary, got {text!r}.')
  wrong = [name for name in values if not isinstance(name, str)]
  if wrong:
    raise ValueError(f'--task_settings must have names of settings as keys, in quotes: got {wrong[0]!r} in {text!r}.')
  return values


def table(found: dict) -> str:
  """What was found, for a person."""
  where = f'checkpoint {found["checkpoint"]}, policy step {found["policy_step"]}'
  lines = [f'{found["task"]}: {found["prompts"]} held-out prompts, {where}', '']
  lines.append(f'{"":18}{"success":>9}  {"95 % interval":16}{"reward":>9}  {"95 % interval":18}{"truncated":>9}{"n":>6}{"lost":>6}')
  for name, label in (('temperature_1', f'temperature {found["temperature"]:g}'), ('greedy', 'greedy')):
    r = found[name]
    lines.append(
        f'{label:18}{r["success"]:9.3f}  [{r["low"]:.3f}, {r["high"]:.3f}]  {r["reward"]:9.3f}  '
        f'[{r["reward_low"]:.3f}, {r["reward_high"]:.3f}]    {r["truncated"]:9.3f}{r["n"]:6}{sum(r["lost"].values()):6}')
  return '\n'.join(lines)


def benchmark_table(found: dict) -> str:
  """What a benchmark found, for a person."""
  lost = ', '.join(f'{reason} {count}' for reason, count in found['lost'].items()) or 'none'
  k = found['num_samples']
  lines = [f'{found["benchmark"]}: {found["problems"]} problems, {k} samples each, temperature {found["temperature"]:g}', '']

  def row(name: str, value: float, low: float, high: float, note: str = '') -> None:
    lines.append(f'{name:12}{value:9.3f}  [{low:.3f}, {high:.3f}]{note}')

  row(f'avg@{k}', found['avg'], found['avg_low'], found['avg_high'])
  for n, at in found['pass_at'].items():
    row(f'pass@{n}', at['value'], at['low'], at['high'], f'  ({at["problems"]} problems)' if at['problems'] < found['problems'] else '')
  if 'maj' in found:
    row(f'maj@{k}', found['maj'], found['maj_low'], found['maj_high'])
  length = found['length']
  lines += [
      '', f'replies: mean length {length.get("mean", 0):.0f} tokens, longest {length.get("max", 0)}, truncated {found["truncated"]:.3f}, '
      f'without an answer {found["no_answer_share"]:.3f}', f'lost samples (in no number above): {lost}', f'written to {found["output"]}']
  return '\n'.join(lines)


def run_benchmark(settings) -> dict:
  """Judges the flags and the file before JAX is imported, then runs the benchmark."""
  from sao_jax import benchmarks, graders

  benchmark = benchmarks.make(BENCHMARK.value)
  benchmarks.load(benchmark, BENCHMARK_PATH.value, limit=LIMIT.value)
  config = settings.from_dict(read_settings(settings))
  from sao_jax import benchmark_run

  request = benchmark_run.Request(
      num_samples=NUM_SAMPLES.value, temperature=TEMPERATURE.value, max_tokens=MAX_TOKENS.value, limit=LIMIT.value,
      python_tool=PYTHON_TOOL.value)
  grader = graders.make(benchmark.grader, **benchmark.grader_settings)
  try:
    return benchmark_run.evaluate_benchmark(
        config, benchmark, BENCHMARK_PATH.value, request, workdir=WORKDIR.value, step=CHECKPOINT.value, output=OUTPUT.value, grader=grader)
  finally:
    grader.close()


def run_swe(settings) -> dict:
  """Grades predictions, lets a policy make them first, or measures the instances."""
  from sao_jax.environments.swe import instances as instances_lib

  repositories = REPOSITORIES.value or ''
  found = instances_lib.load(BENCHMARK_PATH.value, repositories=repositories, limit=LIMIT.value)
  given = PREDICTIONS.value is not None or MEASURE.value is not None
  config = None if given else settings.from_dict(read_settings(settings))
  from sao_jax import swe_run

  request = swe_run.Request(
      source=BENCHMARK_PATH.value, repositories=repositories, measured=MEASURED.value or '', test_time_s=TEST_TIME_S.value,
      controls=CONTROLS.value, workers=WORKERS.value, limit=LIMIT.value)
  progress = lambda what, done, total: command_line.say(f'{what}: {done} of {total}') if done == total or done % 10 == 0 else None
  if MEASURE.value is not None:
    return swe_run.measure(found, request, MEASURE.value, repeats=REPEATS.value, on_progress=progress)
  name = PREDICTIONS.value or PRETRAINED.value or WORKDIR.value or 'policy'
  output = OUTPUT.value or str(pathlib.Path('runs') / 'evaluations' / f'swe-{pathlib.Path(name).stem}')
  if PREDICTIONS.value is not None:
    return swe_run.grade(found, swe_run.read_predictions(PREDICTIONS.value, found), request, output, on_progress=progress)
  return swe_run.evaluate_policy(
      config, found, request, workdir=WORKDIR.value, step=CHECKPOINT.value, output=output, max_turns=MAX_TURNS.value,
      max_turn_tokens=MAX_TOKENS.value, max_tokens=EPISODE_TOKENS.value, temperature=TEMPERATURE.value,
      model_name=pathlib.Path(name).name, on_progress=progress)


def swe_table(found: dict) -> str:
  """What was graded or measured, for a person."""
  if 'usable' in found:
    lost = '; '.join(f'{k}: {v}' for k, v in found['lost'].items()) or 'none'
    return (f'{found["instances"]} instances: {found["usable"]} usable, {found["tests_left_out"]} tests left out, lost: {lost}\n'
            f'written to {found["output"]}')
  share = '-' if found['resolved_share'] is None else f'{found["resolved_share"]:.3f}'
  interval = f'[{found["resolved_low"]:.3f}, {found["resolved_high"]:.3f}]'
  return (f'resolved {found["resolved_instances"]} of {found["judged"]} ({share}) {interval}\n'
          f'verdicts: {", ".join(f"{k} {v}" for k, v in found["reasons"].items()) or "none"}; unusable {found["unusable_instances"]}, '
          f'lost to failures {found["error_instances"]}\nwritten to {found["output"]}')


def main() -> None:
  from sao_jax import config as settings  # Settings are judged before JAX is imported.

  check_flags()
  if BENCHMARK.value == SWE:
    found = run_swe(settings)
    command_line.say(swe_table(found))
    command_line.answer(json.dumps(found), f'The result is in {found["output"]}.')
    return
  if BENCHMARK.value is not None:
    found = run_benchmark(settings)
    from sao_jax import report

    command_line.say(benchmark_table(found))
    command_line.answer(json.dumps(report.plain(found)), f'The result is in {found["output"]}.')
    return
  config = settings.from_dict(read_settings(settings))
  from sao_jax import report
  from sao_jax.evaluate_run import evaluate_run

  found = evaluate_run(config, WORKDIR.value, step=CHECKPOINT.value, prompts=NUM_PROMPTS.value or config.evaluation.prompts)
  command_line.say(table(found))
  command_line.answer(json.dumps(report.plain(found)), 'The table on standard error is the result.')


if __name__ == '__main__':
  command_line.run(
      main, __doc__, interrupted='Run the same command again: a benchmark goes on where it was, held-out prompts begin anew.')
