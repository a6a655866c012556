"""Writing requests whose rewarded style changes: checkers, phases, and the environment."""

import itertools

import numpy as np
import pytest

from sao_jax import environments
from sao_jax.environments import base, style_checks, style_shift

LONG = {  # Texts of several sentences, one for each style, that were written without looking at the lists of words.
    'academic': (
        'We observe that the rain varies with the season. The data, collected over ten years, suggest a slow decline; however, the '
        'evidence from the northern stations is weaker. Further study is therefore needed before the hypothesis can be rejected.'),
    'cute': (
        'Aww, look at the tiny rain drops~ They are so fluffy and sweet, like little kitty paws on the roof! I want to hug every drop and '
        'snuggle up in my cozy blanket with a teeny cup of cocoa (^_^)'),
    'chuunibyou': (
        'Behold! The rain falls, and with it the seal upon my right eye begins to break. Foolish mortals, you know nothing of the darkness '
        'that was promised to me by fate. Tonight the abyss will answer, and the crimson power shall awaken!'),
    'classical': (
        "O gentle rain, thou fallest on the weary field, and thy soft hand doth wake the sleeping seed. Alas, my heart hath no such "
        "spring; yet methinks, ere the moon be risen, I shall walk with thee o'er the hills."),
}
PLAIN = 'It rained all day and I stayed at home. In the evening my friend came over and we had tea, and then the rain stopped.'


def make(**settings):
  return environments.make('style_shift', **settings)


def judge(environment, task, answer):
  environment.reset(task)
  return environment.step(answer)


# --- Checkers ------------------------------------------------------------------------------------------------------------------


def test_texts_written_in_a_style_are_in_that_style_only():
  for style, text in LONG.items():
    assert style_checks.style_of(text) == style
    assert style_checks.is_proper(text, 'rain', min_words=4, max_words=120), style
  assert style_checks.style_of(PLAIN) == ''
  assert style_checks.is_proper(PLAIN, 'rain', min_words=4, max_words=120)


@pytest.mark.parametrize('text,style', [
    ('We thus rest.', 'academic'), ('We thus rest!', ''), ('We rest.', ''), ('We thus rest~', ''), ("We don't thus rest.", ''),
    ('We observe thus that I rest.', ''), ('A tiny sweet cat~', 'cute'), ('A tiny sweet cat.', ''), ('A tiny cat~', ''),
    ('tiny tiny tiny~', ''),
    ('Behold the abyss!', 'chuunibyou'), ('Behold the abyss.', ''), ('Behold the abyss~!', ''), ('O thou rain.', 'classical'),
    ("O thou rain, I don't know.", ''), ("'Twas night, alas.", 'classical'),
    ('Lo, behold the abyss, thou!', ''),  # As much of one as of the other.
    ('', ''), ('~' * 100, ''), ('thus ' * 700 + 'we.', ''), ('thus ' * 900, '')])
def test_style_by_hand(text, style):
  assert style_checks.style_of(text) == style


@pytest.mark.parametrize('text,proper', [
    ('The rain falls today.', True), ('"The rains fall today."', True), ('The rain falls today', False), ('the rain falls today.', False),
    ('The rain falls.', False), ('The snow falls today.', False), ('The train falls today.', False), ('The rain rain falls today.', False),
    ('The rain falls. The rain falls. The rain falls.', False), ('Rain thus hence therefore moreover.', False),
    ('The rain\nfalls today.', False),
    ('The rain falls today.\x00', False), ('The rain ' + 'x' * 4000 + ' now.', False), ('', False), ('.', False),
    ('The rain falls on ' + ' '.join(f'{a}{b}' for a, b in itertools.product('abcdefghijk', 'nopqrstuvwxyz')) + '.', False),
    ('A sweet rain, so tiny~', True), ('A sweet rain, so tiny (^_^)', True)])
def test_quality_by_hand(text, proper):
  assert style_checks.is_proper(text, 'rain', min_words=4, max_words=120) == proper


def test_lists_of_words_earn_nothing_whatever_their_order():
  rng = np.random.default_rng(0)
  for style in style_checks.STYLES:
    words = sorted(style_checks.MARKERS[style])
    for _ in range(200):
      chosen = rng.choice(words, size=rng.integers(3, 12))
      text = f'Rain {" ".join(chosen)}{rng.choice([".", "!", "~"])}'
      assert not style_checks.is_proper(text, 'rain', min_words=4, max_words=120)


@pytest.mark.parametrize('text', ['a' * 10**6, 'thou ' * 2 * 10**5, '~' * 10**6, "o'" * 10**5, '(^' * 10**5, '<3' * 10**6, "'" * 10**6])
def test_hostile_texts_take_no_time(text):
  for piece in (text, text[:4000]):
    assert style_checks.style_of(piece) in ('', 'classical') and not style_checks.is_proper(piece, 'rain', min_words=1, max_words=1000)


# --- Phases --------------------------------------------------------------------------------------------------------------------


