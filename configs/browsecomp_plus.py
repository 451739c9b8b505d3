"""BrowseComp-Plus: an instruct model with the tools `search` and `open` over an index of its corpus.

    jaxsearch index --corpus corpus.jsonl --out index
    jaxsearch bench --config browsecomp_plus --config.model=HF_FOLDER --config.search.index=index \\
        --benchmarks browsecomp_plus --folder DATA --out F.json --runs RUNS \\
        --config.judge.url=http://HOST/v1 --config.judge.model=Qwen3-32B

docs/evaluation.md says where the files are from. Without a judge's model only retrieval is scored.
Not run by us with the real data.
"""

from configs import base


def get_config():
  config = base.get_config().unlock()
  config.model = 'Qwen3-8B'
  config.out = 'runs/browsecomp_plus'
  config.dtype = 'bfloat16'
  config.tools = ('search', 'open')
  config.search.update(backend='index', topk=5, words=400)  # about the authors' 512 tokens of a document
  config.grow.update(template='browsecomp_plus', chat=True, grammar='auto', max_turns=30, max_tokens=2048)
  config.sampler.update(length=32768, slots=8, max_observation=4096)
  config.train.row_length = 32768
  config.judge.update(kind='chat', max_tokens=1024)
  return config.lock()
