"""Episodes with tools of MCP servers."""

from rlhf_plugin_mcp.agent import McpAgent

__all__ = ["McpAgent"]
