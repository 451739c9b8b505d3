"""Prompts of the embedded world. The shipped weights were trained with these strings, so every byte must stay as it is.

They are short, as every rollout pays for every token of a prompt.
"""

POLICY = 'Question: {question}\n'
POLICY_DIRECT = 'Question, without search: {question}\n'
POLICY_EVIDENCE = 'Question, with evidence: {question}\n'
CARL = 'Question, with code: {question}\n'
CARL_DIRECT = 'Question, by heart: {question}\n'
CARL_FORCED = 'Question, with code by all means: {question}\n'

READER = '{evidence}\nQuestion: {question}\nAnswer:'
READER_ALONE = '\nQuestion: {question}\nAnswer:'  # nothing in the place of evidence, as the reader was trained
PASSAGE = '{text} '

REVIEWER = '\nFlawed step, 0 to {steps}:'
