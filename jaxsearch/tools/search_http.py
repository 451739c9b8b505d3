"""Client of the retrieval protocol of Search-R1: `POST /retrieve {"queries", "topk", "return_scores"}`.

The response is `{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`, a list for each query, or with
`return_scores` false the documents themselves. It is checked here, so that nothing further in has to. The server is
`jaxsearch.tools.http_server.search_app`.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, FailFast, Field, model_validator

from jaxsearch.data.corpus import Document, split_contents
from jaxsearch.tools import check_search
from jaxsearch.tools.http_client import JsonClient, RequestError


class SearchError(RequestError):
  kind = 'search'


class Passage(BaseModel):
  id: Any = ''  # Search-R1's own BM25 server sends none
  contents: str


class Hit(BaseModel):
  document: Passage
  score: float = Field(0.0, strict=True, allow_inf_nan=False)

  @model_validator(mode='before')
  @classmethod
  def _without_score(cls, item: Any) -> Any:
    return item if isinstance(item, dict) and 'document' in item else {'document': item}


class Response(BaseModel):
  result: Annotated[list[Annotated[list[Hit], FailFast()]], FailFast()]  # a server at fault may send millions


class HttpSearch(JsonClient):
  """Searches with a retrieval server; may be called from several threads. Args as of `JsonClient`."""

  error, default_path = SearchError, '/retrieve'

  def search(self, queries: Sequence[str], topk: int = 3) -> list[list[Document]]:
    """At most `topk` documents for each query, in the server's order. Raises SearchError."""
    check_search(queries, topk)
    if not queries:
      return []

    def parse(response: object) -> list[list[Document]]:
      result = Response.model_validate(response).result
      if len(result) != len(queries):
        raise ValueError(f'result: {len(result)} lists for {len(queries)} queries')
      return [[Document(str(hit.document.id), *split_contents(hit.document.contents), hit.score) for hit in hits[:topk]]
              for hits in result]

    return self.post({'queries': list(queries), 'topk': topk, 'return_scores': True}, parse)
