"""Graders without processes: extraction, spelling, arithmetic, forms, refusals, and the registry."""

from fractions import Fraction
import math
import time

from absl.testing import parameterized
from hypothesis import given, settings, strategies as st
import pytest

from sao_jax import graders
from sao_jax.graders import arithmetic, base, compare, extract, forms, guards, latex, simple, symbolic
import graders_table

PLAIN = graders_table.pairs(graders_table.PLAIN)


def value(text):
  return arithmetic.evaluate(tuple(latex.grouped(latex.tokens(latex.canonical(text)))))


def plain_verdict(gold, answer):
  """True, False, or None where algebra is needed."""
  if latex.string_key(gold) == latex.string_key(answer):
    return True
  try:
    return symbolic.compare_texts(compare.Comparer(compare.NoAlgebra()), gold, answer)
  except compare.Undecided:
    return None


class ExtractionTest(parameterized.TestCase):

  @parameterized.parameters(
      (r'\boxed{5}', '5'), (r'so \boxed{5}.', '5'), (r'$\boxed{\frac{1}{2}}$', r'\frac{1}{2}'), (r'\boxed{ 5 }', '5'), (r'\boxed {5}', '5'),
      (r'\fbox{5}', '5'), (r'\framebox{5}', '5'), (r'\boxed{\{1,2\}}', r'\{1,2\}'), (r'\boxed{\text{A}}', r'\text{A}'),
      (r'\text{\boxed{7}}', '7'),
      (r'\boxed{1} then \boxed{2}', '2'), (r'\boxed{1}, no: \boxed{2}', '2'), (r'\boxed{4}' + '\n\n' + r'\boxed{5}', '5'),
      (r'\boxed{1} or \boxed{2}', '1, 2'), (r'$\boxed{1}$, $\boxed{2}$ and $\boxed{3}$', '1, 2, 3'), (r'\boxed{5}, \boxed{5}', '5'),
      (r'\boxed{1} \text{ and } \boxed{2}', '1, 2'), (r'\boxed{\boxed{5}}', '{5}'), (r'\boxed{x = \boxed{5}}', 'x = {5}'),
      (r'\boxed 5', '5'), (r'\boxed 72 apples', '72'), (r'$\boxed72$', '72'), (r'\\boxed{5}', '5'), (r'\boxed{a{b}{c{d}}e} tail {',
      'a{b}{c{d}}e'),
      (r'\boxed{\frac{1}{2} and \boxed{3}', '3'), (r'\boxed{}', None), (r'\boxed{ }', None), (r'\boxed{5', None),
      (r'\boxed{7} but \boxed{5', None),
      (r'\boxed', None), (r'\boxedx{5}', None), ('no box', None), ('', None), (r'\boxed{1\\2}', r'1\\2'), (r'\boxed{a\}b}', r'a\}b'),
      ('\\boxed{line one\nline two}', 'line one\nline two'))
  def test_boxed(self, response, expected):
    self.assertEqual(extract.extract(response, 'boxed'), expected)

  @parameterized.parameters(
      ('tag', 'x <answer> 5 </answer> y', '5'), ('tag', '<answer>1</answer><answer>2</answer>', '2'), ('tag', '<answer>5', None),
      ('hash', 'a\n#### 72', '72'), ('hash', '#### 1\n#### 2\nend', '2'), ('hash', '72', None), ('phrase', 'The answer is 72.', '72'),
      ('phrase', 'The final answer is $1.5$. I hope it is.', '$1.5$'),
      ('phrase', 'Answer: **72**', '72'), ('phrase', 'the final answer is: $x^2$\nok', '$x^2$'), ('phrase', '72', None),
      ('last_number', 'from 3 to 1,024.5 it is', '1024.5'), ('last_number', '12-7', '7'), ('last_number', 'none', None),
      ('last_line', 'a\n b \n\n', 'b'), ('last_line', ' \n', None), ('whole', ' 5 \n', '5'), ('whole', '', None),
      ('auto', '72', '72'), ('auto', 'so it is 5\n#### 7', '7'), ('auto', r'answer: 3 \boxed{4}', '4'), ('auto',
      r'the answer is 3 \boxed{4', None),
      ('auto', 'I do not know what the right answer for this one could be', None), ('auto', '<answer>3</answer> answer: 4', '3'),
      ('auto', r'\frac{1}{2} \text{ cm}', r'\frac{1}{2} \text{ cm}'))
  def test_other_forms(self, form, response, expected):
    self.assertEqual(extract.extract(response, form), expected)

  def test_megabytes_take_little_time(self):
    start = time.monotonic()
    for text in ('{' * 10**6, r'\boxed{' * 150_000, r'\boxed' * 170_000, 'answer is ' * 10**5, '####' * 250_000, '1,' * 500_000,
        '\\' * 10**6, ' ' * 10**6,
                 r'\boxed{1} or ' * 70_000, '<answer>' * 10**5):
      for form in extract.FORMS:
        extract.extract(text + r'\boxed{5}', form)
    assert time.monotonic() - start < 20

  def test_answers_far_from_the_end_are_still_found_in_the_window(self):
    assert extract.extract(r'\boxed{5}' + ' word' * 15_000, 'boxed') == '5'
    assert extract.extract(r'\boxed{5}' + ' word' * 30_000, 'boxed') is None  # Documented: beyond the window.


