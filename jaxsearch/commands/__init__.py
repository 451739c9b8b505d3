"""Lists the commands. Each stands below its default config and its flags; its docstring is its help.

JAX and the rest are imported where they are used, so that `--help` and usage errors come at once.
"""

from jaxsearch.commands import evaluation, retrieval, training
from jaxsearch.commands.command import COMMANDS, replaced_fields, saved_config

GROUPS = {room.__doc__: [name for name, parser in COMMANDS.items()
                         if parser.get_default('run').__module__ == room.__name__]
          for room in (training, evaluation, retrieval)}

__all__ = ['COMMANDS', 'GROUPS', 'replaced_fields', 'saved_config']
