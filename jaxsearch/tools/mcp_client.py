"""The tools of MCP servers (Model Context Protocol), as tools that a policy calls by name.

A server is a command that speaks over its standard streams, or the address of a streamable HTTP server. Its
connection lives in one task of the event loop of all clients, and is opened again where a server was lost.
"""

import asyncio
import contextlib
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from jaxsearch.tools.calls import Call, one_line
from jaxsearch.tools.http_client import RequestError, event_loop, parse_url, secret_from_env
from jaxsearch.tools.tool import Show, Tool
from jaxsearch.trees import families, grammar
from jaxsearch.trees.tree import Node

try:
  import jsonschema
  import mcp
  import referencing
  from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
  from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT
except ImportError as error:
  raise ImportError("mcp.servers needs the package mcp: pip install 'jaxsearch[mcp]'") from error

TOOLS, SCHEMA, RESULT = 128, 8_000, 100_000  # tools of a server; characters of a schema and of a result
START = 60.0  # seconds
HUNG = 3  # calls in a row without a reply in time: then the server is started again
TAGS = grammar.Tags(others=families.FAMILIES['hermes'].tags)
VARIABLE = re.compile(r'\$(?:\{([^}]*)|(\w+))')
TOKEN = 'JAXSEARCH_MCP_TOKEN'  # the environment variable of a key for the one server with an address


class McpError(RequestError):
  """A request that a server did not serve."""
  kind = 'the MCP server'

  def __init__(self, server: str, reason: object, fault: str):
    super().__init__(server, one_line(str(reason)), fault)


