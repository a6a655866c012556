"""A small agent that the scaffold environment starts: the standard library alone, one behaviour for each 'mode' of its task."""

import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request

URL, KEY = os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']
TASK = json.loads(pathlib.Path(os.environ['SAO_TASK_FILE']).read_text())
TOOLS = [{'type': 'function', 'function': {'name': 'add', 'description': 'a + b', 'parameters': {
    'type': 'object', 'properties': {'a': {'type': 'integer'}, 'b': {'type': 'integer'}}, 'required': ['a', 'b']}}}]


def ask(messages, timeout=120.0, **others):
  request = urllib.request.Request(
      URL + '/chat/completions', json.dumps({'model': 'x', 'messages': messages, **others}).encode(), {'Authorization': f'Bearer {KEY}'})
  with urllib.request.urlopen(request, timeout=timeout) as response:
    return json.loads(response.read())['choices'][0]


def solve(messages, choice=None, **others):
  """Plays tools until the policy says something without a call; `choice` is its first answer, if there is one already."""
  while True:
    choice, said = None, choice or ask(messages, tools=TOOLS, **others)
    messages.append(said['message'])
    calls = said['message'].get('tool_calls')
    if not calls:
      return said['message']['content']
    for call in calls:
      numbers = json.loads(call['function']['arguments'])
      messages.append({'role': 'tool', 'tool_call_id': call['id'], 'content': str(numbers['a'] + numbers['b'])})


def main():
  mode = TASK.get('mode', 'solve')
  if mode == 'crash_first':
    sys.exit('cannot start')
  if mode == 'hang_first':
    time.sleep(600)
  if mode == 'remove':
    import shutil
    ask([{'role': 'user', 'content': 'x'}])
    shutil.rmtree(os.path.dirname(os.environ['SAO_TASK_FILE']) + ('/work' if TASK['folder'] == 'work' else ''), ignore_errors=True)
    return
  if mode == 'outside':
    import socket
    reached = []
    for address in (('127.0.0.1', TASK['port']), ('192.0.2.1', 80)):
      try:
        socket.create_connection(address, 2.0).close()
        reached.append(address)
      except OSError:
        pass
    pathlib.Path('reached.json').write_text(json.dumps(reached))
  if mode == 'environment':
    names = sorted(set(os.environ) - {'PATH', 'LANG', 'LC_ALL', 'LC_CTYPE', 'TZ', 'VIRTUAL_ENV', 'PWD', 'OLDPWD', 'SHLVL', '_'})
    ask([{'role': 'user', 'content': ' '.join(names)}])
    pathlib.Path('seen.json').write_text(json.dumps({
        'names': names, 'task': TASK, 'stdin': sys.stdin.read(), 'folder': os.getcwd(), 'files': sorted(os.listdir('.'))}))
    return
  messages = [{'role': 'system', 'content': 'You add.'}, {'role': 'user', 'content': TASK['question']}]
  first, patience_s = None, 0.05
  while mode == 'impatient' and first is None:  # The sampler takes longer than the first times together.
    try:
      first = ask(messages, timeout=patience_s, tools=TOOLS, max_tokens=500)
    except urllib.error.HTTPError:
      raise
    except OSError:
      patience_s *= 1.5
  if mode == 'forgetful':
    ask([messages[1]], tools=TOOLS)
  if mode == 'overflow':
    said = ''
    while True:
      try:
        said = ask(messages)['message']
      except urllib.error.HTTPError as error:
        assert json.loads(error.read())['error']['code'] == 'context_length_exceeded'
        messages = [{'role': 'user', 'content': 'in short: ' + TASK['question']}]
        said = ask(messages)['message']
        pathlib.Path('answer.txt').write_text(said['content'])
        return
      messages += [said, {'role': 'user', 'content': 'more, please. ' * 20}]
  if mode == 'stop':
    ask(messages, stop=['END', 'OVER'])
    ask([*messages, {'role': 'user', 'content': 'and now without'}])
  if mode == 'odd_message':
    ask(messages)
    ask([*messages, {'role': 'tool', 'content': 'nobody asked'}, {'role': 'system', 'content': 'x'}, {'role': 'user', 'content': ''}])
  answer = solve(messages, first, max_tokens=TASK.get('max_tokens', 500))
  pathlib.Path('answer.txt').write_text(answer)
  if 'result' in TASK:
    pathlib.Path('result.json').write_text(TASK['result'])
  if mode == 'crash_later':
    sys.exit(3)
  if mode == 'children':
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
  if mode == 'hang_later':
    subprocess.Popen(['/bin/sh', '-c', 'trap "" TERM; sleep 600'])
    time.sleep(600)


main()
