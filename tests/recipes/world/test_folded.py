"""Gold chains with summaries: as a rollout of a perfect policy would be, and read by sft as they were grown."""

import itertools

from configs import folded as config_of
from jaxsearch import setup
from jaxsearch.training import sft
from jaxsearch.trees.tree import Role
from recipes.world import folded


def test_chains_hold_summaries_of_all_facts_and_are_read_back(tmp_path):
  config, path = config_of.get_config(), tmp_path / 'chains.jsonl'
  figures = folded.write(config, path, 12)
  assert figures['chains'] + figures['too_long'] == 12 and figures['folds'] >= 1
  assert figures['longest'] <= config.sampler.length
  tokenizer = setup.load_tokenizer(config)
  for tree in sft.read_demonstrations(path, tokenizer):
    copies = [node.text for node in tree.nodes(Role.CONTEXT)]
    written = [node.text for node in tree.nodes(Role.POLICY) if node.text.startswith('<context>')]
    assert [text.replace('<context> ', '<context>') + '\n' for text in written] == copies
    assert all(later.startswith(earlier.removesuffix('</context>\n')) for earlier, later in itertools.pairwise(copies))
    assert '<answer>' in tree.nodes(Role.POLICY)[-1].text and all(node.trained for node in tree.nodes(Role.POLICY))
