"""Answers that are made to hang, crash or take over a grader, by kind; a function of seed and number alone."""

import random

KINDS = {}


def kind(function):
  KINDS[function.__name__] = function
  return function


@kind
def power_tower(rng, mark):
  tower = str(rng.randint(2, 99))
  for _ in range(rng.randint(2, 9)):
    tower = rng.choice([f'{rng.randint(2, 99)}^{{{tower}}}', f'({rng.randint(2, 99)})^{{{tower}}}'])
  return rng.choice([tower, tower.replace('{', '').replace('}', '').replace('^', '**'), rf'\frac{{1}}{{{tower}}}', f'x^{{{tower}}}',
      f'{tower} - {tower}',
                     rf'\sqrt{{{tower}}}', rf'\pi^{{{tower}}}', rf'\sin({tower})', rf'{tower} \bmod 7', rf'-{tower}'])


@kind
def factorials(rng, mark):
  n = str(rng.randint(50, 10**6))
  return rng.choice([f'(({n}!)!)!', f'{n}!!!!!!', rf'\binom{{10^{{{n}}}}}{{10^5}}', f'({n}^{{9}})!', rf'\frac{{({n}^7)!}}{{2}}',
      f'{n}{n}!', f'(9^{{99}})!!'])


@kind
def deep_nesting(rng, mark):
  n = rng.choice([30, 100, 1000, 10**5, 10**6])
  left, right = rng.choice([('(', ')'), ('{', '}'), ('[', ']'), (r'\sqrt{', '}'), (r'\frac{1}{', '}'), (r'\left(', r'\right)'), ('|', '|'),
      ('-', ''),
                            (r'\{', r'\}'), ('f(', ')'), ('x^{', '}'), ('x_{', '}'), (r'\boxed{', '}'), (r'\lfloor ', r'\rfloor ')])
  n = min(n, 10**6 // len(left))
  return left * n + '1' + (right * n if rng.random() < 0.7 else '')


@kind
def megabytes(rng, mark):
  n = rng.choice([10**4, 10**6, 4 * 10**6])
  text = rng.choice(['1', 'x+', '1,', r'\frac', '\\', '$', '{', '}', ' ', '\n', 'a', '=', '9' * 50 + ' ', '- ', r'\text{a}', r'\boxed',
      '^', '\u00e9', '1.'])
  return text * (n // len(text))


@kind
def code(rng, mark):
  return rng.choice([
      f'__import__("os").system("touch {mark}")', f'import os; os.system("touch {mark}")', f'open("{mark}", "w").write("x")',
      f'exec("open(\\"{mark}\\", \\"w\\")")', f'eval(compile("open(\'{mark}\',\'w\')", "", "eval"))',
      f'().__class__.__bases__[0].__subclasses__()[{rng.randint(50, 200)}]("touch {mark}", shell=True)',
      f'[c for c in ().__class__.__mro__[-1].__subclasses__()][0]("{mark}")', f'(lambda: open("{mark}", "w"))()',
      rf'\operatorname{{open}}({mark})', rf'\input{{{mark}}}', rf'\immediate\write18{{touch {mark}}}', f'`touch {mark}`',
      f'$(touch {mark})',
      f'1 if open("{mark}","w") else 2', f'{{{{ open("{mark}","w") }}}}',
      f'Symbol("x").__class__.__init__.__globals__["os"].system("touch {mark}")',
      f'parse_expr("open(\'{mark}\',\'w\')")', rf'\text{{__import__("os").system("touch {mark}")}}', f'x=1;open("{mark}","w")',
      f'%s%n%x{mark}',
      f"sympify('open(\"{mark}\",\"w\")')", f'lambdify(x, "open({mark!r})")', f'getattr(os, "system")("touch {mark}")'])


@kind
def odd_characters(rng, mark):
  pool = ['\x00', '\x07', '\x1b[2J', '\ud800', '\u202e', '\u200b', '\ufeff', '\U0001f600', 'é' * 20, '١٢٣', '４２', '𝟓', '½' * 9, '²³⁴',
      '∑∫∂', 'ﬁ', '\r\n', '\x85',
          '\u2028', '\\x00', '&#x30;', '%00', '\u0301' * 50, '零', '√' * 30, '∞∞', '≤≥≠', '\t']
  return ''.join(rng.choice(pool) for _ in range(rng.randint(1, 30))) + rng.choice(['', '5', 'x'])


@kind
def unterminated(rng, mark):
  return rng.choice([r'\frac{1}{', r'\sqrt{2', '(1, 2', r'\begin{pmatrix} 1 & 2', r'\{1, 2', '[1, ', r'\left(1', r'\text{abc', r'2^{',
      r'x_{', '1 +', r'\frac', r'\\', '\\',
                     r'\begin{', r'\end{pmatrix}', r'\sum_{i=1}^', r'\int', r'\lfloor 3', '|3', '$$$', r'\(', '5}', '))', r'\right)',
                     '1,,,2', ',', '=', '<>', '= =',
                     r'\log_', '_8', '^2', '!', '%%', r'\$', '{}{}{}', r'\binom{3}', r'\pm', r'\cup', r'\in', r'\cdot', '.', '...', '-',
                     '+-+-', r'\text{}'])


@kind
def slow_algebra(rng, mark):
  n = rng.randint(20, 200)
  return rng.choice([
      '+'.join(rf'\sqrt{{x+{i}}}' for i in range(n)), '(' + '+'.join(f'x_{{{i}}}' for i in range(30)) + f')^{{{n * 100}}}',
      rf'\sum_{{k=1}}^{{10^{{9}}}} \sin(k^{n})',
      rf'\prod_{{k=1}}^{{10^{{8}}}} (1+\frac{{1}}{{k^{n}}})', rf'\int_0^1 e^{{-x^{n}}} \sin(x^{n}) dx',
      rf'\int \frac{{1}}{{x^{{{n}}}+x+1}} dx', rf'\operatorname{{eye}}({n}00000)',
      r'\begin{vmatrix}' + r'\\'.join('&'.join(f'x_{{{i}{j}}}' for j in range(8)) for i in range(8)) + r'\end{vmatrix}',
      rf'\sin(10^{{{n}00}})', rf'\cos(\cos(\cos(x^{{{n}}})))',
      rf'\lim_{{x \to 0}} \frac{{\sin(x^{{{n}}})}}{{x^{{{n}}}}}', rf'\gcd(10^{{{n}0}}+1, 10^{{{n}}}+7)', f'x^{{{n}000}} - 1',
      rf'\frac{{x^{{{n}0}}-1}}{{x-1}}', rf'\log_{{{n}}}(10^{{{n}000}})'])


def answers(count, mark, seed=0):
  """`count` pairs (kind, answer), the kinds in turn; `mark` is the path of a file that code among them tries to make."""
  names = sorted(KINDS)
  return [(names[i % len(names)], KINDS[names[i % len(names)]](random.Random(f'{seed}/{i}'), mark)) for i in range(count)]
