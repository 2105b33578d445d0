"""A server of the real package: ``server.py [streamable-http PORT]``."""

import base64
import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.types import AudioContent, EmbeddedResource, ResourceLink, TextResourceContents

app = MCPServer("tests", log_level="CRITICAL")
count = 0


@app.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@app.tool()
def counted() -> int:
    """Counts calls."""
    global count
    count += 1
    return count


@app.tool()
def number() -> str:
    """Returns the number of the process, and a variable."""
    return f"{os.getpid()} {os.environ.get('OF_TEST')} {os.environ.get('SECRET')}"


@app.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("ouch")


@app.tool()
def die() -> str:
    """Ends the server."""
    sys.stderr.write("last words")
    sys.stderr.flush()
    os._exit(3)


@app.tool()
def hang() -> str:
    """Hangs."""
    time.sleep(60)
    return "late"


@app.tool()
def long() -> str:
    """Returns a long text."""
    return "x" * 100_000


@app.tool()
def picture() -> Image:
    """Returns a picture."""
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    return Image(data=base64.b64decode(png), format="png")


@app.tool()
def sound() -> AudioContent:
    """Returns sound."""
    return AudioContent(type="audio", data="AAAA", mime_type="audio/wav")


@app.tool()
def file() -> list[EmbeddedResource | ResourceLink]:
    """Returns a file and a link."""
    inner = TextResourceContents(uri="file:///a.txt", text="inside")
    return [
        EmbeddedResource(type="resource", resource=inner),
        ResourceLink(type="resource_link", name="more", uri="file:///b.txt"),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        app.run(sys.argv[1], port=int(sys.argv[2]))
    else:
        app.run()
