"""Tables as text, Markdown and LaTeX. Names and texts in them may come from strangers, so they are
escaped."""

import re
from collections.abc import Sequence

_LATEX = str.maketrans({'\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}',
                        **{character: f'\\{character}' for character in '{}$&#_%'}})


def escaped(text: str, form: str) -> str:
  """Returns a text on one line, without what would be a command, a formula, markup or an escape sequence."""
  text = ''.join(character if character.isprintable() else ' ' for character in text)
  if form == 'latex':
    return text.translate(_LATEX).replace(' †', r'$^\dagger$')
  if form == 'markdown':
    return re.sub(r'[\\`|]|<(?=[A-Za-z/!?])|(?<=\])\(', r'\\\g<0>', text)
  return f"'{text}" if form == 'csv' and text.lstrip().startswith(tuple('=+-@＝＋－＠')) else text


def layout(rows: Sequence[Sequence[str]], form: str) -> str:
  """Returns a table in 'text', 'markdown' or 'latex', its heading row first."""
  rows = [[escaped(cell, form) for cell in row] for row in rows]
  if form == 'latex':
    heading, *body = [f'{" & ".join(row)} \\\\' for row in rows]
    begin = f'\\begin{{tabular}}{{l{"r" * (len(rows[0]) - 1)}}}'
    return '\n'.join([begin, '\\hline', heading, '\\hline', *body, '\\hline', '\\end{tabular}'])
  if form == 'markdown':
    rows.insert(1, ['---', *['--:'] * (len(rows[0]) - 1)])
    return '\n'.join(f'| {" | ".join(row)} |' for row in rows)
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
  return '\n'.join('  '.join(line).rstrip() for line in lines)