class ArithmeticTest(parameterized.TestCase):

  @parameterized.parameters(
      ('1/2', Fraction(1, 2)), ('2^{-3}', Fraction(1, 8)), (r'1\frac{4}{5}', Fraction(9, 5)), (r'-1\frac12', Fraction(-3, 2)), ('3 1/4',
      Fraction(13, 4)),
      (r'2\frac{3}{2}', Fraction(3)), (r'\frac{-35}{9}', Fraction(-35, 9)), ('5!', Fraction(120)), ('7!!', Fraction(105)),
      (r'\binom{6}{2}', Fraction(15)),
      (r'\sqrt{\frac{9}{4}}', Fraction(3, 2)), ('2(3+4)', Fraction(14)), ('2^3^2', Fraction(512)), ('(2^3)^2', Fraction(64)), (r'-2^2',
      Fraction(-4)),
      (r'3 \cdot -2', Fraction(-6)), ('1,000,000', Fraction(10**6)), ('1.5e3', None), ('x', None), (r'\pi', None), (r'\sqrt{2}', None),
      ('1/0', None),
      ('0^0', None), ('12 34', None), ('1+', None), (')', None), ('', None), ('(-1)^{100000}', Fraction(1)), (r'10^{-2}', Fraction(1,
      100)), ('2/3/4', Fraction(1, 6)),
      (r'\frac{2025^{101} + 2025^2 + 2025 + 1}{2026}', Fraction(2025**101 + 2025**2 + 2026, 2026)), (r'4\cdot3^{2023}',
      Fraction(4 * 3**2023)))
  def test_values(self, text, expected):
    self.assertEqual(value(text), expected)

  @parameterized.parameters('9^{9^9}', '9**9**9', '9^9^9', '(10^{10})^{10^{10}}', '(9^9)!', '10000!!!', r'\pi^{9^{9}}', r'\sqrt{2}^{9^9}',
      r'2^{\pi^{20}}', r'x^{9^9}',
                            r'\binom{10^9}{10^8}', r'\frac{1}{9^{9^9}}', '5+9^{9^9}', r'\sin(9^{9^9})', '2^{10^7}',
                            r'\left(3^{3^{3^{3}}}\right)', '1,9^{9^9}', 'y=7^{7^{7}}')
  def test_what_is_too_large_is_told_before_it_is_worked_out(self, text):
    start = time.monotonic()
    with self.assertRaises(arithmetic.TooLarge):
      arithmetic.check_size(latex.grouped(latex.tokens(latex.canonical(text))))
    self.assertLess(time.monotonic() - start, 1.0)

  @parameterized.parameters('2^{2025^2} \\text{ no }', '2^{u-2}', 'x^{100}', r'(2k-1)!!', r'\binom{2k}{k}^2', '(n-2)!', 'e^{3}',
      r'\frac{20000}{\pi}')
  def test_what_is_not_too_large_passes(self, text):
    if text.startswith('2^{2025'):
      with self.assertRaises(arithmetic.TooLarge):
        arithmetic.check_size(latex.grouped(latex.tokens(latex.canonical(text))))
      return
    arithmetic.check_size(latex.grouped(latex.tokens(latex.canonical(text))))


