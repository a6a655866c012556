r"""Trains an agent.

  python launch/train.py --config=configs/NAME.py --workdir=DIR [--config.learner.batch_size=32 ...]

Any setting of the config can be changed by its path (`--config.section.name=value`); an unknown one is an error. A workdir that holds an
unfinished run with the same settings is resumed. Everything that the run writes is in the workdir; README.md tells what. SIGTERM saves a
checkpoint after the step under way and ends with status 143.
"""

import pathlib
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))  # The repository, for `import sao_jax` without an installation.

from absl import flags
from ml_collections import config_flags

import command_line

CONFIG = config_flags.DEFINE_config_file('config', None, 'The settings, e.g. configs/quickstart.py.', lock_config=True)
WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of this run; an unfinished run in it is resumed.')
KEEP_PREVIOUS = flags.DEFINE_bool(
    'keep_previous', False, 'Move a finished run, or one with other settings, from the workdir to WORKDIR-1, -2, ... instead of refusing.')
flags.mark_flags_as_required(['config', 'workdir'])


def main() -> None:
  from sao_jax import config as settings  # Settings are judged before JAX is imported.

  config = settings.from_dict(CONFIG.value.to_dict())
  workdir = pathlib.Path(WORKDIR.value)
  if KEEP_PREVIOUS.value:
    command_line.keep_previous(workdir, settings.to_dict(config))
  with command_line.reported_errors(workdir):
    from sao_jax import train

    with command_line.stop_on_sigterm() as stop:
      try:
        summary = train.run(config, workdir, stop=stop)
      except train.Stopped as stopped:
        print(f'SIGTERM: {stopped}. Everything is saved; run the same command again to resume.', file=sys.stderr)
        command_line.leave(143)
  print(command_line.what_came_out(workdir, summary))


if __name__ == '__main__':
  command_line.run(main, __doc__)
