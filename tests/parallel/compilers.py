"""Devices that are not here, to compile for."""

import jax
import pytest

from jaxsearch.parallel import targets


def target_of(name: str) -> targets.Target:
  """The target of that name; skips the test where its compiler is not installed."""
  if not targets.installed(name.split(':')[0]):
    pytest.skip("its compiler is not installed: pip install '.[plan]'")
  return targets.parse(name)


def devices_of(name: str) -> list[jax.Device]:
  """Its devices."""
  return target_of(name).devices()