@settings(max_examples=200, deadline=None)
@given(st.integers(-10**9, 10**9), st.integers(1, 10**6))
def test_every_spelling_of_a_fraction_has_its_value(p, q):
  exact = Fraction(p, q)
  assert value(rf'\frac{{{p}}}{{{q}}}') == exact == value(f'{p}/{q}') == value(rf'\dfrac{{{p}}}{{{q}}}')
  whole, rest = divmod(abs(p), q)
  if whole and rest:
    sign = '-' if p < 0 else ''
    assert value(rf'{sign}{whole}\frac{{{rest}}}{{{q}}}') == exact == value(f'{sign}{whole} {rest}/{q}')
  assert value(f'{p:,}') == p


@settings(max_examples=200, deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-10**6, max_value=10**6), st.integers(1, 9))
def test_decimals_are_exact(number, digit):
  text = f'{number:f}'
  near = text + f'0000000{digit}'
  assert value(text) == Fraction(text)
  assert plain_verdict(text, near) is False
  assert plain_verdict(text, text + '000') is True


class FormsTest(parameterized.TestCase):

  @parameterized.parameters(('1, -2', 'Many'), ('(1,2)', 'Many'), ('[1,2)', 'Interval'), ('x = 5', 'Named'), ('2x + y = 3', 'Relation'),
      ('5', 'Single'),
                            (r'\text{east}', 'Words'), (r'\begin{pmatrix} 1 \\ 2 \end{pmatrix}', 'Matrix'), ('1, 2, \\ldots, 9', 'Other'),
                            ('((', 'Other'), ('', 'Other'))
  def test_kinds(self, text, kind):
    self.assertEqual(type(forms.parse(text)).__name__, kind)

  @parameterized.parameters('inches', 'in.', 'inch', 'Inches')
  def test_units_have_one_spelling(self, text):
    self.assertEqual(forms.unit_of(text, '2'), 'inch^2')
    self.assertEqual(forms.unit_of(f'square {text}'), 'inch^2')


SOUP = st.lists(st.sampled_from(
    [*'0123456789xyeiCf+-*/^_=<>()[]{},;:!|%.$& ~', '12', '1,234', '0.5', r'\frac', r'\sqrt', r'\pm', r'\{', r'\}', r'\$', r'\%',
    r'\left(', r'\right]', r'\cup', r'\in ',
     r'\text{cm}', r'\text{ or }', r'\leq ', r'\neq ', r'\infty', r'\pi', r'^\circ', r'\begin{pmatrix}', r'\end{pmatrix}', r'\\',
     r'\ldots', ' and ', 'apples', r'\binom',
     '!!', r'\mathbb{R}', r'\setminus', r'\approx ', r'\boxed{', '\n', r'\text{base}', r'\lfloor', r'\rfloor', r'\angle']),
     max_size=14).map(''.join)


@settings(max_examples=3000, deadline=None)
@given(SOUP, SOUP)
def test_no_answer_however_odd_raises(gold, answer):
  """And every answer is right against itself, in its string and as a form."""
  for text in (gold, answer):
    form = forms.parse(text)
    assert compare.Comparer(compare.NoAlgebra()).same(form, form)
    simple.whole_number(text)
    guards.refusal(text)
    extract.extract(text, 'auto')
  try:
    plain_verdict(gold, answer)
  except arithmetic.TooLarge:
    pass


