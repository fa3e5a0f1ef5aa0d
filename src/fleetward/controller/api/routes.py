"""Which endpoint a method and path ask for.

Owns matching, built once from the table of endpoints. Refuses to know what an endpoint does.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleetward.domain.errors import MethodNotAllowed, UnknownRoute, quoted
from fleetward.wire.endpoints import Endpoint

PATH_CHARS_MAX = 1024  # the longest path of the table has two ids; this leaves room for names


@dataclass(frozen=True, slots=True)
class Match:
    """The endpoint that was asked for, and the path's parameters as text."""

    endpoint: Endpoint
    params: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Route:
    endpoint: Endpoint
    parts: tuple[str, ...]

    def params(self, parts: list[str]) -> dict[str, str] | None:
        found: dict[str, str] = {}
        for pattern, part in zip(self.parts, parts, strict=True):
            if pattern.startswith("{") and part:
                found[pattern[1:-1]] = part
            elif pattern != part:
                return None
        return found


class Router:
    """The table of endpoints, by the number of their path's parts."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._routes: defaultdict[int, list[_Route]] = defaultdict(list)
        for endpoint in endpoints:
            parts = tuple(endpoint.path.split("/"))
            self._routes[len(parts)].append(_Route(endpoint, parts))
        for routes in self._routes.values():
            # A fixed word wins over a parameter in the same place.
            routes.sort(key=lambda route: [part.startswith("{") for part in route.parts])

    def find(self, *, method: str, path: str) -> Match:
        """Find what a request asks for, or refuse: no such path, or not with this method."""
        if len(path) > PATH_CHARS_MAX or not path.isprintable():
            raise UnknownRoute(f"no endpoint has a path of {len(path)} characters such as {quoted(path)}")
        parts = path.split("/")
        allowed: list[str] = []
        for route in self._routes.get(len(parts), ()):
            params = route.params(parts)
            if params is None:
                continue
            if route.endpoint.method == method:
                return Match(route.endpoint, params)
            allowed.append(route.endpoint.method)
        if allowed:
            raise MethodNotAllowed(
                f"{quoted(path)} does not take {quoted(method)}", hint=f"it takes {', '.join(sorted(allowed))}"
            )
        raise UnknownRoute(f"no endpoint has the path {quoted(path)}", hint="the API is under /api/v1")
