"""What a completed job can be checked by, away from its controller.

Owns the checksum list, SHA256SUMS, as `sha256sum --check` reads it. Refuses to know files and keys.
"""

from collections.abc import Mapping
from typing import Final

from fleetward.domain.errors import ArtifactConflict, MalformedDigest, quoted
from fleetward.verify.digest import Digest
from fleetward.verify.manifest import ArtifactPath, parse_path

CHECKSUMS_NAME: Final = "SHA256SUMS"


def write_checksums(digests: Mapping[ArtifactPath, Digest]) -> str:
    """Write the list, ordered by path so that the same files give the same bytes."""
    return "".join(f"{digests[path].hex}  {path}\n" for path in sorted(digests, key=str.encode))


def read_checksums(text: str) -> dict[ArtifactPath, Digest]:
    """Read a list that may come from anyone. Its paths are safe to open below a folder."""
    digests: dict[ArtifactPath, Digest] = {}
    # Not splitlines(), which also breaks at characters that a line of sha256sum may contain.
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], start=1):
        digest_text, gap, path_text = line[:64], line[64:66], line[66:]
        if gap not in {"  ", " *"}:
            raise MalformedDigest(
                f"line {number} of {CHECKSUMS_NAME} is {quoted(line)}",
                hint="a line is a SHA-256 in hex, two spaces and a path",
            )
        path = parse_path(path_text)
        if path in digests:
            raise ArtifactConflict(f"line {number} of {CHECKSUMS_NAME} names {quoted(path)} a second time")
        digests[path] = Digest.parse(digest_text)
    return digests
