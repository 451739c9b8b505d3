from jaxsearch.sampler.assistants import Assistant


def test_replies_are_those_of_a_prompt_alone(make_engine, tokenizer):
  """Greedy, so that neither the company nor the order matters; cut at the stop string and at the end token."""
  engine = make_engine(temperature=0.0)
  prompts = ['Question: who?', 'Doc 1', 'capital of', 'Question: what is the city?', 'Paris']
  together = Assistant(engine, max_tokens=12)(prompts)
  assert together == [Assistant(engine, max_tokens=12)([prompt])[0] for prompt in prompts]
  assert len(set(together)) > 1
  stop = next(reply for reply in together if len(reply) > 3)[2]
  for reply, whole in zip(Assistant(engine, max_tokens=12, stop=(stop,))(prompts), together):
    assert stop not in reply and whole.startswith(reply)


def test_a_chat_template_is_applied(make_engine, tokenizer, monkeypatch):
  engine = make_engine(temperature=0.0)
  monkeypatch.setattr(type(tokenizer), 'chat', lambda self, messages: f'<think> {messages[0]["role"]}: {messages[0]["content"]}')
  assert Assistant(engine, max_tokens=6, chat=True)(['Paris']) == Assistant(engine, max_tokens=6)(['<think> user: Paris'])


def test_sampled_replies_follow_their_seeds(make_engine):
  """Not the place of a prompt, nor who else is there; two alike are two samples."""
  assistant = Assistant(make_engine(), max_tokens=12, temperature=0.8)
  first, second, other = assistant(['Paris', 'Paris', 'Doc 1'], [7, 2**31 - 1, 7])
  assert assistant(['who?', 'Paris'], [3, 7])[1] == first != second and assistant(['Doc 1'], [7]) == [other]
