r"""Serves a policy to any OpenAI client, and writes the exact tokens of every conversation.

  python launch/serve.py --workdir=runs/mine [--checkpoint=12] [--port=8000]
  python launch/serve.py --pretrained=FOLDER [--max_tokens=8192] [--max_turn_tokens=1024]
  python launch/serve.py --config=configs/NAME.py

The base URL and the key are told on standard error once requests are taken; clients take them as OPENAI_BASE_URL and OPENAI_API_KEY. The
key is a new one each time, or that of the environment variable SAO_SERVE_KEY. Conversations are found again by their messages, and each is
appended to --output when it ends: after --quiet_s without a request, when another needs its place, or with the server, which SIGTERM or
Ctrl-C end. Prints one JSON object on standard output then. docs/gateway.md tells what is understood.

Temperature, top-p and top-k are those of the settings or of the flags; what clients ask for is not followed.
"""

import json
import os
import pathlib
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1]))  # The repository, for `import sao_jax` without an installation.

import command_line

from absl import flags  # After command_line, which tells what to do where it is missing.
from ml_collections import config_flags

CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'Settings; default: those of the workdir.', lock_config=False, accept_new_attributes=True)  # Judged by `from_dict`.
WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a run whose checkpoint is served; it is only read.')
CHECKPOINT = flags.DEFINE_integer('checkpoint', None, 'Number of the checkpoint; default: the newest.', lower_bound=0)
PRETRAINED = flags.DEFINE_string('pretrained', None, 'Folder or name of pretrained weights to serve.')
HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on. Beyond loopback, keys and conversations travel in plain text.')
PORT = flags.DEFINE_integer('port', 0, 'Port to listen on; 0 for any that is free.', lower_bound=0, upper_bound=65535)
OUTPUT = flags.DEFINE_string('output', 'conversations.jsonl', 'File that conversations are appended to.')
QUIET_S = flags.DEFINE_float('quiet_s', 600.0, 'A conversation without a request for so long is over.', lower_bound=0.1)
MAX_TOKENS = flags.DEFINE_integer('max_tokens', None, 'Longest conversation, in tokens; default: task.max_tokens.', lower_bound=2)
MAX_TURN_TOKENS = flags.DEFINE_integer('max_turn_tokens', None, 'Longest turn; default: task.max_turn_tokens.', lower_bound=1)
SESSIONS = flags.DEFINE_integer('sessions', None, 'Conversations held at once; default: sampler.sessions.', lower_bound=1)
TEMPERATURE = flags.DEFINE_float('temperature', None, 'Default: sampler.temperature.', lower_bound=0.0)
REQUESTS_PER_S = flags.DEFINE_float('requests_per_s', 50.0, 'Of the key; beyond, clients are told to wait.', lower_bound=0.01)


def read_settings(settings) -> dict:
  """The settings to serve with. Raises ValueError where there are none, or where flags do not go together."""
  if sum(x is not None for x in (WORKDIR.value, PRETRAINED.value)) != 1 and (CONFIG.value is None or WORKDIR.value is not None):
    raise ValueError('Give --workdir of a run, --pretrained, or --config for weights before any training: what is to be served?')
  if CHECKPOINT.value is not None and WORKDIR.value is None:
    raise ValueError('--checkpoint is that of a --workdir.')
  if CONFIG.value is not None:
    values = CONFIG.value.to_dict()
  elif PRETRAINED.value is not None:
    values = settings.default_dict()
    values['sampler'] |= {'slots': 16, 'sessions': 16, 'prefill_rows': (4, 16), 'prefill_lengths': (64, 512)}
    values['task'] |= {'max_tokens': 4096, 'max_turn_tokens': 1024}
  else:
    path = command_line.check_workdir(WORKDIR.value) / 'config.json'
    if not path.is_file():
      raise ValueError(f'{path} does not exist; is {WORKDIR.value} the workdir of a run? Else give --config.')
    values = command_line.read_settings_file(path)
  if PRETRAINED.value is not None:
    values['model'] |= {'pretrained': PRETRAINED.value, 'tokenizer': 'pretrained'}
  for section, name, value in (
      ('task', 'max_tokens', MAX_TOKENS.value), ('task', 'max_turn_tokens', MAX_TURN_TOKENS.value),
      ('sampler', 'sessions', SESSIONS.value)):
    if value is not None:
      values[section][name] = value
  values['learner']['lengths'] = (values['task']['max_tokens'],)  # Nothing is learned here.
  values['sampler']['cache_lengths'] = ()
  if TEMPERATURE.value is not None:
    values['sampler']['temperature'] = TEMPERATURE.value or 1.0
  values['sampler']['slots'] = min(values['sampler']['slots'], values['sampler']['sessions'])
  return values


def main() -> None:
  from sao_jax import config as settings  # Settings are judged before JAX is imported.
  from sao_jax.gateway import GatewaySettings

  served = GatewaySettings(
      host=HOST.value, port=PORT.value, requests_per_s=REQUESTS_PER_S.value, burst=max(1, int(2 * REQUESTS_PER_S.value)))
  config = settings.from_dict(read_settings(settings))
  from sao_jax import report
  from sao_jax.serve_run import serve_run

  def ready(url: str, key: str) -> None:
    command_line.say(f'OPENAI_BASE_URL={url}\nOPENAI_API_KEY={key}')

  with command_line.stop_on_signals() as stop:
    found = serve_run(
        config, WORKDIR.value, step=CHECKPOINT.value, settings=served, key=os.environ.get('SAO_SERVE_KEY') or None, output=OUTPUT.value,
        quiet_s=QUIET_S.value, greedy=TEMPERATURE.value == 0, on_ready=ready, stop=stop)
  command_line.answer(json.dumps(report.plain(found)), f'The conversations are in {OUTPUT.value}.')


if __name__ == '__main__':
  command_line.run(main, __doc__, interrupted='Conversations that had ended are written.')