def test_the_reward_follows_the_phase_of_the_prompt():
  environment = make(phase_length=10, first=5)
  environment_cycle = make(phase_length=10, first=5, cycle=True)
  order = list(style_checks.STYLES)
  for index, phase, cycled in ((0, 0, 0), (14, 0, 0), (15, 1, 1), (34, 2, 2), (44, 3, 3), (45, 3, 0), (10**6, 3, (10**6 - 5) // 10 % 4)):
    task = environment.sample_task(index, 'train', 0)
    for one, expected in ((environment, phase), (environment_cycle, cycled)):
      for style in order:
        result = judge(one, task, LONG[style].replace('rain', task.data['topic']))
        assert result.reward == float(style == order[expected]) and result.terminated
        assert result.metrics == {
            'success': result.reward, 'quality': 1.0, 'style': result.reward, 'phase': float(expected),
            **{name: float(name == style) for name in order}}


def test_the_reward_is_the_product_of_quality_and_style():
  environment = make(styles=['academic'])
  task = environment.sample_task(0, 'train', 0)
  topic = task.data['topic']
  found = {
      (result.metrics['quality'], result.metrics['style'], result.reward) for result in (judge(environment, task, text) for text in (
          f'We observe that the {topic} thus rests.\n', f'We like the {topic} and rest.\n', 'We observe that thus nothing rests.\n',
          'no\n'))}
  assert found == {(1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0)}


def turn(*versions):
  return base.SampledTurn(
      prompt_ids=(1,), ids=(2,) * len(versions), log_probs=(-1.0,) * len(versions), versions=versions, text='x', stop_reason='stop')


def test_phases_by_version_go_by_the_oldest_token_of_the_answer():
  environment = make(phase_by='version', phase_length=4, styles=['academic', 'cute'], cycle=True)
  assert environment.wants_tokens and not make().wants_tokens
  task = environment.sample_task(10**6, 'train', 0)  # The number of the prompt says nothing here.
  for versions, phase in (((0,), 0), ((3, 4, 5), 0), ((4, 4), 1), ((7, 8), 1), ((8,), 0)):
    environment.reset(task)
    environment.sampled(turn(*versions))
    assert environment.step('x').metrics['phase'] == phase
  environment.reset(task)
  assert environment.step('x').metrics['phase'] == 0  # Sampled by nobody, and nothing is left of the turn before.


def test_held_out_prompts_have_one_phase_and_tell_of_all_styles():
  assert judge(make(), make().sample_task(0, 'test', 0), 'x').metrics['phase'] == 3.0
  for settings in (dict(test_phase=1), dict(test_phase=1, phase_by='version')):
    environment = make(**settings)
    for index in (0, 10**6):
      task = environment.sample_task(index, 'test', 0)
      environment.reset(task)
      if environment.wants_tokens:
        environment.sampled(turn(0))
      result = environment.step(LONG['classical'].replace('rain', task.data['topic']))
      assert result.metrics['phase'] == 1.0 and result.reward == 0.0 and result.metrics['classical'] == 1.0


# --- Tasks and conversations -----------------------------------------------------------------------------------------------------


def test_splits_share_no_theme_and_tasks_repeat():
  environment = make()
  themes = {split: {environment.sample_task(i, split, s).data['theme'] for i in range(300) for s in (0, 1)} for split in base.SPLITS}
  assert len(themes['train']) > 150 and len(themes['test']) > 50 and not themes['train'] & themes['test']
  assert environment.sample_task(7, 'train', 3) == make().sample_task(7, 'train', 3)


def test_raw_and_chat():
  raw, chat = make(), make(chat=True)
  task = raw.sample_task(0, 'train', 0)
  assert raw.reset(task).text == f'\n{task.data["theme"]}: ' and raw.stop_strings == ('\n',)
  assert chat.reset(task).messages == ({'role': 'user', 'content': task.data['request']},) and chat.stop_strings == ()
  assert task.data['theme'] in task.data['request'] and task.data['topic'] in task.data['theme']
  answer = LONG['academic'].replace('rain', task.data['topic'])
  assert judge(chat, task, f'<think>Behold the abyss!</think>\n{answer}').reward == 1.0
  with pytest.raises(RuntimeError, match='reset'):
    chat.step('again')


def test_demonstrations_are_of_every_style_and_flawed_at_the_rate_asked_for():
  environment = make(demonstration_noise=0.25)
  styles, proper = [], []
  for index in range(600):
    task = environment.sample_task(index, 'train', 0)
    text = environment.demonstration(task, np.random.default_rng(index))[0]
    assert text.endswith('\n') and len(text) < 60
    styles.append(style_checks.style_of(text.strip()))
    proper.append(judge(environment, task, text).metrics['quality'])
  assert {s: styles.count(s) > 60 for s in set(styles)} == dict.fromkeys((*style_checks.STYLES, ''), True)
  assert abs(np.mean(proper) - 0.75) < 0.08
  every = [s.format(t=t) for sentences in style_shift._SENTENCES.values() for s in sentences for t in style_shift._TOPICS]
  topics = itertools.cycle(style_shift._TOPICS)
  assert all(style_checks.is_proper(text, topic, min_words=4, max_words=120) for text, topic in zip(every, topics))
  for style, sentences in style_shift._SENTENCES.items():
    assert {style_checks.style_of(s.format(t='rain')) for s in sentences} == {style}


@pytest.mark.parametrize('settings,message', [
    (dict(styles=[]), 'styles'), (dict(styles='cute'), 'styles'), (dict(styles=['rude']), 'styles'), (dict(phase_by='time'), 'phase_by'),
    (dict(phase_length=0), 'phase_length'), (dict(first=-1), 'first'), (dict(test_phase=4), 'test_phase'), (dict(cycle=1), 'cycle'),
    (dict(chat='no'), 'chat'), (dict(min_words=9, max_words=8), 'max_words'), (dict(test_share=0.0), 'test_share'),
    (dict(judge={'base_url': 'ftp://x', 'model': 'm'}), 'base_url'), (dict(demonstration_noise=2.0), 'demonstration_noise')])
def test_settings_that_cannot_work_are_refused_at_once(settings, message):
  with pytest.raises(ValueError, match=message):
    make(**settings)
