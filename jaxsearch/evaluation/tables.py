"""Tables for people: plain text, Markdown, LaTeX or CSV of one list of rows."""

import csv
import io
import re
from collections.abc import Sequence

_LATEX = str.maketrans({'\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}',
                        **{character: f'\\{character}' for character in '{}$&#_%'}})


def layout(rows: Sequence[Sequence[str | float | None]], form: str) -> str:
  """Returns a table in 'text', 'markdown', 'latex' or 'csv', its heading row first.

  Cells are texts; in CSV also numbers, and None where there is none.
  """
  heading, *body = rows = [[escaped(cell, form) for cell in row] for row in rows]
  if form == 'csv':
    file = io.StringIO()
    csv.writer(file, lineterminator='\n').writerows(rows)
    return file.getvalue()
  if form == 'latex':
    first, *others = [f'{" & ".join(row)} \\\\' for row in rows]
    begin = f'\\begin{{tabular}}{{l{"r" * (len(heading) - 1)}}}'
    return '\n'.join([begin, '\\hline', first, '\\hline', *others, '\\hline', '\\end{tabular}'])
  if form == 'markdown':
    rows = [heading, ['---', *['--:'] * (len(heading) - 1)], *body]
    return '\n'.join(f'| {" | ".join(row)} |' for row in rows)
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
  return '\n'.join('  '.join(line).rstrip() for line in lines)


def escaped(text: str | float | None, form: str) -> str | float | None:
  """Returns a text on one line, without what would be a command, a formula, markup or an escape sequence.

  Names and texts in tables may come from strangers.
  """
  if not isinstance(text, str):
    return text
  text = ''.join(character if character.isprintable() else ' ' for character in text)
  if form == 'latex':
    return text.translate(_LATEX).replace(' †', r'$^\dagger$')
  if form == 'markdown':
    return re.sub(r'[\\`|]|<(?=[A-Za-z/!?])|(?<=\])\(', r'\\\g<0>', text)
  return f"'{text}" if form == 'csv' and text.lstrip().startswith(tuple('=+-@＝＋－＠')) else text
