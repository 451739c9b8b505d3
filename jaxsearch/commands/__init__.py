"""The commands of the command line. Each stands below its default config and its flags; its docstring is its `--help`.

JAX and the rest are imported where they are used, so that `--help` and usage errors come at once.
"""

from jaxsearch.commands import evaluation, policies, retrieval, training
from jaxsearch.commands.command import COMMANDS, replaced_fields, saved_config

GROUPS = {group.__doc__: [name for name, parser in COMMANDS.items() if parser.get_default('run').__module__ == group.__name__]
          for group in (training, evaluation, retrieval, policies)}

__all__ = ['COMMANDS', 'GROUPS', 'replaced_fields', 'saved_config']
