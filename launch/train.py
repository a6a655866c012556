r"""Trains an agent.

  python launch/train.py --config=configs/NAME.py --workdir=DIR [--config.learner.batch_size=32 ...]

Any setting of the config can be changed by its path (`--config.section.name=value`); an unknown one is an error. A workdir that holds an
unfinished run with the same settings is resumed. Everything that the run writes is in the workdir; README.md tells what. SIGTERM or Ctrl-C
saves a checkpoint after the step under way and ends with status 143 or 130; a second one ends at once.
"""

import pathlib
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))  # The repository, for `import sao_jax` without an installation.

import command_line

from absl import flags  # After command_line, which tells what to do where it is missing.
from ml_collections import config_flags

CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'The settings, e.g. configs/quickstart.py.', lock_config=False, accept_new_attributes=True)  # Judged by `from_dict`.
WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of this run; an unfinished run in it is resumed.')
KEEP_PREVIOUS = flags.DEFINE_bool(
    'keep_previous', False, 'Move a finished run, or one with other settings, from the workdir to WORKDIR-1, -2, ... instead of refusing.')
flags.mark_flags_as_required(['config', 'workdir'])


def main() -> None:
  from sao_jax import config as settings  # Settings are judged before JAX is imported.

  config = settings.from_dict(CONFIG.value.to_dict())
  workdir = command_line.check_workdir(WORKDIR.value)
  if KEEP_PREVIOUS.value:
    command_line.keep_previous(workdir, settings.to_dict(config))
  with command_line.reported_errors(workdir):
    from sao_jax import train

    command_line.prepare_host()
    with command_line.stop_on_signals() as stop:
      try:
        summary = train.run(config, workdir, stop=stop)
      except train.Stopped as stopped:
        command_line.say(f'{stop.name}: {stopped}. Everything is saved; run the same command again to resume.')
        command_line.leave(stop.status)
  command_line.answer(
      command_line.what_came_out(workdir, summary), f'The run is finished and saved; its results are in {workdir / "summary.json"}.')


if __name__ == '__main__':
  command_line.run(main, __doc__)