def test_the_table_is_long_and_of_many_kinds():
  algebra = graders_table.pairs(graders_table.ALGEBRA)
  assert len(PLAIN) >= 400 and len(algebra) >= 200 and len({k for k, *_ in PLAIN + algebra}) >= 14
  assert len({(g, o) for _, g, o, _ in PLAIN + algebra}) >= 650


@pytest.mark.parametrize('kind', sorted(graders_table.PLAIN))
def test_plain_pairs_need_no_algebra_or_get_no_verdict_without(kind):
  """Right ones are told at once; a wrong one may need algebra to be told, but is never right."""
  rows = [row for row in PLAIN if row[0] == kind]
  assert rows
  for _, gold, other, right in rows:
    refused = guards.refusal(other) or not other.strip()
    verdict = False if refused else plain_verdict(gold, other)
    assert verdict is True if right else verdict is not True, (gold, other, verdict)


def test_few_wrong_answers_need_algebra():
  undecided = [(g, o) for _, g, o, right in PLAIN if not right and o.strip() and not guards.refusal(o) and plain_verdict(g, o) is None]
  assert len(undecided) <= 0.08 * len(PLAIN), undecided


class GuardsTest(parameterized.TestCase):

  @parameterized.parameters('1' * 5000, '(' * 1000 + ')' * 1000, '__import__("os")', 'import os', 'eval(1)', 'os.system("x")', 'open("f")',
      'lambda: 1', '5\x00', '\ud800',
                            r'\input{/etc/passwd}', r'\sqrt' * 100 + '2', '-' * 200 + '1', '2^' * 200 + '2', '().__class__', 'x;f(1)',
                            'getattr(x, y)')
  def test_refused(self, text):
    self.assertTrue(guards.refusal(text), text)
    self.assertEqual(graders.make('math').grade(r'\boxed{' + text + '}', '5').score, 0.0)

  @parameterized.parameters(r'\lambda^8 + 36\lambda^7', r'\operatorname{lcm}(a,b)', 'important', 'x; y', r'\{x : x > 0\}', "f'(x)",
      r'\frac{1}{2}', 'a system of two equations',
                            r'\int_0^1 x\,dx', '1\n2', 'evaluate')
  def test_not_refused(self, text):
    self.assertEqual(guards.refusal(text), '')


class SimpleGradersTest(parameterized.TestCase):

  @parameterized.parameters((r'\boxed{72}', 'right'), ('72', 'right'), ('#### 72', 'right'), ('The answer is 72.', 'right'),
      (r'\boxed{1,072}', 'wrong'), (r'\boxed{72.0}', 'right'),
                            (r'\boxed{72.5}', 'wrong'), (r'\boxed{7}', 'wrong'), (r'\boxed{x = 72}', 'right'), (r'\boxed{72, 73}',
                            'wrong'), (r'\boxed{72', 'no_answer'),
                            (r'\boxed{2 \cdot 36}', 'wrong'), (r'\boxed{seventy-two}', 'wrong'), (r'\boxed{\$72}', 'right'), ('',
                            'no_answer'), (r'\boxed{9^{9^9}}', 'wrong'),
                            ('(' * 10**6, 'no_answer'), (r'\boxed{' + '(' * 50_000 + '}', 'wrong'))
  def test_integer(self, response, verdict):
    grade = graders.make('integer').grade(response, '72')
    self.assertEqual((grade.verdict, grade.score), (verdict, float(verdict == 'right')))

  def test_integer_with_an_answer_that_is_none_is_the_graders_fault(self):
    self.assertEqual(graders.make('integer').grade('72', 'x+1').verdict, 'grader_error')

  @parameterized.parameters((r'\boxed{\frac12}', r'\frac{1}{2}', 'right'), (r'\boxed{0.5}', r'\frac{1}{2}', 'wrong'), ('East',
      r'\text{east}', 'right'), ('west', 'east', 'wrong'),
                            (r'\boxed{x^{2}}', 'x^2', 'right'), (r'\boxed{}', 'x', 'no_answer'))
  def test_exact(self, response, answer, verdict):
    self.assertEqual(graders.make('exact').grade(response, answer).verdict, verdict)

  def test_whole_number_reads_digits_only(self):
    self.assertEqual([simple.whole_number(t) for t in ('1,234', '-5', '+7', '5.0', r'\text{12}', '12_{10}')], [1234, -5, 7, 5, 12, 12])
    self.assertEqual([simple.whole_number(t) for t in ('5%', '12_8', '2^3', '6/2', '5.5', 'x', '1,2')], [None] * 7)