class McpServer:
  """A server; may be called from several threads.

  Args:
    server: a command, see `command_of`, or an address that begins with http.
    timeout: seconds for a call; the start has at least START.
  """

  def __init__(self, server: str, timeout: float):
    self._server, self._timeout = server, timeout
    self._command = None if is_address(server) else command_of(server)
    self.name = self._command.command if self._command else parse_url(server).host
    self._loop, self._lock, self._session = event_loop(), asyncio.Lock(), None
    self._unanswered = 0

  def tools(self) -> list[Tool]:
    """Returns the tools that the server offers, harmless in prompts. Raises McpError, ValueError."""
    async def listed(client: mcp.Client) -> list:
      cursor, offered = None, []
      while len(offered) <= TOOLS:
        page = await client.list_tools(cursor=cursor)
        offered, cursor = offered + page.tools, page.next_cursor
        if cursor is None:
          return offered
      raise ValueError(f'{self.name} offers more than {TOOLS} tools')

    return [self._tool(one.name, one.description or one.title or one.name, one.input_schema)
            for one in self._ask(listed)]

  def _tool(self, name: str, description: str, parameters: Mapping[str, Any]) -> Tool:
    whole = {'name': name, 'description': description, 'parameters': parameters}
    written = json.dumps(whole, ensure_ascii=False)  # escapes would hide what is neutralised below
    if len(written) > SCHEMA:
      raise ValueError(f'{self.name}: the schema of {name!r:.100} has more than {SCHEMA} characters')
    kind = jsonschema.validators.validator_for(parameters, default=jsonschema.Draft202012Validator)
    try:
      kind.check_schema(parameters)
    except jsonschema.SchemaError as error:  # or a pattern that is none of Python's
      reason = f'{self.name}: the schema of {name!r:.100} is not valid: {error.message:.200}'
      raise ValueError(reason) from error
    fitting = kind(parameters, registry=referencing.Registry())  # which fetches nothing

    def check(arguments: Any) -> Mapping[str, Any]:
      try:
        wrong = jsonschema.exceptions.best_match(fitting.iter_errors(arguments))
      except (RecursionError, OverflowError, referencing.exceptions.Unresolvable) as error:
        raise ValueError(f'{tool.usage}: its schema cannot be checked ({type(error).__name__})') from error
      if wrong:
        place = '.'.join(map(str, wrong.path)) or 'arguments'
        raise ValueError(f'{tool.usage}: {place}: {wrong.message:.500}')
      return arguments

    def serve(node: Node, arguments: Mapping[str, Any], show: Show) -> list[Call]:
      query = json.dumps(arguments, ensure_ascii=False)
      return [Call(lambda _: self.call(name, arguments), node, name, query, show)]

    tool = Tool(json.loads(grammar.neutralise(written, grammar.CONTROL, TAGS)), check, serve)
    return tool

  def call(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the text of a result, which may say what was wrong with the arguments. Raises McpError."""
    result = self._ask(lambda client: client.call_tool(name, dict(arguments)))
    blocks = [(block.type, getattr(block, 'resource', block)) for block in result.content]
    text = '\n'.join(getattr(block, 'text', f'[{kind}]') for kind, block in blocks)
    text = text or json.dumps(result.structured_content, ensure_ascii=False)
    return ('The tool reports an error: ' if result.is_error else '') + text[:RESULT]

  def close(self) -> None:
    """Ends the connection, and the process of a command."""
    self._drop(self._session)

  def _drop(self, connection: asyncio.Task | None) -> None:
    if connection and connection is self._session:
      self._loop.call_soon_threadsafe(connection.cancel)
      self._session = None

  def _ask(self, request: Callable[[mcp.Client], Coroutine]) -> Any:
    """Returns the reply to a request, within the time-out."""
    used = None  # the connection: another call may have opened a new one by the time this one fails

    async def reply() -> Any:
      nonlocal used
      client = await asyncio.wait_for(self._connected(), max(START, self._timeout))
      used = self._session
      return await asyncio.wait_for(request(client), self._timeout)

    try:
      result = asyncio.run_coroutine_threadsafe(reply(), self._loop).result()
      self._unanswered = 0
      return result
    except TimeoutError as error:
      self._unanswered += 1
      if self._unanswered % HUNG == 0:
        self._drop(used)
      raise McpError(self.name, f'no reply in time ({self._timeout:g} s)', 'timeout') from error
    except mcp.MCPError as error:
      if error.code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
        self._unanswered = 0  # a refusal is a reply
      lost = error.code == CONNECTION_CLOSED or 'session' in error.message.casefold()  # a restart forgets it
      if lost:
        self._drop(used)  # the next request opens another
      fault = 'connection' if lost else 'timeout' if error.code == REQUEST_TIMEOUT else 'refused'
      raise McpError(self.name, error.message, fault) from error
    except (OSError, ExceptionGroup) as error:
      self._drop(used)
      raise McpError(self.name, error, 'connection') from error

  async def _connected(self) -> mcp.Client:
    """Returns the client of the server, and opens its connection where there is none."""
    async with self._lock:
      if self._session is None or self._session.done():
        ready = self._loop.create_future()
        self._session = self._loop.create_task(self._hold(ready))
        try:
          self._client = await ready
        except BaseException:  # the time-out too
          self.close()
          raise
      return self._client

  async def _hold(self, ready: asyncio.Future) -> None:
    """Holds a connection until its task is cancelled: what opens one has to close it."""
    try:
      async with contextlib.AsyncExitStack() as opened:
        server = self._command
        if server is None:
          token = secret_from_env(TOKEN)
          headers = {'authorization': f'Bearer {token}'} if token else None
          http = await opened.enter_async_context(create_mcp_http_client(headers=headers))
          server = streamable_http_client(self._server, http_client=http)
        ready.set_result(await opened.enter_async_context(mcp.Client(server)))
        await self._loop.create_future()  # for ever
    except Exception as error:
      if not ready.done():
        ready.set_exception(error)


def command_of(server: str) -> mcp.StdioServerParameters:
  """Reads a command line; as in a shell NAME=VALUE may begin it. $NAME there, in quotes too, is our variable.

  The server gets no other variables than these and some such as PATH. Raises ValueError.
  """
  try:
    words = shlex.split(server)
  except ValueError as error:
    raise ValueError(f'mcp.servers: {server!r}: {error}') from error
  given = list(itertools.takewhile(re.compile(r'\w+=').match, words))
  if not (command := words[len(given):]):
    raise ValueError(f'mcp.servers: {server!r} names no command')
  env = dict(word.split('=', 1) for word in given)
  named = [braced or plain for value in env.values() for braced, plain in VARIABLE.findall(value)]
  if unset := [name for name in named if name not in os.environ]:
    raise ValueError(f'mcp.servers: {command[0]} is to get ${unset[0]}, which is not set')
  env = {name: os.path.expandvars(value) for name, value in env.items()}
  return mcp.StdioServerParameters(command=command[0], args=command[1:], env=env)


def is_address(server: str) -> bool:
  """Tells whether a server is one with an address, not a command."""
  return server.startswith(('http://', 'https://'))


def open_servers(settings: Any, others: Collection[str]) -> dict[str, Tool]:
  """Returns the tools of the servers of config.mcp by name, beside `others`. Raises McpError, ValueError."""
  tools, addresses = {}, [server for server in settings.servers if is_address(server)]
  if len(addresses) > 1 and secret_from_env(TOKEN):
    raise ValueError(f'mcp.servers: {TOKEN} is a key for one server, and {len(addresses)} have an address')
  for server in settings.servers:
    for tool in McpServer(server, settings.timeout).tools():
      if tool.name in tools or tool.name in others:
        raise ValueError(f'mcp.servers: two tools are called {tool.name!r}')
      tools[tool.name] = tool
  return tools
