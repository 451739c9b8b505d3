"""Names of devices that are not here, and how long they take to exchange bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxsearch.parallel import mesh as meshes, targets
from tests.parallel.compilers import devices_of


def test_a_target_is_a_kind_and_a_shape():
  assert targets.parse('tpu:v5p:4x4x4') == targets.Target('tpu:v5p', (4, 4, 4))
  assert targets.parse('cuda:h100:2x8').device.memory == 84942979072


@pytest.mark.parametrize('text, message', [
  ('tpu:v5p', "tpu is none of tpu:v5e"), ('tpu:v4:2x2x1', 'tpu:v4 is none of'), ('', 'none of'), ('h100:8', 'h100 is none of'),
  ('tpu:v5p:4x4', "'4x4' is no shape of tpu:v5p"), ('tpu:v6e:4x4x4', 'no shape'), ('cuda:h100:0x8', 'no shape'),
  ('cuda:h100:8', 'no shape'), ('tpu:v6e:4by4', 'no shape')])
def test_what_is_no_target_is_said(text, message):
  with pytest.raises(ValueError, match=message):
    targets.parse(text)


def test_a_target_without_its_compiler_names_the_extra(monkeypatch):
  monkeypatch.setattr(targets, 'installed', lambda platform: False)
  with pytest.raises(ValueError, match=r"tpu:v6e:4x4 needs the compiler .* pip install 'jaxsearch\[plan\]'"):
    targets.parse('tpu:v6e:4x4').devices()


def test_hosts_of_gpus_share_what_comes_over_the_network():
  """16 GPUs exchange 9 GB: 15/16 of it at 450 GB/s inside; or half of it, at 8 cards of 50 GB/s a host."""
  target = targets.parse('cuda:h100:2x8')
  assert targets.network_seconds(target, 2, 9e9) == pytest.approx(max(9 * 15 / 16 / 450, 4.5 / 400))
  wide = targets.parse('cuda:h100:32x8')
  assert targets.network_seconds(wide, 32, 9e9) == pytest.approx(9 * 31 / 32 / 400)
  assert targets.network_seconds(targets.parse('tpu:v5p:4x4x4'), 16, 6e9) == pytest.approx(6 * 63 / 64 / 600)


@pytest.mark.parametrize('kind', ['tpu:v5e:4x4', 'tpu:v5p:2x2x4', 'tpu:v6e:4x4'])
def test_one_host_of_several_sums_over_its_devices(kind):
  """What compiles for four devices of a v6e slice of sixteen: not a sum over all four."""
  devices = devices_of(kind)
  host = targets.one_host(devices)
  assert len(devices) == 16 and len(host) == 4 and {one.device_kind for one in host} == {devices[0].device_kind}
  assert targets.one_host(host) == host
  split = NamedSharding(meshes.make_mesh(devices=host, fsdp=1, tensor=4), PartitionSpec('tensor'))
  summed = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(split.mesh, PartitionSpec()))
  assert 'all-reduce' in summed.lower(jax.ShapeDtypeStruct((8, 1024, 128), jnp.float32, sharding=split)).compile().as_text()
