r"""Held-out success of a checkpoint, greedy and at temperature 1.

  python launch/evaluate.py --workdir=runs/quickstart [--checkpoint=12] [--num_prompts=500]
  python launch/evaluate.py --workdir=runs/quickstart --task=calculator --task_settings="{'min_operations': 3, 'max_operations': 3}"
  python launch/evaluate.py --config=configs/smollm2_chain_sum.py          (before any training)

Settings come from the workdir's config.json, or from --config and its overrides. Prints a table on standard error and one JSON object on
standard output. Intervals: 95 %, Wilson's for success, bootstrap for the mean reward.
"""

import ast
import json
import pathlib
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))  # The repository, for `import sao_jax` without an installation.

from absl import flags
from ml_collections import config_flags

import command_line

CONFIG = config_flags.DEFINE_config_file('config', None, 'Settings; default: those of the workdir.', lock_config=True)
WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a run; without it, the weights that --config starts from are evaluated.')
CHECKPOINT = flags.DEFINE_integer('checkpoint', None, 'Number of the checkpoint; default: the newest.', lower_bound=0)
TASK = flags.DEFINE_string('task', None, 'Another environment.')
TASK_SETTINGS = flags.DEFINE_string('task_settings', None, "Its settings, as a Python dictionary, e.g. \"{'max_operations': 4}\".")
NUM_PROMPTS = flags.DEFINE_integer('num_prompts', None, 'Held-out prompts; default: evaluation.prompts of the settings.', lower_bound=1)
SEED = flags.DEFINE_integer('seed', None, 'Of the held-out prompts and the sampling noise; default: evaluation.seed of the settings.')
TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Of the sampled evaluation.')
TOP_P = flags.DEFINE_float('top_p', 1.0, 'Of the sampled evaluation; 1 for the whole distribution.')
TOP_K = flags.DEFINE_integer('top_k', 0, 'Of the sampled evaluation; 0 for the whole distribution.')


def read_settings_file(path: pathlib.Path) -> dict:
  """Settings that a run wrote. Raises ValueError where the file is damaged."""
  try:
    values = json.loads(path.read_text(encoding='utf-8'))
    return {**values, **{name: dict(values[name]) for name in ('sampler', 'rl', 'value_pretrain', 'sft', 'evaluation', 'task')}}
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{path} is damaged ({error!r}); restore it, or give the settings with --config.') from None


def read_settings() -> dict:
  """The settings to evaluate with. Raises ValueError where there are none, or where they are not readable."""
  if CONFIG.value is not None:
    values = CONFIG.value.to_dict()
  elif WORKDIR.value is None:
    raise ValueError('Give --workdir of a run, or --config for weights before any training.')
  elif not (path := pathlib.Path(WORKDIR.value) / 'config.json').is_file():
    raise ValueError(f'{path} does not exist; is {WORKDIR.value} the workdir of a run? Else give --config.')
  else:
    values = read_settings_file(path)
  values['sampler'] |= {'temperature': TEMPERATURE.value, 'top_p': TOP_P.value, 'top_k': TOP_K.value}
  values['rl']['policy_steps'] = values['value_pretrain']['rollouts'] = values['sft']['steps'] = 0  # Nothing is trained here.
  if SEED.value is not None:
    values['evaluation']['seed'] = SEED.value
  if TASK.value is not None:
    values['task'] |= {'name': TASK.value, 'settings': {}}
  if TASK_SETTINGS.value is not None:
    try:
      values['task']['settings'] = dict(ast.literal_eval(TASK_SETTINGS.value))
    except (ValueError, SyntaxError, TypeError):
      raise ValueError(f'--task_settings must be a Python dictionary, got {TASK_SETTINGS.value!r}.') from None
  return values


def table(found: dict) -> str:
  """What was found, for a person."""
  lines = [f'{found["task"]}: {found["n"]} held-out prompts, checkpoint {found["checkpoint"]}, policy step {found["policy_step"]}', '']
  lines.append(f'{"":18}{"success":>9}  {"95 % interval":16}{"reward":>9}  {"95 % interval":18}{"truncated":>9}{"lost":>6}')
  for name, label in (('temperature_1', f'temperature {found["temperature"]:g}'), ('greedy', 'greedy')):
    r = found[name]
    lines.append(
        f'{label:18}{r["success"]:9.3f}  [{r["low"]:.3f}, {r["high"]:.3f}]  {r["reward"]:9.3f}  '
        f'[{r["reward_low"]:.3f}, {r["reward_high"]:.3f}]    {r["truncated"]:9.3f}{sum(r["lost"].values()):6}')
  return '\n'.join(lines)


def main() -> None:
  from sao_jax import config as settings  # Settings are judged before JAX is imported.

  config = settings.from_dict(read_settings())
  from sao_jax import report
  from sao_jax.evaluate_run import evaluate_run

  found = evaluate_run(config, WORKDIR.value, step=CHECKPOINT.value, prompts=NUM_PROMPTS.value or config.evaluation.prompts)
  print(table(found), file=sys.stderr)
  print(json.dumps(report.plain(found)))


if __name__ == '__main__':
  command_line.run(main, __doc__)
