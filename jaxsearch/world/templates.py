"""Prompts of the embedded world. The shipped weights were trained with them: do not change a byte."""

POLICY = 'Question: {question}\n'
POLICY_DIRECT = 'Question, without search: {question}\n'
POLICY_EVIDENCE = 'Question, with evidence: {question}\n'
CARL = 'Question, with code: {question}\n'
CARL_DIRECT = 'Question, by heart: {question}\n'
CARL_FORCED = 'Question, with code by all means: {question}\n'

READER = '{evidence}\nQuestion: {question}\nAnswer:'
READER_ALONE = '\nQuestion: {question}\nAnswer:'  # nothing in the place of evidence, as in training
PASSAGE = '{text} '

REVIEWER = '\nFlawed step, 0 to {steps}:'

# The formats above for methods/prompted; the policies were trained with none of its other calls.
_FOUND = POLICY + ('<think> Find the answer.</think><search> {question}</search>\n'
                   '<information>{documents}</information>\n')
PROMPTED = {
  'direct': POLICY + '<think> I guess.</think><answer>', 'cot': POLICY, 'documents': _FOUND,
  'reasoned': _FOUND, 'candidates': _FOUND, 'search_o1': POLICY, 'react': POLICY, 'tools': CARL,
  'tools_forced': CARL_FORCED, 'extract': _FOUND.replace('{question}', '{query}'),
}  # fmt: skip
