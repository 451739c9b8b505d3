import dataclasses

import jax
import numpy as np
import pytest

from jaxsearch.models.architecture import initial_params, preset
from jaxsearch.models.decoder import hidden_states, logits
from recipes.world.induction import plant_induction


def repeated_rank(config, params):
  """Median rank (0 is best) of the right next token in the second copy of a random sequence."""
  once = np.random.default_rng(0).integers(100, config.vocab_size, (8, 24))
  tokens = np.concatenate([once, once], axis=1)
  scores = np.asarray(logits(params, hidden_states(config, params, tokens)))[:, 24:-1]
  right = np.take_along_axis(scores, tokens[:, 25:, None], axis=-1)
  return np.median(np.sum(scores > right, axis=-1))


@pytest.mark.parametrize('name, gain', [('world-tiny', 10), ('world-reader', 3)])
def test_a_planted_decoder_copies_without_training(name, gain):
  config = preset(name)
  params = initial_params(config, jax.random.key(0))
  params['embedding'] = 2.5 * params['embedding']
  chance = config.vocab_size / 2
  assert repeated_rank(config, params) > chance / 4
  assert repeated_rank(config, plant_induction(config, params)) < chance / gain


@pytest.mark.parametrize('change', [{'qk_norm': True}, {'tie_embeddings': False}, {'num_layers': 1}])
def test_an_architecture_without_room_is_refused(change):
  config = dataclasses.replace(preset('world-tiny'), **change)
  with pytest.raises(ValueError, match='induction heads are planted into'):
    plant_induction(config, initial_params(config, jax.random.key(0)))
