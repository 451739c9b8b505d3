"""Checkpoints in S3: Orbax writes arrays to folders and to gs:// alone, though TensorStore below it also knows S3.

Orbax treats both alike once it takes an address of S3 for one of a bucket: a checkpoint counts from its commit mark on, since
nothing can be renamed in one go. That decision stands in private functions of Orbax (0.12), which are replaced here.
"""

import os

from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

SCHEME = 's3://'


def enable() -> None:
  """Makes Orbax read and write s3://; doing it again changes nothing."""
  if SCHEME in gcs_utils._GCS_PATH_PREFIX:
    return
  gcs_utils._GCS_PATH_PREFIX += (SCHEME,)
  of_gcs, normalized = gcs_utils.get_kvstore_for_gcs, tensorstore_utils._normalize_path
  gcs_utils.get_kvstore_for_gcs = lambda path: kvstore(path) if path.startswith(SCHEME) else of_gcs(path)
  tensorstore_utils._use_gcs_driver = lambda path: path.startswith(gcs_utils._GCS_PATH_PREFIX)
  tensorstore_utils._normalize_path = lambda path: normalized(path).replace('s3:/', SCHEME)


def kvstore(path: str) -> dict:
  """The key-value store of TensorStore for s3://BUCKET/PATH; server and region from where the tools of AWS take them."""
  bucket, _, inside = path.removeprefix(SCHEME).partition('/')
  settings = {'endpoint': ('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL'), 'aws_region': ('AWS_REGION', 'AWS_DEFAULT_REGION')}
  given = {field: next(filter(None, map(os.environ.get, names)), None) for field, names in settings.items()}
  if 'AWS_ACCESS_KEY_ID' in os.environ:  # else it looks for files first, and logs an error for each that is not there
    given['aws_credentials'] = {'type': 'environment'}
  return {'driver': 's3', 'bucket': bucket, 'path': inside} | {field: value for field, value in given.items() if value}