class ProtocolTest(parameterized.TestCase):

  def test_make_names_what_is_known(self):
    with self.assertRaisesRegex(ValueError, "Unknown grader 'maths'; known: code, exact, integer, math"):
      graders.make('maths')
    with self.assertRaisesRegex(ValueError, "Unknown setting 'timeout'.*time_limit_s"):
      graders.make('math', timeout=3)

  @parameterized.parameters(('math', {'extraction': 'box'}), ('math', {'workers': -1}), ('math', {'time_limit_s': 0}), ('math',
      {'memory_mb': 1}), ('math', {'workers': True}),
                            ('code', {'time_limit_s': 'x'}), ('integer', {'extraction': ''}), ('code', {'memory_mb': 1.0}))
  def test_settings_out_of_range_are_refused(self, name, settings_):
    with self.assertRaisesRegex(ValueError, 'must be'):
      graders.make(name, **settings_)

  @parameterized.parameters((5, '5'), ('5', 5), (None, '5'), ('5', ''), ('5', '  '), (b'5', '5'))
  def test_what_is_no_text_is_refused(self, response, answer):
    for name in ('math', 'integer', 'exact'):
      with self.assertRaises(ValueError):
        graders.make(name).grade(response, answer)

  def test_grade_holds_score_and_verdict_together(self):
    self.assertEqual([base.grade_of(v).score for v in graders.VERDICTS], [1.0, 0.0, 0.0, 0.0, 0.0])
    with self.assertRaises(ValueError):
      base.Grade(1.0, 'wrong')
    with self.assertRaises(ValueError):
      base.Grade(0.0, 'timeout')

  def test_a_fault_of_a_grader_is_a_verdict(self):
    class Broken(base.Grader):
      def _grade(self, response, answer, metadata):
        raise KeyError('x')
    grade = Broken().grade('a', 'b')
    self.assertEqual((grade.verdict, grade.score), ('grader_error', 0.0))
    self.assertIn('KeyError', grade.reason)

  def test_shared_graders_are_one_for_the_same_settings(self):
    one, two, other = (graders.shared('integer', extraction=e) for e in ('boxed', 'boxed', 'auto'))
    self.assertIs(one, two)
    self.assertIsNot(one, other)
    graders.close_shared()
    self.assertIsNot(graders.shared('integer', extraction='boxed'), one)

  def test_register_refuses_a_taken_name(self):
    with self.assertRaisesRegex(ValueError, 'taken'):
      graders.register('math', 'x', 'Y')


def test_spelling_is_one():
  same = [('\\frac12', '\\dfrac{1}{2}'), ('x^{2}', 'x^2'), ('\\left(1,2\\right)', '(1, 2)'), ('5\\,000', '5 000'), ('a\\le b', 'a ≤ b'),
      ('$x$', 'x'), ('\\text{East}', 'east')]
  for one, two in same:
    assert latex.string_key(one) == latex.string_key(two), (one, two)
  assert latex.string_key('x^{12}') != latex.string_key('x^12') or math.isfinite(0)
  assert latex.string_key('x^{1}2') != latex.string_key('x^{12}')
  assert latex.string_key('ab') != latex.string_key('a b c')
